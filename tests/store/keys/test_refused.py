"""What follows a write that a full store has refused was planned from a state that never came."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.store.builders import NOW, delivery_for, envelope_for, message_id, store_message
from tests.store.spools import Spool
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Message
from zonerelay.store import records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import Finish, MessageNotFoundError, OwnMessage, StoreError, StoreFullError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import WriteBatch
from zonerelay.store.leveldb.engine import AtomicBatch
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.memory import MemoryEngine
from zonerelay.store.queue.partition_keeper import open_queue
from zonerelay.store.queue.store import PartitionStore

QUEUE = queue_of("default")


@dataclass
class FullStore:
    """A queue whose partition has no space for the batches that `is_refused` selects, from `fill` on."""

    queue: PartitionStore
    partition: Partition
    given: list[Delivery]
    is_refused: Callable[[WriteBatch], bool] = lambda batch: False
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    def fill(self, is_refused: Callable[[WriteBatch], bool]) -> None:
        self.is_refused = is_refused
        apply = self.partition.keeper.apply

        async def full(batch: WriteBatch) -> None:
            if not self.entered.is_set():
                self.entered.set()
                await self.goes_on.wait()
            if self.is_refused(batch):
                raise StoreFullError("no space")
            await apply(batch)

        self.partition.keeper.apply = full  # type: ignore[method-assign]  # as a server would answer


@pytest.fixture
async def full() -> AsyncIterator[FullStore]:
    given: list[Delivery] = []

    def take(deliveries: object, is_next: bool) -> int:
        assert isinstance(deliveries, list)
        given.extend(deliveries)
        return 0

    clock = SystemClock()
    partition = await open_partition(MemoryEngine(clock), 0, clock=clock)
    queue = await open_queue(partition, StoreContext(clock, on_stored=take))
    yield FullStore(queue, partition, given)
    await queue.close()


async def test_an_outcome_that_follows_a_refused_one_removes_no_message_too_early(full: FullStore) -> None:
    queue = full.queue
    await store_message(queue, 1, "a@example.net", "b@example.net", "c@example.net")
    first, second, third = await queue.claim(QUEUE, 10, now=NOW)
    batches: list[WriteBatch] = []

    def is_first(batch: WriteBatch) -> bool:
        batches.append(batch)
        return len(batches) == 1

    full.fill(is_first)
    refused = asyncio.create_task(queue.settle([Finish(first)]))
    await full.entered.wait()
    follows = asyncio.create_task(queue.settle([Finish(second)]))
    await asyncio.sleep(0.01)
    full.goes_on.set()
    results = await asyncio.gather(refused, follows, return_exceptions=True)
    for delivery, result in zip((first, second), results, strict=True):
        if isinstance(result, StoreError):
            await queue.settle([Finish(delivery)])
    assert (await queue.read_message(message_id(1))).id == message_id(1), "one delivery is left"
    await queue.settle([Finish(third)])
    with pytest.raises(MessageNotFoundError):
        await queue.read_message(message_id(1))


async def test_refused_mail_leaves_the_counts_of_other_messages_right(full: FullStore) -> None:
    queue = full.queue
    await store_message(queue, 1, "a@example.net", "b@example.net", "c@example.net")
    first, second, third = await queue.claim(QUEUE, 10, now=NOW)
    full.fill(lambda batch: records.metadata_key(message_id(2)) in batch.write.changes)
    report = envelope_for(message_id(3), "from@example.org", sender="")
    change = OwnMessage(
        Message(envelope=report, size=0, chunks=0), b"", (delivery_for(report, "from@example.org"),)
    )
    new = asyncio.create_task(store_message(queue, 2, "d@example.net"))
    outcome = asyncio.create_task(queue.settle([Finish(first), change]))
    await full.entered.wait()
    follows = asyncio.create_task(queue.settle([Finish(second)]))
    await asyncio.sleep(0.01)
    full.goes_on.set()
    results = await asyncio.gather(new, outcome, follows, return_exceptions=True)
    assert isinstance(results[0], StoreFullError)
    assert results[1] is None, "what frees space is written"
    assert message_id(3) in {each.message_id for each in full.given}, "the bounce is announced"
    if results[2] is not None:
        await queue.settle([Finish(second)])
    await queue.settle([Finish(third)])
    with pytest.raises(MessageNotFoundError):
        await queue.read_message(message_id(1))


async def test_a_message_is_read_anew_once_reopened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose sync failed is not there before the reopening, and may be there afterwards."""
    async with Spool(tmp_path / "spool") as spool:
        store = spool.store
        await store_message(store, 1, "a@example.net", "b@example.net", "c@example.net")
        first, second, third = await store.claim(QUEUE, 10, now=NOW)
        commit, reopen, unsynced = LevelDb.commit, LevelDb.reopen, list[AtomicBatch]()

        def fail_once(db: LevelDb, batch: AtomicBatch) -> None:
            if not unsynced:
                unsynced.append(batch)
                raise StoreError("the sync failed")
            commit(db, batch)

        def find(db: LevelDb, *, full: bool = False) -> None:
            reopen(db, full=full)
            count = records.open_count_key(message_id(1))
            db.write([[(records.delivery_key(first.key), None), (count, b"2")]])

        monkeypatch.setattr(LevelDb, "commit", fail_once)
        monkeypatch.setattr(LevelDb, "reopen", find)
        with pytest.raises(StoreError):
            await store.settle([Finish(first)])
        await store.read_message(message_id(1))
        assert await store.usable()
        await store.settle([Finish(each) for each in (first, second, third)])
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(1))
        assert await store.left_over() == ""
