"""A receiver that counts: how many connections at once, and when each MAIL came."""

from __future__ import annotations

import asyncio
import time
from collections import Counter


class CountingReceiver:
    """Takes everything after `delay` seconds. `peers`: whose connections are open, by client address."""

    def __init__(self, *, delay: float = 0.05, host: str = "127.0.0.1") -> None:
        self.delay = delay
        self.host = host
        self.port = 0
        self.open = self.peak = self.connections = self.messages = 0
        self.mails: list[float] = []
        self.senders: Counter[bytes] = Counter()
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


class _Connection(asyncio.Protocol):
    def __init__(self, counts: CountingReceiver) -> None:
        self._counts = counts
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._in_data = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        counts = self._counts
        counts.connections += 1
        counts.open += 1
        counts.peak = max(counts.peak, counts.open)
        self._transport = transport
        transport.write(b"220 counting ESMTP\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.open -= 1
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n" in self._buffer:
            if self._in_data:
                if b"\r\n.\r\n" not in self._buffer:
                    return
                _, _, self._buffer = self._buffer.partition(b"\r\n.\r\n")
                self._in_data = False
                asyncio.get_running_loop().call_later(self._counts.delay, self._taken)
                continue
            line, _, self._buffer = self._buffer.partition(b"\r\n")
            self._command(line)

    def _command(self, line: bytes) -> None:
        verb = line[:4].upper()
        if verb == b"EHLO":
            self._say(b"250-counting\r\n250 PIPELINING\r\n")
        elif verb == b"DATA":
            self._in_data = True
            # The line end before the dot may be this command's own.
            self._buffer = b"\r\n" + self._buffer
            self._say(b"354 go on\r\n")
        elif verb == b"QUIT":
            self._say(b"221 bye\r\n")
            if self._transport is not None:
                self._transport.close()
        else:
            if verb == b"MAIL":
                self._counts.mails.append(time.monotonic())
                self._counts.senders[line] += 1
            self._say(b"250 ok\r\n")

    def _taken(self) -> None:
        self._counts.messages += 1
        self._say(b"250 taken\r\n")

    def _say(self, reply: bytes) -> None:
        if self._transport is not None:
            self._transport.write(reply)
