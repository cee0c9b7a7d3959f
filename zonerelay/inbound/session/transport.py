"""Unwraps the bytes between a session and its socket: a PROXY header, then TLS; writes and closes.

Owns asyncio's transport. Input goes through `receive` while `is_wrapped`, output through `write`. Clear text
that came before a handshake never reaches the session after it: the session drops what it has, and everything
later is ciphertext.

Failure: `receive` raises TransportFault when the connection cannot be used any more; its text is for the
operator. Nothing else raises; a write to a client that is gone does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.inbound.tls.ports import Channel, TlsFault, TlsInfo
from zonerelay.smtp.server.proxy_protocol import ProxyFault, ProxyHeader, ProxyReader

LINGER = 10.0  # seconds for a client to take the last reply before it is cut off


class TransportFault(Exception):
    """`tls` says whether it was TLS or the PROXY header that went wrong."""

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
