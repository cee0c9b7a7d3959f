"""What a 250 of a PostgreSQL store leans on: settings that others change, and commits that are in doubt."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool, until
from tests.support.postgres import PostgresServer
from zonerelay.config.settings import LOSS_WORDS, Backend, PostgresSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres import session as postgres_session
from zonerelay.store.postgres.driver import Link
from zonerelay.store.postgres.store import PostgresStore

SHOW = "SHOW synchronous_commit"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def settings(server: PostgresServer) -> PostgresSettings:
    return PostgresSettings(url=server.url, schema=f"promises_{uuid.uuid4().hex[:16]}", lease=2.0)


def of(settings: PostgresSettings, path: Path) -> Spool:
    return Spool(path, backend=Backend.POSTGRES, postgres=settings, clock=SystemClock())


@pytest.fixture
async def spool(settings: PostgresSettings, tmp_path: Path) -> AsyncIterator[Spool]:
    async with of(settings, tmp_path) as spool:
        yield spool


def writer_of(spool: Spool) -> Link:
    assert isinstance(spool.store, PostgresStore)
    writer = spool.store._keeper._writer
    assert writer is not None
    return writer


async def commits(spool: Spool) -> set[str]:
    """What `synchronous_commit` is in each kind of session of the store."""
    assert isinstance(spool.store, PostgresStore)
    keeper = spool.store._keeper
    assert keeper._control is not None
    found = [await keeper._control.fetch(SHOW), await writer_of(spool).fetch(SHOW)]
    async with keeper.links.use() as link:
        found.append(await link.fetch(SHOW))
    return {rows[0][0] for rows in found}


@pytest.fixture
def asynchronous(server: PostgresServer) -> Iterator[None]:
    server.set("synchronous_commit", "off")
    yield
    server.set("synchronous_commit", "on")


async def test_reload_that_switches_synchronous_commit_off_changes_none_of_our_sessions(
    server: PostgresServer, spool: Spool
) -> None:
    server.set("synchronous_commit", "off")
    try:
        assert await commits(spool) == {"on"}
    finally:
        server.set("synchronous_commit", "on")


@pytest.mark.parametrize(
    ("value", "ours"),
    [("off", "on"), ("local", "on"), ("remote_write", "on"), ("on", "on"), ("remote_apply", "remote_apply")],
)
async def test_our_sessions_wait_for_the_disk_and_for_no_less_than_the_server_says(
    settings: PostgresSettings, tmp_path: Path, value: str, ours: str
) -> None:
    url = f"{settings.url}?synchronous_commit={value}"
    async with of(replace(settings, url=url), tmp_path) as spool:
        assert await commits(spool) == {ours}


async def test_the_words_leave_synchronous_commit_as_it_is(
    settings: PostgresSettings, tmp_path: Path, asynchronous: None
) -> None:
    async with of(replace(settings, accept_loss=LOSS_WORDS), tmp_path) as spool:
        assert await commits(spool) == {"off"}


async def test_server_that_stops_syncing_is_noticed_at_the_next_beat(
    server: PostgresServer, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_session, "LONGEST_PAUSE", 0.2)
    server.set("fsync", "off")
    try:
        await until(lambda: spool.store.unhealthy() == "the database may lose what it has acknowledged")
        with pytest.raises(StoreError):
            await store_message(spool.store, 1)
    finally:
        server.set("fsync", "on")
    await until(lambda: spool.store.unhealthy() is None)
    await store_message(spool.store, 1)


async def test_commit_that_stopped_waiting_for_its_standby_is_no_acceptance(
    server: PostgresServer, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_session, "LONGEST_PAUSE", 0.2)
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    pid = writer_of(spool).pid
    server.set("synchronous_standby_names", "elsewhere")
    try:
        storing = asyncio.create_task(store_message(spool.store, 1))
        await until(lambda: str(pid) in server.psql(waits).split())
        server.psql(f"SELECT pg_cancel_backend({pid})")
        with pytest.raises(StoreError):
            await storing
    finally:
        server.set("synchronous_standby_names", "")
    await until(lambda: spool.store.unhealthy() is None)
    assert [delivery async for delivery in spool.store.scan()] == [], "its client was told no"
    await store_message(spool.store, 2)
    (delivery,) = await spool.store.claim(queue_of("default"), 10, now=NOW)
    assert delivery.message_id == message_id(2)
