"""A receiver that counts: how many connections at once, and when each MAIL came."""

from __future__ import annotations

import asyncio
import time

from tests.bench.sink import SinkProtocol


class CountingReceiver:
    """Takes everything, and answers each message after `delay` seconds."""

    def __init__(self, *, delay: float = 0.05, host: str = "127.0.0.1") -> None:
        self.delay = delay
        self.host = host
        self.port = 0
        self.open = self.peak = self.messages = 0
        self.mails: list[float] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def fullest(self, seconds: float) -> int:
        """The most MAIL commands in any such time."""
        return max(
            (sum(first <= each < first + seconds for each in self.mails) for first in self.mails), default=0
        )


class _Connection(SinkProtocol):
    def __init__(self, counts: CountingReceiver) -> None:
        super().__init__(lambda *_: None)
        self._counts = counts

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._counts.open += 1
        self._counts.peak = max(self._counts.peak, self._counts.open)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.open -= 1
        self._transport = None

    def _command(self, line: bytes) -> bytes:
        if line[:4].upper() == b"MAIL":
            self._counts.mails.append(time.monotonic())
        return super()._command(line)

    def _content(self, data: bytes, replies: list[bytes]) -> tuple[bytes, bool]:
        rest, ended = super()._content(data, replies)
        if ended:
            asyncio.get_running_loop().call_later(self._counts.delay, self._take, replies.pop())
        return rest, ended

    def _take(self, reply: bytes) -> None:
        self._counts.messages += 1
        if self._transport is not None:
            self._transport.write(reply)
