"""A client may leave at any point: before the final dot nothing exists, after it nothing is forgotten."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from tests.support.inbound import House, RememberingStore, Talk, listening, until
from zonerelay.config.models import ListenerSettings

LARGE = b"Subject: x\r\n\r\n" + b"y" * 200_000 + b"\r\n"


def reset(talk: Talk) -> None:
    """Leave with a TCP reset."""
    raw = talk.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    talk.writer.transport.abort()


async def gone(house: House) -> None:
    await until(lambda: house.listener.connections == 0)


@pytest.mark.parametrize("said", [b"", b"EHLO x\r\n", b"EHLO x", b"EHLO x\r\nMAIL FR", b"\xff\x00"])
async def test_leaving_before_a_message_leaves_nothing(said: bytes) -> None:
    async with listening() as house:
        talk = await house.connect()
        talk.send(said)
        await talk.close()
        await gone(house)
        assert house.store.begun == 0


@pytest.mark.parametrize(
    "body", [b"", b"Subject: x\r\n", b"Subject: x\r\n\r\nbody\r\n.", b"body\r\n.\r", LARGE]
)
@pytest.mark.parametrize("abruptly", [False, True])
async def test_leaving_before_the_final_dot_stores_nothing(body: bytes, abruptly: bool) -> None:
    async with listening() as house:
        talk = await house.connect()
        await talk.begin()
        talk.send(body)
        await talk.writer.drain()
        if body is LARGE:
            await until(lambda: house.store.begun == 1)
        if abruptly:
            reset(talk)
        else:
            await talk.close()
        await gone(house)
        await until(lambda: house.store.aborted == house.store.begun)
        assert house.store.stored == []
        await until(lambda: house.log.reasons() == ["client-left"])


@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize("body", [b"Subject: x\r\n", LARGE])
async def test_leaving_after_the_final_dot_does_not_cancel_the_commit(body: bytes, abruptly: bool) -> None:
    store = RememberingStore()
    committing, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        committing.set()
        await go.wait()

    store.before_commit = slowly
    async with listening(store=store) as house:
        talk = await house.connect()
        await talk.begin()
        talk.send(body + b".\r\n")
        await committing.wait()
        if abruptly:
            reset(talk)
            await gone(house)
        else:
            await talk.close()
        go.set()
        await until(lambda: len(store.stored) == 1)
        assert house.notified == ["default"]
        if abruptly:
            await until(lambda: bool(house.log.named("reply-lost")))
        await gone(house)
        assert store.aborted == 0


async def test_half_closing_after_the_dot_still_gets_the_reply() -> None:
    """`printf … | nc` closes its sending side at once."""
    store = RememberingStore()

    async def slowly() -> None:
        await asyncio.sleep(0.02)

    store.before_commit = slowly
    async with listening(store=store) as house, await house.connect() as talk:
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\nQUIT\r\n")
        talk.writer.write_eof()
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
        assert await talk.line() == b"221 2.0.0 Bye"
        assert await talk.closed() == b""


async def test_half_closing_in_mid_conversation_closes() -> None:
    async with listening() as house, await house.connect() as talk:
        talk.send(b"NOOP\r\nNOO")
        talk.writer.write_eof()
        assert await talk.line() == b"250 2.0.0 OK"
        assert await talk.closed() == b""


async def test_half_closing_inside_data_stores_nothing() -> None:
    async with listening() as house, await house.connect() as talk:
        await talk.begin()
        talk.send(b"Subject: x\r\n")
        talk.writer.write_eof()
        assert await talk.closed() == b""
        assert house.store.stored == []


async def test_commands_behind_the_dot_wait_for_its_reply() -> None:
    store = RememberingStore()
    go = asyncio.Event()

    async def slowly() -> None:
        await go.wait()

    store.before_commit = slowly
    async with listening(store=store) as house, await house.connect() as talk:
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\nNOOP\r\n")
        talk.send(b"MAIL FROM:<a@example.org>\r\n")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await talk.reader.read(1)
        go.set()
        replies = [await talk.line() for _ in range(3)]
        assert [reply[:9] for reply in replies] == [b"250 2.0.0", b"250 2.0.0", b"250 2.1.0"]
        assert b"queued" in replies[0]


async def test_drain_awaits_a_commit_whose_client_is_gone() -> None:
    store = RememberingStore()
    committing, go = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        committing.set()
        await go.wait()

    store.before_commit = slowly
    async with listening(ListenerSettings(address="127.0.0.1:0"), store=store) as house:
        talk = await house.connect()
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\n")
        await committing.wait()
        reset(talk)
        await gone(house)
        draining = asyncio.create_task(house.listener.drain(0.01))
        await asyncio.sleep(0.05)
        assert not draining.done()
        go.set()
        await draining
        assert len(store.stored) == 1
