"""Unwraps the bytes between a session and its socket: a PROXY header, then TLS; writes and closes.

Owns asyncio's transport. Input goes through `receive` while `is_wrapped`, output through `write`. Clear text
that came before a handshake never reaches the session after it: the session drops what it has, and everything
later is ciphertext.

Failure: `receive` raises TransportFault when the connection cannot be used any more; its text is for the
operator. Nothing else raises; a write to a client that is gone does nothing.

The deadlines of a client. No timers are here: the session asks when its one timer fires.

- handshake: for a PROXY header, or for a TLS handshake, from its beginning to its end.
- idle: between our reply and the client's next complete command (dribbling single bytes does not help), and
  between two pieces of a body (RFC 5321 4.5.3.2.7).
- data rate: a body, or a BDAT chunk, that takes longer than the idle time must come with so many bytes a
  second on average (Postfix's smtpd_min_data_rate): an byte a minute is not idle, but it is no mail.
- transaction: from MAIL to the end of data, so that every trickle ends some day.

These clocks stand still while the relay does not read, or asks a question before it replies. Late clients get
421 4.4.2; inside a TLS handshake the client could not read that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import HANDSHAKE
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.inbound.tls.ports import Channel, TlsFault, TlsInfo
from zonerelay.smtp.server.proxy_protocol import ProxyFault, ProxyHeader, ProxyReader


class Deadlines:
    """The clocks of one client. Times are the event loop's, in seconds; `min_rate` is in bytes a second."""

    def __init__(self, now: float, *, idle: float, transaction: float, min_rate: int = 0) -> None:
        self._idle = idle
        self._transaction = transaction
        self._min_rate = min_rate
        self.heard = now  # when the client last did its part: body bytes came, or it is waiting for us
        self.octets = 0  # of the body at hand; the session adds what comes
        self._began: float | None = None  # the transaction
        self._timed: object | None = None  # which one that is
        self._body: float | None = None
        self._handshake: float | None = None
        self._paused: float | None = None
        self.is_paused = False

    def began_handshake(self, now: float) -> None:
        """The client's PROXY header or TLS handshake is next."""
        self._handshake = now
        self.heard = now

    def established(self, now: float) -> None:
        """The handshake is complete; the next command has the idle time."""
        self._handshake = None
        self.heard = now

    def answered(self, now: float, transaction: object | None) -> None:
        """Commands were answered; the client is now in this transaction, or in none.

        It may be another one than before: RSET and MAIL can come in one packet.
        """
        self.heard = now
        if transaction is None:
            self._began = None
        elif self._began is None or transaction is not self._timed:
            self._began = now
        self._timed = transaction

    def body_began(self, now: float) -> None:
        """A body or a BDAT chunk begins: from now on `octets` are counted.

        A chunk that was refused has no transaction, but no more time than one that has.
        """
        self._body = now
        self.octets = 0
        if self._began is None:
            self._began = now

    def chunk_complete(self, now: float) -> None:
        """A BDAT chunk is here, but not the message: the next command has the idle time."""
        self._body = None
        self.heard = now

    def complete(self) -> None:
        """The end of data is here: what takes time now is ours."""
        self._began = None
        self._body = None

    def paused(self, now: float) -> None:
        """Stop the clocks: the relay does not read, or has not replied yet, for a reason of its own."""
        if self._paused is None:
            self._paused = now
            self.is_paused = True

    def resumed(self, now: float) -> None:
        """Start the clocks again: those that ran are set back by the pause, those begun in it begin now."""
        if self._paused is None:
            return
        stalled = now - self._paused
        self._paused = None
        self.is_paused = False
        self.heard = now
        if self._handshake is not None:
            self._handshake = min(self._handshake + stalled, now)
        if self._began is not None:
            self._began = min(self._began + stalled, now)
        if self._body is not None:
            self._body = min(self._body + stalled, now)

    def late(self, now: float) -> ServerReply | None:
        if self._paused is not None:
            now = self._paused
        if self._handshake is not None and now >= self._handshake + HANDSHAKE:
            return replies.IDLE
        if self._began is not None and now >= self._began + self._transaction:
            return replies.TRANSACTION_TIME
        if now >= self.heard + self._idle:
            return replies.IDLE
        due = self._data_due()
        return replies.DATA_RATE if due is not None and now >= due else None

    def next_look(self, now: float) -> float:
        """Return the time to call `late` again: early enough for every clock, also one that begins now."""
        theirs = now if self._paused is None else self._paused
        due = self._data_due()
        # What began while we paused counts from the end of the pause, which may be now.
        handshake = theirs if self._handshake is None or self._handshake > theirs else self._handshake
        began = theirs if self._began is None or self._began > theirs else self._began
        heard = self.heard if self.heard < theirs else theirs
        earliest = min(heard + self._idle, handshake + HANDSHAKE, began + self._transaction)
        if due is not None and due < earliest:
            earliest = due
        return earliest + (now - theirs)

    def _data_due(self) -> float | None:
        """Return the time at which the body is too slow if nothing more comes."""
        if self._body is None or not self._min_rate:
            return None
        body = self._body if self._paused is None or self._body < self._paused else self._paused
        return body + self._idle + self.octets / self._min_rate


LINGER = 10.0  # seconds for a client to take the last reply before it is cut off


class TransportFault(Exception):
    """A transport fault. `tls` says whether it was TLS or the PROXY header that went wrong."""

    def __init__(self, text: str, *, tls: bool) -> None:
        super().__init__(text)
        self.tls = tls


class Transport:
    """One connection's bytes. `named` and `secured` are set by the call of `receive` that completed them."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport: asyncio.Transport | None = transport
        self._loop = loop
        self.is_paused = False
        self.is_blocked = False  # the client does not take our replies
        # Most connections have no TLS, and every reply goes through here.
        self.write: Callable[[bytes], None] = transport.write
        self._overheard: Callable[[bytes], None] | None = None
        self._proxy: ProxyReader | None = None
        self._tls: Channel | None = None
        self.is_wrapped = False
        self.named: ProxyHeader | None = None
        self.secured: TlsInfo | None = None
        self.ended = False  # the client has said in TLS that nothing more will come

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    @property
    def is_lost(self) -> bool:
        """The event loop has reported that the connection is gone."""
        return self._transport is None

    def expect_proxy_header(self) -> None:
        self._proxy = ProxyReader()
        self.is_wrapped = True

    def start_tls(self, channel: Channel) -> None:
        """Treat all later input as TLS; the client begins the handshake."""
        self._tls = channel
        self.is_wrapped = True
        self.write = self._write_encrypted

    def receive(self, data: bytes) -> bytes:
        """Return the clear text of these bytes: empty while a PROXY header or a handshake goes on.

        The call that completes a PROXY header returns what came behind it, and that may be TLS: start it
        and hand the bytes in again. Raises TransportFault.
        """
        if self._proxy is not None:
            return self._receive_proxy(self._proxy, data)
        if self._tls is not None:
            return self._receive_tls(self._tls, data)
        return data

    def _receive_proxy(self, reader: ProxyReader, data: bytes) -> bytes:
        try:
            header = reader.feed(data)
        except ProxyFault as fault:
            raise TransportFault(str(fault), tls=False) from fault
        if header is None:
            return b""
        self.named = header
        self._proxy = None
        self.is_wrapped = False
        return reader.rest

    def _receive_tls(self, channel: Channel, data: bytes) -> bytes:
        try:
            plain = channel.receive(data)
        except TlsFault as fault:
            self._write_raw(channel.take_output())  # the alert that tells the client
            raise TransportFault(str(fault), tls=True) from fault
        self._write_raw(channel.take_output())
        self.secured = channel.info
        self.ended = channel.closed
        return plain

    # Out, and the end.

    def overhear(self, told: Callable[[bytes], None]) -> None:
        """Tell of all that is written, in clear text. Again after a handshake."""
        if self.write is self._overheard:
            return
        write = self.write

        def tell_and_write(data: bytes) -> None:
            told(data)
            write(data)

        self.write = self._overheard = tell_and_write

    def _write_encrypted(self, data: bytes) -> None:
        assert self._tls is not None
        self._write_raw(self._tls.send(data))

    def _write_raw(self, data: bytes) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    def pause_reading(self, pause: bool) -> None:
        if pause is self.is_paused or self._transport is None:
            return
        self.is_paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def close(self) -> asyncio.TimerHandle | None:
        """Close once the output has gone out. The returned timer ends a client that does not take it."""
        transport = self._transport
        if transport is None:
            return None
        if self.secured is not None and self._tls is not None:
            self._write_raw(self._tls.close())
        handle = None
        if transport.get_write_buffer_size():
            handle = self._loop.call_later(LINGER, transport.abort)
        transport.close()
        self._drop_output()
        return handle

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def lost(self) -> None:
        """The event loop reports that the connection is gone."""
        self._transport = None
        self._drop_output()

    def _drop_output(self) -> None:
        # OpenSSL's part is tens of kilobytes, and a client may be slow to take the last reply.
        self._tls = None
        self.write = _discard


def _discard(data: bytes) -> None:
    """Write nothing: the client is gone."""
