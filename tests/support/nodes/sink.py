"""A receiver that keeps account of every transaction: which message, from which node, from when to when."""

import asyncio
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex

from tests.support.nodes.network import MAIL_HOST
from tests.support.sink import Sink
from tests.support.sink_conversation import READ_SIZE, Conversation, Received

_TOKEN = re.compile(rb"^Subject: (\S+)\r$", re.MULTILINE)
_DOMAIN = re.compile(r"@([^>]+)>")
LOOK = 0.005


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


class LedgerSink(Sink):
    """Takes everything, and thinks about each message for `delay` seconds: some are always on their way."""

    def __init__(self, *, delay: float = 0.03) -> None:
        super().__init__(host=MAIL_HOST)
        self.delay = delay
        self.arrivals: list[Arrival] = []
        self.begun: list[Begun] = []
        self.looked = 0.0
        """When the loop last had time for anything: what it reads now has come since."""
        self.longest_wait = 0.0
        """How late it was for that: the processors were others'."""

    async def start(self) -> None:
        await super().start()
        self._look()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self.looked:
            self.longest_wait = max(self.longest_wait, now - self.looked - LOOK)
        self.looked = now
        self._looking = loop.call_later(LOOK, self._look)

    async def close(self) -> None:
        self._looking.cancel()
        await super().close()

    async def accept(self, message: Received) -> None:
        """It is in `arrivals`."""

    def reader(self) -> asyncio.StreamReader:
        return _Reader(self)

    def conversation(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Conversation:
        assert isinstance(reader, _Reader)
        return _LedgerConversation(self, reader, writer)

    def by_token(self) -> dict[str, list[Arrival]]:
        found: dict[str, list[Arrival]] = {}
        for arrival in self.arrivals:
            found.setdefault(arrival.token, []).append(arrival)
        return found


class _Reader(asyncio.StreamReader):
    """Knows since when the octets that came last can have come."""

    def __init__(self, sink: LedgerSink) -> None:
        super().__init__(READ_SIZE)
        self._sink = sink
        self.came = 0.0

    def feed_data(self, data: Iterable[SupportsIndex]) -> None:
        self.came = self._sink.looked
        super().feed_data(data)


class _LedgerConversation(Conversation):
    def __init__(self, sink: LedgerSink, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        super().__init__(sink, reader, writer)
        self._sink, self._fed = sink, reader
        self._loop = asyncio.get_running_loop()
        self._node: str = writer.get_extra_info("peername")[0]

    async def _mail(self, argument: str) -> None:
        self._began, self._earliest = self._loop.time(), self._fed.came
        await super()._mail(argument)

    async def _rcpt(self, argument: str) -> None:
        if match := _DOMAIN.search(argument):
            self._sink.begun.append(Begun(self._node, match[1], self._earliest, self._began))
        await super()._rcpt(argument)

    async def _answer_message(self, behaviours: Any, body: bytes, *given: Any) -> None:
        await asyncio.sleep(self._sink.delay)
        if self._fed.at_eof() or self._fed.exception():
            raise EOFError  # whoever sent it has left without an answer
        match = _TOKEN.search(body)
        token = match[1].decode() if match else "?"
        self._sink.arrivals.append(Arrival(token, self._node, self._began, self._loop.time(), self._earliest))
        await super()._answer_message(behaviours, body, *given)
