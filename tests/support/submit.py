"""A client that keeps account: which messages were acknowledged, and under which token.

Speaks SMTP over plain asyncio streams, one command at a time, and takes every loss of the connection
as a real client does: what has no 250 was not accepted. Each message carries its token in its
Subject, so that a sink's messages can be matched with the acknowledged ones.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from tests.support.sink_conversation import Received

_TOKEN = re.compile(rb"^Subject: (\S+)\r$", re.MULTILINE)


class Submitter:
    """`acknowledged` are the tokens that were answered 250 after the final dot, with the ids they were given.

    Messages go to the `recipients` in turn.
    """

    def __init__(
        self,
        port: int,
        *,
        prefix: str,
        size: int = 2000,
        host: str = "127.0.0.1",
        recipients: Sequence[str] = ("someone@example.com",),
    ) -> None:
        self._host, self._port = host, port
        self._prefix = prefix
        self._recipients = recipients
        # Nothing that a store could compress: a full disk must really fill.
        noise = random.Random(size).randbytes(size * 3 // 4)
        self.body = base64.encodebytes(noise).replace(b"\n", b"\r\n")
        self._number = 0
        self.ids: dict[str, str] = {}
        self.replies: Counter[bytes] = Counter()

    @property
    def acknowledged(self) -> set[str]:
        return set(self.ids)

    async def run(self, sessions: int, messages: int) -> None:
        """Send `messages` in all over `sessions` connections; returns when done or disconnected."""
        left = iter(range(messages))
        await asyncio.gather(*(self._session(left) for _ in range(sessions)))

    async def _session(self, left: Iterable[int]) -> None:
        with contextlib.suppress(OSError, EOFError):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                await self._reply(reader)
                await self._command(reader, writer, b"EHLO client.test")
                for _ in left:
                    await self._message(reader, writer)
                await self._command(reader, writer, b"QUIT")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()

    async def _message(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._number += 1
        token = f"{self._prefix}-{self._number}"
        recipient = self._recipients[self._number % len(self._recipients)]
        for command in (b"MAIL FROM:<app@example.org>", f"RCPT TO:<{recipient}>".encode(), b"DATA"):
            reply = await self._command(reader, writer, command)
            if reply[:1] not in b"23":
                self.replies[reply[:9]] += 1
                if reply[:1] == b"4":
                    await self._command(reader, writer, b"RSET")
                return
        header = f"From: app@example.org\r\nSubject: {token}\r\n\r\n".encode()
        writer.write(header + self.body + b".\r\n")
        reply = await self._reply(reader)
        self.replies[reply[:9]] += 1
        if reply.startswith(b"250"):
            self.ids[token] = reply.split()[-1].decode("ascii")

    async def _command(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: bytes
    ) -> bytes:
        writer.write(line + b"\r\n")
        return await self._reply(reader)

    async def _reply(self, reader: asyncio.StreamReader) -> bytes:
        while True:
            line = await reader.readuntil(b"\r\n")
            if line[3:4] != b"-":
                return line


def tokens(messages: Iterable[Received]) -> Counter[str]:
    """How often each token arrived."""
    found: Counter[str] = Counter()
    for message in messages:
        match = _TOKEN.search(message.body)
        if match is not None:
            found[match[1].decode()] += 1
    return found
