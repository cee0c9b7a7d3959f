"""Unwraps the bytes between a session and its socket: first the PROXY header, then TLS. It also writes and
closes.

It owns asyncio's transport. Input goes through `unwrap` while `is_wrapped`, output through `write`.
Unencrypted input from before a handshake never reaches the session after it: the session discards its input,
and everything later is ciphertext.

On failure: `unwrap` calls `say_goodbye` if the connection cannot be used any more. Nothing raises an
exception. A write to a closed connection does nothing.

The module also has the deadlines of a client. It has no timers: the session checks when its one timer fires.

- handshake: for a PROXY header or a TLS handshake, from its beginning to its end.
- idle: between our reply and the client's next complete command (sending single bytes does not help), and
  between two reads of a body (RFC 5321 4.5.3.2.7).
- data rate: a body or BDAT chunk that takes longer than the idle time must arrive with a minimum average rate
  (Postfix's smtpd_min_data_rate). A byte a minute is not idle, but it is too slow.
- transaction: from MAIL to the end of data, so that even a slow client is ended at some time.

These clocks stop while the relay does not read, or waits for a lookup before it replies. Late clients get 421
4.4.2, except inside a TLS handshake, where they could not read it.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import HANDSHAKE
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.inbound.tls.channel import TlsChannel, TlsFault, TlsInfo
from zonerelay.smtp.server.proxy_protocol import ProxyFault, ProxyHeader, ProxyReader


class Deadlines:
    """The time limits of one client of a listener, in event loop time."""

    def __init__(self, now: float, settings: ListenerSettings) -> None:
        self._settings = settings
        self.heard = now  # when the client last sent body bytes, or began to wait for us
        self.octets = 0  # of the current body; the session adds the received bytes
        self._began: float | None = None  # of the transaction
        self._timed: object | None = None  # the transaction that is timed
        self._body: float | None = None
        self._handshake: float | None = None
        self.paused_at: float | None = None

    def began_handshake(self, now: float) -> None:
        """Start the time limit of a PROXY header or TLS handshake."""
        self._handshake = now
        self.heard = now

    def established(self, now: float) -> None:
        """End the time limit of the handshake, and start the idle time."""
        self._handshake = None
        self.heard = now

    def answered(self, now: float, transaction: object | None) -> None:
        """Restart the time limits after commands were answered. The client is now in this transaction, or in
        none.

        It may differ from the previous one, because RSET and MAIL can arrive in one packet.
        """
        self.heard = now
        if transaction is None:
            self._began = None
        elif self._began is None or transaction is not self._timed:
            self._began = now
        self._timed = transaction

    def body_began(self, now: float) -> None:
        """Start the time limit of a body or BDAT chunk, and count its bytes.

        A refused chunk has no transaction, but gets no more time than others.
        """
        self._body = now
        self.octets = 0
        if self._began is None:
            self._began = now

    def chunk_complete(self, now: float) -> None:
        """End the time limit of a BDAT chunk that is not the last one, and start the idle time."""
        self._body = None
        self.heard = now

    def complete(self) -> None:
        """Stop the time limits of a message that has arrived completely."""
        self._began = None
        self._body = None

    def paused(self, now: float) -> None:
        """Stop all time limits while the relay itself causes the delay."""
        if self.paused_at is None:
            self.paused_at = now

    def resumed(self, now: float) -> None:
        """Continue the time limits after a pause. Limits that were running are extended by the pause; limits
        that began during it begin now.
        """
        if self.paused_at is None:
            return
        stalled = now - self.paused_at
        self.paused_at = None
        self.heard = now
        self._handshake, self._began, self._body = (
            None if since is None else min(since + stalled, now)
            for since in (self._handshake, self._began, self._body)
        )

    def late(self, now: float) -> ServerReply | None:
        if self.paused_at is not None:
            now = self.paused_at
        late = (reply for since, limit, reply in self._clocks() if since is not None and now >= since + limit)
        return next(late, None)

    def next_look(self, now: float) -> float:
        """Return the time at which `late` has to be called again, before any time limit expires."""
        theirs = now if self.paused_at is None else self.paused_at
        # Clocks that begin later, or began during the pause, start at this time at the earliest.
        dues = [
            (theirs if since is None or since > theirs else since) + limit
            for since, limit, _ in self._clocks()
        ]
        return min(dues) + (now - theirs)

    def _clocks(self) -> Iterator[tuple[float | None, float, ServerReply]]:
        """Yield each time limit with its start (or None), its length in seconds, and the reply to a client
        that exceeds it.
        """
        yield self._handshake, HANDSHAKE, replies.IDLE
        idle, min_rate = self._settings.idle_timeout, self._settings.min_data_rate
        yield self._began, self._settings.transaction_timeout, replies.TRANSACTION_TIME
        yield self.heard, idle, replies.IDLE
        if min_rate:
            yield self._body, idle + self.octets / min_rate, replies.DATA_RATE


LINGER = 10.0  # seconds for a client to read the last reply before the connection is aborted


class Connection(Protocol):
    """Interface: an SMTP session or HTTP connection, whose methods `Transport.unwrap` calls."""

    def named(self, header: ProxyHeader) -> bool:
        """Continue as the client that the PROXY header names. Return False if it is refused."""

    def encrypted(self, info: TlsInfo) -> None:
        """Continue after the TLS handshake."""

    def client_ended(self) -> None:
        """End the connection, because the client has announced the end of its data in TLS (close_notify)."""

    def say_goodbye(self, answer: ServerReply, *, detail: str = "") -> None:
        """End the connection with this reply, because it cannot be used any more. `detail` is for the
        operator.
        """


class Transport:
    """The byte stream of a connection behind the PROXY header and TLS. `secured` is set after a TLS
    handshake.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport: asyncio.Transport | None = transport
        self._loop = loop
        self.is_paused = False
        self.is_blocked = False  # the client does not read our replies
        # Most connections have no TLS, and every reply uses this.
        self.write: Callable[[bytes], None] = transport.write
        self._overheard: Callable[[bytes], None] | None = None
        self._proxy: ProxyReader | None = None
        self._tls: TlsChannel | None = None
        self.is_wrapped = False
        self.secured: TlsInfo | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    @property
    def is_lost(self) -> bool:
        """Whether the event loop has reported that the connection is closed."""
        return self._transport is None

    def expect_proxy_header(self) -> None:
        self._proxy = ProxyReader()
        self.is_wrapped = True

    def start_tls(self, channel: TlsChannel) -> None:
        """Treat all further input as TLS. The client begins the handshake."""
        self._tls = channel
        self.is_wrapped = True
        self.write = self._write_encrypted

    def unwrap(self, data: bytes, owner: Connection) -> bytes:
        """Return the plaintext of received bytes, and report the PROXY header and the TLS handshake to the
        connection. It is empty while a PROXY header or a handshake is incomplete, and if the connection
        cannot be used any more.
        """
        while data and self.is_wrapped:
            if self._proxy is None:
                return self._decrypted(data, owner)
            try:
                header = self._proxy.feed(data)
            except ProxyFault as fault:
                owner.say_goodbye(replies.BAD_PROXY, detail=str(fault))
                return b""
            if header is None:
                return b""
            data, self._proxy, self.is_wrapped = self._proxy.rest, None, False
            if not owner.named(header):
                return b""
        return data

    def _decrypted(self, data: bytes, owner: Connection) -> bytes:
        channel = self._tls
        if channel is None:
            return b""  # the connection is closed
        try:
            plain = channel.receive(data)
        except TlsFault as fault:
            self._write_raw(channel.take_output())  # the alert for the client
            owner.say_goodbye(replies.TLS_FAULT, detail=str(fault))
            return b""
        self._write_raw(channel.take_output())
        if channel.info is not None and channel.info is not self.secured:
            self.secured = channel.info
            owner.encrypted(channel.info)
        if channel.closed:
            owner.client_ended()
        return plain

    # Output, and closing.

    def overhear(self, on_output: Callable[[bytes], None]) -> None:
        """Call `on_output` with all plaintext output from now on. Call this again after a handshake."""
        if self.write is self._overheard:
            return
        write = self.write

        def tell_and_write(data: bytes) -> None:
            on_output(data)
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
        """Close the connection after all output has been sent. The returned timer aborts a connection whose
        client does not read.
        """
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
        """Release the transport, because the event loop reports that the connection is closed."""
        self._transport = None
        self._drop_output()

    def _drop_output(self) -> None:
        # OpenSSL's state is tens of kilobytes, and a client may read the last reply slowly.
        self._tls = None
        self.write = _discard


def _discard(data: bytes) -> None:
    """Discard output, because the connection is closed."""
