"""SRS against postsrsd, which is libsrs2's scheme: we take its addresses, each wraps those of the other."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from tests.support.debian import ready_package
from tests.support.ports import LOOPBACK, accepts, free_ports
from tests.support.servers import running_server
from zonerelay.config.settings import SrsSettings
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.envelope import Mailbox

DOMAIN = "srs.example.net"
SECRET = "a secret of some length"


@dataclass(frozen=True, slots=True)
class Postsrsd:
    forward_port: int
    reverse_port: int

    def forward(self, address: str) -> str:
        return _ask(self.forward_port, address)

    def reverse(self, address: str) -> str:
        return _ask(self.reverse_port, address)


def _ask(port: int, address: str) -> str:
    """Postfix's tcp_table protocol; `""` when the answer is that there is none."""
    with socket.create_connection((LOOPBACK, port), timeout=10) as connection:
        connection.sendall(f"get {quote(address, safe='')}\n".encode())
        code, _, text = connection.makefile().readline().strip().partition(" ")
    return unquote(text) if code == "200" else ""


@contextmanager
def running(program: Path, directory: Path, *options: str) -> Iterator[Postsrsd]:
    secret = directory / "secret"
    secret.write_text(f"{SECRET}\n")
    there, back = free_ports(2)
    command = [str(program), f"-s{secret}", f"-d{DOMAIN}", "-4", f"-l{LOOPBACK}", f"-f{there}", f"-r{back}"]
    with running_server([*command, *options], directory / "log", lambda: accepts(there) and accepts(back)):
        yield Postsrsd(there, back)


SENDERS = [
    "ann@first.example",
    "Ann.Bo=b+c@First.Example",
    "{}|~*'`?^!#$&@x.example",
    "SRS0=aaaa=bb=c.d=e@other.example",
    "SRS0+aaaa=bb=c.d=e@other.example",
    "srs0-Xy+z=aB=c.d=e@Other.example",
    "SRS1=abcd=c.d==x=y=z=w@other.example",
]


@pytest.fixture(scope="module")
def program() -> Path:
    package = ready_package("postsrsd", "usr/sbin/postsrsd")
    return package.path("usr/sbin/postsrsd")


@pytest.mark.parametrize("options", [(), ("-n8",), ("-a+",)])
def test_what_it_made_is_taken_on_request(program: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    srs = Srs(SrsSettings(domain=DOMAIN, accept_legacy=True), [SECRET])
    with running(program, tmp_path, *options) as postsrsd:
        for sender in SENDERS:
            theirs = postsrsd.forward(sender)
            first = postsrsd.reverse(theirs)
            assert first.count("@") == 1, sender
            assert srs.reverse(Mailbox(theirs), time.time()) == first
            # Both know who the first sender of a chain is.
            assert srs.reverse(srs.forward(Mailbox(sender), time.time()), time.time()) == first
            with pytest.raises(SrsError, match=r"old form|wrong hash"):
                Srs(SrsSettings(domain=DOMAIN), [SECRET]).reverse(Mailbox(theirs), time.time())


def test_it_forwards_what_we_have_made_and_sends_reports_back_to_us(program: Path, tmp_path: Path) -> None:
    srs = Srs(SrsSettings(domain="srs.other.example"), ["another secret of some length"])
    with running(program, tmp_path) as postsrsd:
        for sender in SENDERS:
            ours = srs.forward(Mailbox(sender), time.time())
            first = srs.reverse(ours, time.time())
            back = postsrsd.reverse(postsrsd.forward(ours))
            if ours.startswith("SRS0="):
                assert back == ours
                assert srs.reverse(Mailbox(back), time.time()) == first
            else:
                assert back == first  # a chain is cut short
            theirs = postsrsd.forward(sender)
            if len(theirs.rpartition("@")[0]) > 36:
                continue  # with one more forwarder it is too long for SMTP
            wrapped = srs.reverse(srs.forward(Mailbox(theirs), time.time()), time.time())
            assert wrapped == (theirs if theirs.startswith("SRS0=") else first)
