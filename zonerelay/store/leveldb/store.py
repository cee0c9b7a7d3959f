"""The LevelDB spool: `Store` over one directory, for one process.

Owns the order of things: plan a change, hand it to the group committer, and when it is durable let
claims, window and counts follow. What memory does not hold is read by `leveldb_cold.py`. On any failed write
everything unconfirmed is given up, callers get StoreError, and `SpoolKeeper` reopens the database; the queue
is then read from disk again, and only claims survive, so that nothing is handed out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.body.chunks import check_own_message, split
from zonerelay.store.common.body.writer import BodyWriter
from zonerelay.store.common.write.batches import BatchedUpdate, ChangeOne, changed
from zonerelay.store.contract import CHUNK_SIZE, Change, Finish, Postpone, QueueCounts, Submit
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.claims import Zones
from zonerelay.store.leveldb.cold_reads import ColdReads, read_chunks
from zonerelay.store.leveldb.engine import Op
from zonerelay.store.leveldb.in_flight import NOTHING, InFlight
from zonerelay.store.leveldb.keeper import SpoolKeeper
from zonerelay.store.leveldb.write_plan import WritePlan, due_time


class LevelDbStore(BatchedUpdate):
    """Built by `open_store`; belongs to the event loop that was running then."""

    node = 0

    def __init__(
        self, keeper: SpoolKeeper, in_flight: InFlight, *, last_id: MessageId | None, empty: bool
    ) -> None:
        self.uploads = 0
        self._keeper = keeper
        self._committer = keeper.committer
        self._reader = keeper.reader
        self._in_flight = in_flight
        self._bodies = BodyCache()
        self._cold = ColdReads(keeper, in_flight, self._bodies)
        self._zones = Zones(keeper, in_flight, empty=empty)
        self.claim = self._zones.claim
        self.claim_new = self._zones.claim_new
        self.claim_domain = self._zones.claim_domain
        self.release = self._zones.release
        self.next_due = self._zones.next_due
        self.has_ready = self._zones.has_ready
        self._last_id = last_id
        self._stored_last_id: MessageId | None = None
        # Reports under way, and those whose write has failed: they may be there all the same.
        self._reporting: set[MessageId] = set()
        self._doubtful: set[MessageId] = set()
        keeper.on_failure = self._reset
        self.check_writable = keeper.check_writable
        self.unhealthy = keeper.unhealthy
        self.problems = keeper.problems
        self.acknowledge = keeper.acknowledge
        self.usable = keeper.usable
        self.scan = self._cold.scan

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        ops = _put_chunks(message_id, first, chunks)
        self._bodies.extend(message_id, first, chunks)
        return self._committer.submit(ops, size=len(chunks) * CHUNK_SIZE)

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        plan = WritePlan(self._in_flight)
        self._add_message(plan, message, deliveries, chunks)
        stored = self._submit(plan)
        if message.chunks > len(chunks):
            self._watch(stored, message.envelope.id)
        return stored

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._bodies.drop(message_id)
        ops: list[Op] = [(records.chunk_key(message_id, number), None) for number in range(1, count + 1)]
        self._watch(self._committer.submit(ops, lazy=True), message_id)

    def _watch(self, written: asyncio.Future[None], message_id: MessageId) -> None:
        """The last write that concerns an upload: its chunks are there already, and must not stay for it."""

        def ended(written: asyncio.Future[None]) -> None:
            if written.cancelled() or written.exception() is not None:
                self._keeper.note_cut_off(message_id)

        written.add_done_callback(ended)

    def _add_message(
        self, plan: WritePlan, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> None:
        """A new message with its last `chunks` (all of them, when it is small)."""
        message_id = message.envelope.id
        if message.chunks <= 1:
            body = chunks[0] if chunks else b""
            if chunks:
                plan.ops.append((records.chunk_key(message_id, 1), body))
            plan.size += len(body)
            plan.add_message(message, deliveries)
            self._bodies.put(message_id, body)
        else:
            first = message.chunks - len(chunks) + 1
            plan.ops += _put_chunks(message_id, first, chunks)
            plan.size += len(chunks) * CHUNK_SIZE
            plan.add_message(message, deliveries)
            self._bodies.extend(message_id, first, chunks)
        if self._last_id is None or message_id > self._last_id:
            self._last_id = message_id

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        keys: list[DeliveryKey] = []
        reports: set[MessageId] = set()
        for change in changes:
            if isinstance(change, Submit):
                reports.add(change.message.id)
            else:
                keys.append(change.delivery.key)
        doubtful = reports & self._doubtful
        made = await self.read_messages(list(doubtful)) if doubtful else {}
        found = NOTHING if self._in_flight.knows(keys) else await self._cold.find(keys)
        plan = WritePlan(self._in_flight, found)
        key = iter(keys)
        for change in changes:
            if isinstance(change, Finish):
                plan.change(next(key), None)
            elif isinstance(change, Postpone):
                plan.change(next(key), change.delivery)
            else:
                check_own_message(change)
                if change.message.id not in made:
                    self._add_message(plan, change.message, change.deliveries, split(change.body))
        self._reporting |= reports
        try:
            if plan.ops:
                await self._submit(plan, settled=keys, lazy=lazy)
            else:
                self._drop_claims(keys)
            self._doubtful -= reports
        finally:
            self._reporting -= reports

    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        existed = 0
        found = await self._cold.find(keys)
        plan = WritePlan(self._in_flight, found)
        for key in keys:
            old = self._in_flight.state(key, found)
            if old is None:
                continue
            existed += 1
            new = changed(old, change)
            if new != old:
                plan.change(key, new)
        if plan.ops:
            await self._submit(plan)
        return existed

    def _submit(
        self, plan: WritePlan, *, settled: Sequence[DeliveryKey] = (), lazy: bool = False
    ) -> asyncio.Future[None]:
        """Hand a plan to the committer. What it means takes effect when it is durable, waited for or not."""
        claims = self._in_flight.claims
        # Before memory runs ahead of the disk: a refused write would leave it ahead for good.
        self._keeper.check_usable()
        plan.seal()
        for key, (old, _) in plan.transitions.items():
            if old is not None and key not in claims:
                self._zones[key.queue].window.forget(key)
        if plan.removes_message and self._last_id is not None and self._last_id != self._stored_last_id:
            # As long as the youngest message is there, its keys tell its id.
            self._stored_last_id = self._last_id
            plan.ops.append((records.META_LAST_ID, self._last_id.encode("ascii")))
        applied = functools.partial(self._apply, plan, settled)
        return self._committer.submit(plan.ops, size=plan.size, lazy=lazy, applied=applied)

    def _apply(self, plan: WritePlan, settled: Sequence[DeliveryKey]) -> None:
        """The plan is durable."""
        self._drop_claims(settled)
        for key, (old, new) in plan.transitions.items():
            self._apply_step(key, old, new)
        for message_id, entry in plan.messages.items():
            if self._in_flight.settled(message_id, entry):
                self._bodies.drop(message_id)
                self._keeper.note_removed(message_id)

    def _apply_step(self, key: DeliveryKey, old: Delivery | None, new: Delivery | None) -> None:
        in_flight, window = self._in_flight, self._zones[key.queue].window
        self._keeper.counts.move(key.queue, old, new)
        if old is not None and old.next_attempt and (was_due := due_time(old)):
            window.due_range.gone(records.deferred_key(key, was_due))
        is_latest = in_flight.landed(key, new)
        if key in in_flight.claims:
            in_flight.claims[key] = new
        elif not is_latest:
            return
        elif new is None:
            window.forget(key)
        else:
            window.add(key, new)

    def _drop_claims(self, keys: Sequence[DeliveryKey]) -> None:
        pop = self._in_flight.claims.pop
        for key in keys:
            pop(key, None)

    def _reset(self) -> None:
        """A write failed: nothing that memory says about the disk is certain any more."""
        self._in_flight.reset()
        self._bodies.clear()
        self._stored_last_id = None
        self._doubtful |= self._reporting
        self._zones.empty = False
        for zone in self._zones.values():
            zone.window.reset()

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        known = self._in_flight.message(message_id)
        if known is None or known.message is None:
            return await self._cold.read_message(message_id)
        return known.message

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        message = await self.read_message(message_id)
        cached = self._bodies.get(message_id, message.chunks)
        if cached is not None:
            for chunk in cached:
                yield chunk
            return
        async with contextlib.aclosing(read_chunks(self._reader, message_id, message.chunks)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def oldest(self, zone: str, *, now: float) -> float | None:
        window = self._zones[zone].window
        start = window.oldest
        first = await self._reader.read(
            scan.oldest, start or window.fresh_range.prefix, window.fresh_range.end, now
        )
        if first is None:
            return None
        if window.oldest == start:
            window.oldest = first[0]
        return first[1]

    async def zones(self) -> set[str]:
        return await self._reader.read(scan.zones)

    async def left_over(self) -> str:
        return await self._reader.read(scan.left_over)

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        return await self._reader.read(scan.deliveries_of, message_id)

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await self._reader.read(scan.read_messages, ids)

    def counts(self) -> dict[str, QueueCounts]:
        return self._keeper.counts.current()

    def is_counted(self) -> bool:
        return self._keeper.counts.is_whole

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    # --- health

    async def probe(self) -> None:
        await self._keeper.probe()

    async def close(self) -> None:
        await self._keeper.close()
        self._reset()  # nothing can be read any more, not from memory either


def _put_chunks(message_id: MessageId, first: int, chunks: Sequence[bytes]) -> list[Op]:
    return [(records.chunk_key(message_id, number), chunk) for number, chunk in enumerate(chunks, first)]
