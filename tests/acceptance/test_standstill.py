"""A relay that stood still beyond its lease sends no copy of what its heir has delivered.

A peer holds conversations at every point before the end of the body. The relay is stopped (SIGSTOP), another
one takes its mail over and delivers it, and the held replies are in the sockets before the relay goes on: it
finds them in the same turn of its event loop in which it could find out about its lease.
"""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.holding_peer import Hold, HoldingPeer
from tests.support.postgres import PostgresServer
from tests.support.process import RelayProcess
from tests.support.redis_server import RedisServer
from tests.support.s3_server import BUCKET, KEY, SECRET, MotoServer
from tests.support.submit import Submitter
from tests.support.toml import Table

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


@contextmanager
def postgres(name: str) -> Iterator[Engine]:
    with PostgresServer() as server:
        spool: Table = {"backend": "postgres"}
        first: Table = {"url": server.url, "schema": name, "node": 0, "lease": LEASE}
        yield Engine(
            ({"spool": spool, "postgres": first}, {"spool": spool, "postgres": {**first, "node": 1}})
        )


@contextmanager
def redis(name: str) -> Iterator[Engine]:
    with RedisServer() as server:
        tables: Tables = {
            "spool": {"backend": "redis"},
            "redis": {"url": server.url, "prefix": f"{name}:", "lease": LEASE, "timeout": "5s"},
        }
        yield Engine((tables, tables))


@contextmanager
def s3(name: str) -> Iterator[Engine]:
    with MotoServer() as server:
        place: Table = {"bucket": BUCKET, "endpoint_url": server.url, "prefix": f"{name}/"}
        tables: Tables = {
            "spool": {"backend": "s3"},
            "s3": {
                **place,
                "access_key": KEY,
                "secret_key": "env:S3_SECRET",
                "lease": LEASE,
                "timeout": "5s",
            },
        }
        yield Engine((tables, tables))


@contextmanager
def outbox(name: str) -> Iterator[Engine]:
    with PostgresServer() as server:
        tables: Tables = {
            "outbox": {"url": server.url, "schema": name, "create_tables": True, "lease": LEASE}
        }
        yield Engine((tables, tables), server, name)


def relay(directory: Path, tables: Tables, peer: HoldingPeer) -> RelayProcess:
    return RelayProcess(
        directory,
        next_hop=f"127.0.0.1:{peer.port}",
        spool=tables.get("spool", {}),
        zone={"max_connections": 20, "max_connections_per_destination": 20},
        tables={
            **{name: table for name, table in tables.items() if name != "spool"},
            "retry": {"schedule": ["1s"], "suspend_min": "1s"},
        },
        environment={"S3_SECRET": SECRET},
    )


@pytest.fixture
async def peer() -> AsyncIterator[HoldingPeer]:
    peer = HoldingPeer(HOLDS)
    await peer.start()
    yield peer
    await peer.close()


@pytest.mark.parametrize("engine", [postgres, redis, s3, outbox])
async def test_relay_that_stood_still_sends_no_copy_of_what_its_heir_has_delivered(
    tmp_path: Path, peer: HoldingPeer, engine: Callable[[str], AbstractContextManager[Engine]]
) -> None:
    with engine(f"still_{uuid.uuid4().hex[:8]}") as shared:
        first, heir = (
            relay(tmp_path / name, tables, peer)
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
            await asyncio.to_thread(
                first.wait_for, lambda: first.http("/readyz")[0] == 200, what="ready again"
            )
            again = await shared.submit(first, small=3)
            async with asyncio.timeout(30):
                await peer.until_arrived(again)
                await asyncio.to_thread(first.terminate)
        assert {token: count for token, count in peer.copies.items() if count > 1} == {}
        assert delivered == len(sent)
        assert len(first.events("delivered")) == len(again)
        assert not first.events("deferred")
