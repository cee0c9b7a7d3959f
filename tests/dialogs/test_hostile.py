"""What somebody may try who reads the source: the account of memory, other people's turns, our own clocks."""

from __future__ import annotations

import asyncio
import socket
import struct
import tracemalloc
from dataclasses import replace

import pytest

from tests.support.inbound import House, RememberingStore, Talk, listening, until
from zonerelay.config.models import ListenerSettings
from zonerelay.inbound.memory import SESSION_COST, SessionMemory
from zonerelay.inbound.shared import Shared

HERE = ListenerSettings(address="127.0.0.1:0")


def reset(talk: Talk) -> None:
    """Leave with a TCP reset."""
    raw = talk.writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    talk.writer.transport.abort()


async def nobody_left(house: House) -> None:
    await until(lambda: not house.listener._sessions)
    await asyncio.sleep(0.01)


# The account of memory: who gets it below zero has no limit any more.


async def test_leaving_with_commands_that_wait_for_their_turn_gives_back_what_they_held_once() -> None:
    shared = Shared(memory=SessionMemory(1 << 30))
    async with listening(shared=shared) as house:
        for _ in range(3):
            talk = await house.connect()
            talk.send(b"NOOP\r\n" * 20_000)
            await asyncio.sleep(0)
            reset(talk)
            await nobody_left(house)
            assert shared.memory.used == 0


async def test_leaving_with_commands_behind_a_commit_gives_back_what_they_held_once() -> None:
    store, shared = RememberingStore(), Shared(memory=SessionMemory(1 << 30))
    go = asyncio.Event()

    async def slowly() -> None:
        await go.wait()

    store.before_commit = slowly
    async with listening(shared=shared, store=store) as house:
        talk = await house.connect()
        await talk.begin()
        talk.send(b"Subject: x\r\n.\r\n" + b"NOOP\r\n" * 1000)
        talk.writer.write_eof()
        session = next(iter(house.listener._sessions))
        await until(lambda: session.ended)
        session.link._transport.abort()  # type: ignore[union-attr]
        await until(lambda: house.listener.connections == 0)
        go.set()
        await nobody_left(house)
        await talk.close()
        assert len(store.stored) == 1
        assert shared.memory.used == 0


@pytest.mark.parametrize("what", ["header", "recipients"])
async def test_a_message_that_waits_for_the_store_does_not_keep_others_from_being_shed(what: str) -> None:
    """It is the heaviest and cannot go; whoever makes the memory full goes instead."""
    store, shared = RememberingStore(), Shared(memory=SessionMemory(200_000 + 3 * SESSION_COST))
    go, committing = asyncio.Event(), asyncio.Event()

    async def slowly() -> None:
        committing.set()
        await go.wait()

    store.before_commit = store.before_write = slowly
    async with listening(replace(HERE, max_recipients=1000), shared=shared, store=store) as house:
        heavy, light = await house.connect(), await house.connect()
        await heavy.begin()
        heavy.send(b"Subject: x\r\n\r\n" + b"y" * 150_000 + b"\r\n.\r\n")
        await committing.wait()
        assert shared.memory.used > 140_000
        if what == "header":
            await light.begin()
            light.send(b"X: y\r\n" * 12_000)
        else:
            await light.ask(b"EHLO x")
            await light.ask(b"MAIL FROM:<a@example.org>")
            light.send(b"".join(b"RCPT TO:<b%d@example.com>\r\n" % number for number in range(200)))
        await until(lambda: house.log.reasons() == ["memory"])
        assert shared.memory.used < 200_000
        await light.close()
        go.set()
        assert (await heavy.line()).startswith(b"250 ")
        await heavy.close()
    assert shared.memory.used == 0


# Clocks: who does its part is not cut off, who does not is.


async def test_the_octets_of_a_refused_chunk_are_not_idling() -> None:
    """Cut off, the client would not hear why it was refused, and come again with all of it."""
    async with listening(replace(HERE, idle_timeout=0.2)) as house, await house.connect() as talk:
        talk.send(b"BDAT 1000\r\n")
        for _ in range(10):
            talk.send(b"x" * 100)
            await asyncio.sleep(0.05)
        assert await talk.line() == b"503 5.5.1 Send MAIL first"
        assert house.log.reasons() == ["sequence"]
        await asyncio.sleep(0.1)
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"idle_timeout": 0.2, "min_data_rate": 1_000_000}, "data-rate"),
        ({"transaction_timeout": 0.2}, "transaction-timeout"),
        ({"idle_timeout": 0.02}, "idle-timeout"),
    ],
)
async def test_a_refused_chunk_has_no_more_time_than_any(limits: dict[str, float], reason: str) -> None:
    async with listening(replace(HERE, **limits)) as house, await house.connect() as talk:  # type: ignore[arg-type]  # numbers
        talk.send(b"BDAT 100000\r\n")
        while len(house.log.reasons()) < 2:
            talk.send(b"x")
            await asyncio.sleep(0.05)
        assert house.log.reasons() == ["sequence", reason]
        await talk.close()


async def test_a_body_in_pieces_of_two_octets_takes_the_memory_that_is_accounted() -> None:
    async with listening() as house, await house.connect() as talk:
        await talk.begin()
        session = next(iter(house.listener._sessions))
        # As the loop would hand them over, from a client that sends them slowly.
        session.data_received(b"Subject: x\r\n\r\n")
        tracemalloc.start()
        for number in range(30_000):
            session.data_received(b"%02d" % (number % 100))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 60_000 < house.listener._shared.memory.used <= 64 * 1024
        assert taken < 2 * house.listener._shared.memory.used
