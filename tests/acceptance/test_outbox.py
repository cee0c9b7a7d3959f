"""Relays on an outbox as real processes: kill -9, SIGSTOP beyond the lease, a crash of the database."""

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.sink_conversation import Received
from tests.support.submit import Submitter

IN_FLIGHT = 5
LEASE = 1.5


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def schema() -> str:
    return f"outbox_{uuid.uuid4().hex[:16]}"


def relay(
    path: Path, server: PostgresServer, schema: str, sink: Sink, *, name: str = "first"
) -> RelayProcess:
    return RelayProcess(
        path / name,
        next_hop=f"127.0.0.1:{sink.port}",
        zone={"max_connections": IN_FLIGHT, "max_connections_per_destination": IN_FLIGHT},
        tables={
            "outbox": {"url": server.url, "schema": schema, "create_tables": True, "lease": f"{LEASE}s"},
            "retry": {"schedule": ["1s"], "suspend_min": "1s"},
        },
    )


def insert(server: PostgresServer, schema: str, count: int, *, first: int = 0) -> None:
    server.psql(
        f"INSERT INTO {schema}.outbound_messages (from_address, to_addresses, subject, text_body)"
        f" SELECT 'app@example.org', ARRAY['user' || i || '@example.com'], 'x', repeat('text ', 500)"
        f" FROM generate_series({first}, {first + count - 1}) i"
    )


async def until_sent(server: PostgresServer, schema: str, count: int) -> None:
    statement = f"SELECT count(*) FROM {schema}.outbound_messages WHERE status = 'sent'"
    try:
        async with asyncio.timeout(20):
            while await asyncio.to_thread(server.psql, statement) != str(count):
                await asyncio.sleep(0.1)
    except TimeoutError:
        waiting = (
            "SELECT id, status, next_retry_at - clock_timestamp() AS due, claimed_by, attempts, error_log"
            f" FROM {schema}.outbound_messages WHERE status <> 'sent' ORDER BY id LIMIT 10"
        )
        raise AssertionError(f"not all are sent:\n{await asyncio.to_thread(server.psql, waiting)}") from None


def arrivals(messages: list[Received]) -> Counter[str]:
    return Counter(recipient for message in messages for recipient in message.recipients)


async def test_killed_relay_and_crashed_database_lose_nothing(
    tmp_path: Path, server: PostgresServer, schema: str, sink: Sink
) -> None:
    with relay(tmp_path, server, schema, sink) as running:
        insert(server, schema, 300)
        await sink.wait_for(60)
        await asyncio.to_thread(running.kill)
        # It has the name of before, so nobody waits for the lease.
        await asyncio.to_thread(running.start)
        await until_sent(server, schema, 300)
        arrived = arrivals(sink.messages)
        assert len(arrived) == 300
        assert sum(arrived.values()) - 300 <= 120  # what was sent and not yet written down
        insert(server, schema, 300, first=300)
        await sink.wait_for(sum(arrived.values()) + 30)
        server.kill()
        client = Submitter(running.smtp_port, prefix="smtp")
        await client.run(1, 3)
        assert len(client.acknowledged) == 3  # taking mail and sending it is nothing to the outbox
        await asyncio.to_thread(server.start)
        await until_sent(server, schema, 600)
        assert running.http("/readyz")[0] == 200
    arrived = arrivals(sink.messages)
    assert len([each for each in arrived if each.startswith("user")]) == 600
    assert all(count <= 2 for each, count in arrived.items() if each.startswith("user"))
