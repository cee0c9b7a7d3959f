"""Clients that send without a pause to all nodes, and keep account of every 250.

What was not answered with 250 is sent again under another token, to the next node: whoever got the first one
may deliver it or not. `acknowledged` are those that must arrive.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.nodes.network import MAIL_HOST

PATIENCE = 2.0
"""Seconds that a client waits for an answer."""
REFUSED_PAUSE = 0.1
SESSIONS = 12
SIZE = 4000
LINE = b"It is not the strongest of the species that survives.\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """To a message's final dot, or to what came before if that was refused; asked when it `began`."""

    token: str
    node: str
    began: float
    at: float
    code: str


class Injector:
    """`rate` messages a second in all, over so many sessions; `domains` are taken in turn."""

    def __init__(self, doors: Sequence[tuple[str, int]], *, rate: float, per_connection: int = 8) -> None:
        self.domains = ["example.com"]
        self.acknowledged: dict[str, Answer] = {}
        self.refused: list[Answer] = []
        self.lost = 0
        self._doors = doors
        self._pause = SESSIONS / rate
        self._per_connection = per_connection
        self._body = LINE * (SIZE // len(LINE)) + b".\r\n"
        self._numbers = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._session(place)) for place in range(SESSIONS)]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def codes(self) -> Counter[str]:
        return Counter(answer.code for answer in self.refused)

    def first_since(self, moment: float) -> dict[str, float]:
        """Of each node, when it first acknowledged what was sent after this moment."""
        found: dict[str, float] = {}
        for answer in self.acknowledged.values():
            if answer.began > moment:
                found.setdefault(answer.node, answer.at)
        return found

    async def _session(self, place: int) -> None:
        for turn in itertools.count(place):
            host, port = self._doors[turn % len(self._doors)]
            try:
                async with asyncio.timeout(PATIENCE):
                    reader, writer = await asyncio.open_connection(host, port, local_addr=(MAIL_HOST, 0))
            except (OSError, TimeoutError):
                await asyncio.sleep(0.05)
                continue
            try:
                await self._converse(host, reader, writer)
            except (OSError, EOFError, TimeoutError):
                self.lost += 1
                await asyncio.sleep(0.05)
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _converse(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not (await _reply(reader)).startswith("220"):
            return
        writer.write(b"EHLO client.test\r\n")
        await _reply(reader)
        for _ in range(self._per_connection):
            if not await self._message(host, reader, writer):
                await asyncio.sleep(REFUSED_PAUSE)
                return
            await asyncio.sleep(self._pause)

    async def _message(self, host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """False when it was refused."""
        number = next(self._numbers)
        token, domain = f"t{number}", self.domains[number % len(self.domains)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        code = "250"
        for command in ("MAIL FROM:<app@example.org>", f"RCPT TO:<someone@{domain}>", "DATA"):
            writer.write(f"{command}\r\n".encode())
            code = await _reply(reader)
            if code[0] not in "23":
                break
        else:
            began = loop.time()
            writer.write(f"Subject: {token}\r\n\r\n".encode() + self._body)
            code = await _reply(reader)
        answer = Answer(token, host, began, loop.time(), code)
        if code == "250":
            self.acknowledged[token] = answer
        else:
            self.refused.append(answer)
        return code == "250"


async def _reply(reader: asyncio.StreamReader) -> str:
    """The code."""
    async with asyncio.timeout(PATIENCE):
        while True:
            line = await reader.readuntil(b"\r\n")
            if line[3:4] != b"-":
                return line[:3].decode()
