"""Relays on a PostgreSQL database as real processes: kill -9 of one of two, and of the server, under load."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens

SESSIONS = 5
IN_FLIGHT = 10


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def schema() -> str:
    return f"relays_{uuid.uuid4().hex[:16]}"


def relay(path: Path, server: PostgresServer, schema: str, sink: Sink, *, node: int = 0) -> RelayProcess:
    return RelayProcess(
        path / f"node{node}",
        next_hop=f"127.0.0.1:{sink.port}",
        spool={"backend": "postgres"},
        zone={"max_connections": IN_FLIGHT, "max_connections_per_destination": IN_FLIGHT},
        tables={
            "postgres": {"url": server.url, "schema": schema, "node": node, "lease": "3s"},
            "retry": {"schedule": ["1s"], "suspend_min": "1s"},
        },
    )


def queued(server: PostgresServer, schema: str) -> int:
    return int(server.psql(f"SELECT count(*) FROM {schema}.delivery"))


async def until_empty(server: PostgresServer, schema: str) -> None:
    async with asyncio.timeout(20):
        while await asyncio.to_thread(queued, server, schema):
            await asyncio.sleep(0.1)


@pytest.fixture
async def both(
    tmp_path: Path, server: PostgresServer, schema: str, sink: Sink
) -> AsyncIterator[tuple[RelayProcess, RelayProcess]]:
    with (
        relay(tmp_path, server, schema, sink) as first,
        relay(tmp_path, server, schema, sink, node=1) as second,
    ):
        yield first, second


async def test_second_relay_takes_over_from_one_that_was_killed(
    both: tuple[RelayProcess, RelayProcess], server: PostgresServer, schema: str, sink: Sink
) -> None:
    first, second = both
    clients = [
        Submitter(each.smtp_port, prefix=f"node{number}", size=5000) for number, each in enumerate(both)
    ]
    loads = [asyncio.create_task(client.run(SESSIONS, 100_000)) for client in clients]
    await asyncio.sleep(0.7)
    await asyncio.to_thread(first.kill)
    await loads[0]
    await asyncio.to_thread(second.terminate)
    await loads[1]
    await asyncio.to_thread(second.start)
    await until_empty(server, schema)
    acknowledged = clients[0].acknowledged | clients[1].acknowledged
    arrived = tokens(sink.messages)
    assert all(len(client.acknowledged) > SESSIONS for client in clients)
    assert not acknowledged - arrived.keys()
    # What the first had finished within its last moments, and what it was sending.
    assert sum(count - 1 for count in arrived.values()) < 500
    assert not [token for token in clients[1].acknowledged if arrived[token] > 1]


async def test_relay_outlives_a_crash_of_its_database(
    tmp_path: Path, server: PostgresServer, schema: str, sink: Sink
) -> None:
    with relay(tmp_path, server, schema, sink) as running:
        before = Submitter(running.smtp_port, prefix="before", size=5000)
        load = asyncio.create_task(before.run(SESSIONS, 100_000))
        await asyncio.sleep(0.7)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(running.wait_for, lambda: running.http("/readyz")[0] == 503, what="not ready")
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(running.wait_for, lambda: running.http("/readyz")[0] == 200, what="ready")
        after = Submitter(running.smtp_port, prefix="after")
        await after.run(1, 5)
        assert len(after.acknowledged) == 5
        await until_empty(server, schema)
        assert running.metric("zonerelay_messages_accepted_total") >= len(before.acknowledged) + 5
    arrived = tokens(sink.messages)
    assert len(before.acknowledged) > SESSIONS
    assert not (before.acknowledged | after.acknowledged) - arrived.keys()
