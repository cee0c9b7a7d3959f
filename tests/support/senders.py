"""Real programs that hand mail in: swaks, msmtp, PHP's mail(), openssl s_client.

Each comes from its Debian package, unpacked below `.cache` (see `debian`), and is run once per call. A
Result is what the program said; whether that is right is for the test to say. A program that cannot be had or
hangs raises. Certificates are checked against the CA that the `Server` names, never ignored.
"""

from __future__ import annotations

import enum
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import UnpackedPackage, providers
from tests.support.ports import LOOPBACK

PATIENCE = 60.0

SENDER = "app@example.org"
RECIPIENT = "b@example.com"


class Tls(enum.StrEnum):
    NONE = "none"
    STARTTLS = "starttls"
    IMPLICIT = "implicit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where to send to, and as whom; no `user` means no AUTH."""

    port: int
    tls: Tls = Tls.NONE
    ca: Path | None = None
    name: str = "relay.test"  # what its certificate is for; the connection always goes to loopback
    user: str = ""
    password: str = ""
    auth: str = "PLAIN"
    certificate: Path | None = None  # our own, with its chain
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A program's exit status, and everything it wrote: transcript or complaint."""

    code: int
    transcript: str

    def said(self, text: str) -> bool:
        return text in self.transcript


class Swaks:
    """The Swiss Army knife for SMTP: one session, each step of it in the transcript."""

    def __init__(self) -> None:
        # Perl itself is there wherever git is.
        self._package = UnpackedPackage("swaks", also=["libnet-ssleay-perl"])
        self._package.ensure(["usr/bin/swaks", "usr/lib/*/perl5/*/auto/Net/SSLeay/SSLeay.so"])
        module = self._package.path("usr/lib/*/perl5/*/Net/SSLeay.pm")
        self._environment = {
            **os.environ,
            "LC_ALL": "C",
            "HOME": str(self._package.home),  # nobody's ~/.swaksrc
            "PERL5LIB": str(module.parents[1]),
            "LD_LIBRARY_PATH": self._package.library_path(),
        }

    def send(self, server: Server, message: bytes = b"Subject: x\n\nhello\n", *options: str) -> Result:
        command = [
            str(self._package.path("usr/bin/swaks")),
            *("--server", LOOPBACK, "--port", str(server.port), "--helo", "client.test"),
            *("--from", SENDER, "--to", RECIPIENT, "--data", "-", "--timeout", "20"),
            *_swaks_tls(server),
            *_swaks_auth(server),
            *options,
        ]
        # It ends the last line itself.
        return run(command, stdin=message.removesuffix(b"\n"), environment=self._environment)


def _swaks_tls(server: Server) -> list[str]:
    if server.tls is Tls.NONE:
        return []
    options = ["--tls" if server.tls is Tls.STARTTLS else "--tls-on-connect", "--tls-sni", server.name]
    if server.ca:
        options += ["--tls-verify", "--tls-ca-path", str(server.ca)]
    if server.certificate and server.key:
        options += ["--tls-cert", str(server.certificate), "--tls-key", str(server.key)]
    return options


def _swaks_auth(server: Server) -> list[str]:
    if not server.user:
        return []
    return ["--auth", server.auth, "--auth-user", server.user, "--auth-password", server.password]


class Msmtp:
    """What most machines without a mail server of their own have as /usr/sbin/sendmail."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._package = UnpackedPackage("msmtp")
        self._package.ensure(["usr/bin/msmtp"])

    def send(self, server: Server, message: bytes, *recipients: str) -> Result:
        script = self.sendmail(server)
        return run([str(script), "-f", SENDER, "-i", *(recipients or [RECIPIENT])], stdin=message)

    def sendmail(self, server: Server) -> Path:
        """A script with the arguments of sendmail(1), as a PHP site or cron would call it."""
        settings = self._directory / "msmtprc"
        settings.write_text(msmtprc(server))
        settings.chmod(0o600)  # or it is not read: there is a password in it
        script = self._directory / "sendmail"
        program = shlex.quote(str(self._package.path("usr/bin/msmtp")))
        libraries = shlex.quote(self._package.library_path())
        script.write_text(
            f"#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {program} -C {shlex.quote(str(settings))} "
            '--debug "$@"\n'
        )
        script.chmod(0o755)
        return script


def msmtprc(server: Server) -> str:
    on_off = {True: "on", False: "off"}
    lines = {
        "account": "relay",
        "host": LOOPBACK,
        "port": str(server.port),
        "domain": "client.test",
        "from": SENDER,
        "tls": on_off[server.tls is not Tls.NONE],
        "tls_starttls": on_off[server.tls is Tls.STARTTLS],
        "auth": server.auth.lower() if server.user else "off",
    }
    if server.ca:
        lines |= {"tls_trust_file": str(server.ca), "tls_host_override": server.name}
    if server.certificate and server.key:
        lines |= {"tls_cert_file": str(server.certificate), "tls_key_file": str(server.key)}
    if server.user:
        lines |= {"user": server.user, "password": f'"{server.password}"'}
    return "".join(f"{name} {value}\n" for name, value in lines.items()) + "account default : relay\n"


class PhpMail:
    """PHP's mail() in front of a sendmail(1): how most web sites send."""

    def __init__(self) -> None:
        (name,) = providers("php-cli", r"php[0-9.]+-cli")
        self._package = UnpackedPackage(name)
        program = f"usr/bin/{name.removesuffix('-cli')}"
        self._package.ensure([program])
        self._program = self._package.path(program)

    def send(self, sendmail: Path, *, to: str, subject: str, body: str, headers: Mapping[str, str]) -> Result:
        """`-n`: no configuration of this machine; sendmail_path as php.ini has it by default."""
        arguments = (to, subject, body, "\r\n".join(f"{name}: {text}" for name, text in headers.items()))
        code = "exit(mail($argv[1], $argv[2], $argv[3], $argv[4]) ? 0 : 1);"
        command = [str(self._program), "-n", "-d", f"sendmail_path={sendmail} -t -i", "-r", code, "--"]
        return run(
            [*command, *arguments],
            environment={**os.environ, "LD_LIBRARY_PATH": self._package.library_path()},
        )


class Openssl:
    """`openssl s_client`: what an administrator asks a TLS server with."""

    def __init__(self) -> None:
        self._package = UnpackedPackage("openssl")
        self._package.ensure(["usr/bin/openssl"])

    def connect(self, server: Server, *options: str) -> Result:
        """Handshake, then QUIT; the verdict about the certificate is in the transcript."""
        trust = ["-CAfile", str(server.ca), "-verify_return_error"] if server.ca else []
        start = ["-starttls", "smtp"] if server.tls is Tls.STARTTLS else []
        command = [
            str(self._package.path("usr/bin/openssl")),
            *("s_client", "-connect", f"{LOOPBACK}:{server.port}", "-servername", server.name),
            *("-verify_hostname", server.name, "-crlf", "-ign_eof", *trust, *start, *options),
        ]
        environment = {**os.environ, "LD_LIBRARY_PATH": self._package.library_path()}
        return run(command, stdin=b"QUIT\n", environment=environment)


def run(
    command: Sequence[str], *, stdin: bytes = b"", environment: Mapping[str, str] | None = None
) -> Result:
    done = subprocess.run(
        command,
        input=stdin,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(errors="replace"))
