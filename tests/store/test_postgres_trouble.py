"""What goes wrong between a relay and its database: callers hear StoreError, and it mends itself."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from string import ascii_letters, digits

import pytest

from tests.store.builders import NOW, body_of, delivery_for, envelope_for, message_id, store_message
from tests.store.spools import Spool, until
from tests.store.test_crash import Facts, check, command, whole_lines, work_for
from tests.support.postgres import PostgresServer
from zonerelay.config.settings import Backend, PostgresSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common.claims import index_claims
from zonerelay.store.contract import CHUNK_SIZE, Finish, Store, StoreError
from zonerelay.store.postgres.driver import Access, ConnectionLostError, Fetch, Link
from zonerelay.store.postgres.store import PostgresStore

CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'zonerelay%'"

WAITING_FOR_STANDBY = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """To be broken."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
async def spool(server: PostgresServer, tmp_path: Path) -> AsyncIterator[Spool]:
    settings = PostgresSettings(url=server.url, schema=f"trouble_{uuid.uuid4().hex[:16]}", lease=4.0)
    async with Spool(tmp_path, backend=Backend.POSTGRES, postgres=settings, clock=SystemClock()) as spool:
        yield spool


async def recovered(spool: Spool) -> None:
    await until(lambda: spool.store.unhealthy() is None, seconds=15.0)


@contextlib.asynccontextmanager
async def reopened(spool: Spool) -> AsyncIterator[tuple[Store, Fetch]]:
    """With what was changed, and a transaction of somebody else who stands in the way."""
    assert spool.postgres is not None
    store = await spool.reopen()
    other = await Link.open(Access(spool.postgres.url, str, spool.postgres.schema, "other", 60.0))
    try:
        async with other.transaction() as fetch:
            yield store, fetch
    finally:
        await other.close()


async def test_connections_that_are_cut_are_made_again_and_claims_are_kept(
    server: PostgresServer, spool: Spool
) -> None:
    store = spool.store
    for number in range(4):
        await store_message(store, number)
    claimed = await store.claim(queue_of("default"), 2, now=NOW)
    server.psql(CUT)
    await until(lambda: store.unhealthy() is not None)
    assert store.unhealthy() == "the database cannot be used"
    with pytest.raises(StoreError):
        await store_message(store, 9)
    with pytest.raises(StoreError):
        await store.settle([Finish(claimed[0])])
    await recovered(spool)
    assert spool.health == ["the database cannot be used", None]
    assert spool.lost == []
    rest = await store.claim(queue_of("default"), 10, now=NOW)
    assert [d.message_id for d in rest] == [message_id(2), message_id(3)]
    await store.settle([Finish(delivery) for delivery in (*claimed, *rest)])
    assert await store.queues() == set()


async def test_acknowledged_mail_survives_kill_9_of_the_server(server: PostgresServer, spool: Spool) -> None:
    store = spool.store
    stored: set[int] = set()
    refused: set[int] = set()

    async def take(start: int) -> None:
        for number in range(start, start + 100_000):
            try:
                await store_message(store, number, body=b"%d\r\n" % number * 2000)
            except StoreError:
                refused.add(number)
                return
            stored.add(number)

    load = [asyncio.create_task(take(session * 100_000)) for session in range(5)]
    await until(lambda: len(stored) > 100)
    await asyncio.to_thread(server.kill)
    await asyncio.gather(*load)
    assert store.unhealthy() is not None
    with pytest.raises(StoreError):
        await store.claim(queue_of("default"), 1, now=NOW)
    await asyncio.to_thread(server.start)
    await recovered(spool)
    found = {int(delivery.message_id, 16) async for delivery in store.scan()}
    assert found == stored
    assert not found & refused, "what was refused must not be delivered"
    claimed = await store.claim(queue_of("default"), 100_000, now=NOW)
    assert {int(delivery.message_id, 16) for delivery in claimed} == stored
    some = max(stored)
    assert await body_of(store, message_id(some)) == b"%d\r\n" % some * 2000
    await store.settle([Finish(delivery) for delivery in claimed])


async def test_server_that_goes_away_in_good_order_is_waited_for(
    server: PostgresServer, spool: Spool
) -> None:
    (delivery,) = await store_message(spool.store, 1)
    await asyncio.to_thread(server.shut_down)
    await until(lambda: spool.store.unhealthy() is not None)
    await asyncio.sleep(0.5)
    await asyncio.to_thread(server.start)
    await recovered(spool)
    assert await spool.store.claim(queue_of("default"), 1, now=NOW) == [delivery]


async def test_commit_of_which_nobody_knows_whether_it_happened_did_not(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the commit is lost: the client was told no, so the message must not be delivered."""
    store = spool.store
    fetch = Link._fetch

    async def lose_the_answer(
        link: Link, statement: str, *values: object, timeout: float | None = None
    ) -> object:
        rows = await fetch(link, statement, *values, timeout=timeout)
        if "INSERT INTO message" in statement:
            monkeypatch.undo()
            raise ConnectionLostError("the answer was lost")
        return rows

    monkeypatch.setattr(Link, "_fetch", lose_the_answer)
    with pytest.raises(StoreError):
        await store_message(store, 1)
    await recovered(spool)
    assert [d async for d in store.scan()] == []
    await store_message(store, 1)
    assert len(await store.claim(queue_of("default"), 10, now=NOW)) == 1


async def test_outcome_of_which_nobody_knows_whether_it_was_stored_is_stored_again(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = spool.store
    await store_message(store, 1, "a@x.example", "b@x.example")
    first, second = await store.claim(queue_of("default"), 2, now=NOW)
    fetch = Link._fetch

    async def lose_the_answer(
        link: Link, statement: str, *values: object, timeout: float | None = None
    ) -> object:
        rows = await fetch(link, statement, *values, timeout=timeout)
        if "DELETE FROM delivery" in statement:
            monkeypatch.undo()
            raise ConnectionLostError("the answer was lost")
        return rows

    monkeypatch.setattr(Link, "_fetch", lose_the_answer)
    with pytest.raises(StoreError):
        await store.settle([Finish(first)])
    await recovered(spool)
    await store.settle([Finish(first)])
    assert await store.deliveries_of(message_id(1)) == [second]
    await store.settle([Finish(second)])
    assert await store.queues() == set()


async def test_sick_message_fails_alone(spool: Spool) -> None:
    store = spool.store
    await store_message(store, 1)
    results = await asyncio.gather(*(store_message(store, n) for n in (2, 1, 3)), return_exceptions=True)
    assert [isinstance(result, StoreError) for result in results] == [False, True, False]
    assert store.unhealthy() is None
    assert len(await store.claim(queue_of("default"), 10, now=NOW)) == 3


async def test_message_beyond_what_the_database_can_index_fails_alone(spool: Spool) -> None:
    """54000: an index row may not be longer than 2704 octets, after compression."""
    store = spool.store
    zone = "".join(Random(1).choices(ascii_letters + digits, k=8000))
    some = (store_message(store, 1), store_message(store, 2, zone=zone), store_message(store, 3))
    results = await asyncio.gather(*some, return_exceptions=True)
    assert [isinstance(result, StoreError) for result in results] == [False, True, False]
    assert store.unhealthy() is None
    assert len(await store.claim(queue_of("default"), 10, now=NOW)) == 2


async def test_claim_that_is_cancelled_loses_nothing(spool: Spool) -> None:
    store = spool.store
    for number in range(30):
        await store_message(store, number, next_attempt=1.0)
    for _ in range(10):
        claiming = asyncio.create_task(store.claim(queue_of("default"), 30, now=NOW))
        await asyncio.sleep(0.0005)
        claiming.cancel()
        await asyncio.wait([claiming])
        if not claiming.cancelled():
            store.release([delivery.key for delivery in claiming.result()])
    assert len(await store.claim(queue_of("default"), 30, now=NOW)) == 30


async def test_server_that_stands_still_makes_nobody_wait_for_ever(
    server: PostgresServer, spool: Spool
) -> None:
    envelope = envelope_for(message_id(1), "a@x.example")
    writer = spool.store.begin(envelope)
    await writer.write(b"x")
    server.halt()
    try:
        with pytest.raises(StoreError):
            await asyncio.wait_for(spool.store.probe(), 5)
        with pytest.raises(StoreError):
            await writer.commit([delivery_for(envelope, "a@x.example")])
    finally:
        server.go_on()
    await recovered(spool)
    await store_message(spool.store, 2)


def test_acknowledged_mail_survives_kill_9_of_the_relay(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_POSTGRES", server.url)
    facts = Facts()
    for number in range(3):
        with subprocess.Popen(command("take", Backend.POSTGRES, tmp_path), stdout=subprocess.PIPE) as process:
            first = work_for(0.3 + 0.1 * number, process)
            process.kill()
            assert process.stdout is not None
            facts.hear(whole_lines(first + process.stdout.read()))
        check(facts, Backend.POSTGRES, tmp_path)
    assert len(facts.stored) > 10


async def test_update_that_is_cancelled_at_its_commit_is_what_the_database_says(
    server: PostgresServer, spool: Spool
) -> None:
    """An operator's connection to the relay ends in the middle: the mail is held, and must not be sent."""
    store = spool.store
    (delivery,) = await store_message(store, 1)
    server.set("synchronous_standby_names", "elsewhere")
    try:
        holding = asyncio.create_task(store.update([delivery.key], lambda d: replace(d, held=True)))
        await until(lambda: server.psql(WAITING_FOR_STANDBY) != "0")
        holding.cancel()
        await asyncio.wait([holding])
    finally:
        server.set("synchronous_standby_names", "")
    await recovered(spool)
    assert await store.claim(queue_of("default"), 10, now=NOW) == []
    assert [found.held async for found in store.scan()] == [True]


async def test_claim_that_outlives_its_connection_is_given_back(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_claims, "RECONCILE", 0.3)
    async with reopened(spool) as (store, fetch):
        (delivery,) = await store_message(store, 1, next_attempt=1.0)
        await fetch("LOCK TABLE delivery IN SHARE MODE")
        asking = asyncio.create_task(store.claim(queue_of("default"), 10, now=NOW))
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'delivery'::regclass"
        while (await fetch(waits))[0][0] == 0:
            await asyncio.sleep(0.01)
        assert isinstance(store, PostgresStore)
        store._keeper.links.cut()  # the server does not notice while it waits for the lock
        with pytest.raises(StoreError):
            await asking
        await recovered(spool)
        assert await fetch("SELECT claimed_by FROM delivery") == [(None,)]
    spool.news.clear()
    await until(lambda: queue_of("default") in spool.news)
    assert await store.claim(queue_of("default"), 10, now=NOW) == [delivery]


async def test_mail_that_was_locked_while_a_claim_looked_is_not_forgotten(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_claims, "RECONCILE", 0.3)
    async with reopened(spool) as (store, fetch):
        (delivery,) = await store_message(store, 1, next_attempt=1.0)
        await fetch("SELECT * FROM delivery FOR UPDATE")
        assert await store.claim(queue_of("default"), 10, now=NOW) == []
    spool.news.clear()
    await until(lambda: queue_of("default") in spool.news)
    assert await store.claim(queue_of("default"), 10, now=NOW) == [delivery]


async def test_upload_that_failed_leaves_nothing_while_the_relay_lives(
    server: PostgresServer, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_claims, "RECONCILE", 0.3)
    async with reopened(spool) as (store, fetch):

        async def chunks() -> int:
            ((count,),) = await fetch("SELECT count(*) FROM chunk")
            return int(count)

        big = bytes(12 * CHUNK_SIZE)
        envelope = envelope_for(message_id(1), "a@x.example")
        going_on = store.begin(envelope)
        await going_on.write(big)
        async with store.begin(envelope_for(message_id(2), "a@x.example")) as given_up:
            await given_up.write(big)
            while await chunks() < 22:  # the last of each is still in memory
                await asyncio.sleep(0.01)
            server.psql(CUT)
            await until(lambda: store.unhealthy() is not None)
        await recovered(spool)
        async with asyncio.timeout(10):
            while await chunks() > 11:
                await asyncio.sleep(0.01)
        await going_on.commit([delivery_for(envelope, "a@x.example")])
        assert await body_of(store, message_id(1)) == big


async def test_unreadable_delivery_holds_nobody_up(
    server: PostgresServer, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_claims, "RECONCILE", 0.2)
    async with reopened(spool) as (store, _):
        for number in range(3):
            await store_message(store, number, next_attempt=1.0)
        assert spool.postgres is not None
        server.psql(f"UPDATE {spool.postgres.schema}.delivery SET record = 'junk' WHERE message_id = 1")
        found = await store.claim(queue_of("default"), 10, now=NOW)
        assert [delivery.message_id for delivery in found] == [message_id(0), message_id(2)]
        spool.news.clear()
        await asyncio.sleep(0.7)
        assert spool.news == []
        assert await store.claim(queue_of("default"), 10, now=NOW) == []
        assert sum("unreadable" in record.message for record in caplog.records) == 1
