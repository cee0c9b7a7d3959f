"""Exim as a sender: a message handed to it locally goes to us at once, with BDAT when we offer CHUNKING;
and as a server that passes on what it takes.

The package is unpacked into `.cache` (see `debian`), never installed. Debian's Exim insists on a user
Debian-exim, so libnss-wrapper gives it one; it starts itself anew as that user, when the
environment counts no more, so the libraries are named on the dynamic linker's command line, in a
script that is its `exim_path`. Needs root. Settings are Exim's defaults but for what `configuration`
names; nothing is left running.
"""

import pwd
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.debian import loader, ready_package
from tests.support.ports import LOOPBACK, free_ports, greets
from tests.support.postfix import OWNERS, first_user
from tests.support.senders import RECIPIENT, SENDER, Result, Server, Tls, run
from tests.support.servers import running_server

PROGRAM = "usr/sbin/exim4"
EXIM_USER = "Debian-exim"


class EximSender:
    """`send` returns Exim's own account of the session (`-v`). Its files are below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._package = ready_package("exim4-daemon-light", PROGRAM, also=("libnss-wrapper",))
        self._directory = directory
        self._script = directory / "exim"
        self._configuration = directory / "exim.conf"
        owner = first_user(OWNERS)
        for folder in (directory, directory / "spool", directory / "log"):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.chown(folder, owner)
        self._write_script(owner)

    @contextmanager
    def receiving(self, next_hop: Server, *, options: str = "") -> Iterator[int]:
        """A daemon on a port of its own, which anybody may use to reach `next_hop`.

        `options` are further lines of its configuration.
        """
        self._configuration.write_text(
            configuration(self._directory, self._script, next_hop) + "\nbegin acl\nall:\n  accept\n"
        )
        head = (
            f"{options}acl_smtp_rcpt = all\nreceived_header_text =\n"
            "log_selector = +smtp_protocol_error +all\n"
        )
        self._configuration.write_text(head + self._configuration.read_text())
        (port,) = free_ports(1)
        command = [str(self._script), "-C", str(self._configuration), "-bdf", "-oX", f"{LOOPBACK}.{port}"]
        with running_server(command, self._directory / "output", lambda: greets(port)):
            yield port

    def log(self) -> str:
        return (self._directory / "log" / "main").read_text()

    def send(self, server: Server, message: bytes, *recipients: str) -> Result:
        """Foreground delivery (-odf): when this returns the message was sent, or Exim says why not."""
        self._configuration.write_text(configuration(self._directory, self._script, server))
        command = [str(self._script), "-C", str(self._configuration), "-odf", "-i", "-v", "-f", SENDER]
        return run([*command, *(recipients or [RECIPIENT])], stdin=message)

    def _write_script(self, owner: str) -> None:
        account = pwd.getpwnam(owner)
        users, groups = self._directory / "passwd", self._directory / "group"
        line = f"{EXIM_USER}:x:{account.pw_uid}:{account.pw_gid}::/:/bin/false\n"
        users.write_text(Path("/etc/passwd").read_text() + line)
        groups.write_text(Path("/etc/group").read_text() + f"{EXIM_USER}:x:{account.pw_gid}:\n")
        program, libraries = self._package.path(PROGRAM), self._package.library_path()
        linker = [str(loader(program, libraries)), "--library-path", libraries]
        command = shlex.join([*linker, "--preload", "libnss_wrapper.so", str(program)])
        self._script.write_text(
            "#!/bin/sh\n"
            f"export NSS_WRAPPER_PASSWD={shlex.quote(str(users))}\n"
            f"export NSS_WRAPPER_GROUP={shlex.quote(str(groups))}\n"
            f'exec {command} "$@"\n'
        )
        self._script.chmod(0o755)


def configuration(directory: Path, script: Path, server: Server) -> str:
    return f"""
primary_hostname = exim.test
exim_path = {script}
spool_directory = {directory}/spool
log_file_path = {directory}/log/%s
keep_environment = ^NSS_WRAPPER
disable_ipv6
daemon_smtp_ports = 25
host_lookup =
begin routers
relay:
  driver = manualroute
  transport = relay
  route_list = * {LOOPBACK}::{server.port} byname
  self = send
begin transports
relay:
  driver = smtp
  port = 25
  allow_localhost
{_transport(server)}
begin retry
* * F,1h,5m
begin authenticators
plain:
  driver = plaintext
  public_name = PLAIN
  client_send = ^{server.user}^{server.password}
"""


def _transport(server: Server) -> str:
    lines = []
    if server.user:
        lines.append("hosts_require_auth = *")
    if server.tls is Tls.NONE:
        lines.append("hosts_avoid_tls = *")
    else:
        lines += ["hosts_require_tls = *", "tls_verify_hosts = *", f"tls_verify_certificates = {server.ca}"]
        # A list of hosts: for these the certificate's name counts. It is the address that we route to.
        lines += [f"tls_verify_cert_hostnames = {LOOPBACK}", f"tls_sni = {server.name}"]
    if server.tls is Tls.IMPLICIT:
        lines.append("protocol = smtps")
    return "\n".join(f"  {line}" for line in lines)
