"""What a big queue costs a LevelDB spool, counted in operations and deliveries in memory, not in seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.store.builders import NOW, store_message
from tests.store.spools import Spool
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.store.contract import Finish
from zonerelay.store.keys.port import Row
from zonerelay.store.leveldb.engine import AtomicBatch, Batches, View
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.queue.store import PartitionStore

LIST = 5000
MANY = 300


class Counted(LevelDb):
    """Counts what is asked of LevelDB."""

    written = rows_read = looked_up = 0

    def batch(self, batches: Batches) -> AtomicBatch:
        Counted.written += sum(len(ops) for ops in batches)
        return super().batch(batches)

    def rows(
        self,
        start: bytes,
        stop: bytes | None = None,
        *,
        limit: int,
        values: bool = True,
        view: View | None = None,
    ) -> Iterator[Row]:
        for row in super().rows(start, stop, limit=limit, values=values, view=view):
            Counted.rows_read += 1
            yield row

    def get_many(self, keys: Sequence[bytes], view: View | None = None) -> list[bytes | None]:
        Counted.looked_up += len(keys)
        return super().get_many(keys, view)

    @classmethod
    def reset(cls) -> None:
        cls.written = cls.rows_read = cls.looked_up = 0


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PartitionStore]:
    monkeypatch.setattr("zonerelay.store.leveldb.keeper.LevelDb", Counted)
    async with Spool(tmp_path / "spool") as spool:
        assert isinstance(spool.store, PartitionStore)
        Counted.reset()
        yield spool.store


async def deliver_all(store: PartitionStore, together: int, each: Callable[[list[Delivery]], None]) -> int:
    """Claim, read and finish until nothing is left; how many were delivered."""
    count = 0
    while claimed := await store.claim(queue_of("default"), 500, now=NOW):
        each(claimed)
        count += len(claimed)
        for start in range(0, len(claimed), together):
            some = claimed[start : start + together]
            await store.read_message(some[0].message_id)
            await store.settle([Finish(delivery) for delivery in some], lazy=start + together < len(claimed))
    return count


async def test_a_list_of_thousands_is_stored_once_and_finished_step_by_step(store: PartitionStore) -> None:
    recipients = [f"r{number}@d{number % 100}.example" for number in range(LIST)]
    await store_message(store, 1, *recipients, body=b"x" * 10_000)
    # The body and the envelope once; a record for each recipient.
    assert Counted.written <= LIST + 10
    Counted.reset()
    assert await deliver_all(store, 50, lambda claimed: None) == LIST
    # A removal each, a count for each batch of 50, the message's keys; and no record is read twice.
    assert Counted.written <= LIST + LIST // 50 + 10
    assert Counted.rows_read + Counted.looked_up <= 2 * LIST
    assert await store.queues() == set()


async def test_the_store_holds_a_page_in_memory_and_finds_the_rest(
    store: PartitionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zonerelay.store.queue.claims._READ_AHEAD", 20)
    for number in range(1, MANY + 1):
        await store_message(store, number)
    cursors = store._claims[queue_of("default")]
    assert not len(cursors._ready)
    in_memory: list[int] = []
    Counted.reset()
    assert await deliver_all(store, 10, lambda claimed: in_memory.append(len(cursors._ready))) == MANY
    assert max(in_memory) <= 20
    # Each row once or twice (a page begins with the one that ended the page before), never from the start.
    assert Counted.rows_read <= 2 * MANY


async def test_who_is_looked_for_is_found_without_reading_the_others(store: PartitionStore) -> None:
    for number in range(1, 51):
        await store_message(store, number, f"a@d{number % 10}.example")
    decoded: list[str] = []

    def wanted(recipient: str) -> bool:
        decoded.append(recipient)
        return recipient.endswith("@d7.example")

    found = [each.recipient async for each in store.scan(wanted=wanted)]
    assert found == ["a@d7.example"] * 5
    assert len(decoded) == 50
