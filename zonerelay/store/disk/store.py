"""Implements `Store` over files, for one process, after the custom of traditional MTAs.

Owns the order of things: plan a change, hand it to the group committer, and when it is durable let
index and walks follow; `IndexClaims` hands deliveries out. On any failed write everything
unconfirmed is given up, callers get StoreError, and `DiskKeeper` repairs the directories; what was touched is
then read from disk again, and only claims survive, so that nothing is handed out twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import NamedTuple

from zonerelay.config.settings import SpoolSettings
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.process.threads import STORE
from zonerelay.store.common.body.writer import BodyWriter, NewMessage, split
from zonerelay.store.common.claims.index import Index
from zonerelay.store.common.claims.index_claims import IndexClaims
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.local_store import LocalStore
from zonerelay.store.common.once.reservations import Page, Reservations, register_for
from zonerelay.store.common.reading import read_each
from zonerelay.store.contract import (
    Kept,
    KeptKeys,
    Once,
    QueueCounts,
    StoreCorruptError,
    StoreError,
    StoreOpenError,
    Submit,
    Wanted,
    everybody,
)
from zonerelay.store.disk import files
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.batch import Keep
from zonerelay.store.disk.directories import Directories, check_marks, open_directories
from zonerelay.store.disk.keeper import DiskKeeper
from zonerelay.store.disk.reader import Walk, read_chunks
from zonerelay.store.disk.states import ChangePlan, MessageState, States
from zonerelay.store.disk.stock import Stock, forget_keys, left_over, list_names, take_stock
from zonerelay.store.disk.uploads import ScratchUploads
from zonerelay.store.surroundings import Surroundings


class DiskStore(IndexClaims[MessageState], LocalStore[ChangePlan]):
    """Built by `open_store`; belongs to the event loop that was running then."""

    def __init__(self, keeper: DiskKeeper, stock: Stock, around: Surroundings) -> None:
        LocalStore.__init__(self, keeper, stock.last_id)
        self._keeper = keeper
        self._committer = keeper.committer
        self._index = Index()
        self._states = States(lambda ids: keeper.read(files.read_states, ids))
        self._uploads = ScratchUploads(keeper, self._bodies)
        self._kept = stock.kept
        self._reservations = Reservations(
            self._find_kept,
            self._kept_page,
            self._forget_keys,
            keeper.usable,
            clock=around.clock,
            register=register_for(around.siblings),
        )
        self._walks: set[Walk] = set()
        self._uncertain: list[MessageState] = []
        keeper.last_id = self.last_message_id
        keeper.on_failure = self._reset
        keeper.on_repair = self._repaired
        IndexClaims.__init__(
            self, lambda: self._index, keeper.check_usable, self._states.hold, self._states.drop
        )
        for message_id, records in stock.entries:
            for record in records:
                key = disk_format.key_of(message_id, record)
                self._index[key.queue].put(key, record.created, record.next_attempt, held=record.held)

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        return self._uploads.append(message_id, first, chunks)

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._uploads.discard(message_id)

    def begin_keys(self) -> None:
        self._reservations.start()

    async def _find_kept(self, identity: str) -> Kept | None:
        self._keeper.check_usable()
        return self._kept.get(identity)

    async def _kept_page(self, after: str) -> Page:
        return [] if after else list(self._kept.items())

    async def keep_keys(self, keys: KeptKeys) -> None:
        names = [
            disk_format.key_name(Once(identity, kept.digest, kept.until), kept.message_id)
            for identity, kept in keys
        ]
        await self._committer.submit([Keep(name) for name in names])
        self._kept.update(keys)

    async def _forget_keys(self, now: float, most: int, is_used: Callable[[str], bool]) -> None:
        del is_used  # a key that is used again has a file of its own
        for identity in await self._keeper.read(forget_keys, now, most):
            if (kept := self._kept.get(identity)) is not None and kept.until <= now:
                del self._kept[identity]

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        message, deliveries, chunks, beside, once = given
        plan = ChangePlan({})
        for report in beside:
            self._add_report(plan, report)
        if once is not None:
            plan.once = (once, message.id)
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
        self._note_id(message.id)
        return new

    # --- settling

    async def _plan(self, keys: Sequence[DeliveryKey]) -> ChangePlan:
        self._keeper.check_usable()
        return ChangePlan(await self._states.hold({key.message_id for key in keys}))

    def _let_go(self, plan: ChangePlan) -> None:
        self._states.drop(plan.held.values())

    def _add_report(self, plan: ChangePlan, report: Submit) -> None:
        self._add_message(plan, report.message, report.deliveries, split(report.body), is_own=True)

    def _drop_claims(self, keys: Sequence[DeliveryKey]) -> None:
        self.release(keys)

    async def _stored_reports(self, doubtful: Collection[MessageId]) -> Collection[MessageId]:
        return doubtful

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
        if plan.once is not None:
            once, message_id = plan.once
            self._kept[once.identity] = Kept(message_id, once.digest, once.until)

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
                # Its settle failed and is repeated. It may have left by then, and is not made a second time.
                self._doubtful.add(state.id)
            there = {} if isinstance(now, StoreCorruptError) else {d.key: d for d in now}
            for key in state.known:
                self._index[key.queue].clear_changes(key)
                self._index.show(key, there.get(key))
        self._uncertain = []

    # --- reading

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

    def _read_chunks(self, message: Message) -> AsyncGenerator[bytes, None]:
        return read_chunks(self._keeper, message.id)

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        self._keeper.check_usable()
        return self._index[queue].oldest(now)

    async def queues(self) -> set[QueueName]:
        self._keeper.check_usable()
        return self._index.queues()

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

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        self._keeper.check_usable()
        keys = self._index.sorted_keys(queue)
        if after is not None:
            keys = keys[bisect_right(keys, after) :]
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

    def counts(self) -> dict[QueueName, QueueCounts]:
        return {queue: counts for queue, counts in self._index.counts() if queue.is_mail}

    def is_counted(self) -> bool:
        return True  # the index was read before the store was there

    # --- health

    async def close(self) -> None:
        await self._reservations.close()
        await self._uploads.close()
        await self._keeper.close()
        self._states.reset()
        self._bodies.clear()


_log = logging.getLogger("zonerelay.store")


class _Opened(NamedTuple):
    directories: Directories
    ballast: Ballast
    stock: Stock


async def open_disk(settings: SpoolSettings, around: Surroundings) -> DiskStore:
    """Raises StoreOpenError. Returns when every state has been read."""
    opened = await STORE.run(_open, settings, around.clock.now())
    keeper = DiskKeeper(
        opened.directories,
        noted_id=opened.stock.noted_id,
        number=opened.stock.number,
        ballast=opened.ballast,
        min_free_space=settings.min_free_space,
        around=around,
    )
    store = DiskStore(keeper, opened.stock, around)
    keeper.start()
    store.begin_keys()
    return store


def _open(settings: SpoolSettings, now: float) -> _Opened:
    directories = open_directories(settings)
    try:
        ballast = Ballast(directories.meta.path, settings.min_free_space // 2)
        stock = ballast.make_way(lambda: _take_stock(directories, now))
    except StoreOpenError:
        directories.close()
        raise
    except (StoreError, OSError) as error:
        directories.close()
        raise StoreOpenError(
            f"the queue in {directories.meta.path} cannot be read: {error}; nothing of it was given up"
        ) from error
    if stock.unreadable or stock.foreign:
        _log.error(
            "the queue in %s has %d unreadable and %d foreign files: docs/disk-queue.md says what to do",
            directories.meta.path,
            stock.unreadable,
            stock.foreign,
        )
    return _Opened(directories, ballast, stock)


def _take_stock(directories: Directories, now: float) -> Stock:
    listing = list_names(directories)
    identity = f"{now:.6f} {directories.meta.path.stat().st_ino:x}"
    check_marks(directories, identity=identity, pending=bool(listing.intents), used=listing.is_used)
    return take_stock(directories)
