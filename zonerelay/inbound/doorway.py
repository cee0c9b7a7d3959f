"""How a connection becomes a conversation: its PROXY header, its TLS handshake, its greeting; XCLIENT too.

Owns the order of these: a PROXY header first and exactly once, from listed peers only; then, on a listener
with implicit TLS, the handshake; then the greeting. Whenever it is known anew who the client is, or
after a handshake, there is a new dialog: nothing said before counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from zonerelay.config.models import ListenerTls
from zonerelay.inbound import answers
from zonerelay.inbound.access import Client
from zonerelay.inbound.answers import Answer
from zonerelay.inbound.deadlines import Deadlines
from zonerelay.inbound.dialog import Dialog
from zonerelay.inbound.link import Link, LinkFault
from zonerelay.inbound.reception import Reception
from zonerelay.smtp.commands import TLS_HELLO
from zonerelay.smtp.lines import LineReader
from zonerelay.smtp.proxy_protocol import looks_like_proxy

FOREIGN = frozenset(b"\x16P\r")
"""First octets of what `turns_away` knows: a TLS hello, PROXY headers of both versions."""


class Readmission(Protocol):
    def __call__(self, client: Client, address: str, port: int, /) -> tuple[Client, Answer | None]:
        """The connection is that of another client, or may not be."""


class Visitor(Protocol):
    """The session, as far as its beginning goes."""

    link: Link
    lines: LineReader
    deadlines: Deadlines
    dialog: Dialog
    client: Client
    ended: bool

    @property
    def now(self) -> float:
        """The loop's time."""

    def reply(self, replies: bytes, last: Answer) -> None: ...

    def say_goodbye(self, answer: Answer, *, detail: str = "") -> None: ...

    def charge(self) -> None:
        """What it holds in memory has changed."""

    def leave_soon(self) -> None:
        """The client has ended TLS: close once what it has sent is answered."""


class Doorway:
    __slots__ = ("_greeted", "_readmit", "_reception", "_visitor")

    def __init__(self, visitor: Visitor, reception: Reception, readmit: Readmission) -> None:
        self._visitor = visitor
        self._reception = reception
        self._readmit = readmit
        self._greeted = False

    def open(self) -> None:
        """A connection has been made and its peer is welcome."""
        visitor = self._visitor
        if visitor.client.proxies:
            visitor.deadlines.began_handshake(visitor.now)
            visitor.link.expect_proxy_header()
        else:
            self._come_in()

    def unwrap(self, data: bytes) -> bytes:
        """What of these bytes is SMTP. The link takes header and TLS off; what that changes is done here."""
        visitor = self._visitor
        link = visitor.link
        named, secured = link.named, link.secured
        try:
            data = link.receive(data)
        except LinkFault as fault:
            visitor.say_goodbye(answers.TLS_FAULT if fault.tls else answers.BAD_PROXY, detail=str(fault))
            return b""
        if link.named is not named:
            return self._has_been_named(data)
        if link.secured is not secured:
            self._has_been_secured()
        if link.ended and not visitor.ended:
            visitor.leave_soon()
        return data

    def turns_away(self, data: bytes) -> bool:
        """Nothing has been said yet, and this is the beginning of something else than SMTP."""
        if data.startswith(TLS_HELLO):
            self._visitor.say_goodbye(answers.NOT_SMTP)
            return True
        if looks_like_proxy(data):
            self._visitor.say_goodbye(answers.NO_PROXY)
            return True
        return False

    def start_tls(self) -> None:
        """What has come in clear text and has not been answered is dropped (RFC 3207 4.2)."""
        certificates = self._reception.certificates
        assert certificates is not None
        visitor = self._visitor
        visitor.lines.clear()
        visitor.deadlines.began_handshake(visitor.now)
        visitor.link.start_tls(certificates.channel())
        visitor.charge()

    def readmit(self) -> None:
        """As whom XCLIENT names; what it does not name stays (XCLIENT_README)."""
        visitor = self._visitor
        xclient, standing = visitor.dialog.xclient, visitor.dialog.standing
        assert xclient is not None
        client = visitor.client
        address = client.address if xclient.address is None else xclient.address
        port = client.port if xclient.port is None else xclient.port
        if self._is_now(address, port):
            # The certificate is that of the server in front, not of the client that it names.
            tls = standing.tls if standing.tls is None else replace(standing.tls, certificate="")
            visitor.dialog = Dialog(self._reception, visitor.client, tls)
            visitor.dialog.standing.take_over(standing, xclient)
            self._greet()

    def _come_in(self) -> None:
        if self._reception.settings.tls is ListenerTls.IMPLICIT:
            self.start_tls()
        else:
            self._greet()

    def _greet(self) -> None:
        self._greeted = True
        answer = self._visitor.dialog.greet()
        self._visitor.reply(answer.wire, answer)

    def _has_been_named(self, data: bytes) -> bytes:
        visitor = self._visitor
        header = visitor.link.named
        assert header is not None
        visitor.deadlines.established(visitor.now)
        if not self._is_now(header.address, header.port):
            return b""
        visitor.dialog = Dialog(self._reception, visitor.client)
        self._come_in()
        return self.unwrap(data) if data and visitor.link.is_wrapped else data

    def _has_been_secured(self) -> None:
        visitor = self._visitor
        info = visitor.link.secured
        assert info is not None
        visitor.deadlines.established(visitor.now)
        self._reception.events.metrics.inbound_tls(info.version)
        visitor.dialog = Dialog(self._reception, visitor.client, info)
        if not self._greeted:
            self._greet()

    def _is_now(self, address: str, port: int) -> bool:
        visitor = self._visitor
        visitor.client, refusal = self._readmit(visitor.client, address, port)
        if refusal is not None:
            visitor.say_goodbye(refusal)
        return refusal is None
