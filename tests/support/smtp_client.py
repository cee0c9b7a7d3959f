"""An SMTP client over plain asyncio streams: it says what it is told to, and reads whole replies."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.support.ports import LOOPBACK

TO_DATA = (b"EHLO c", b"MAIL FROM:<a@example.org>", b"RCPT TO:<b@example.com>", b"DATA")


class SmtpClient:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def reply(self) -> bytes:
        """Return a reply's last line; raise EOFError when the server hangs up instead."""
        while True:
            line = await self.reader.readuntil(b"\r\n")
            if line[3:4] != b"-":
                return line[:-2]

    async def refusals(self, count: int) -> list[bytes]:
        """Read so many replies and return those that are refusals."""
        replies = [await self.reply() for _ in range(count)]
        return [each for each in replies if each[:1] not in b"23"]

    async def say(self, *commands: bytes) -> bytes:
        """Send one command after the other, each when that before is answered; return the last reply."""
        answer = b""
        for command in commands:
            self.write(command + b"\r\n")
            answer = await self.reply()
        return answer


@contextlib.asynccontextmanager
async def connected(
    port: int, *commands: bytes, host: str = LOOPBACK, greeted: bool = True
) -> AsyncIterator[SmtpClient]:
    """Connect, wait for the greeting unless told otherwise, say the commands; close at the end."""
    reader, writer = await asyncio.open_connection(host, port)
    client = SmtpClient(reader, writer)
    try:
        if greeted:
            await client.reply()
        await client.say(*commands)
        yield client
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
