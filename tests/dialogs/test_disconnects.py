"""A client may leave at any point: before the final dot nothing exists, after it nothing is forgotten."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.inbound import Hold, Talk, listening, talking
from tests.support.waiting import until
from zonerelay.config.settings import ListenerSettings

LARGE = b"Subject: x\r\n\r\n" + b"y" * 200_000 + b"\r\n"


async def test_drain_awaits_a_commit_whose_client_is_gone() -> None:
    async with listening(ListenerSettings(address="127.0.0.1:0")) as house:
        hold = house.store.before_commit = Hold()
        talk = await house.connect()
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\n")
        await hold.reached.wait()
        talk.reset()
        await house.gone()
        draining = asyncio.create_task(house.listener.drain(0.01))
        await asyncio.sleep(0.05)
        assert not draining.done()
        hold.go.set()
        await draining
        assert len(house.store.stored) == 1


# Messages in chunks (BDAT).

CHUNK = b"Subject: x\r\n\r\n" + b"y" * 100_000


async def begin_chunks(talk: Talk) -> None:
    """One chunk is here, and on its way into the store; the client is expected to send more."""
    await talk.begin(opening=b"BDAT %d" % len(CHUNK))
    talk.send(CHUNK)
    assert await talk.line() == b"250 2.0.0 %d octets received" % len(CHUNK)


async def test_store_that_fails_between_two_chunks_is_answered_with_the_next() -> None:
    async with talking() as (house, talk):
        hold = house.store.before_write = Hold(OSError(28, "No space left on device"))
        await begin_chunks(talk)
        hold.go.set()
        await until(lambda: house.store.aborted == 1)
        talk.send(b"BDAT 6\r\nQUIT\r\nBDAT 6 LAST\r\nQUIT\r\n")
        assert await talk.line() == b"451 4.3.0 Local error, try again later"
        assert await talk.line() == b"503 5.5.1 Send MAIL first"
        assert await talk.ask(b"MAIL FROM:<a@example.org>") == b"250 2.1.0 Sender OK"
        assert len(house.log.named("trouble")) == 1


async def test_drain_lets_a_message_in_chunks_end() -> None:
    async with talking() as (house, talk):
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
    async with talking() as (house, talk):
        await begin_chunks(talk)
        async with asyncio.timeout(2):
            await house.listener.drain(0.02)
        assert await talk.closed() == b""
        assert (house.store.aborted, house.store.stored) == (1, [])


@pytest.mark.parametrize("size", [1_000, 50_000, 300_000])
async def test_chunks_wait_while_the_store_is_behind(size: int) -> None:
    """The answer to a chunk does not say that it is stored, but only so much is taken ahead of the store."""
    count = 6_000_000 // size
    async with talking() as (house, talk):
        hold = house.store.before_write = Hold()
        await begin_chunks(talk)
        talk.send((b"BDAT %d\r\n" % size + b"z" * size) * count)
        session = house.session
        await until(lambda: session.transport.is_paused)
        await asyncio.sleep(0.05)
        assert session.transport.is_paused
        assert session.held < 1_000_000
        hold.go.set()
        for _ in range(count):
            assert await talk.line() == b"250 2.0.0 %d octets received" % size
        talk.send(b"BDAT 0 LAST\r\n")
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
        assert len(house.store.stored[0].body) > 6_000_000


async def test_a_client_that_waits_for_each_chunk_is_held_up_too() -> None:
    async with talking() as (house, talk):
        hold = house.store.before_write = Hold()
        await begin_chunks(talk)
        session = house.session
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
        hold.go.set()
        assert await talk.line() == b"250 2.0.0 100000 octets received"
        talk.send(b"BDAT 0 LAST\r\n")
        assert (await talk.line()).startswith(b"250 2.0.0 OK queued as")
