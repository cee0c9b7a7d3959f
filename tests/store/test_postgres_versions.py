"""Relays of several versions on one database: what an older one can work with, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool, until
from tests.support.postgres import shared_postgres
from zonerelay.config.settings import Backend, PostgresSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, StoreOpenError
from zonerelay.store.postgres import schema as postgres_schema
from zonerelay.store.postgres.driver import Access, Link
from zonerelay.store.postgres.schema import Migration

NEXT = postgres_schema.VERSION + 1
COLUMN = "ALTER TABLE delivery ADD COLUMN tomorrow text"


class Database:
    """A schema; `step` is what the version of tomorrow does to it, at its start."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._patch = monkeypatch
        self.spool = Spool(directory, backend=Backend.POSTGRES, clock=SystemClock())

    @property
    def settings(self) -> PostgresSettings:
        assert self.spool.postgres is not None
        return self.spool.postgres

    async def upgrade(self, *, oldest: int) -> None:
        """Then today's version goes on."""
        steps = (*postgres_schema.MIGRATIONS, Migration(COLUMN, oldest=oldest))
        with self._patch.context() as patch:
            patch.setattr(postgres_schema, "MIGRATIONS", steps)
            patch.setattr(postgres_schema, "VERSION", len(steps))
            link = await Link.open(Access(self.settings.url, str, self.settings.schema, "tomorrow", 60.0))
            try:
                await postgres_schema.migrate(link, self.settings.schema)
            finally:
                await link.close()

    def psql(self, statement: str) -> str:
        return shared_postgres().psql(f"SET search_path = {self.settings.schema}; {statement}")

    async def another(self) -> None:
        """Start one of today's version as another node, and stop it."""
        settings = replace(self.settings, node=7)
        spool = Spool(self._directory, backend=Backend.POSTGRES, postgres=settings, clock=SystemClock())
        await spool.open()
        await spool.store.close()


@pytest.fixture
async def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    database = Database(tmp_path, monkeypatch)
    async with database.spool:
        yield database


async def test_running_relay_goes_on_and_an_older_one_starts_where_the_newer_schema_allows_for_it(
    database: Database,
) -> None:
    store = database.spool.store
    await store_message(store, 1)
    await database.upgrade(oldest=1)
    await store_message(store, 2)
    claimed = await store.claim(queue_of("default"), 10, now=NOW)
    assert [delivery.message_id for delivery in claimed] == [message_id(1), message_id(2)]
    await store.settle([Finish(delivery) for delivery in claimed])
    await database.another()
    assert database.psql("SELECT max(version), max(oldest) FROM schema_version") == f"{NEXT}|1"


async def test_older_relay_refuses_a_schema_that_does_not_allow_for_it(database: Database) -> None:
    await database.spool.store.close()
    await database.upgrade(oldest=NEXT)
    with pytest.raises(
        StoreOpenError, match=f"at least version {NEXT} for, and this zonerelay knows {NEXT - 1}"
    ):
        await database.another()


async def test_schema_that_shuts_out_older_relays_is_not_made_while_one_is_alive(
    database: Database,
) -> None:
    with pytest.raises(StoreOpenError, match=r"\(node 0\): this version cannot work beside them"):
        await database.upgrade(oldest=NEXT)
    await store_message(database.spool.store, 1)
    assert database.psql("SELECT max(version) FROM schema_version") == str(NEXT - 1)


async def test_older_relay_that_was_believed_dead_does_not_come_back_to_a_schema_that_shuts_it_out(
    database: Database,
) -> None:
    database.psql("UPDATE node SET expires = now() - interval '1 hour'")
    await database.upgrade(oldest=NEXT)
    with pytest.raises(Exception, match="lease"):
        await database.spool.store.probe()
    await asyncio.sleep(0.3)
    assert database.spool.store.unhealthy()
    assert database.psql("SELECT count(session) FROM node") == "0"


async def test_table_that_somebody_reads_for_long_holds_up_the_newer_relay_and_nobody_else(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_schema, "LOCK_PATIENCE", 0.2)
    store = database.spool.store
    await store_message(store, 1)
    settings = database.settings
    reader = await Link.open(Access(settings.url, str, settings.schema, "reader", 60.0), reads=True)
    async with reader.transaction(one_moment=True) as fetch:
        await fetch("SELECT count(*) FROM delivery")
        upgrading = asyncio.create_task(database.upgrade(oldest=1))
        waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        await until(lambda: database.psql(waiting) != "0")
        async with asyncio.timeout(5):
            await store_message(store, 2)
    await upgrading
    await reader.close()
    assert database.psql("SELECT max(version) FROM schema_version") == str(NEXT)
