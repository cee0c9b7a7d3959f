"""A client may leave at any point: before the final dot nothing exists, after it nothing is forgotten."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest

from tests.support.inbound import House, RememberingStore, Talk, listening, until
from zonerelay.config.settings import ListenerSettings

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


# Messages in chunks (BDAT).

CHUNK = b"Subject: x\r\n\r\n" + b"y" * 100_000


async def begin_chunks(talk: Talk) -> None:
    """One chunk is here, and on its way into the store; the client is expected to send more."""
    await talk.ask(b"EHLO x")
    await talk.ask(b"MAIL FROM:<a@example.org>")
    await talk.ask(b"RCPT TO:<b@example.com>")
    talk.send(b"BDAT %d\r\n" % len(CHUNK) + CHUNK)
    assert await talk.line() == b"250 2.0.0 %d octets received" % len(CHUNK)


@pytest.mark.parametrize("said", [b"", b"BDAT", b"BDAT 5 LAST\r\n", b"BDAT 5 LAST\r\nbody", b"NOOP\r\n"])
@pytest.mark.parametrize("abruptly", [False, True])
async def test_leaving_between_two_chunks_stores_nothing(said: bytes, abruptly: bool) -> None:
    async with listening() as house:
        talk = await house.connect()
        await begin_chunks(talk)
        talk.send(said)
        if abruptly:
            reset(talk)
        else:
            await talk.close()
        await gone(house)
        await until(lambda: house.store.aborted == 1)
        assert (house.store.begun, house.store.stored) == (1, [])
        await until(lambda: house.log.reasons() == ["client-left"])


async def test_half_closing_between_two_chunks_stores_nothing() -> None:
    async with listening() as house, await house.connect() as talk:
        await begin_chunks(talk)
        talk.writer.write_eof()
        assert await talk.closed() == b""
        await until(lambda: house.store.aborted == 1)
        assert house.store.stored == []


async def test_half_closing_after_the_last_chunk_still_gets_the_reply() -> None:
    store = RememberingStore()

    async def slowly() -> None:
        await asyncio.sleep(0.02)

    store.before_commit = slowly
    async with listening(store=store) as house, await house.connect() as talk:
        await begin_chunks(talk)
        talk.send(b"BDAT 2 LAST\r\n\r\nQUIT\r\n")
        talk.writer.write_eof()
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
        assert await talk.line() == b"221 2.0.0 Bye"
        assert await talk.closed() == b""


async def test_store_that_fails_between_two_chunks_is_answered_with_the_next() -> None:
    store = RememberingStore()
    go = asyncio.Event()

    async def fail() -> None:
        await go.wait()
        raise OSError(28, "No space left on device")

    store.before_write = fail
    async with listening(store=store) as house, await house.connect() as talk:
        await begin_chunks(talk)
        go.set()
        await until(lambda: store.aborted == 1)
        talk.send(b"BDAT 6\r\nQUIT\r\nBDAT 6 LAST\r\nQUIT\r\n")
        assert await talk.line() == b"451 4.3.0 Local error, try again later"
        assert await talk.line() == b"503 5.5.1 Send MAIL first"
        assert await talk.ask(b"MAIL FROM:<a@example.org>") == b"250 2.1.0 Sender OK"
        assert len(house.log.named("trouble")) == 1


async def test_drain_lets_a_message_in_chunks_end() -> None:
    async with listening() as house, await house.connect() as talk:
        await begin_chunks(talk)
        house.listener.stop_accepting()
        draining = asyncio.create_task(house.listener.drain(5))
        await asyncio.sleep(0.02)
        assert not draining.done()
        talk.send(b"BDAT 2 LAST\r\n\r\n")
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
        assert await talk.line() == b"421 4.3.2 Shutting down"
        await draining
        assert len(house.store.stored) == 1


async def test_drain_closes_hard_between_chunks_when_time_is_up() -> None:
    async with listening() as house, await house.connect() as talk:
        await begin_chunks(talk)
        async with asyncio.timeout(2):
            await house.listener.drain(0.02)
        assert await talk.closed() == b""
        assert (house.store.aborted, house.store.stored) == (1, [])


@pytest.mark.parametrize("size", [1_000, 50_000, 300_000])
async def test_chunks_wait_while_the_store_is_behind(size: int) -> None:
    """The answer to a chunk does not say that it is stored, but only so much is taken ahead of the store."""
    store = RememberingStore()
    go = asyncio.Event()

    async def slowly() -> None:
        await go.wait()

    store.before_write = slowly
    count = 6_000_000 // size
    async with listening(store=store) as house, await house.connect() as talk:
        await begin_chunks(talk)
        talk.send((b"BDAT %d\r\n" % size + b"z" * size) * count)
        session = next(iter(house.listener._admission.sessions))
        await until(lambda: session.transport.is_paused)
        await asyncio.sleep(0.05)
        assert session.transport.is_paused
        assert session.held < 1_000_000
        go.set()
        for _ in range(count):
            assert await talk.line() == b"250 2.0.0 %d octets received" % size
        talk.send(b"BDAT 0 LAST\r\n")
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
        assert len(store.stored[0].body) > 6_000_000


async def test_a_client_that_waits_for_each_chunk_is_held_up_too() -> None:
    store = RememberingStore()
    go = asyncio.Event()

    async def slowly() -> None:
        await go.wait()

    store.before_write = slowly
    async with listening(store=store) as house, await house.connect() as talk:
        await begin_chunks(talk)
        session = next(iter(house.listener._admission.sessions))
        taken = 0
        for _ in range(40):
            talk.send(b"BDAT 100000\r\n" + b"z" * 100_000)
            try:
                async with asyncio.timeout(0.05):
                    await talk.line()
            except TimeoutError:
                break
            taken += 1
        assert taken < 10
        assert session.held < 1_000_000
        go.set()
        assert await talk.line() == b"250 2.0.0 100000 octets received"
        talk.send(b"BDAT 0 LAST\r\n")
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
