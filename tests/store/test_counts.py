"""Seeded runs of verbs, many at a time: counted is what a scan finds, and nothing is handed out twice.

In some of them calls fail at random, and what was refused is repeated, as a settler does.
"""

import asyncio
import contextlib
import errno
import os
import random
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.store.builders import NOW, attempt, message_id, own_message, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName, queue_of
from zonerelay.store.contract import Change, Finish, OwnMessage, Postpone, QueueCounts, Store, StoreError
from zonerelay.store.keys import group_commit
from zonerelay.store.leveldb import keeper
from zonerelay.store.leveldb.engine import AtomicBatch
from zonerelay.store.leveldb.spool import LevelDb

ZONES = ("a", "b")
ADDRESSES = ("p@one.example", "q@one.example", "p@two.example")
LARGE = b"z" * 600_000
STEPS = 25

Work = Coroutine[Any, Any, object]  # Any: what a coroutine sends is nobody's business


class Run:
    """`store` may be another one after a restart. `handed` is what claims brought and nobody gave back."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.handed: dict[DeliveryKey, Delivery] = {}
        self.claiming: set[DeliveryKey] = set()
        self._number = 0
        self._known: list[DeliveryKey] = []
        self._refused: list[list[Change]] = []

    async def step(self) -> None:
        """Some verbs at once. What the store refuses is no failure of a run."""
        known = self._known
        verbs: list[Callable[[list[DeliveryKey]], Work]] = [
            self._store, self._store, self._claim, self._settle, self._settle, self._update, self._drop,
            self._repeat, self._give_back,
        ]  # fmt: skip
        chosen = self.random.choices(verbs, k=self.random.choice((1, 4, 8)))
        work = [asyncio.ensure_future(verb(known)) for verb in chosen]
        for _ in range(self.random.randrange(8)):
            await asyncio.sleep(0)
        left = self.random.randrange(5 * len(work))
        if left < len(work) and chosen[left] not in (self._update, self._drop):
            work[left].cancel()
        for result in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(
                result, StoreError | asyncio.CancelledError
            ):
                raise result

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _some(self, keys: list[DeliveryKey]) -> list[DeliveryKey]:
        return self.random.sample(keys, min(len(keys), self.random.randint(1, 3)))

    async def _store(self, _known: list[DeliveryKey]) -> None:
        await store_message(
            self.store,
            self._next(),
            *self.random.sample(ADDRESSES, self.random.randint(1, 3)),
            zone=self.random.choice(ZONES),
            body=self.random.choice((b"x", b"x", LARGE)),
            next_attempt=self.random.choice((0.0, 0.0, NOW + 20)),
            held=self.random.random() < 0.1,
        )

    async def _claim(self, _known: list[DeliveryKey]) -> None:
        zone, limit, skip = (
            self.random.choice(ZONES),
            self.random.randint(1, 4),
            self.random.choice(((), ("one.example",))),
        )
        for delivery in await self.store.claim(queue_of(zone), limit, now=NOW, skip_domains=skip):
            assert delivery.key not in self.handed, "handed out twice"
            self.handed[delivery.key] = delivery

    async def _settle(self, _known: list[DeliveryKey]) -> None:
        changes: list[Change] = []
        for key in self._some(sorted(self.handed)):
            delivery = self.handed.pop(key)
            postponed = self.random.choice(
                (delivery.deferred(NOW + 30, attempt()), structs.replace(delivery, held=True))
            )
            changes.append(self.random.choice((Finish(delivery), Finish(delivery), Postpone(postponed))))
        if changes and self.random.random() < 0.5:
            message, bounce = own_message(message_id(self._next()), b"bounce", ADDRESSES[0])
            changes.append(OwnMessage(message, b"bounce", (structs.replace(bounce, queue=queue_of("a")),)))
        await self._try(changes)

    async def _try(self, changes: list[Change]) -> None:
        try:
            await self.store.settle(changes, lazy=self.random.random() < 0.5)
        except StoreError:
            self._refused.append(changes)

    async def _repeat(self, _known: list[DeliveryKey]) -> None:
        if self._refused:
            await self._try(self._refused.pop())

    async def _update(self, known: list[DeliveryKey]) -> None:
        held, due = self.random.random() < 0.3, self.random.choice((0.0, NOW + 5))
        await self.store.update(self._some(known), lambda d: structs.replace(d, held=held, next_attempt=due))

    async def _drop(self, known: list[DeliveryKey]) -> None:
        """What came last, most of all: of that something else may be under way."""
        youngest = sorted(known, key=lambda key: key.message_id)[-4:]
        await self.store.update(self._some(youngest), lambda _: None)

    async def _give_back(self, known: list[DeliveryKey]) -> None:
        """Also what is just being claimed."""
        keys = self._some(known)
        for key in keys:
            self.handed.pop(key, None)
        self.store.release(keys)

    async def check(self) -> None:
        """What somebody began who has left may still become durable: soon both say the same."""
        await self.store.probe()
        deadline = asyncio.get_running_loop().time() + 2.0
        while (found := await self._scanned()) != self.counts():
            assert asyncio.get_running_loop().time() < deadline, (found, self.counts())
            await asyncio.sleep(0.01)

    async def _scanned(self) -> dict[QueueName, QueueCounts]:
        self._known.clear()
        found: dict[QueueName, QueueCounts] = {}
        async for delivery in self.store.scan():
            self._known.append(delivery.key)
            counts = found.setdefault(delivery.queue, QueueCounts())
            counts.held += delivery.held
            counts.deferred += not delivery.held and delivery.next_attempt > 0
            counts.ready += not delivery.held and delivery.next_attempt <= 0
        return found

    def counts(self) -> dict[QueueName, QueueCounts]:
        return {zone: counts for zone, counts in self.store.counts().items() if counts.total}


@pytest.mark.parametrize("seed", range(2))
async def test_counts_are_what_a_scan_finds(store: Store, seed: int) -> None:
    run = Run(store, seed)
    for _ in range(STEPS):
        await run.step()
        await run.check()


class Faults:
    """Of the calls that it is put around, some raise before or after they do what they should."""

    def __init__(self, seed: int) -> None:
        self.rate = 0.0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def around(self, call: Callable[..., object], error: Exception) -> Callable[..., object]:
        def faulty(*args: object, **more: object) -> object:
            with self._lock:
                fails, done = self._random.random() < self.rate, self._random.random() < 0.5
            if not fails:
                return call(*args, **more)
            if done:
                with contextlib.suppress(OSError):
                    call(*args, **more)
            raise error

        return faulty


async def healthy(store: Store) -> bool:
    """False after a write that had begun before."""
    await until(lambda: store.unhealthy() is None)
    try:
        await store.probe()
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("seed", range(8))
async def test_counts_after_calls_that_failed(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(keeper, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(group_commit, "GATHER_LIMIT", 0.0)
    faults = Faults(seed)
    for name in ("rename", "link", "unlink", "fsync", "writev", "pread"):
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        monkeypatch.setattr(os, name, faults.around(getattr(os, name), error))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        async with Spool(Path(name) / "q", backend=Backend.DISK, clock=SystemClock()) as spool:
            run = Run(spool.store, seed)
            for _ in range(STEPS):
                faults.rate = run.random.choice((0.0, 0.03, 0.15))
                await run.step()
                faults.rate = 0.0
                while not await healthy(spool.store):
                    pass
                await run.check()
            before = [delivery async for delivery in spool.store.scan()]
            store = await spool.reopen()
            assert [delivery async for delivery in store.scan()] == before


async def test_a_failed_report_is_counted_once(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """LevelDB: when it was opened again the failed write is found complete, and the settle is repeated."""
    (delivery,) = await store_message(spool.store, 1)
    message, bounce = own_message(message_id(5), b"bounce", ADDRESSES[0])
    outcome: list[Change] = [Finish(delivery), OwnMessage(message, b"bounce", (bounce,))]
    with monkeypatch.context() as patches:
        commit = LevelDb.commit

        def fail(db: LevelDb, batch: AtomicBatch) -> None:
            commit(db, batch)
            raise StoreError("the answer is lost")

        patches.setattr(LevelDb, "commit", fail)
        with pytest.raises(StoreError):
            await spool.store.settle(outcome)
    await until(lambda: spool.store.unhealthy() is None)
    await spool.store.settle(outcome)
    await until(spool.store.is_counted)
    assert spool.store.counts()[queue_of("default")] == QueueCounts(ready=1)
    assert await spool.store.claim(queue_of("default"), 10, now=NOW) == [bounce]
    await spool.store.settle([Finish(bounce)])
    assert spool.store.counts()[queue_of("default")].total == 0
