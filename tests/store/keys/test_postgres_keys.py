"""Ordered keys in PostgreSQL: poolers, a server that dies, a former primary, and settings of others'
making.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from tests.store.keys.servers import write_through_kills, write_while_judged
from tests.support.pgbouncer import pooled
from tests.support.postgres import PostgresServer, shared_postgres
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import (
    FencedError,
    KeyRange,
    NodeTakenError,
    OlderStateError,
    Write,
)
from zonerelay.store.postgres.driver import DatabaseAccess
from zonerelay.store.postgres.engine import PostgresEngine


def access_to(url: str, *, lease: float = 60.0) -> DatabaseAccess:
    return DatabaseAccess(url, str, f"keys_{uuid.uuid4().hex[:12]}", "test", lease)


@dataclass
class Opening:
    stack: AsyncExitStack

    async def __call__(self, access: DatabaseAccess, node: int = 0, token: str = "here") -> Partition:
        engine = PostgresEngine(access)
        partition = await open_partition(engine, node, token=token, clock=SystemClock())
        self.stack.push_async_callback(partition.close)
        return partition


@pytest.fixture
async def opened() -> AsyncIterator[Opening]:
    async with AsyncExitStack() as stack:
        yield Opening(stack)


async def warm(url: str, count: int, statement: str) -> list[asyncpg.Connection]:
    """Connections of others to the pool, each with its own server connection."""
    made = [await asyncpg.connect(url, statement_cache_size=0) for _ in range(count)]

    async def use(connection: asyncpg.Connection) -> None:
        await connection.execute(f"BEGIN; {statement}; SELECT pg_sleep(0.1); COMMIT")

    await asyncio.gather(*(use(each) for each in made))
    return made


async def test_a_pool_for_transactions_does_no_harm(opened: Opening) -> None:
    """Server connections change from statement to statement, and have what others have set in them."""
    server = shared_postgres()
    with pooled(server, "transaction") as pool:
        others = await warm(pool, 6, "SET synchronous_commit = off; SET search_path = nowhere")
        access = access_to(pool)
        try:
            one, two = await opened(access, 0), await opened(access, 1)

            async def session(partition: Partition, number: int) -> None:
                for step in range(20):
                    key = b"%d %d" % (number, step)
                    await partition.write(Write({key: b"x", b"gone": None}, [KeyRange(b"y", b"z")]))
                    assert await partition.get([key]) == [b"x"]

            await asyncio.gather(*(session(each, n) for each in (one, two) for n in range(8)))
            with pytest.raises(NodeTakenError):
                await opened(access, 0, token="another")
            heir = await opened(access, 0)  # our own successor
            with pytest.raises(FencedError):
                await one.write(Write({b"late": b""}))
            assert await heir.get([b"late", b"7 19"]) == [None, b"x"]
        finally:
            for each in others:
                await each.close()
    left = server.psql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    assert left == "0"


async def test_a_batch_is_synced_whatever_others_have_set(opened: Opening) -> None:
    server = shared_postgres()
    with pooled(server, "transaction") as pool:
        others = await warm(pool, 4, "SET synchronous_commit = off")
        access = access_to(pool)
        partition = await opened(access)
        server.psql(
            f"CREATE TABLE {access.schema}.seen (setting text);"
            f"CREATE FUNCTION {access.schema}.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" INSERT INTO {access.schema}.seen VALUES (current_setting('synchronous_commit'));"
            " RETURN NULL; END $$;"
            f"CREATE CONSTRAINT TRIGGER note AFTER INSERT OR UPDATE ON {access.schema}.entry"
            f" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {access.schema}.note()"
        )
        for number in range(12):
            await partition.write(Write({b"%d" % number: b""}))
        assert server.psql(f"SELECT DISTINCT setting FROM {access.schema}.seen") == "on"
        for each in others:
            await each.close()


async def test_a_server_that_is_killed_under_load_loses_nothing(opened: Opening) -> None:
    with PostgresServer() as server:
        await write_through_kills(await opened(access_to(server.url)), server, 2)


async def test_a_former_primary_is_neither_read_nor_written(opened: Opening) -> None:
    """The connection ends, and the next one finds a state that is older than what was written."""
    with PostgresServer() as server:
        access = access_to(server.url)
        partition = await opened(access)
        await partition.write(Write({b"a": b"1"}))
        server.psql(f"CREATE TABLE kept AS TABLE {access.schema}.partition")
        await partition.write(Write({b"a": b"2"}))
        server.psql(
            f"DELETE FROM {access.schema}.partition;"
            f"INSERT INTO {access.schema}.partition SELECT * FROM kept;"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test'"
        )
        await asyncio.sleep(0.1)
        with pytest.raises(OlderStateError):
            await partition.get([b"a"])
        with pytest.raises(StoreOpenError, match="an older state of the queue"):
            await partition.write(Write({b"a": b"3"}))
        assert server.psql(f"SELECT encode(value, 'escape') FROM {access.schema}.entry") == "2"
        await partition.abandon()


async def test_unsafe_settings_and_a_missing_server_are_refused(tmp_path: Path) -> None:
    with PostgresServer({"fsync": "off"}) as server:
        with pytest.raises(StoreOpenError, match="fsync = off"):
            await open_partition(PostgresEngine(access_to(server.url)), 0, token="x", clock=SystemClock())
        url = server.url
    with pytest.raises(StoreError, match="the database does not respond"):
        await open_partition(PostgresEngine(access_to(url)), 0, token="x", clock=SystemClock())


async def test_a_batch_that_ends_while_a_new_connection_is_judged_is_no_older_state(
    opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_while_judged(await opened(access_to(shared_postgres().url)), monkeypatch)
