"""Every durable store and memory do the same under any sequence of verbs; nothing committed is ever missed.

The limits of the window are made tiny, so that a handful of messages overflows every one of them.
"""

import asyncio
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from tests.store.builders import NOW, attempt, body_of, delivery_for, envelope_for, message_id, own_message
from tests.store.spools import Spool
from tests.support.memory_store import MemoryStore
from tests.support.s3_server import shared_moto
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName, queue_of
from zonerelay.model.envelope import MessageId
from zonerelay.store import records
from zonerelay.store.contract import Change, Finish, MessageWriter, OwnMessage, Postpone, QueueCounts
from zonerelay.store.keys import port
from zonerelay.store.keys.port import Write
from zonerelay.store.nodes import NodeStore
from zonerelay.store.objects import engine as objects
from zonerelay.store.queue import claims as leveldb_claims
from zonerelay.store.queue import in_flight
from zonerelay.store.queue import reads as queue_reads

T = TypeVar("T")

ZONES = ("a", "a b", "a~")
DOMAINS = ("one.example", "two.example", "żółw.example")
RECIPIENTS = tuple(f"{name}@{domain}" for domain in DOMAINS for name in ("x", "y"))
SIZES = (0, 10, 64 * 1024, 70_000, 600_000)

TINY: dict[object, dict[str, int]] = {
    queue_reads: {"PAGE_ROWS": 3},
    port: {"PAGE_ROWS": 3},
    leveldb_claims: {"_READ_AHEAD": 1, "_MOST": 4},
    in_flight: {"HOT_MESSAGES": 2, "UPDATE_BATCH": 2},
    objects: {"LARGE_VALUE": 1000, "LEAST_LOG": 5000, "AHEAD": 3},
}

recipients = st.lists(st.sampled_from(RECIPIENTS), min_size=1, max_size=4, unique=True)
times = st.sampled_from((0.0, 0.0, 0.0, NOW - 5, NOW + 30))
picks = st.lists(st.integers(0, 30), max_size=4)
limits = st.integers(1, 6)
skips = st.sets(st.sampled_from(DOMAINS), max_size=2)
outcomes = st.sampled_from(("finish", "finish", "defer", "defer far", "hold", "again"))


class Comparison(RuleBasedStateMachine):
    """Every verb goes to both; what the store hands out must be what memory could hand out."""

    backend = Backend.LEVELDB
    remembers_passed_over = False

    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        for module, limits_ in TINY.items():
            for name, value in limits_.items():
                self.patches.setattr(module, name, value)
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        home = Path(self.directory.name)
        places = {"shelve": home / "shelf"} if self.backend is Backend.MEMORY else {}
        self.spool = Spool(home / "spool", backend=self.backend, places=places)
        self.run(self.spool.open())
        self.memory = MemoryStore()
        self.now = NOW
        self.number = 0
        self.open: list[tuple[MessageWriter, MessageWriter, list[Delivery]]] = []
        self.aborted: set[MessageId] = set()
        self.claimed: list[Delivery] = []
        # What a claim may have passed over: how far it looks before its limit is reached is its business.
        self.passed_over: set[DeliveryKey] = set()

    def run(self, work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine sends is nobody's business
        return self.loop.run_until_complete(work)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    # --- taking mail

    @rule(
        addresses=recipients,
        zone=st.sampled_from(ZONES),
        when=times,
        held=st.booleans(),
        size=st.sampled_from(SIZES),
    )
    def begin(self, addresses: list[str], zone: str, when: float, held: bool, size: int) -> None:
        envelope = envelope_for(message_id(self.next_number()), *addresses)
        deliveries = [
            delivery_for(
                envelope, address, zone=zone, next_attempt=when, held=held and address == addresses[0]
            )
            for address in addresses
        ]
        real, model = self.spool.store.begin(envelope), self.memory.begin(envelope)
        for start in range(0, size, 50_000):
            piece = bytes(min(50_000, size - start))
            self.run(real.write(piece))
            self.run(model.write(piece))
        self.open.append((real, model, deliveries))

    @rule(addresses=recipients, zone=st.sampled_from(ZONES), when=times, size=st.sampled_from(SIZES))
    def store(self, addresses: list[str], zone: str, when: float, size: int) -> None:
        self.begin(addresses, zone, when, held=False, size=size)
        self.commit(-1, drop=False)

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 5), drop=st.booleans())
    def commit(self, pick: int, drop: bool) -> None:
        real, model, deliveries = self.open.pop(pick % len(self.open))
        if drop and len(deliveries) > 1:
            deliveries = deliveries[1:]
        assert self.run(real.commit(deliveries)) == self.run(model.commit(deliveries))

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 5))
    def abort(self, pick: int) -> None:
        real, model, deliveries = self.open.pop(pick % len(self.open))
        self.run(real.abort())
        self.run(model.abort())
        self.aborted.add(deliveries[0].message_id)

    # --- handing out

    @rule(zone=st.sampled_from(ZONES), limit=limits, skip=skips)
    def claim(self, zone: str, limit: int, skip: set[str]) -> None:
        claimable = self.claimable(zone, skip)
        found = self.run(self.spool.store.claim(queue_of(zone), limit, now=self.now, skip_domains=skip))
        self.check_claim(found, claimable, limit)
        fresh = [d.message_id for d in self.never_deferred(found)]
        waiting = sorted(d.message_id for d in self.never_deferred(claimable))
        assert fresh == waiting[: len(fresh)], "an older fresh delivery was left behind"
        self.passed_over |= {d.key for d in self.claimable(zone, set()) if d.domain in skip}
        self.take(found)

    @rule(zone=st.sampled_from(ZONES), back=st.integers(0, 8), limit=limits, skip=skips)
    def claim_new(self, zone: str, back: int, limit: int, skip: set[str]) -> None:
        since = message_id(max(1, self.number - back))
        fresh = [d for d in self.claimable(zone, set()) if d.next_attempt <= 0 and d.message_id >= since]
        found = self.run(
            self.spool.store.claim(queue_of(zone), limit, now=self.now, since=since, skip_domains=skip)
        )
        self.check_found(found, [d for d in fresh if d.domain not in skip])
        taken = {d.key for d in found}
        left = [d for d in fresh if d.key not in self.passed_over | taken and d.domain not in skip]
        newest = max((d.message_id for d in found), default=None)
        if len(found) < limit:
            assert not left, "there was more"
        assert all(newest is None or d.message_id >= newest for d in left), "an older one was left behind"
        self.passed_over |= {d.key for d in fresh if d.domain in skip}
        self.take(found)

    @rule(zone=st.sampled_from(ZONES), domain=st.sampled_from(DOMAINS), limit=limits)
    def claim_domain(self, zone: str, domain: str, limit: int) -> None:
        claimable = [d for d in self.claimable(zone, set()) if d.domain == domain]
        found = self.run(self.spool.store.claim(queue_of(zone), limit, now=self.now, domain=domain))
        assert {d.key for d in found} <= {d.key for d in claimable}
        self.take(found)

    @precondition(lambda self: self.claimed)
    @rule(which=picks)
    def release(self, which: list[int]) -> None:
        keys = [d.key for d in self.pick(which)]
        self.spool.store.release(keys)
        self.memory.release(keys)
        self.claimed = [d for d in self.claimed if d.key not in keys]

    # --- settling and operating

    @precondition(lambda self: self.claimed)
    @rule(
        which=picks,
        outcome=st.lists(outcomes, min_size=4, max_size=4),
        bounce=st.booleans(),
        lazy=st.booleans(),
    )
    def settle(self, which: list[int], outcome: list[str], bounce: bool, lazy: bool) -> None:
        changes = self.changes(self.pick(which), outcome)
        if bounce:
            message, delivery = own_message(message_id(self.next_number()), b"z" * 70_000, RECIPIENTS[0])
            changes.append(
                OwnMessage(message, b"z" * 70_000, (structs.replace(delivery, queue=queue_of("a")),))
            )
        self.run(self.spool.store.settle(changes, lazy=lazy))
        self.run(self.memory.settle(changes))
        self.drop_settled(changes)

    @rule(
        which=picks,
        verb=st.sampled_from(("hold", "free", "now", "later", "move", "remove")),
        claimed_too=st.booleans(),
    )
    def update(self, which: list[int], verb: str, claimed_too: bool) -> None:
        everything = self.everything()
        busy = set() if claimed_too else {d.key for d in self.claimed}
        keys = [everything[i % len(everything)].key for i in which] if everything else []
        keys = [key for key in keys if key not in busy]

        def change(delivery: Delivery) -> Delivery | None:
            changed: dict[str, Delivery | None] = {
                "hold": structs.replace(delivery, held=True),
                "free": structs.replace(delivery, held=False),
                "now": structs.replace(delivery, next_attempt=self.now),
                "later": structs.replace(delivery, next_attempt=self.now + 45.3),
                "move": structs.replace(delivery, queue=queue_of(ZONES[ZONES.index(delivery.zone) - 1])),
                "remove": None,
            }
            return changed[verb]

        # What an update leaves as it is stays passed over.
        self.passed_over -= {d.key for d in everything if d.key in keys and change(d) != d}
        assert self.run(self.spool.store.update(keys, change)) == self.run(self.memory.update(keys, change))

    @precondition(lambda self: self.claimed and self.open)
    @rule(
        zone=st.sampled_from(ZONES),
        which=picks,
        outcome=st.lists(outcomes, min_size=4, max_size=4),
        skip=skips,
    )
    def all_at_once(self, zone: str, which: list[int], outcome: list[str], skip: set[str]) -> None:
        """Claims, commits, settles and updates of the same messages, overlapping."""
        store = self.spool.store
        changes = self.changes(self.pick(which), outcome)
        real, model, deliveries = self.open.pop()
        idle = [d.key for d in self.everything() if d.key not in {c.key for c in self.claimed}][:2]

        async def overlap() -> list[Delivery]:
            found: list[Delivery] = []

            async def claim(skip: set[str]) -> None:
                found.extend(await store.claim(queue_of(zone), 4, now=self.now, skip_domains=skip))

            work: list[Coroutine[Any, Any, object]] = [  # Any: as above
                claim(skip),
                claim(set()),
                real.commit(deliveries),
                *(store.settle([change], lazy=True) for change in changes),
                store.update(idle, lambda d: structs.replace(d, warned=True)),
                store.next_due(queue_of(zone)),
            ]
            await asyncio.gather(*work)
            return found

        found = self.run(overlap())
        self.run(model.commit(deliveries))
        for change in changes:
            self.run(self.memory.settle([change]))
        self.run(self.memory.update(idle, lambda d: structs.replace(d, warned=True)))
        self.drop_settled(changes)
        assert len({d.key for d in found}) == len(found), "handed out twice"
        claimable = {d.key for d in self.claimable(zone, set())}
        assert {d.key for d in found} <= claimable
        self.passed_over |= {d.key for d in self.claimable(zone, set()) if d.domain in skip}
        self.take(found)

    # --- time and restarts

    @rule(seconds=st.sampled_from((0.25, 20.0, 50.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def restart(self) -> None:
        for real, model, deliveries in self.open:
            self.run(real.abort())
            self.run(model.abort())
            self.aborted.add(deliveries[0].message_id)
        self.open.clear()
        self.run(self.reopen())
        self.memory.forget_claims()
        self.claimed.clear()
        if not self.remembers_passed_over:
            self.passed_over.clear()

    async def reopen(self) -> None:
        """Counts that are called whole are, from the first moment."""
        store = await self.spool.reopen()
        await until(store.is_counted)
        assert with_mail(store.counts()) == with_mail(self.memory.counts())

    # --- what must hold

    @invariant()
    def same_queue(self) -> None:
        async def both() -> None:
            store, memory = self.spool.store, self.memory
            # Recipients of one message sort by their encoded form in a spool.
            scanned = [d async for d in store.scan()]
            assert [d.message_id for d in scanned] == [d.message_id async for d in memory.scan()]
            assert {d.key: d for d in scanned} == {d.key: d async for d in memory.scan()}
            assert await store.queues() == await memory.queues()
            # The chunks of an upload that was aborted as the store closed stay until the sweep after a start.
            assert store.last_message_id() in {memory.last_message_id(), *self.aborted}
            for zone in ZONES:
                assert await store.next_due(queue_of(zone)) in self.possible_next_due(queue_of(zone))
                assert await store.oldest(queue_of(zone), now=self.now) == await memory.oldest(
                    queue_of(zone), now=self.now
                )
            await until(lambda: with_mail(store.counts()) == with_mail(memory.counts()))
            async for delivery in memory.scan():
                assert await store.read_message(delivery.message_id) == await memory.read_message(
                    delivery.message_id
                )

        self.run(both())

    def teardown(self) -> None:
        try:
            self.run(self.drain())
            self.run(self.spool.store.close())
        finally:
            self.patches.undo()
            self.loop.close()
            self.directory.cleanup()

    async def drain(self) -> None:
        """Everything is found, its body is whole, and when all of it is finished nothing is left."""
        store = self.spool.store
        store.release([d.key for d in self.claimed])
        everything = [d async for d in self.memory.scan()]
        await store.update([d.key for d in everything], lambda d: structs.replace(d, held=False))
        found = []
        for zone in ZONES:
            found += await store.claim(queue_of(zone), 10_000, now=self.now + 1000)
        assert {d.key for d in found} == {d.key for d in everything}
        for delivery in found:
            assert await body_of(store, delivery.message_id) == await body_of(
                self.memory, delivery.message_id
            )
        for delivery in found:
            await store.settle([Finish(delivery)])
        for writer, _, _ in self.open:
            await writer.abort()
        assert await store.queues() == set()
        await store.close()
        await self.spool.open()
        async with asyncio.timeout(5):
            while await self.left_behind():  # the sweep after a start removes what the close has cut off
                await asyncio.sleep(0.01)

    async def left_behind(self) -> list[object]:
        rows = await leveldb_rows(self.spool)
        return [key for key in rows if not key.startswith(b"meta ") or key.startswith(b"meta open")]

    # --- helpers

    def everything(self) -> list[Delivery]:
        async def scan() -> list[Delivery]:
            return [d async for d in self.memory.scan()]

        return self.run(scan())

    def never_deferred(self, deliveries: list[Delivery]) -> list[Delivery]:
        return [d for d in deliveries if d.next_attempt == 0 and d.key not in self.passed_over]

    def possible_next_due(self, queue: QueueName) -> set[float | None]:
        """The earliest due time, or that of something earlier that may have been passed over."""
        claimed = {d.key for d in self.claimed}
        waiting = [
            d
            for key, d in self.memory._deliveries.items()
            if key.queue == queue and key not in claimed and d.next_attempt > 0 and not d.held
        ]
        certain = min((d.next_attempt for d in waiting if d.key not in self.passed_over), default=None)
        maybe = {d.next_attempt for d in waiting if d.key in self.passed_over}
        return {certain} | {when for when in maybe if certain is None or when < certain}

    def claimable(self, zone: str, skip: set[str]) -> list[Delivery]:
        return [d for d in self.memory._claimable(queue_of(zone), self.now) if d.domain not in skip]

    def check_claim(self, found: list[Delivery], claimable: list[Delivery], limit: int) -> None:
        assert len(found) == min(limit, len(claimable))
        self.check_found(found, claimable)

    def check_found(self, found: list[Delivery], claimable: list[Delivery]) -> None:
        known = {d.key: d for d in claimable}
        assert len({d.key for d in found}) == len(found)
        assert all(known.get(d.key) == d for d in found)
        assert [d.message_id for d in found] == sorted(d.message_id for d in found)

    def take(self, found: list[Delivery]) -> None:
        """Claim the same in memory."""
        self.memory._claim(found, len(found))
        self.claimed += found
        self.passed_over -= {d.key for d in found}

    def pick(self, which: list[int]) -> list[Delivery]:
        return list(
            {index % len(self.claimed): self.claimed[index % len(self.claimed)] for index in which}.values()
        )

    def changes(self, deliveries: list[Delivery], outcome: list[str]) -> list[Change]:
        def change(delivery: Delivery, verdict: str) -> Change:
            if verdict == "finish":
                return Finish(delivery)
            if verdict == "hold":
                return Postpone(structs.replace(delivery, held=True))
            if verdict == "again":
                return Postpone(structs.replace(delivery, next_attempt=0.0))
            delay = 20.0 if verdict == "defer" else 99.7
            return Postpone(delivery.deferred(self.now + delay, attempt(self.now)))

        return [change(d, verdict) for d, verdict in zip(deliveries, outcome, strict=False)]

    def drop_settled(self, changes: list[Change]) -> None:
        keys = {c.delivery.key for c in changes if not isinstance(c, OwnMessage)}
        self.claimed = [d for d in self.claimed if d.key not in keys]


def with_mail(counts: dict[QueueName, QueueCounts]) -> dict[QueueName, QueueCounts]:
    return {zone: found for zone, found in counts.items() if found.total}


async def swept(spool: Spool) -> None:
    """Wait until the start has removed what an upload left that was given up as the store closed."""
    for _ in range(1000):
        if not (left := await spool.store.left_over()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"something was left behind: {left}")


async def leveldb_rows(spool: Spool) -> list[bytes]:
    """Every key of a spool, once the sweep after opening is over."""
    await swept(spool)
    await spool.store.close()
    from zonerelay.store.leveldb.spool import LevelDb

    db = LevelDb(spool.settings.path, write_buffer=1024 * 1024)
    db.open()
    try:
        return [key for key, _ in db.rows(b"", limit=10_000)]
    finally:
        db.close()


class KeysComparison(Comparison):
    """The same with ordered keys in memory."""

    backend = Backend.MEMORY

    async def left_behind(self) -> list[object]:
        await swept(self.spool)
        await self.spool.store.close()
        return []


class DiskComparison(KeysComparison):
    """The same with files."""

    backend = Backend.DISK


class SharedComparison(Comparison):
    """The same with a node's partition in a server."""

    async def left_behind(self) -> list[object]:
        store = self.spool.store
        assert isinstance(store, NodeStore)
        partition = store._own.partition
        await partition.write(Write(makes_room=True))  # what was removed before is gone
        prefixes = (b"delivery-", b"deferred-", b"message ")
        rows = [(await partition.page(each, records.after(each))).rows for each in prefixes]
        await store.close()
        return [key for some in rows for key, _ in some]


class RedisComparison(SharedComparison):
    """The same with Redis."""

    backend = Backend.REDIS


class PostgresComparison(SharedComparison):
    """The same with a database."""

    backend = Backend.POSTGRES


class S3Comparison(Comparison):
    """The same with a bucket."""

    backend = Backend.S3

    async def left_behind(self) -> list[object]:
        await self.spool.store.close()
        assert self.spool.s3 is not None
        prefix = self.spool.s3.prefix
        return [key for key in shared_moto().keys(prefix) if "/values/" in key]


_SETTINGS = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)

TestAgainstMemory = Comparison.TestCase
TestAgainstMemory.settings = _SETTINGS
TestKeysAgainstMemory = KeysComparison.TestCase
TestKeysAgainstMemory.settings = _SETTINGS
TestRedisAgainstMemory = RedisComparison.TestCase
TestRedisAgainstMemory.settings = _SETTINGS
TestDiskAgainstMemory = pytest.mark.proof(DiskComparison.TestCase)
TestDiskAgainstMemory.settings = _SETTINGS
TestPostgresAgainstMemory = PostgresComparison.TestCase
TestPostgresAgainstMemory.settings = settings(_SETTINGS, max_examples=8)
TestS3AgainstMemory = S3Comparison.TestCase
TestS3AgainstMemory.settings = settings(_SETTINGS, max_examples=2, stateful_step_count=20)
