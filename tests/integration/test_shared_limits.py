"""Two workers, one set of limits: what the receiver sees is never more than the configuration says."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.counting import CountingReceiver
from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.relay import Running, relay_with, settings
from zonerelay.config.settings import (
    Backend,
    PostgresSettings,
    RedisSettings,
    Settings,
    SpoolSettings,
    ZoneSettings,
)
from zonerelay.config.units import parse_rate
from zonerelay.limits.authority import LimitTable
from zonerelay.limits.unix_socket import LimitServer
from zonerelay.model.clock import SystemClock
from zonerelay.process.setup import Identity

MESSAGE = b"From: a@example.org\r\nSubject: x\r\n\r\nbody\r\n"
LIMIT = 4


@pytest.fixture
async def receiver() -> AsyncIterator[CountingReceiver]:
    counting = CountingReceiver()
    await counting.start()
    yield counting
    await counting.close()


def zone(receiver: CountingReceiver, **other: object) -> ZoneSettings:
    base = ZoneSettings(
        next_hop=f"{receiver.host}:{receiver.port}",
        max_connections=LIMIT + 2,
        max_connections_per_destination=LIMIT,
    )
    return replace(base, **other)  # type: ignore[arg-type]  # fields by name


def private(directory: Path, chosen: ZoneSettings) -> Settings:
    directory.mkdir(parents=True)
    return settings(
        directory, zone=chosen, spool=SpoolSettings(backend=Backend.MEMORY, path=directory, min_free_space=0)
    )


@asynccontextmanager
async def workers_of_a_supervisor(
    tmp_path: Path, socket: Path, chosen: ZoneSettings, count: int = 2
) -> AsyncIterator[list[Running]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                relay_with(
                    private(tmp_path / str(number), chosen),
                    identity=Identity(limits=socket),
                )
            )
            for number in range(count)
        ]


async def submit(workers: Sequence[Running], each: int) -> None:
    async def one(worker: Running) -> None:
        for number in range(each):
            await worker.send("app@example.org", [f"u{number}@example.com"], MESSAGE)

    await asyncio.gather(*(one(worker) for worker in workers))


@asynccontextmanager
async def serving(path: Path, *, quiet: float = 0.0) -> AsyncIterator[LimitServer]:
    server = LimitServer(path, LimitTable(SystemClock(), quiet=quiet))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_workers_of_one_machine_share_connections(tmp_path: Path, receiver: CountingReceiver) -> None:
    socket = tmp_path / "limits.sock"
    async with serving(socket), workers_of_a_supervisor(tmp_path, socket, zone(receiver)) as workers:
        await submit(workers[:1], 5)
        await workers[0].until_empty()
        await submit(workers, 30)
        for worker in workers:
            await worker.until_empty(timeout=20)
        assert receiver.messages == 65
        assert receiver.peak == LIMIT


async def test_a_supervisor_that_starts_again_stops_nothing_and_exceeds_nothing(
    tmp_path: Path, receiver: CountingReceiver
) -> None:
    socket = tmp_path / "limits.sock"
    receiver.delay = 0.1
    async with AsyncExitStack() as stack:
        server = LimitServer(socket, LimitTable(SystemClock()))
        await server.start()
        workers = await stack.enter_async_context(workers_of_a_supervisor(tmp_path, socket, zone(receiver)))
        await submit(workers, 40)
        await server.close()
        before = receiver.messages
        await workers[0].until(lambda: receiver.messages >= before + 6, what="mail goes on")
        await stack.enter_async_context(serving(socket, quiet=1.0))
        for worker in workers:
            await worker.until_empty(timeout=20)
            assert worker.log.named("limits-restored")
        assert receiver.messages == 80
        assert receiver.peak == LIMIT


async def test_what_a_dead_worker_had_the_other_has_at_once(
    tmp_path: Path, receiver: CountingReceiver
) -> None:
    socket = tmp_path / "limits.sock"
    one = zone(receiver, max_connections_per_destination=1)
    async with serving(socket), workers_of_a_supervisor(tmp_path, socket, one, 1) as (alive,):
        async with workers_of_a_supervisor(tmp_path / "other", socket, one, 1) as (dying,):
            await submit([dying], 2)
            await dying.until_empty()
        await submit([alive], 2)
        await alive.until_empty()
        assert receiver.peak == 1


async def test_workers_of_one_machine_share_a_rate(tmp_path: Path, receiver: CountingReceiver) -> None:
    socket = tmp_path / "limits.sock"
    receiver.delay = 0.0
    chosen = zone(receiver, max_rate_per_destination=parse_rate("20/1s"))
    async with serving(socket), workers_of_a_supervisor(tmp_path, socket, chosen) as workers:
        await submit(workers, 20)
        for worker in workers:
            await worker.until_empty(timeout=20)
    assert receiver.messages == 40
    assert receiver.fullest(1.0) <= 20
    assert receiver.mails[-1] - receiver.mails[0] < 4.5


def shared_spool(backend: Backend, directory: Path, chosen: ZoneSettings) -> list[Settings]:
    name = uuid.uuid4().hex[:16]
    found = []
    for node in range(2):
        identity = directory / str(node)
        identity.mkdir()
        base = settings(
            identity, zone=chosen, spool=SpoolSettings(backend=backend, path=identity, min_free_space=0)
        )
        if backend is Backend.REDIS:
            base = replace(base, redis=RedisSettings(url=shared_server().url, prefix=f"{name}:"))
        else:
            server = shared_postgres()
            postgres = PostgresSettings(url=server.url, schema=f"limits_{name}", node=node)
            base = replace(base, postgres=postgres)
        found.append(base)
    return found


@pytest.mark.parametrize("backend", [Backend.REDIS, Backend.POSTGRES])
async def test_machines_that_share_a_spool_share_its_limits(
    tmp_path: Path, receiver: CountingReceiver, backend: Backend
) -> None:
    rate = parse_rate("50/1s")
    chosen = zone(receiver, max_rate=rate)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(relay_with(each))
            for each in shared_spool(backend, tmp_path, chosen)
        ]
        await submit(workers, 30)
        await workers[0].until(lambda: receiver.messages >= 60, what="all mail", timeout=20)
        assert receiver.messages == 60
        assert receiver.peak <= LIMIT
        assert receiver.fullest(rate.seconds) <= rate.count
