"""How a connection becomes a conversation: its PROXY header, its TLS handshake, its greeting; XCLIENT too.

Owns the order of these: a PROXY header first and exactly once, from listed peers only; then, on a listener
with implicit TLS, the handshake; then the greeting. Whenever it is known anew who the client is, or
after a handshake, there is a new conversation: nothing said before counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from zonerelay.config.tables.models import ListenerTls
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.session.timeouts import Deadlines
from zonerelay.inbound.session.transport import Transport, TransportFault
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.smtp.server.commands import TLS_HELLO
from zonerelay.smtp.server.lines import LineReader
from zonerelay.smtp.server.proxy_protocol import looks_like_proxy

FOREIGN = frozenset(b"\x16P\r")
"""First octets of what `turns_away` knows: a TLS hello, PROXY headers of both versions."""


class Visitor(Protocol):
    """The session, as far as its beginning goes."""

    transport: Transport
    lines: LineReader
    deadlines: Deadlines
    conversation: Conversation
    client: Client
    ended: bool
    greeted: bool
    context: ListenerContext

    @property
    def now(self) -> float:
        """The loop's time."""

    def is_now(self, address: str, port: int) -> bool:
        """The client is another one; false when that one may not come in, and is told so."""

    def reply(self, octets: bytes, last: ServerReply) -> None: ...

    def say_goodbye(self, answer: ServerReply, *, detail: str = "") -> None: ...

    def charge(self) -> None:
        """What it holds in memory has changed."""

    def leave_soon(self) -> None:
        """The client has ended TLS: close once what it has sent is answered."""


def open_to(visitor: Visitor) -> None:
    """A connection has been made and its peer is welcome."""
    if visitor.client.proxies:
        visitor.deadlines.began_handshake(visitor.now)
        visitor.transport.expect_proxy_header()
    else:
        _come_in(visitor)


def unwrap(visitor: Visitor, data: bytes) -> bytes:
    """What of these bytes is SMTP. The link takes header and TLS off; what that changes is done here."""
    link = visitor.transport
    named, secured = link.named, link.secured
    try:
        data = link.receive(data)
    except TransportFault as fault:
        visitor.say_goodbye(replies.TLS_FAULT if fault.tls else replies.BAD_PROXY, detail=str(fault))
        return b""
    if link.named is not named:
        return _has_been_named(visitor, data)
    if link.secured is not secured:
        _has_been_secured(visitor)
    if link.ended and not visitor.ended:
        visitor.leave_soon()
    return data


def turns_away(visitor: Visitor, data: bytes) -> bool:
    """Nothing has been said yet, and this is the beginning of something else than SMTP."""
    if data.startswith(TLS_HELLO):
        visitor.say_goodbye(replies.NOT_SMTP)
        return True
    if looks_like_proxy(data):
        visitor.say_goodbye(replies.NO_PROXY)
        return True
    return False


def is_heard(visitor: Visitor) -> bool:
    """Before its handshake a client that expects TLS could not read what we say."""
    return visitor.transport.secured is not None or visitor.context.settings.tls is not ListenerTls.IMPLICIT


def start_tls(visitor: Visitor) -> None:
    """What has come in clear text and has not been answered is dropped (RFC 3207 4.2)."""
    certificates = visitor.context.certificates
    assert certificates is not None
    visitor.lines.clear()
    visitor.deadlines.began_handshake(visitor.now)
    visitor.transport.start_tls(certificates.channel())
    visitor.charge()


def readmit(visitor: Visitor) -> None:
    """As whom XCLIENT names; what it does not name stays (XCLIENT_README)."""
    xclient, client_state = visitor.conversation.xclient, visitor.conversation.client_state
    assert xclient is not None
    client = visitor.client
    address = client.address if xclient.address is None else xclient.address
    port = client.port if xclient.port is None else xclient.port
    if visitor.is_now(address, port):
        # The certificate is that of the server in front, not of the client that it names.
        tls = client_state.tls if client_state.tls is None else replace(client_state.tls, certificate="")
        visitor.conversation = Conversation(visitor.context, visitor.client, tls)
        visitor.conversation.client_state.take_over(client_state, xclient)
        _greet(visitor)


def _come_in(visitor: Visitor) -> None:
    if visitor.context.settings.tls is ListenerTls.IMPLICIT:
        start_tls(visitor)
    else:
        _greet(visitor)


def _greet(visitor: Visitor) -> None:
    visitor.greeted = True
    answer = visitor.conversation.greet()
    visitor.reply(answer.wire, answer)


def _has_been_named(visitor: Visitor, data: bytes) -> bytes:
    header = visitor.transport.named
    assert header is not None
    visitor.deadlines.established(visitor.now)
    if not visitor.is_now(header.address, header.port):
        return b""
    visitor.conversation = Conversation(visitor.context, visitor.client)
    _come_in(visitor)
    return unwrap(visitor, data) if data and visitor.transport.is_wrapped else data


def _has_been_secured(visitor: Visitor) -> None:
    info = visitor.transport.secured
    assert info is not None
    visitor.deadlines.established(visitor.now)
    visitor.context.events.metrics.inbound_tls(info.version)
    before = visitor.conversation
    visitor.conversation = Conversation(visitor.context, visitor.client, info)
    visitor.conversation.go_on_from(before)
    if not visitor.greeted:
        _greet(visitor)
