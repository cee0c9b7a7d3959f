"""A relay that stood still beyond its lease sends no copy of what its heir has delivered.

A peer holds conversations at every point before the end of the body. The relay is stopped (SIGSTOP), another
one takes its mail over and delivers it, and the held replies are in the sockets before the relay goes on: it
finds them in the same turn of its event loop in which it could find out about its lease.
"""

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.engines import ENVIRONMENT, shared_tables
from tests.support.holding_peer import Hold, HoldingPeer
from tests.support.postgres import PostgresServer, shared_postgres
from tests.support.process import RelayProcess
from tests.support.submit import Submitter
from tests.support.toml import Table
from zonerelay.config.settings import Backend

LEASE = "2s"
HOLDS = (Hold.GREETING, Hold.MAIL, Hold.RCPT, Hold.DATA, Hold.BDAT, Hold.BODY)
SMALL = 2000
LARGE = 12_000_000
"""Octets that the socket's buffers do not take, so that the relay is stopped in the middle of the body."""

Tables = Mapping[str, Table]


@dataclass
class Engine:
    """`tables` of two relays; `outbox`: they share an outbox there, and each has a spool of its own."""

    tables: tuple[Tables, Tables]
    spool: Table = field(default_factory=dict)
    outbox: PostgresServer | None = None
    schema: str = ""

    async def submit(self, relay: RelayProcess, *, small: int, large: int = 0) -> set[str]:
        sent: set[str] = set()
        for size, count in ((SMALL, small), (LARGE, large)):
            prefix = uuid.uuid4().hex
            if self.outbox is not None:
                self.outbox.psql(
                    f"INSERT INTO {self.schema}.outbound_messages"
                    " (from_address, to_addresses, subject, text_body)"
                    f" SELECT 'app@example.org', ARRAY['user@example.com'], '{prefix}.' || i,"
                    f" repeat('words of a text ', {size // 16}) FROM generate_series(1, {count}) i"
                )
                sent |= {f"{prefix}.{number}" for number in range(1, count + 1)}
            else:
                client = Submitter(relay.smtp_port, prefix=prefix, size=size)
                await client.run(1, count)
                sent |= client.acknowledged
        assert len(sent) == small + large
        return sent


def engine_of(backend: Backend | None) -> Engine:
    """Without one the relays share an outbox."""
    name = f"still_{uuid.uuid4().hex[:8]}"
    if backend is not None:
        first, second = (shared_tables(backend, name, node, lease=LEASE) for node in (0, 1))
        return Engine((first, second), spool={"backend": backend.value})
    server = shared_postgres()
    tables: Tables = {"outbox": {"url": server.url, "schema": name, "create_tables": True, "lease": LEASE}}
    return Engine((tables, tables), outbox=server, schema=name)


def relay(directory: Path, tables: Tables, spool: Table, peer: HoldingPeer) -> RelayProcess:
    return RelayProcess(
        directory,
        next_hop=f"127.0.0.1:{peer.port}",
        spool=spool,
        zone={"max_connections": 20, "max_connections_per_destination": 20},
        tables={**tables, "retry": {"schedule": ["1s"], "suspend_min": "1s"}},
        environment=ENVIRONMENT,
    )


@pytest.fixture
async def peer() -> AsyncIterator[HoldingPeer]:
    peer = HoldingPeer(HOLDS)
    await peer.start()
    yield peer
    await peer.close()


@pytest.mark.parametrize("backend", [Backend.POSTGRES, Backend.REDIS, Backend.S3, None])
async def test_relay_that_stood_still_sends_no_copy_of_what_its_heir_has_delivered(
    tmp_path: Path, peer: HoldingPeer, backend: Backend | None
) -> None:
    shared = engine_of(backend)
    first, heir = (
        relay(tmp_path / name, tables, shared.spool, peer)
        for name, tables in zip(("first", "heir"), shared.tables, strict=True)
    )
    with first:
        sent = await shared.submit(first, small=len(HOLDS) - 1, large=1)
        async with asyncio.timeout(30):
            await peer.until_held()
        first.signal(signal.SIGSTOP)
        with heir:
            async with asyncio.timeout(60):
                await peer.until_arrived(sent)
                peer.release()
                first.signal(signal.SIGCONT)
                await peer.until_ended()
                # Killed, it would leave what it has delivered in its last 50 ms to be sent again.
                await asyncio.to_thread(heir.terminate)
            delivered = len(heir.events("delivered"))
        # It has taken another lease, and works under it.
        await asyncio.to_thread(first.wait_for, lambda: first.http("/readyz")[0] == 200, what="ready again")
        again = await shared.submit(first, small=3)
        async with asyncio.timeout(30):
            await peer.until_arrived(again)
            await asyncio.to_thread(first.terminate)
    assert {token: count for token, count in peer.copies.items() if count > 1} == {}
    assert delivered == len(sent)
    assert len(first.events("delivered")) == len(again)
    assert not first.events("deferred")
