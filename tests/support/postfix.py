"""Postfix for comparison: its tools smtp-source and smtp-sink, and a private relay that really runs.

The package is unpacked into `.cache/postfix` (see `debian`), never installed. A PostfixInstance has
its own configuration, queue and data directories and one loopback port, and leaves nothing behind.
Postfix's master insists on root and on an unprivileged owner: an existing system user is used.
Settings are Postfix's defaults but for what the comparison needs (named in `main_cf`); in
particular it fsyncs each queue file before it answers 250, as it always does.
"""

import contextlib
import fcntl
import grp
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tests.support.debian import DebianError, Say, UnpackedPackage
from tests.support.ports import LOOPBACK, free_ports, greets, wait_until
from tests.support.sasldb import write_users
from tests.support.servers import ServerProcess

DAEMONS = (
    *("master", "smtpd", "smtp", "cleanup", "qmgr", "trivial-rewrite", "scache", "tlsproxy", "anvil"),
    "postlogd",
)
TOOLS = ("smtp-source", "smtp-sink", "postqueue")
OWNERS = ("postfix", "daemon", "bin", "mail")
GROUPS = ("postdrop", "operator", "mail", "games")
QUEUES = ("active", "bounce", "corrupt", "defer", "deferred", "flush", "hold", "incoming", "saved", "trace")
REALM = "relay.test"
MAX_SOCKET_PATH = 107
ATTEMPTS = 3
START_TIMEOUT = 30.0
STOP_TIMEOUT = 30.0


class PostfixError(Exception):
    """Postfix could not be had or did not run; the text says what to do."""


class PostfixTools:
    """Where the unpacked programs are, and the environment they need."""

    def __init__(self, *, say: Say = lambda _: None) -> None:
        self._package = UnpackedPackage("postfix", also=["libsasl2-modules"], say=say)
        try:
            self._package.ensure(
                [f"usr/lib/postfix/sbin/{name}" for name in DAEMONS]
                + [f"usr/sbin/{name}" for name in TOOLS]
                + ["usr/lib/*/sasl2/libplain.so", "usr/lib/*/sasl2/liblogin.so"]
            )
        except DebianError as error:
            raise PostfixError(str(error)) from error
        self.sbin = self._package.path("usr/sbin")
        self.daemons = self._package.path("usr/lib/postfix/sbin")
        self.shared = self._package.path("usr/lib/postfix")
        self.etc = self._package.path("etc/postfix")
        self.environment = {
            **os.environ,
            "LD_LIBRARY_PATH": self._package.library_path(),
            "SASL_PATH": str(self._package.path("usr/lib/*/sasl2")),
            "LC_ALL": "C",
        }

    def source_command(self, *arguments: str) -> list[str]:
        return [str(self.sbin / "smtp-source"), *arguments]

    def sink_command(self, *arguments: str) -> list[str]:
        """As root smtp-sink demands to be told which user to become."""
        become = ["-u", first_user(OWNERS)] if os.geteuid() == 0 else []
        return [str(self.sbin / "smtp-sink"), *become, *arguments]

    @property
    def version(self) -> str:
        """The package's version, from the name of the downloaded file."""
        names = sorted(path.name for path in (self._package.home / "debs").glob("postfix_*.deb"))
        return names[-1].split("_")[1] if names else "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostfixSettings:
    """What the comparison sets; the rest is Postfix's default."""

    next_hop: str = ""
    transports: Mapping[str, str] = field(default_factory=dict)  # recipient domain to "[host]:port"
    connections_out: int = 50
    process_limit: int = 100
    message_size_limit: int = 50 * 1024 * 1024
    next_hop_tls: str = ""  # smtp_tls_security_level: "encrypt", "secure"
    next_hop_name: str = ""  # what the next hop's certificate is for
    next_hop_ca: Path | None = None
    next_hop_implicit_tls: bool = False
    milter: str = ""  # the path of its Unix socket
    user: str = ""  # AUTH to the next hop
    password: str = ""
    certificate: Path | None = None  # of its server: STARTTLS on the one port, TLS at once on another
    key: Path | None = None
    protocols: str = ""  # smtpd_tls_protocols, such as "TLSv1"
    users: Mapping[str, str] = field(default_factory=dict)  # who may log in there, with what password
    mechanisms: str = "PLAIN LOGIN"
    users_only: bool = False  # nobody relays without a log-in


class PostfixInstance(ServerProcess):
    """One private relay. Its files are below `directory`, which other users must be able to enter."""

    def __init__(
        self, tools: PostfixTools, directory: Path, settings: PostfixSettings, *, launcher: Sequence[str] = ()
    ) -> None:
        if os.geteuid() != 0:
            raise PostfixError("Postfix's master runs only as root: run this as root, or leave Postfix out")
        self._tools = tools
        self.directory = directory
        self.smtp_port, self.smtps_port = free_ports(2)
        self.queue = directory / "queue"
        if len(f"{self.queue}/public/postlog") > MAX_SOCKET_PATH:
            raise PostfixError(f"too long for the path of Postfix's sockets: {self.queue}")
        self.log = directory / "maillog"
        self._config = directory / "config"
        self._environment = {**tools.environment, "MAIL_CONFIG": str(self._config)}
        # -d: stay in the foreground with our standard streams.
        self._command = [*launcher, str(tools.daemons / "master"), "-d"]
        self._lay_out(settings)

    def _lay_out(self, settings: PostfixSettings) -> None:
        owner, group = first_user(OWNERS), first_group(GROUPS)
        for folder in (self.directory, self.queue, self._config):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        for name in (*QUEUES, "private"):
            _make(self.queue / name, 0o700, owner)
        _make(self.queue / "pid", 0o755, "root")
        _make(self.queue / "public", 0o710, owner, group)
        _make(self.queue / "maildrop", 0o730, owner, group)
        _make(self.directory / "data", 0o700, owner)
        shutil.copy(self._tools.etc / "postfix-files", self._config)
        (self._config / "main.cf").write_text(self._main_cf(settings, owner, group))
        passwords = self._config / "passwords"
        passwords.write_text(f"{settings.next_hop} {settings.user}:{settings.password}\n")
        passwords.chmod(0o600)
        services = master_cf(self.smtp_port)
        if settings.certificate is not None:
            services += smtps_service(self.smtps_port)
        (self._config / "master.cf").write_text(services)

    def _main_cf(self, settings: PostfixSettings, owner: str, group: str) -> str:
        places = {
            "queue_directory": str(self.queue),
            "data_directory": str(self.directory / "data"),
            "command_directory": str(self._tools.sbin),
            "daemon_directory": str(self._tools.daemons),
            "shlib_directory": str(self._tools.shared),
            "meta_directory": str(self._config),
            "maillog_file": str(self.log),
            "maillog_file_prefixes": str(self.directory),
            "mail_owner": owner,
            "setgid_group": group,
            "default_privs": "nobody",
        }
        lines = {**places, **main_cf(settings)}
        if settings.user:
            lines["smtp_sasl_password_maps"] = f"texthash:{self._config / 'passwords'}"
        if settings.users:
            lines["cyrus_sasl_config_path"] = str(self._write_users(settings, owner))
        return "".join(f"{name} = {value}\n" for name, value in lines.items())

    def _write_users(self, settings: PostfixSettings, owner: str) -> Path:
        try:
            folder, plugins = write_users(
                self._config, settings.users, realm=REALM, owner=owner, mechanisms=settings.mechanisms
            )
        except DebianError as error:
            raise PostfixError(str(error)) from error
        self._environment["SASL_PATH"] += f":{plugins}"
        return folder

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> Self:
        # A port that was free may be another connection's for a moment, and then master exits at once.
        for _ in range(ATTEMPTS):
            # On SIGTERM master signals the process group that it believes to lead.
            log = self.directory / "stderr"
            self.spawn(self._command, log, environment=self._environment, leads=True)
            if not wait_until(lambda: not self.running or greets(self.smtp_port), timeout=START_TIMEOUT):
                self.stop()
                raise PostfixError(f"Postfix does not answer on port {self.smtp_port}\n{self.log_tail()}")
            if self.running:
                return self
        said = (self.directory / "stderr").read_text(errors="replace")
        raise PostfixError(f"Postfix's master exited while starting\n{said}\n{self.log_tail()}")

    def stop(self) -> None:
        """SIGTERM to master, which signals its process group; killed if that does not end it."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT)
        wait_until(self._is_unlocked, timeout=STOP_TIMEOUT)  # master's children have its lock, too

    def _is_unlocked(self) -> bool:
        with contextlib.suppress(FileNotFoundError), (self.queue / "pid/master.pid").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def queued(self) -> int:
        """Messages in the queue, counted as files."""
        return sum(
            1
            for name in ("incoming", "active", "deferred")
            for path in (self.queue / name).rglob("*")
            if path.is_file()
        )

    def log_text(self) -> str:
        """Its log so far. Postfix's own daemon writes it, a moment after what it is about."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self) -> str:
        texts = [
            path.read_text(errors="replace")
            for path in (self.directory / "stderr", self.log)
            if path.exists()
        ]
        return "\n".join(texts)[-4000:]


def main_cf(settings: PostfixSettings) -> dict[str, str]:
    """Every setting that differs from Postfix's defaults, apart from places and users."""
    lines = {
        "compatibility_level": "3.6",
        # The loader's path has to survive master's clean environment: the libraries are not installed.
        "import_environment": "MAIL_CONFIG TZ LANG=C LD_LIBRARY_PATH SASL_PATH",
        "myhostname": REALM,
        "inet_interfaces": "loopback-only",
        "inet_protocols": "ipv4",
        "mynetworks": "127.0.0.0/8",
        "smtpd_relay_restrictions": "permit_mynetworks, reject",
        # A pure relay: nothing is local.
        "mydestination": "",
        "local_transport": "error:no local mail here",
        "local_recipient_maps": "",
        "alias_maps": "",
        "alias_database": "",
        # No DNS on loopback; zonerelay does not ask either.
        "smtpd_peername_lookup": "no",
        "smtp_dns_support_level": "disabled",
        "smtp_host_lookup": "native",
        **_client_security(settings),
        **_server_security(settings),
        # As many connections and recipients per transaction as zonerelay is given.
        "default_process_limit": str(settings.process_limit),
        "default_destination_concurrency_limit": str(settings.connections_out),
        "initial_destination_concurrency": str(settings.connections_out),
        "default_destination_recipient_limit": "50",
        "smtpd_client_connection_count_limit": "1000",
        "message_size_limit": str(settings.message_size_limit),
        "mailbox_size_limit": "0",
        # Does not slow down input while mail arrives faster than it leaves.
        "in_flow_delay": "0",
    }
    if settings.milter:
        lines |= {"smtpd_milters": f"unix:{settings.milter}", "milter_default_action": "tempfail"}
    if settings.next_hop:
        lines["relayhost"] = settings.next_hop
    if settings.transports:
        pairs = " ".join(f"{{ {domain} = smtp:{hop} }}" for domain, hop in settings.transports.items())
        lines["transport_maps"] = f"inline:{{ {pairs} }}"
    return lines


def _client_security(settings: PostfixSettings) -> dict[str, str]:
    """How its client meets the next hop: in clear text unless told otherwise."""
    lines = {"smtp_tls_security_level": settings.next_hop_tls}
    if settings.next_hop_tls:
        lines |= {
            "smtp_tls_CAfile": str(settings.next_hop_ca or ""),
            "smtp_tls_loglevel": "1",
            "smtp_tls_connection_reuse": "yes",
            "smtp_tls_wrappermode": "yes" if settings.next_hop_implicit_tls else "no",
        }
    if settings.next_hop_name:
        lines["smtp_tls_secure_cert_match"] = lines["smtp_tls_servername"] = settings.next_hop_name
    if settings.user:
        # The default, noplaintext, would leave nothing but challenges.
        lines |= {"smtp_sasl_auth_enable": "yes", "smtp_sasl_security_options": "noanonymous"}
    return lines


def _server_security(settings: PostfixSettings) -> dict[str, str]:
    """What it offers to clients: nothing unless told otherwise."""
    lines: dict[str, str] = {}
    if settings.certificate is not None:
        lines |= {
            "smtpd_tls_security_level": "may",
            "smtpd_tls_cert_file": str(settings.certificate),
            "smtpd_tls_key_file": str(settings.key or settings.certificate),
            **({"smtpd_tls_protocols": settings.protocols} if settings.protocols else {}),
        }
    if settings.users:
        lines |= {"smtpd_sasl_auth_enable": "yes", "smtpd_sasl_local_domain": REALM}
    if settings.users_only:
        lines["smtpd_relay_restrictions"] = "permit_sasl_authenticated, reject"
    return lines


def smtps_service(port: int) -> str:
    return f"{LOOPBACK}:{port} inet n - n - - smtpd -o smtpd_tls_wrappermode=yes\n"


def master_cf(port: int) -> str:
    """The services that relaying uses, with the limits of Postfix's own master.cf, without chroot."""
    services = (
        f"{LOOPBACK}:{port} inet n - n - - smtpd",
        "pickup unix n - n 60 1 pickup",
        "cleanup unix n - n - 0 cleanup",
        "qmgr unix n - n 300 1 qmgr",
        "tlsmgr unix - - n 1000? 1 tlsmgr",
        "rewrite unix - - n - - trivial-rewrite",
        "bounce unix - - n - 0 bounce",
        "defer unix - - n - 0 bounce",
        "trace unix - - n - 0 bounce",
        "flush unix n - n 1000? 0 flush",
        "proxymap unix - - n - - proxymap",
        "smtp unix - - n - - smtp",
        "relay unix - - n - - smtp",
        "showq unix n - n - - showq",
        "error unix - - n - - error",
        "retry unix - - n - - error",
        "anvil unix - - n - 1 anvil",
        "scache unix - - n - 1 scache",
        "tlsproxy unix - - n - 0 tlsproxy",
        "postlog unix-dgram n - n - 1 postlogd",
    )
    return "\n".join(services) + "\n"


def first_user(names: Sequence[str]) -> str:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return _first(names, known, "user")


def first_group(names: Sequence[str]) -> str:
    known = {entry.gr_name for entry in grp.getgrall()}
    return _first(names, known, "group")


def _first(names: Sequence[str], known: set[str], kind: str) -> str:
    for name in names:
        if name in known:
            return name
    raise PostfixError(f"none of the usual {kind}s exists here: {', '.join(names)}")


def _make(folder: Path, mode: int, owner: str, group: str | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.chown(folder, owner, group)
    folder.chmod(mode)
