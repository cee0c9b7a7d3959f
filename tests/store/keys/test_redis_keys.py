"""Ordered keys in Redis: a server that dies, is full, is cut off, has an older state, or is a cluster."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from tests.store.keys.servers import write_through_kills, write_while_judged
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from zonerelay.config.settings import RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreFullError, StoreOpenError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import KeyRange, OlderStateError, Write, pages
from zonerelay.store.redis.connection import RedisEndpoint
from zonerelay.store.redis.engine import RedisEngine

PREFIX = "{zonerelay}:"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


async def opened(url: str, *, patience: float = 5.0, timeout: float = 2.0) -> Partition:
    settings = RedisSettings(url=url, prefix=PREFIX, lease=30.0, timeout=timeout)
    engine = RedisEngine(RedisEndpoint(settings))
    return await open_partition(engine, 0, token="here", clock=SystemClock(), patience=patience)


async def test_a_server_that_is_killed_under_load_loses_nothing(server: RedisServer) -> None:
    await write_through_kills(await opened(server.url), server, 3)


async def test_a_full_server_refuses_new_mail_and_takes_outcomes(server: RedisServer) -> None:
    partition = await opened(server.url)
    await partition.write(Write({b"old %d" % number: bytes(60_000) for number in range(100)}))
    server.configure("maxmemory", "6mb")
    refused = asyncio.ensure_future(partition.write(Write({b"new": bytes(1000)})))
    outcome = partition.write(Write({b"old 1": None, b"outcome": b"delivered"}, makes_room=True))
    with pytest.raises(StoreFullError, match="the spool's server is out of memory"):
        await refused
    await outcome
    assert await partition.get([b"new", b"old 1", b"outcome"]) == [None, None, b"delivered"]
    await partition.write(Write({}, [KeyRange.of_prefix(b"old ")], makes_room=True))
    await partition.write(Write({b"new": b"1"}))
    room = await partition.room()
    assert room is not None
    assert room > 1_000_000
    await partition.close()


async def test_a_server_that_stands_still_is_cut_off_and_its_batch_found_out(server: RedisServer) -> None:
    """It carries out later what was sent to it before the connection was given up."""
    partition = await opened(server.url, patience=20, timeout=0.5)
    await partition.write(Write({b"a": b"1"}))
    server.signal(signal.SIGSTOP)
    waiting = asyncio.ensure_future(partition.write(Write({b"a": b"2"})))
    await asyncio.sleep(1.5)
    server.signal(signal.SIGCONT)
    await waiting
    assert await partition.get([b"a"]) == [b"2"]
    assert partition.seen.last.number == 2
    assert partition.seen.epoch > 1
    await partition.close()


async def test_a_log_that_was_cut_is_an_older_state(server: RedisServer) -> None:
    partition = await opened(server.url, patience=0.1)
    for number in range(100):
        await partition.write(Write({b"k%03d" % number: bytes(1000)}))
    server.kill()
    (log,) = server.directory.glob("appendonlydir/*.incr.aof")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 40_000)
    server.start()
    with pytest.raises(OlderStateError, match="older state of the queue"):
        await partition.write(Write({b"new": b""}))
    found = server.ask("HGET", f"{PREFIX}node:0", "epoch")
    assert found.startswith(b"$1\r\n1\r\n")  # nothing was changed there
    await partition.abandon()


async def test_an_emptied_server_is_refused(server: RedisServer) -> None:
    partition = await opened(server.url, patience=0.1)
    await partition.write(Write({b"a": b"1"}))
    server.ask("FLUSHALL")
    with pytest.raises(StoreOpenError, match="it has no mark, like an empty store"):
        await partition.write(Write({b"a": b"2"}))
    assert server.ask("DBSIZE") == b":0\r\n"
    await partition.abandon()


async def test_one_slot_of_a_cluster_is_enough() -> None:
    with RedisServer(
        {"cluster-enabled": "yes", "cluster-port": str(free_port())}, port=free_port()
    ) as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        deadline = time.monotonic() + 20
        while b"cluster_state:ok" not in server.query("CLUSTER", "INFO"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        partition = await opened(server.url)
        await partition.write(Write({b"k%d" % number: b"x" for number in range(2500)}))
        await partition.write(Write({b"k1": None}, [KeyRange(b"k2", b"k3")]))
        found = [key async for rows in pages(partition, b"k", b"l") for key, _ in rows]
        assert found == sorted(b"k%d" % n for n in range(2500) if n != 1 and not str(n).startswith("2"))
        await partition.close()


async def test_an_unsafe_server_is_refused() -> None:
    with (
        RedisServer({"appendfsync": "everysec"}) as server,
        pytest.raises(StoreOpenError, match="appendfsync is everysec"),
    ):
        await opened(server.url)


async def test_a_batch_that_ends_while_a_new_connection_is_judged_is_no_older_state(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_while_judged(await opened(server.url), monkeypatch)
