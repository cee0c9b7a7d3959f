"""What one client can use up: connections, time, memory."""

import asyncio
import resource
import time
from pathlib import Path

import pytest

from tests.support.inbound import Hold, Talk, talking
from tests.support.waiting import until
from zonerelay.config.settings import MB


@pytest.mark.alone
async def test_dribbling_a_command_is_idling() -> None:
    async with talking(idle_timeout=0.15) as (house, talk):
        began = time.monotonic()
        while time.monotonic() - began < 2 and not talk.reader.at_eof():
            talk.send(b"x")
            await asyncio.sleep(0.02)
            if house.log.reasons():
                break
        assert house.log.reasons() == ["idle-timeout"]


@pytest.mark.alone
async def test_commands_in_time_keep_the_connection() -> None:
    async with talking(idle_timeout=0.2) as (_, talk):
        for _ in range(6):
            await asyncio.sleep(0.05)
            assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"


@pytest.mark.alone
async def test_transaction_limit_ends_with_the_transaction() -> None:
    async with talking(transaction_timeout=0.15) as (_, talk):
        for _ in range(5):
            await talk.begin()
            talk.send(b".\r\n")
            assert (await talk.line()).startswith(b"250 ")
            await asyncio.sleep(0.05)


@pytest.mark.alone
async def test_waiting_for_our_store_is_not_held_against_the_client() -> None:
    async with talking(idle_timeout=0.1, transaction_timeout=0.2) as (house, talk):
        house.store.before_commit = lambda: asyncio.sleep(0.3)
        await talk.begin()
        talk.send(b".\r\n")
        assert (await talk.line()).startswith(b"250 ")


async def test_reading_pauses_while_the_client_does_not_take_replies() -> None:
    async with talking() as (house, talk):
        # The stream's own reader stops at its limit, and then the kernel's buffers fill.
        session = house.session
        chunk = b"VRFY x\r\n" * 5_000
        for _ in range(400):
            talk.send(chunk)
            if session.transport.is_blocked:
                break
            await asyncio.sleep(0.001)
        await until(lambda: session.transport.is_paused)
        talk.writer.transport.abort()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def pour(talk: Talk, piece: bytes, total: int) -> int:
    """Send until `total` octets are out or the server closes; what was sent."""
    sent = 0
    while sent < total and not talk.writer.transport.is_closing():
        talk.send(piece)
        try:
            async with asyncio.timeout(5):
                await talk.writer.drain()
        except ConnectionError:
            break
        sent += len(piece)
    return sent


async def test_stream_without_line_end_in_data_does_not_grow_memory() -> None:
    """60 MB against a limit of 1 MB: far beyond it the connection is closed, and memory stays flat."""
    async with talking(max_message_size=1 * MB) as (house, talk):
        await talk.begin()
        piece = b"x" * 256 * 1024
        before = resident()
        sent = await pour(talk, piece, 60 * MB)
        assert sent < 30 * MB, "the kernel's buffers hold a few megabytes, not the rest"
        assert resident() - before < 16 * MB
        await until(lambda: house.log.reasons() == ["size"])
        assert house.store.stored == []


async def test_large_message_beyond_the_limit_is_read_to_its_end_and_refused() -> None:
    async with talking(max_message_size=20 * MB) as (house, talk):
        house.store.keep_bodies = False
        await talk.begin()
        piece = b"x" * 256 * 1024
        before = resident()
        assert await pour(talk, piece, 30 * MB) == 30 * MB
        talk.send(b"\r\n.\r\n")
        assert await talk.line() == b"552 5.3.4 Message exceeds 20 MB, the limit of this listener"
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"
        assert resident() - before < 16 * MB
        assert house.store.aborted == house.store.begun == 1


async def test_command_without_line_end_does_not_grow_memory() -> None:
    async with talking() as (_, talk):
        before = resident()
        await pour(talk, b"x" * 256 * 1024, 30 * MB)
        talk.send(b"\r\n")
        assert await talk.line() == b"500 5.5.2 Line too long"
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"
        assert resident() - before < 16 * MB


async def test_body_of_one_endless_line_is_taken_as_it_is() -> None:
    async with talking() as (house, talk):
        house.store.keep_bodies = False
        await talk.begin()
        before = resident()
        await pour(talk, b"x" * 256 * 1024, 40 * MB)
        talk.send(b"\r\n.\r\n")
        assert (await talk.line()).startswith(b"250 ")
        assert resident() - before < 16 * MB
        assert house.store.stored[0].message.size > 40 * MB


# Messages in chunks (BDAT).

CHUNK = b"Subject: x\r\n\r\n" + b"y" * 100_000


async def begin_chunks(talk: Talk) -> None:
    """One chunk is here, and on its way into the store; the client is expected to send more."""
    await talk.begin(opening=b"BDAT %d" % len(CHUNK))
    talk.send(CHUNK)
    assert await talk.line() == b"250 2.0.0 %d octets received" % len(CHUNK)


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
