"""The receivers of the acceptance tests notice a client without manners, and are as bad as they say."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.receivers.conversation import Receiver
from tests.support.receivers.manners import message_problem
from tests.support.receivers.nature import Nature

HELLO = "EHLO client.test\r\n"
MAIL, RCPT = "MAIL FROM:<b-1@origin.test>\r\n", "RCPT TO:<a@here.test>\r\n"
TEXT = "Subject: x\r\n\r\nhello\r\n.\r\n"


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def write(self, text: str) -> None:
        self._writer.write(text.encode())

    async def reply(self) -> str:
        async with asyncio.timeout(5):
            while True:
                line = (await self._reader.readline()).decode()
                if line[3:4] != "-":
                    return line

    async def say(self, *commands: str) -> list[str]:
        """One after the other."""
        replies = []
        for command in commands:
            self.write(command)
            replies.append((await self.reply())[:3])
        return replies

    async def ended(self) -> bool:
        async with asyncio.timeout(5):
            return await self._reader.read() == b""


@asynccontextmanager
async def receiving(nature: Nature, *, names: dict[str, str] | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver("here", nature, ehlo_names=names)
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.close()


@asynccontextmanager
async def client(receiver: Receiver, *, greeting: str = "220") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", receiver.port)
    try:
        one = Client(reader, writer)
        if greeting:
            assert (await one.reply()).startswith(greeting)
        yield one
    finally:
        writer.close()


async def test_good_manners_are_no_error() -> None:
    async with receiving(Nature(chunking=True)) as receiver, client(receiver) as one:
        await one.say(HELLO)
        one.write(MAIL + RCPT + "DATA\r\n")
        assert [(await one.reply())[:3] for _ in range(3)] == ["250", "250", "354"]
        assert await one.say(TEXT, MAIL, RCPT, "BDAT 6 LAST\r\nx: y\r\n", "QUIT\r\n") == ["250"] * 4 + ["221"]
    assert receiver.journal.errors == []
    assert [each.recipients for each in receiver.journal.arrivals] == [("a@here.test",)] * 2


@pytest.mark.parametrize(
    ("commands", "error"),
    [
        ([MAIL], "MAIL out of order"),
        ([HELLO, MAIL, MAIL], "MAIL out of order"),
        ([HELLO, RCPT], "RCPT without MAIL"),
        ([HELLO, "DATA\r\n"], "DATA without MAIL"),
        ([HELLO, MAIL, RCPT, "BDAT 1 LAST\r\nx"], "BDAT without CHUNKING"),
        ([HELLO, "STARTTLS\r\n"], "STARTTLS that is not offered"),
        ([HELLO, "VRFY a\r\n"], "VRFY is no command"),
        ([HELLO, MAIL.replace(">", "> SIZE=1")], "SIZE=1 without SIZE"),
        (["HELO x\r\n", MAIL.replace(">", "> BODY=8BITMIME")], "BODY=8BITMIME without"),
        ([HELLO, MAIL, RCPT.replace(">", "> NOTIFY=NEVER")], "NOTIFY=NEVER without DSN"),
        ([HELLO, "MAIL FROM:<a\n@b>\r\n"], "a bare CR, LF or NUL"),
        ([HELLO, f"MAIL FROM:<{'a' * 2000}@b>\r\n"], "a line of"),
        (["EHLO other.test\r\n"], "127.0.0.1 calls itself other.test"),
        ([HELLO, MAIL, RCPT, "DATA\r\n", "Subject: x\n\r\n.\r\n"], "a bare CR, LF or NUL in a message"),
        ([HELLO, MAIL, RCPT, "DATA\r\n", f"X-Digest: {'0' * 64}\r\n\r\n.\r\n"], "another body"),
    ],
)
async def test_what_no_client_may_do_is_noted(commands: list[str], error: str) -> None:
    async with receiving(Nature(), names={"127.0.0.1": "client.test"}) as receiver, client(receiver) as one:
        for command in commands:
            one.write(command)
            await one.reply()
    assert any(error in each for each in receiver.journal.errors), receiver.journal.errors


@pytest.mark.parametrize("after", [0.0, 0.05])
@pytest.mark.parametrize(
    ("offered", "commands"),
    [(False, MAIL + RCPT), (True, "DATA\r\nSubject: x\r\n"), (True, HELLO + MAIL), (True, "NOOP\r\n" + MAIL)],
)
async def test_commands_before_their_time_are_noted(offered: bool, commands: str, after: float) -> None:
    """Also when they come in another packet, while the answer is on its way."""
    async with receiving(Nature(pipelining=offered, replies_after=0.1)) as receiver, client(receiver) as one:
        await one.say(HELLO)
        first, second = commands.split("\r\n", 1)
        one.write(first + "\r\n" + ("" if after else second))
        await asyncio.sleep(after)
        one.write(second if after else "")
        await one.reply()
        await asyncio.sleep(0.05)
    assert any("wait" in each or "early" in each or "before" in each for each in receiver.journal.errors)


async def test_a_client_that_speaks_before_the_greeting_is_noted() -> None:
    async with receiving(Nature(greets_after=0.1)) as receiver, client(receiver, greeting="") as one:
        one.write(HELLO)
        await one.reply()
    assert receiver.journal.errors


def test_messages_are_looked_at() -> None:
    assert "998" in message_problem(b"Subject: x\r\n\r\n" + b"x" * 999 + b"\r\n", set())
    eight = "Subject: x\r\n\r\nü\r\n".encode()
    assert "8BITMIME" in message_problem(eight, set())
    assert message_problem(eight, {"8BITMIME"}) == ""


# As bad as they say
