"""The LevelDB spool: `Store` over one directory, for one process.

Owns the order of things: plan a change, hand it to the group committer, and when it is durable let
claims, window and counts follow. On any failed write everything unconfirmed is given up, callers
get StoreError, and `SpoolKeeper` reopens the database; the queue is then read from disk again, and
only claims survive, so that nothing is handed out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.store import leveldb_scan as scan
from zonerelay.store import records
from zonerelay.store.base import (
    CHUNK_SIZE,
    Change,
    Finish,
    Postpone,
    QueueCounts,
    StoreError,
    Submit,
)
from zonerelay.store.body_cache import BodyCache
from zonerelay.store.checks import check_own_message, split
from zonerelay.store.ledger import Found, Ledger
from zonerelay.store.leveldb_body import read_chunks
from zonerelay.store.leveldb_claims import ZoneClaims
from zonerelay.store.leveldb_engine import Op
from zonerelay.store.leveldb_keeper import SpoolKeeper
from zonerelay.store.leveldb_writer import LevelDbWriter
from zonerelay.store.plan import Plan, Transition, due_time

UPDATE_BATCH = 256
"""Deliveries that an operator's bulk change rewrites in one write."""


class LevelDbStore:
    """Built by `open_store`; belongs to the event loop that was running then."""

    survives_restart = True

    def __init__(
        self, keeper: SpoolKeeper, ledger: Ledger, *, last_id: MessageId | None, empty: bool
    ) -> None:
        self.uploads = 0
        self._keeper = keeper
        self._committer = keeper.committer
        self._threads = keeper.threads
        self._ledger = ledger
        self._bodies = BodyCache()
        self._zones: dict[str, ZoneClaims] = {}
        self._last_id = last_id
        self._empty = empty
        keeper.on_failure = self._reset

    # --- taking mail

    def begin(self, envelope: Envelope) -> LevelDbWriter:
        return LevelDbWriter(self, envelope)

    def check_writable(self) -> None:
        self._keeper.check_writable()

    def submit_chunks(self, ops: Sequence[Op], size: int) -> asyncio.Future[None]:
        return self._committer.submit(ops, size=size)

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[Op], body: bytes | None
    ) -> asyncio.Future[None]:
        plan = Plan(self._ledger)
        plan.ops.extend(chunks)
        plan.size = len(chunks) * CHUNK_SIZE if body is None else len(body)
        plan.add_message(message, deliveries)
        return self._submit(plan, bodies={} if body is None else {message.id: body})

    def remove_chunks(self, ops: Sequence[Op]) -> None:
        self._committer.submit(ops, lazy=True)

    # --- handing out

    async def claim(
        self, zone: str, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        self._keeper.check_usable()
        return await self._zone(zone).claim(limit, skip_domains, now)

    async def claim_domain(self, zone: str, domain: str, limit: int, *, now: float) -> list[Delivery]:
        self._keeper.check_usable()
        return await self._zone(zone).claim_domain(domain, limit, now)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._zone(key.zone).release((key,))

    async def next_due(self, zone: str) -> float | None:
        self._keeper.check_usable()
        return await self._zone(zone).next_due()

    def has_ready(self, zone: str) -> bool:
        return self._zone(zone).window.has_ready()

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        keys = [change.delivery.key for change in changes if not isinstance(change, Submit)]
        found = await self._find(keys)
        plan = Plan(self._ledger, found)
        bodies: dict[MessageId, bytes] = {}
        for change in changes:
            if isinstance(change, Finish):
                plan.change(change.delivery.key, None)
            elif isinstance(change, Postpone):
                plan.change(change.delivery.key, change.delivery)
            else:
                self._add_own_message(plan, change, bodies)
        if not plan.ops:
            self._drop_claims(keys)
            return
        await self._submit(plan, settled=keys, bodies=bodies, lazy=lazy)

    def _add_own_message(self, plan: Plan, change: Submit, bodies: dict[MessageId, bytes]) -> None:
        check_own_message(change)
        message, body = change.message, change.body
        for number, chunk in enumerate(split(body), 1):
            plan.ops.append((records.chunk_key(message.id, number), chunk))
        plan.size += len(body)
        plan.add_message(message, change.deliveries)
        if message.chunks <= 1:
            bodies[message.id] = body

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
        wanted = list(dict.fromkeys(keys))
        existed = 0
        for start in range(0, len(wanted), UPDATE_BATCH):
            batch = wanted[start : start + UPDATE_BATCH]
            found = await self._find(batch)
            plan = Plan(self._ledger, found)
            for key in batch:
                old = self._ledger.state(key, found)
                if old is None:
                    continue
                existed += 1
                new = change(old)
                if new is not None and new.key != key:
                    raise StoreError("a change may not turn a delivery into another one")
                if new != old:
                    plan.change(key, new)
            if plan.ops:
                await self._submit(plan)
        return existed

    async def _find(self, keys: Sequence[DeliveryKey]) -> Found:
        """Read what the ledger does not know of these deliveries; returns without a gap before planning."""
        found = Found()
        ledger = self._ledger
        if not ledger.unknown(keys, found):
            return found
        with ledger.reading():
            while unknown := ledger.unknown(keys, found):
                self._keeper.check_usable()
                since = ledger.moment()
                read = await self._threads.read(scan.read_states, unknown)
                # What was changed while it was being read is read again.
                found.merge(read, unknown)
                found.drop(functools.partial(ledger.is_stale, since=since))
        return found

    def _submit(
        self,
        plan: Plan,
        *,
        settled: Sequence[DeliveryKey] = (),
        bodies: dict[MessageId, bytes] | None = None,
        lazy: bool = False,
    ) -> asyncio.Future[None]:
        """Hand a plan to the committer. What it means takes effect when it is durable, waited for or not."""
        ledger = self._ledger
        # Before the ledger runs ahead: a refused write would leave it ahead for good.
        self._keeper.check_usable()
        plan.seal()
        for key, step in plan.transitions.items():
            if step.old is not None and key not in ledger.claims:
                self._zone(key.zone).window.forget(key)
        if bodies is not None and plan.messages:
            self._last_id = max(self._last_id or MessageId(""), *plan.messages)
            plan.ops.append((records.META_LAST_ID, self._last_id.encode("ascii")))

        def applied() -> None:
            self._apply(plan, settled, bodies)

        return self._committer.submit(plan.ops, size=plan.size, lazy=lazy, applied=applied)

    def _apply(
        self, plan: Plan, settled: Sequence[DeliveryKey], bodies: dict[MessageId, bytes] | None
    ) -> None:
        """The plan is durable."""
        self._drop_claims(settled)
        if bodies:
            for message_id, body in bodies.items():
                self._bodies.put(message_id, body)
        for key, step in plan.transitions.items():
            self._apply_step(key, step)
        for message_id, entry in plan.messages.items():
            if self._ledger.settled(message_id, entry):
                self._bodies.drop(message_id)

    def _apply_step(self, key: DeliveryKey, step: Transition) -> None:
        ledger, window = self._ledger, self._zone(key.zone).window
        old, new = step
        self._keeper.counts.move(key.zone, old, new)
        was_due = due_time(old)
        if was_due:
            window.due_range.gone(records.deferred_key(key, was_due))
        is_latest = ledger.landed(key, new)
        if key in ledger.claims:
            ledger.claims[key] = new
        elif not is_latest:
            return
        elif new is None:
            window.forget(key)
        else:
            window.add(key, new)

    def _drop_claims(self, keys: Sequence[DeliveryKey]) -> None:
        pop = self._ledger.claims.pop
        for key in keys:
            pop(key, None)

    def _reset(self) -> None:
        """A write failed: nothing that memory says about the disk is certain any more."""
        self._ledger.reset()
        self._bodies.clear()
        self._empty = False
        for zone in self._zones.values():
            zone.window.reset()

    def _zone(self, name: str) -> ZoneClaims:
        found = self._zones.get(name)
        if found is None:
            found = ZoneClaims(name, self._threads, self._committer, self._ledger, empty=self._empty)
            self._zones[name] = found
        return found

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        self._keeper.check_open()
        known = self._ledger.message(message_id)
        if known is None or known.message is None:
            return await self._read_cold(message_id)
        return known.message

    async def _read_cold(self, message_id: MessageId) -> Message:
        ledger = self._ledger
        with ledger.reading():
            since = ledger.moment()
            message, count, body = await self._threads.read(scan.read_message_and_body, message_id)
            if not ledger.is_stale(message_id, since):
                ledger.remember(message_id, count)
                if body is not None:
                    self._bodies.put(message_id, body)
        return message

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        self._keeper.check_open()
        body = self._bodies.get(message_id)
        if body is not None:
            if body:
                yield body
            return
        message = await self.read_message(message_id)
        async with contextlib.aclosing(read_chunks(self._threads, message_id, message.chunks)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def oldest(self, zone: str) -> float | None:
        window = self._zone(zone).window
        start = window.oldest
        first = await self._threads.read(
            scan.oldest, start or window.fresh_range.prefix, window.fresh_range.end
        )
        if first is None:
            return None
        if window.oldest == start:
            window.oldest = first[0]
        return first[1]

    async def zones(self) -> set[str]:
        return await self._threads.read(scan.zones)

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        return await self._threads.read(scan.deliveries_of, message_id)

    async def scan(self, zone: str | None = None) -> AsyncIterator[Delivery]:
        read = self._threads.read
        prefix = records.DELIVERY_PREFIX if zone is None else records.zone_prefix(zone)
        view = await read(type(self._threads.db).snapshot)
        try:
            start: bytes | None = prefix
            while start is not None:
                page = await read(scan.scan_page, start, records.after(prefix), view)
                for delivery in page.deliveries:
                    yield delivery
                start = page.low
        finally:
            view.close()

    def counts(self) -> dict[str, QueueCounts]:
        return self._keeper.counts.current()

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    # --- health

    def unhealthy(self) -> str | None:
        return self._keeper.unhealthy()

    async def probe(self) -> None:
        await self._keeper.probe()

    async def close(self) -> None:
        await self._keeper.close()
