"""Where and as whom a program hands mail in; swaks, which does that step by step.

It comes from its Debian package, unpacked below `.cache` (see `debian`), and is run once per call. A
Result is what the program said; whether that is right is for the test to say. A program that cannot be had or
hangs raises. Certificates are checked against the CA that the `Server` names, never ignored.
"""

import enum
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.debian import ready_package
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
        self._package = ready_package(
            "swaks",
            "usr/bin/swaks",
            "usr/lib/*/perl5/*/auto/Net/SSLeay/SSLeay.so",
            also=("libnet-ssleay-perl",),
        )
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
