"""A client that keeps account: which messages were acknowledged, and under which token.

Speaks SMTP over plain asyncio streams, one command at a time, and takes every loss of the connection
as a real client does: what has no 250 was not accepted. Each message carries its token in its
Subject, so that a sink's messages can be matched with the acknowledged ones.
"""

import asyncio
import base64
import contextlib
import random
import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence

from tests.support.process import RelayProcess
from tests.support.sink_conversation import Received
from tests.support.smtp_client import SmtpClient, connected

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

    def send(self, sessions: int, messages: int) -> None:
        """Do the same for a test that is not on a loop."""
        asyncio.run(self.run(sessions, messages))

    async def _session(self, left: Iterable[int]) -> None:
        with contextlib.suppress(OSError, EOFError):
            async with connected(self._port, b"EHLO client.test", host=self._host) as client:
                for _ in left:
                    await self._message(client)
                await client.say(b"QUIT")

    async def _message(self, client: SmtpClient) -> None:
        self._number += 1
        token = f"{self._prefix}-{self._number}"
        recipient = self._recipients[self._number % len(self._recipients)]
        for command in (b"MAIL FROM:<app@example.org>", f"RCPT TO:<{recipient}>".encode(), b"DATA"):
            reply = await client.say(command)
            if reply[:1] not in b"23":
                self.replies[reply[:9]] += 1
                if reply[:1] == b"4":
                    await client.say(b"RSET")
                return
        header = f"From: app@example.org\r\nSubject: {token}\r\n\r\n".encode()
        client.write(header + self.body + b".\r\n")
        reply = await client.reply()
        self.replies[reply[:9]] += 1
        if reply.startswith(b"250"):
            self.ids[token] = reply.split()[-1].decode("ascii")


def tokens(messages: Iterable[Received]) -> Counter[str]:
    """How often each token arrived."""
    found: Counter[str] = Counter()
    for message in messages:
        match = _TOKEN.search(message.body)
        if match is not None:
            found[match[1].decode()] += 1
    return found


MOST = 10
"""Missing messages that are told in full."""


class Account:
    """`ids` of what was acknowledged, by token."""

    def __init__(self, *clients: Submitter) -> None:
        self.ids: dict[str, str] = {}
        for client in clients:
            self.add(client)

    def add(self, client: Submitter) -> None:
        self.ids |= client.ids

    def missing(self, arrived: Container[str], relay: RelayProcess) -> list[str]:
        """Empty when everything has arrived; else a text for each that has not, with what the log says."""
        lost = {token: identity for token, identity in self.ids.items() if token not in arrived}
        lines = relay.log_text().splitlines() if lost else []
        told = []
        for token, identity in list(lost.items())[:MOST]:
            traces = "\n    ".join(line for line in lines if identity in line) or "nothing in the log"
            told.append(f"{token} was acknowledged as {identity} and has not arrived:\n    {traces}")
        return [*told, *list(lost)[MOST:]]
