"""A receiver that keeps account of every transaction: which message, from which node, from when to when."""

import asyncio
import re
from dataclasses import dataclass
from typing import cast

from tests.support.nodes.network import MAIL_HOST

_TOKEN = re.compile(rb"^Subject: (\S+)\r$", re.MULTILINE)
_DOMAIN = re.compile(rb"@([^>]+)>")
LOOK = 0.005
_END = b"\r\n.\r\n"
_EHLO = b"250-sink.test\r\n250-PIPELINING\r\n250-8BITMIME\r\n250 ENHANCEDSTATUSCODES\r\n"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One message taken with 250. `began` with MAIL, `ended` with that answer, by the loop's clock. MAIL came
    between `earliest` and `began`: the loop that reads it has other things to do, too.
    """

    token: str
    node: str
    began: float
    ended: float
    earliest: float

    def overlaps(self, other: "Arrival") -> bool:
        return self.began < other.ended and other.began < self.ended


@dataclass(frozen=True, slots=True)
class Begun:
    """One MAIL command, for a recipient of `domain`. It came between `earliest` and `at`: the loop that reads
    it has other things to do, too.
    """

    node: str
    domain: str
    earliest: float
    at: float


class LedgerSink:
    """Takes everything, and thinks about each message for `delay` seconds: some are always on their way."""

    def __init__(self, *, delay: float = 0.03) -> None:
        self.delay = delay
        self.port = 0
        self.arrivals: list[Arrival] = []
        self.begun: list[Begun] = []
        self.looked = 0.0
        """When the loop last had time for anything: what it reads now has come since."""
        self.longest_wait = 0.0
        """How late it was for that: the processors were others'."""
        self.open: dict[str, int] = {}
        self.most_open = 0
        self._server: asyncio.Server | None = None
        self._looking: asyncio.TimerHandle | None = None

    async def start(self, host: str = MAIL_HOST) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Conversation(self), host, 0, backlog=200)
        self.port = self._server.sockets[0].getsockname()[1]
        self._look()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self.looked:
            self.longest_wait = max(self.longest_wait, now - self.looked - LOOK)
        self.looked = now
        self._looking = loop.call_later(LOOK, self._look)

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()

    def count_open(self, node: str, change: int) -> None:
        self.open[node] = self.open.get(node, 0) + change
        self.most_open = max(self.most_open, sum(self.open.values()))

    def by_token(self) -> dict[str, list[Arrival]]:
        found: dict[str, list[Arrival]] = {}
        for arrival in self.arrivals:
            found.setdefault(arrival.token, []).append(arrival)
        return found


class _Conversation(asyncio.Protocol):
    """One connection; commands may be pipelined."""

    def __init__(self, sink: LedgerSink) -> None:
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._pending = b""
        self._body = False
        self._thinking = False
        self._came = self._earliest = self._began = 0.0
        self._node = ""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Of asyncio's own loop it is one; uvloop's is only alike.
        self._transport = cast(asyncio.Transport, transport)
        self._node = transport.get_extra_info("peername")[0]
        self._sink.count_open(self._node, 1)
        self._transport.write(b"220 sink.test ESMTP\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self._sink.count_open(self._node, -1)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._came = self._sink.looked
        self._pending += data
        self._go_on()

    def _go_on(self) -> None:
        while not self._thinking and self._transport is not None:
            mark = _END if self._body else b"\r\n"
            part, found, rest = self._pending.partition(mark)
            if not found:
                return
            self._pending = rest
            if self._body:
                self._message(part)
            else:
                self._command(self._transport, part)

    def _command(self, transport: asyncio.Transport, line: bytes) -> None:
        verb = line[:4].upper()
        if verb == b"MAIL":
            self._began = self._loop.time()
            self._earliest = self._came
        elif verb == b"RCPT" and (match := _DOMAIN.search(line)):
            begun = Begun(self._node, match[1].decode(), self._earliest, self._began)
            self._sink.begun.append(begun)
        self._body = verb == b"DATA"
        replies = {b"DATA": b"354 go on\r\n", b"EHLO": _EHLO, b"QUIT": b"221 2.0.0 bye\r\n"}
        transport.write(replies.get(verb, b"250 2.0.0 ok\r\n"))
        if verb == b"QUIT":
            transport.close()

    def _message(self, content: bytes) -> None:
        self._body, self._thinking = False, True
        match = _TOKEN.search(content)
        token = match[1].decode() if match else "?"
        self._loop.call_later(self._sink.delay, self._taken, token)

    def _taken(self, token: str) -> None:
        self._thinking = False
        if self._transport is None:
            return  # whoever sent it has left without an answer
        self._sink.arrivals.append(Arrival(token, self._node, self._began, self._loop.time(), self._earliest))
        self._transport.write(b"250 2.0.0 taken\r\n")
        self._go_on()
