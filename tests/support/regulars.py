"""Clients that connect anew for each message, and write down everything that is not as it should be.

A message counts as acknowledged after its 250 and not before. Its Subject is its token (`submit.tokens`).
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.support.smtp_client import SmtpClient, connected


class Regulars:
    """`complaints` are counted by their texts; `pause` is between two visits of a client."""

    def __init__(self, port: int, *, pause: float = 0.0) -> None:
        self._port = port
        self._pause = pause
        self.acknowledged: set[str] = set()
        self.complaints: Counter[str] = Counter()
        self._number = 0
        self._stop = False

    @contextmanager
    def at_work(self, clients: int = 6) -> Iterator[None]:
        """On a thread of their own."""
        with ThreadPoolExecutor(1) as thread:
            working = thread.submit(asyncio.run, self._work(clients))
            try:
                yield
            finally:
                self._stop = True
            working.result()

    async def _work(self, clients: int) -> None:
        await asyncio.gather(*(self._come_and_go() for _ in range(clients)))

    async def _come_and_go(self) -> None:
        while not self._stop:
            self._number += 1
            token = f"regular-{self._number}"
            try:
                async with asyncio.timeout(20):
                    await self._visit(token)
            except (OSError, EOFError, TimeoutError) as error:
                self.complaints[repr(error)] += 1
            await asyncio.sleep(self._pause)

    async def _visit(self, token: str) -> None:
        async with connected(self._port, greeted=False) as client:
            await self._expect(client, b"220")
            for line in (b"EHLO c", b"MAIL FROM:<a@example.org>", b"RCPT TO:<b@example.com>"):
                client.write(line + b"\r\n")
                await self._expect(client, b"250")
            client.write(b"DATA\r\n")
            await self._expect(client, b"354")
            client.write(f"Subject: {token}\r\n\r\n.\r\n".encode())
            await self._expect(client, b"250")
            self.acknowledged.add(token)
            client.write(b"QUIT\r\n")
            await client.reader.read()

    async def _expect(self, client: SmtpClient, code: bytes) -> None:
        if not (reply := await client.reply()).startswith(code):
            raise EOFError(reply.decode())
