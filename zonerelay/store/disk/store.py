"""The disk queue: `Store` over files, for one process, after the custom of traditional MTAs.

Owns the order of things: plan a change, hand it to the group committer, and when it is durable let
index and walks follow; `IndexClaims` hands deliveries out. On any failed write everything
unconfirmed is given up, callers get StoreError, and `DiskKeeper` repairs the directories; what was touched is
then read from disk again, and only claims survive, so that nothing is handed out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.body.chunks import check_own_message, split
from zonerelay.store.common.body.writer import BodyWriter
from zonerelay.store.common.claims.index import Index
from zonerelay.store.common.claims.index_claims import IndexClaims
from zonerelay.store.common.reading import read_each
from zonerelay.store.common.write.batches import BatchedUpdate, ChangeOne, changed
from zonerelay.store.contract import (
    Change,
    Finish,
    QueueCounts,
    StoreCorruptError,
    Submit,
    Wanted,
    everybody,
)
from zonerelay.store.disk import files
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.keeper import DiskKeeper
from zonerelay.store.disk.reader import Walk, read_chunks
from zonerelay.store.disk.states import ChangePlan, MessageState, States
from zonerelay.store.disk.stock import Stock, left_over
from zonerelay.store.disk.uploads import ScratchUploads


class DiskStore(BatchedUpdate):
    """Built by `open_store`; belongs to the event loop that was running then."""

    node = 0

    def __init__(self, keeper: DiskKeeper, stock: Stock) -> None:
        self._keeper = keeper
        self._committer = keeper.committer
        self._index = Index()
        self._states = States(self._read_states)
        self._bodies = BodyCache()
        self._uploads = ScratchUploads(keeper, self._bodies)
        self._walks: set[Walk] = set()
        self._uncertain: list[MessageState] = []
        # Reports that a repair has found although their settle failed. It is repeated; they may have left by
        # then, and are not to be made a second time.
        self._made: set[MessageId] = set()
        self._last_id = stock.last_id
        keeper.last_id = self.last_message_id
        keeper.on_failure = self._reset
        keeper.on_repair = self._repaired
        self.check_writable = keeper.check_writable
        self.unhealthy = keeper.unhealthy
        self.problems = keeper.problems
        self.usable = keeper.usable
        # Called for every claim, so without a step in between.
        claims = IndexClaims(lambda: self._index, keeper.check_usable, self._states.hold, self._states.drop)
        self.claim = claims.claim
        self.claim_new = claims.claim_new
        self.claim_domain = claims.claim_domain
        self.release = claims.release
        self.next_due = claims.next_due
        self.has_ready = claims.has_ready
        for message_id, records in stock.entries:
            for record in records:
                key = disk_format.key_of(message_id, record)
                self._index[key.queue].put(key, record.created, record.next_attempt, held=record.held)

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    @property
    def uploads(self) -> int:
        return self._uploads.count

    @uploads.setter
    def uploads(self, count: int) -> None:
        self._uploads.count = count

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        return self._uploads.append(message_id, first, chunks)

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._uploads.discard(message_id)

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        plan = ChangePlan()
        if message.id not in self._uploads:
            self._add_message(plan, message, deliveries, chunks)
            return self._submit(plan)
        new = self._add_message(plan, message, deliveries, None)
        first = message.chunks - len(chunks) + 1
        return self._uploads.finish(new, first, chunks, functools.partial(self._submit, plan))

    def _add_message(
        self,
        plan: ChangePlan,
        message: Message,
        deliveries: Sequence[Delivery],
        chunks: Sequence[bytes] | None,
        *,
        is_own: bool = False,
    ) -> files.EncodedMessage:
        """`chunks` None: they are in scratch."""
        new = plan.add_message(message, deliveries, chunks, is_own=is_own)
        if chunks is not None:
            self._bodies.extend(message.id, 1, chunks)
        if self._last_id is None or message.id > self._last_id:
            self._last_id = message.id
        return new

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        self._keeper.check_usable()
        reports = [change for change in changes if isinstance(change, Submit)]
        for report in reports:
            check_own_message(report)
        keys = [change.delivery.key for change in changes if not isinstance(change, Submit)]
        held = await self._states.hold({key.message_id for key in keys})
        written = None
        try:
            plan = ChangePlan()
            for change in changes:
                if isinstance(change, Submit):
                    if change.message.id not in self._made:
                        chunks = split(change.body)
                        self._add_message(plan, change.message, change.deliveries, chunks, is_own=True)
                elif (state := held.get(change.delivery.message_id)) is not None:
                    new = None if isinstance(change, Finish) else change.delivery
                    plan.change(state, change.delivery.key, new)
            if plan.states:
                written = self._submit(plan, settled=keys, lazy=lazy)
            else:
                self.release(keys)
        finally:
            self._states.drop(held.values())
        if written is not None:
            await written
        self._made.difference_update(report.message.id for report in reports)

    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        self._keeper.check_usable()
        held = await self._states.hold({key.message_id for key in keys})
        written = None
        existed = 0
        try:
            plan = ChangePlan()
            for key in keys:
                state = held.get(key.message_id)
                old = None if state is None else plan.current(state, key)
                if state is None or old is None:
                    continue
                existed += 1
                new = changed(old, change)
                if new != old:
                    plan.change(state, key, new)
            if plan.states:
                written = self._submit(plan)
        finally:
            self._states.drop(held.values())
        if written is not None:
            await written
        return existed

    def _submit(
        self, plan: ChangePlan, *, settled: Sequence[DeliveryKey] = (), lazy: bool = False
    ) -> asyncio.Future[None]:
        """Hand a plan to the committer. What it means takes effect when it is durable, waited for or not."""
        # Before the states run ahead: a refused write would leave them ahead for good.
        self._keeper.check_usable()
        plan.seal(self._states)
        for key in plan.transitions:
            self._index[key.queue].begin_change(key)
        applied = functools.partial(self._apply, plan, settled)
        return self._committer.submit(plan.ops, size=plan.size, lazy=lazy, applied=applied)

    def _apply(self, plan: ChangePlan, settled: Sequence[DeliveryKey]) -> None:
        """The plan is durable."""
        for key in settled:
            self._index[key.queue].drop_claim(key)
        for key, (old, new) in plan.transitions.items():
            for walk in self._walks:
                walk.changed(key, old)
            self._index[key.queue].end_change(key)
            self._index.show(key, new)
        for state in plan.states.values():
            state.is_new = False
            if not state.deliveries:
                self._bodies.drop(state.id)
        self._states.drop(plan.states.values())

    # --- after a failed write

    def _reset(self) -> tuple[list[MessageId], list[MessageId]]:
        """Which messages are refused, and which touched: nothing that memory says of them is certain now."""
        uncertain = self._states.reset()
        self._bodies.clear()
        self._uncertain = uncertain
        refused = [state.id for state in uncertain if state.is_new and not state.is_own]
        return refused, [state.id for state in uncertain]

    def _repaired(self, found: dict[MessageId, files.State]) -> None:
        """This is what the touched messages look like on disk."""
        for state in self._uncertain:
            now = found.get(state.id, [])
            if state.is_new and state.is_own and state.id in found:
                self._made.add(state.id)
            there = {} if isinstance(now, StoreCorruptError) else {d.key: d for d in now}
            for key in state.known:
                self._index[key.queue].clear_changes(key)
                self._index.show(key, there.get(key))
        self._uncertain = []

    # --- reading

    async def _read_states(self, ids: Sequence[MessageId]) -> dict[MessageId, files.State]:
        return await self._keeper.read(files.read_states, ids)

    async def read_message(self, message_id: MessageId) -> Message:
        self._keeper.check_usable()
        state = self._states.get(message_id)
        if state is not None and state.message is not None:
            return state.message
        stored, body = await self._keeper.read(files.read_message_and_body, message_id)
        state = self._states.get(message_id)
        if state is not None and state.deliveries:
            state.message = stored.message
            if body is not None:
                self._bodies.put(message_id, body)
        return stored.message

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        message = await self.read_message(message_id)
        cached = self._bodies.get(message_id, message.chunks)
        if cached is not None:
            for chunk in cached:
                yield chunk
            return
        async with contextlib.aclosing(read_chunks(self._keeper, message_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def oldest(self, zone: str, *, now: float) -> float | None:
        self._keeper.check_usable()
        return self._index[zone].oldest(now)

    async def zones(self) -> set[str]:
        self._keeper.check_usable()
        return self._index.zones()

    async def left_over(self) -> str:
        return await self._keeper.read(left_over)

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        self._keeper.check_usable()
        held = await self._states.hold([message_id])
        self._states.drop(held.values())
        found = [delivery for state in held.values() for delivery in state.deliveries.values()]
        return sorted(found, key=lambda delivery: (delivery.recipient, delivery.queue))

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await read_each(self.read_message, ids)

    async def scan(self, zone: str | None = None, *, wanted: Wanted = everybody) -> AsyncIterator[Delivery]:
        self._keeper.check_usable()
        keys = self._index.sorted_keys(zone)
        if wanted is not everybody:
            keys = [key for key in keys if wanted(key.recipient)]
        walk = Walk(self._keeper, keys)
        self._walks.add(walk)
        try:
            async with contextlib.aclosing(walk.deliveries()) as deliveries:
                async for delivery in deliveries:
                    yield delivery
        finally:
            self._walks.discard(walk)

    def counts(self) -> dict[str, QueueCounts]:
        return dict(self._index.counts())

    def is_counted(self) -> bool:
        return True  # the index was read before the store was there

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    # --- health

    async def probe(self) -> None:
        await self._keeper.probe()

    async def close(self) -> None:
        await self._uploads.close()
        await self._keeper.close()
        self._states.reset()
        self._bodies.clear()
