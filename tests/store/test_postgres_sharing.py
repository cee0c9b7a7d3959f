"""Several relays on one database: nothing is handed out twice, a dead node's claims are taken over after its
lease, and a node that was only slow changes nothing of what it has lost.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import (
    NOW,
    attempt,
    body_of,
    delivery_for,
    envelope_for,
    message_id,
    own_message,
    store_message,
)
from tests.store.spools import Spool, until
from tests.support.postgres import shared_postgres
from zonerelay.config.settings import Backend, PostgresSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common.claims import pool as claim_pool
from zonerelay.store.contract import (
    CHUNK_SIZE,
    ClaimLostError,
    Finish,
    MessageNotFoundError,
    Postpone,
    QueueCounts,
    StoreError,
    Submit,
)
from zonerelay.store.postgres import counts as postgres_counts
from zonerelay.store.postgres import session as postgres_session
from zonerelay.store.postgres.driver import Link
from zonerelay.store.postgres.store import PostgresStore

LEASE = 1.2


class Nodes:
    """Spools on one schema, each a node of its own."""

    def __init__(self, path: Path) -> None:
        self.lease = LEASE
        self._path = path
        self._settings = PostgresSettings(
            url=shared_postgres().url, schema=f"nodes_{uuid.uuid4().hex[:16]}", lease=LEASE
        )
        self.spools: list[Spool] = []

    async def add(self, *, clock: ManualClock | None = None) -> Spool:
        settings = replace(self._settings, node=len(self.spools), lease=self.lease)
        spool = Spool(self._path, backend=Backend.POSTGRES, postgres=settings, clock=clock)
        await spool.open()
        self.spools.append(spool)
        return spool

    def psql(self, statement: str) -> str:
        return shared_postgres().psql(f"SET search_path = {self._settings.schema}; {statement}")

    async def close(self) -> None:
        for spool in self.spools:
            await spool.store.close()
        self.psql(f"DROP SCHEMA {self._settings.schema} CASCADE")


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    await nodes.close()


def stop_heart(spool: Spool) -> None:
    """As if the process stood still: its session is not renewed any more."""
    assert isinstance(spool.store, PostgresStore)
    assert spool.store._keeper._heart is not None
    spool.store._keeper._heart.cancel()


def start_heart(spool: Spool) -> None:
    assert isinstance(spool.store, PostgresStore)
    keeper = spool.store._keeper
    keeper._heart = keeper._tasks.start(keeper._beat())


async def test_nodes_share_a_queue_without_overlap(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_pool, "POOL_LIMIT", 5)
    first, second = await nodes.add(), await nodes.add()
    for number in range(60):
        await store_message(first.store, number)
    # A node has claimed up to a pool more than it has handed out: each is asked until it has nothing left.
    claimed: list[str] = []
    while True:
        batches = await asyncio.gather(
            *(
                spool.store.claim(queue_of("default"), 3, now=NOW)
                for _ in range(15)
                for spool in (first, second)
            )
        )
        if not any(batches):
            break
        claimed += [delivery.message_id for batch in batches for delivery in batch]
    assert sorted(claimed) == [message_id(number) for number in range(60)]


async def test_what_one_node_has_no_room_for_another_hears_of(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_pool, "POOL_LIMIT", 2)
    first, second = await nodes.add(), await nodes.add()
    await until(lambda: not first.news)
    assert await second.store.claim(queue_of("default"), 10, now=NOW) == []
    for number in range(4):
        await store_message(first.store, number)
    await until(lambda: queue_of("default") in second.news)
    found = await second.store.claim(queue_of("default"), 10, now=NOW)
    assert [delivery.message_id for delivery in found] == [message_id(2), message_id(3)]
    assert await body_of(second.store, message_id(3))


async def test_node_that_stops_leaves_its_mail_to_the_others_at_once(nodes: Nodes) -> None:
    nodes.lease = 300.0  # none ends, and no heart beats, while this runs
    first, second = await nodes.add(), await nodes.add()
    (delivery,) = await store_message(first.store, 1)
    await store_message(first.store, 2, next_attempt=NOW + 60)
    assert await second.store.claim(queue_of("default"), 10, now=NOW) == []
    await first.store.close()
    await until(lambda: queue_of("default") in second.news)
    assert await second.store.claim(queue_of("default"), 10, now=NOW) == [delivery]
    assert await second.store.next_due(queue_of("default")) == NOW + 60


async def test_claims_of_a_silent_node_are_taken_over_after_its_lease_and_not_before(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    (delivery,) = await store_message(first.store, 1)
    assert await first.store.claim(queue_of("default"), 1, now=NOW) == [delivery]
    await asyncio.sleep(1.5 * LEASE)
    assert await second.store.claim(queue_of("default"), 1, now=NOW) == [], (
        "a node that lives keeps its claims"
    )
    stop_heart(first)
    await asyncio.sleep(0.4 * LEASE)
    assert await second.store.claim(queue_of("default"), 1, now=NOW) == []
    await until(lambda: queue_of("default") in second.news)
    assert await second.store.claim(queue_of("default"), 1, now=NOW) == [delivery]


async def test_a_servers_clock_that_is_set_back_does_not_keep_a_dead_nodes_claims(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_session, "LONGEST_LEASE", 4 * LEASE)
    first, second = await nodes.add(), await nodes.add()
    (delivery,) = await store_message(first.store, 1)
    assert await first.store.claim(queue_of("default"), 1, now=NOW) == [delivery]
    stop_heart(first)
    nodes.psql("UPDATE node SET expires = clock_timestamp() + interval '1 day' WHERE node = 0")
    await until(lambda: queue_of("default") in second.news, seconds=30.0)
    assert await second.store.claim(queue_of("default"), 1, now=NOW) == [delivery]


async def test_node_that_was_only_slow_changes_nothing_of_what_it_lost(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    deliveries = await store_message(first.store, 1, "a@x.example", "b@x.example", "c@x.example")
    assert await first.store.claim(queue_of("default"), 3, now=NOW) == deliveries
    stop_heart(first)
    await until(lambda: queue_of("default") in second.news)
    assert await second.store.claim(queue_of("default"), 3, now=NOW) == deliveries
    report, bounce = own_message(message_id(9), b"report", "from@example.org")
    keys = tuple(delivery.key for delivery in deliveries[:1])
    await first.store.settle([Finish(deliveries[0]), Submit(report, b"report", (bounce,), keys)])
    await first.store.settle([Postpone(deliveries[1].deferred(NOW + 60, attempt()))])
    first.store.release([deliveries[2].key])
    assert await second.store.deliveries_of(message_id(1)) == deliveries
    assert await second.store.deliveries_of(message_id(9)) == [], "who has the delivery reports for itself"
    await second.store.settle([Finish(delivery) for delivery in deliveries])
    assert await second.store.queues() == set()


async def test_node_that_comes_back_hears_what_it_has_lost_and_reads_none_of_it(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    (delivery,) = await store_message(first.store, 1)
    await first.store.claim(queue_of("default"), 1, now=NOW)
    stop_heart(first)
    await until(lambda: queue_of("default") in second.news)
    assert await second.store.claim(queue_of("default"), 1, now=NOW) == [delivery]
    start_heart(first)
    await until(lambda: bool(first.lost))
    await until(lambda: first.store.unhealthy() is None)
    assert first.lost == [[delivery.key]]
    with pytest.raises(StoreError, match="lease"):
        await body_of(first.store, message_id(1))
    assert await body_of(second.store, message_id(1))
    await first.store.settle([Finish(delivery)])
    assert await second.store.deliveries_of(message_id(1)) == [delivery]
    await second.store.settle([Finish(delivery)])
    with pytest.raises(MessageNotFoundError):
        await first.store.read_message(message_id(1))


async def test_nothing_is_begun_once_the_lease_may_have_run_out(nodes: Nodes) -> None:
    clock = ManualClock()
    spool = await nodes.add(clock=clock)
    await store_message(spool.store, 1)
    await store_message(spool.store, 2)
    await spool.store.claim(queue_of("default"), 1, now=NOW)
    stop_heart(spool)
    spool.store.check_claim(message_id(1))
    clock.suspend(LEASE)
    with pytest.raises(ClaimLostError):
        spool.store.check_claim(message_id(1))
    with pytest.raises(ClaimLostError):
        await spool.store.read_message(message_id(1))
    with pytest.raises(ClaimLostError):
        await spool.store.claim(queue_of("default"), 1, now=NOW)
    assert await spool.store.read_message(message_id(2)), "nobody is sending that one"


async def test_last_two_deliveries_finished_by_two_nodes_at_once_take_the_message(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    for number in range(20):
        mine, other = await store_message(first.store, number, "a@x.example", "b@x.example")
        await first.store.update([mine.key, other.key], lambda d: replace(d, warned=True))
        (mine,) = await first.store.claim(queue_of("default"), 1, now=NOW)
        (other,) = await second.store.claim(queue_of("default"), 1, now=NOW)
        await asyncio.gather(first.store.settle([Finish(mine)]), second.store.settle([Finish(other)]))
    assert nodes.psql("SELECT (SELECT count(*) FROM message), (SELECT count(*) FROM delivery)") == "0|0"


async def test_operator_leaves_alone_what_another_node_is_sending(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    (delivery,) = await store_message(first.store, 1)
    await first.store.claim(queue_of("default"), 1, now=NOW)
    assert await second.store.update([delivery.key], lambda _delivery: None) == 0
    assert await first.store.update([delivery.key], lambda _delivery: None) == 1


async def test_upload_of_a_node_that_was_given_up_cannot_be_committed(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    envelope = envelope_for(message_id(1), "a@x.example")
    async with first.store.begin(envelope) as writer:
        for _ in range(20):
            await writer.write(bytes(CHUNK_SIZE))
        stop_heart(first)
        await until(lambda: nodes.psql("SELECT count(*) FROM chunk") == "0")
        with pytest.raises(StoreError):
            await writer.commit([delivery_for(envelope, "a@x.example")])
    assert await second.store.queues() == set()


async def test_every_node_counts_the_whole_queue(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_counts, "RECOUNT", 0.1)
    first = await nodes.add()
    await store_message(first.store, 1, "a@x.example", "b@x.example")
    second = await nodes.add()
    await until(lambda: second.store.counts() == {queue_of("default"): QueueCounts(ready=2)})
    assert second.store.last_message_id() == message_id(1)
    await store_message(first.store, 2, zone="other")
    await until(lambda: second.store.counts().get(queue_of("other")) == QueueCounts(ready=1))


async def test_node_that_stands_still_within_a_transaction_holds_nobody_up(nodes: Nodes) -> None:
    first, second = await nodes.add(), await nodes.add()
    (delivery,) = await store_message(first.store, 1)
    await first.store.claim(queue_of("default"), 1, now=NOW)
    assert isinstance(first.store, PostgresStore)
    link = await Link.open(first.store._keeper.access)
    stopped = asyncio.Event()

    async def half_done() -> None:
        async with link.transaction() as fetch:
            await fetch("UPDATE node SET last_id = 7 WHERE node = 0")
            await fetch("UPDATE delivery SET held = true")
            stopped.set()
            await asyncio.Event().wait()

    standing = asyncio.create_task(half_done())
    await stopped.wait()
    stop_heart(first)
    await until(lambda: queue_of("default") in second.news)
    assert await second.store.claim(queue_of("default"), 1, now=NOW) == [delivery]
    assert second.health == []
    link.cut()
    standing.cancel()
    await asyncio.gather(standing, return_exceptions=True)
