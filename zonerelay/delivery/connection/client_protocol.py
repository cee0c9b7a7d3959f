"""The asyncio protocol of an outgoing connection: reads reply lines and writes bytes.

It is made for thousands of transactions on one connection: no task, no timeout context, at most one future
per wait, and one timer for the life of the connection, which is reused for each phase.

Promises: a reply that arrived before the connection broke is still returned. Every wait ends by its deadline.
The write limit and the reply parser's limits bound memory. Bytes that arrive on an idle connection (`idle`)
close it, because the next command would be paired with the wrong reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.model.reply import Reply
from zonerelay.smtp.client.replies import ReplyParser
from zonerelay.telemetry.events.transcript import SessionRecorder

WRITE_LIMIT = 256 * 1024
"""Bytes queued in this process before the writer waits."""


class ConnectionLostError(Exception):
    """The connection is lost."""


class ReplyTimeoutError(Exception):
    """The reply was not received before its deadline, and the connection cannot be used any more."""


class ClientProtocol(asyncio.Protocol):
    """The asyncio protocol of an open outgoing connection. Calls `on_lost` exactly once, when the socket is
    gone.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, on_lost: Callable[[], None]
    ) -> None:
        self.lost = False
        self.idle = False
        self.record: SessionRecorder | None = None
        """The record of a transcript that an operator has started."""
        self.on_surplus: Callable[[], None] | None = None
        """Called when unexpected bytes other than a 421 arrive on the idle connection."""
        self._transport = transport
        self._loop = loop
        self._on_lost = on_lost
        self._parser = parser = ReplyParser()
        self._feed = parser.feed
        self.next_reply = parser.next_reply
        """Returns a reply that has arrived, or None. Raises PeerError."""
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._deadline = 0.0
        # The handle is not queried for its time: uvloop's fails with less than a millisecond left.
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        transport.set_write_buffer_limits(high=WRITE_LIMIT)
        transport.set_protocol(self)

    # Callbacks of the transport.

    def data_received(self, data: bytes) -> None:
        if self.record is not None:
            self.record.replies(data)
        self._feed(data)
        if self.idle and self._parser.has_input:
            self.abort()
            if self.on_surplus is not None and not data.startswith(b"421"):
                self.on_surplus()
        self._wake()

    def eof_received(self) -> None:
        # No reply can arrive any more, so nothing that is queued can succeed.
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.record is not None:
            self.record.note("the connection has ended")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()
        self._on_lost()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    # Methods for a transaction.

    @property
    def usable(self) -> bool:
        """Whether a new transaction may start: the connection is open and no unexpected byte has arrived."""
        return not (self.lost or self._parser.has_input or self._transport.is_closing())

    @property
    def skipped(self) -> str:
        """A line that was skipped because it has no code, or `""`."""
        return self._parser.skipped

    @property
    def heard(self) -> bool:
        """Whether the peer has sent bytes that have not been read yet."""
        return self._parser.has_input

    @property
    def time_left(self) -> float:
        """The seconds until the present wait ends."""
        return max(self._deadline - self._loop.time(), 0.0)

    def write(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionLostError
        if self.record is not None:
            self.record.commands(data)
        self._transport.write(data)

    async def reply(self, timeout: float) -> Reply:
        """Wait for the next reply after `next_reply` returned none. `timeout` (seconds) covers the whole
        reply.

        Raise ConnectionLostError, ReplyTimeoutError or PeerError.
        """
        if not self.lost:
            self._start_clock(timeout)
        while not self.lost:
            await self._change()
            reply = self.next_reply()
            if reply is not None:
                return reply
        raise ConnectionLostError

    async def drain(self, timeout: float) -> None:
        """Wait while the peer reads more slowly than we write. Return when it catches up or sends a reply.

        Raise ConnectionLostError or ReplyTimeoutError.
        """
        if self._paused:
            self._start_clock(timeout)
        while self._paused and not self.lost and not self._parser.has_input:
            await self._change()
        if self.lost and not self._parser.has_input:
            raise ConnectionLostError

    async def flush(self, timeout: float) -> None:
        """Wait like `drain` until all data is written to the socket."""
        if not self._transport.get_write_buffer_size():
            return  # with a limit of 0, TLS transports would pause us and never resume
        self._transport.set_write_buffer_limits(high=0)
        try:
            await self.drain(timeout)
        finally:
            self._transport.set_write_buffer_limits(high=WRITE_LIMIT)

    def quit(self, timeout: float) -> None:
        """Send QUIT and close without waiting for the 221, as Postfix does. `timeout` limits the closing, in
        seconds.
        """
        if not self._transport.is_closing():
            self.idle = False
            if self.record is not None:
                self.record.command(b"QUIT")
            self._transport.write(b"QUIT\r\n")
            self._transport.close()
            if self._timer is not None:
                self._timer.cancel()
            # TLS and a full socket both wait for the peer while closing.
            self._timer = self._loop.call_later(timeout, self._transport.abort)

    def abort(self) -> None:
        """Close the connection immediately and discard queued bytes. A body that must not be completed ends
        here.
        """
        self._transport.abort()

    # Waiting.

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _change(self) -> asyncio.Future[None]:
        """Return a future that is done after the next event, while the timer runs. Raise ReplyTimeoutError
        afterwards.
        """
        if self._timer is None:
            raise ReplyTimeoutError
        waiter = self._waiter = self._loop.create_future()
        return waiter

    def _start_clock(self, timeout: float) -> None:
        deadline = self._deadline = self._loop.time() + timeout
        if self._timer is not None:
            if self._timer_at <= deadline:
                return
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._loop.time() < self._deadline:
            self._timer_at = self._deadline
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
        else:
            self._wake()
