"""What an operator changes while a claim is still reading: never handed out as it was before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.store.builders import NOW, body_of, delivery_for, envelope_for, message_id, store_message
from tests.store.spools import Spool, until
from tests.support.memory_store import MemoryStore
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import row_id
from zonerelay.model.queue_name import QueueName, queue_of
from zonerelay.outbox.joined import JoinedStore
from zonerelay.store.contract import Finish, Store
from zonerelay.store.leveldb import scan as leveldb_scan
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.postgres.claims import PostgresClaims

if TYPE_CHECKING:
    from zonerelay.outbox.store import OutboxStore


@pytest.mark.parametrize("given_back_first", [False, True])
async def test_what_is_dropped_during_a_claim_stays_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_back_first: bool
) -> None:
    read_fresh, reads, go_on = leveldb_scan.read_fresh, 0, threading.Event()

    def slow(db: LevelDb, start: bytes, end: bytes, wanted: int) -> leveldb_scan.Page:
        nonlocal reads
        reads += 1
        if reads == 2:
            assert go_on.wait(10.0)
        return read_fresh(db, start, end, wanted)

    monkeypatch.setattr(leveldb_scan, "PAGE_ROWS", 1)
    monkeypatch.setattr(leveldb_scan, "read_fresh", slow)
    async with Spool(tmp_path / "spool") as spool:
        first, second = await store_message(spool.store, 1, "a@example.net", "b@example.net")
        store = await spool.reopen()
        await store.read_message(message_id(1))
        claiming = asyncio.create_task(store.claim(queue_of("default"), 10, now=NOW))
        await until(lambda: reads == 2)
        await store.update([first.key], lambda _: None)
        if given_back_first:
            store.release([first.key])
        go_on.set()
        claimed = await claiming
        # Until it is given back, whoever dropped it keeps others' hands off it.
        left = {delivery.key for delivery in claimed} - (set() if given_back_first else {first.key})
        assert left == {second.key}
        store.release([first.key])
        assert await store.claim(queue_of("default"), 10, now=NOW) == []
        # Counted down twice, the message would leave with one delivery still open.
        await store.settle([Finish(first)])
        assert await body_of(store, message_id(1))
        assert store.counts()[queue_of("default")].total == 1


async def claimed(store: Store) -> set[DeliveryKey]:
    found = [delivery.key for delivery in await store.claim(queue_of("default"), 10, now=NOW)]
    assert len(set(found)) == len(found), "handed out twice by one claim"
    return set(found)


async def test_what_is_given_back_during_a_claim_is_handed_out_once(
    store: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each turn of the loop that a claim takes, or at many of them."""
    asks = request.node.callspec.params["store"] in ("postgres", "redis")
    # So that claims have something to read.
    monkeypatch.setattr(leveldb_scan, "PAGE_ROWS", 1)
    everything = {(await store_message(store, number))[0].key for number in range(4)}
    turns, done = 0, False
    while not done or turns < 20:
        turns += 1 + turns // 40
        if asks:  # after this they look again, and not only at what is at hand
            await store.update(everything, lambda delivery: replace(delivery, warned=not delivery.warned))
        first = asyncio.create_task(claimed(store))
        for _ in range(turns):
            await asyncio.sleep(0)
        done = first.done()
        store.release(everything)
        second = set() if done else await claimed(store)
        assert not await first & second, f"handed out twice after {turns} turns"
        store.release(everything)
    assert await claimed(store) == everything


async def test_postgres_claim_that_goes_on_looking_leaves_out_what_was_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks, go_on = PostgresClaims._unpark, 0, asyncio.Event()

    async def slow(
        claims: PostgresClaims, queue: QueueName, limit: int, skip: Collection[str]
    ) -> list[Delivery]:
        nonlocal looks
        looks += 1
        await go_on.wait()
        return await look(claims, queue, limit, skip)

    monkeypatch.setattr(PostgresClaims, "_unpark", slow)
    async with Spool(tmp_path / "spool", backend=Backend.POSTGRES) as spool:
        one, two = await store_message(spool.store, 1, "a@example.net", "b@example.net")
        first = asyncio.create_task(claimed(spool.store))
        await until(lambda: looks == 1)
        spool.store.release([one.key])
        go_on.set()
        assert await first == {two.key}
        assert await claimed(spool.store) == {one.key}


class Rows:
    """As much of an outbox as handing out takes."""

    def __init__(self, *rows: Delivery) -> None:
        self._rows = {row.key: row for row in rows}
        self._free = set(self._rows)

    def claim(self, _zone: str, limit: int, _skip: Collection[str]) -> list[Delivery]:
        keys = sorted(self._free)[:limit]
        self._free -= set(keys)
        return [self._rows[key] for key in keys]

    def release(self, keys: Collection[DeliveryKey]) -> None:
        self._free |= set(keys)


async def test_row_that_is_given_back_while_its_claim_waits_for_the_spool_is_handed_out_once() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow(MemoryStore):
        async def claim(self, *args: Any, **more: Any) -> list[Delivery]:  # Any: as it is
            asked.set()
            await go_on.wait()
            return await super().claim(*args, **more)

    row = delivery_for(envelope_for(row_id(7), "a@example.net"), "a@example.net")
    store = JoinedStore(Slow(), cast("OutboxStore", Rows(row)))
    first = asyncio.create_task(store.claim(queue_of("default"), 10, now=NOW))
    await asked.wait()
    store.release([row.key])
    go_on.set()
    assert await store.claim(queue_of("default"), 10, now=NOW) == [row]
    assert await first == []
