"""A receiver that holds its first conversations at chosen points until it is told to go on.

It counts complete messages by the token in their Subject, so a test sees how many copies have arrived,
wherever the relay that sends them was stopped meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.support.ports import LOOPBACK

_TOKEN = re.compile(rb"^Subject: (\S+)\r$", re.MULTILINE)


class Hold(StrEnum):
    """The reply that is held back; BODY: the body is not read to its end."""

    GREETING = "greeting"
    MAIL = "MAIL"
    RCPT = "RCPT"
    DATA = "DATA"
    BODY = "body"
    END = "end of the body"
    BDAT = "BDAT"
    NOTHING = "nothing"


@dataclass
class HoldingPeer:
    """Connection number n is held at the n-th of `holds`; later ones at nothing."""

    holds: Sequence[Hold]
    copies: Counter[str] = field(default_factory=Counter)
    held: list[Hold] = field(default_factory=list)
    ended: list[Hold] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = list(self.holds)
        self._go_on = asyncio.Event()
        self.changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, LOOPBACK, 0, limit=64 * 1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def release(self) -> None:
        self._go_on.set()

    async def close(self) -> None:
        assert self._server is not None
        self.release()
        self._server.close()

    async def until_held(self) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.held) == len(self.holds))

    async def until_ended(self) -> None:
        """Waits until the relay has closed every connection that was held."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.ended) == len(self.holds))

    async def until_arrived(self, tokens: set[str]) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: tokens <= self.copies.keys())

    async def hold(self, at: Hold) -> None:
        """Waits for `release`."""
        async with self.changed:
            self.held.append(at)
            self.changed.notify_all()
        await self._go_on.wait()

    async def arrived(self, token: str) -> None:
        async with self.changed:
            self.copies[token] += 1
            self.changed.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hold = self._left.pop(0) if self._left else Hold.NOTHING
        conversation = _Conversation(self, hold, reader, writer)
        with contextlib.suppress(OSError, EOFError):
            await conversation.run()
        writer.close()
        if hold is not Hold.NOTHING:
            async with self.changed:
                self.ended.append(hold)
                self.changed.notify_all()


class _Conversation:
    def __init__(
        self, peer: HoldingPeer, hold: Hold, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._peer, self._hold = peer, hold
        self._reader, self._writer = reader, writer
        self._chunks = b""

    async def run(self) -> None:
        await self._reply(Hold.GREETING, b"220 peer.test ESMTP")
        while line := await self._reader.readline():
            words = line.split()
            verb = words[0].upper() if words else b""
            if verb == b"EHLO":
                chunking = b"250-CHUNKING\r\n" if self._hold is Hold.BDAT else b""
                await self._reply(Hold.NOTHING, b"250-peer.test\r\n" + chunking + b"250 8BITMIME")
            elif verb == b"MAIL":
                await self._reply(Hold.MAIL, b"250 2.1.0 Ok")
            elif verb == b"RCPT":
                await self._reply(Hold.RCPT, b"250 2.1.5 Ok")
            elif verb == b"DATA":
                await self._reply(Hold.DATA, b"354 Go on")
                await self._data()
            elif verb == b"BDAT":
                self._chunks += await self._reader.readexactly(int(words[1]))
                if words[-1].upper() == b"LAST":
                    await self._arrived(self._chunks)
                    self._chunks = b""
                await self._reply(Hold.BDAT, b"250 2.0.0 Ok")
            else:
                await self._reply(Hold.NOTHING, b"250 2.0.0 Ok")

    async def _data(self) -> None:
        if self._hold is Hold.BODY:
            await self._held()
        head = body = b""
        while not body.endswith(b"\r\n.\r\n"):
            piece = await self._reader.read(65536)
            if not piece:
                raise EOFError
            head = head or piece
            body = body[-4:] + piece
        await self._arrived(head)
        await self._reply(Hold.END, b"250 2.0.0 Ok")

    async def _arrived(self, content: bytes) -> None:
        found = _TOKEN.search(content)
        assert found is not None
        await self._peer.arrived(found.group(1).decode())

    async def _reply(self, at: Hold, text: bytes) -> None:
        if at is not Hold.NOTHING and at is self._hold:
            await self._held()
        self._writer.write(text + b"\r\n")
        await self._writer.drain()

    async def _held(self) -> None:
        held, self._hold = self._hold, Hold.NOTHING
        await self._peer.hold(held)
