"""Implements `Store` on the keys of one partition, or of one LevelDB directory, for one process.

It defines the order of operations: plan a change, submit it to the keeper, and update claims and counts when
it is durable. Then new mail is given to the scheduler. After any failed write all unconfirmed state is
discarded, callers receive StoreError, and the keeper repairs what it writes to. The queue is then read again.
Only claims survive, so that no delivery is claimed twice.

Memory is ahead of the disk, so data that changes during a read is read again or discarded. Bodies are read in
groups of chunks, and the next group is read while one is consumed, so a reader holds at most two groups.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import Envelope, Message, MessageId
from zonerelay.store import contract, records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import Change, ChangeOne, Finish, OwnMessage, Wanted, everybody
from zonerelay.store.keys.port import Op
from zonerelay.store.queue.body import BodyCache, BodyWriter, NewMessage, check_own_message, split
from zonerelay.store.queue.claims import ClaimCursors, QueueCursors
from zonerelay.store.queue.in_flight import NOTHING, InFlight, ReadResult, WritePlan, changed, in_batches
from zonerelay.store.queue.keeper import QueueKeeper
from zonerelay.store.queue.reads import READ_CHUNKS, DeliveryPage, scanned
from zonerelay.store.queue.reservations import Reservations, register_for


class PartitionStore:
    """The store of one queue. `open_store` creates it. It belongs to the event loop that was running then."""

    node = 0

    def __init__(
        self, keeper: QueueKeeper, around: StoreContext, *, last_id: MessageId | None, empty: bool
    ) -> None:
        self._keeper = keeper
        self._health = keeper.health
        self.uploads = 0
        self._bodies = BodyCache()
        self._last_id = last_id
        # Bounces whose settle is pending, and those whose settle has failed, which may be stored anyway.
        self._reporting: set[MessageId] = set()
        self._doubtful: set[MessageId] = set()
        self._write = keeper.submit
        self._read = keeper.read
        self._in_flight = InFlight()
        self._claims = ClaimCursors(keeper, self._in_flight, empty=empty)
        self._on_stored = around.on_stored
        self._stored_last_id: MessageId | None = None
        # Expired idempotency keys are looked for from here on. A start finds those stored after their expiry.
        self._forgotten = records.ONCE_UNTIL_PREFIX
        keeper.on_failure = self._reset
        self._reservations = Reservations(
            lambda identity: self._read(lambda reads: reads.kept(identity)),
            lambda after: self._read(lambda reads: reads.kept_page(after)),
            self.keep_keys,
            self._forget_keys,
            keeper.health.usable,
            clock=around.clock,
            register=around.register or register_for(around.siblings),
        )
        self.check_writable = keeper.health.check_writable
        self.usable = keeper.health.usable
        self.probe = keeper.probe
        self.acknowledge = keeper.acknowledge
        self.left_over = keeper.left_over
        self.claim = self._claims.claim
        self.release = self._claims.release
        self.next_due = self._claims.next_due
        self.submit_once = self._reservations.store
        self.kept_keys = self._reservations.kept_keys
        keeper.begin(last_id)
        self._reservations.start()

    # --- health

    def unhealthy(self) -> contract.Unhealthy | None:
        return self._health.reason

    def problems(self) -> Sequence[str]:
        return (*self._health.problems(), *self._reservations.problems())

    # --- accepting mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        ops = _put_chunks(message_id, first, chunks)
        self._bodies.extend(message_id, first, chunks)
        return self._write(ops, size=len(chunks) * contract.CHUNK_SIZE)

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        message, deliveries, chunks, companions, once = given
        plan = WritePlan(self._in_flight)
        self._add_message(plan, message, deliveries, chunks)
        for report in companions:
            self._add_report(plan, report)
        if once is not None:
            plan.ops += _once_ops(once.identity, once.kept(message.id))
        stored = self._submit(plan)
        if message.chunks > len(chunks):
            self._watch(stored, message.envelope.id)
        return stored

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._bodies.drop(message_id)
        ops: list[Op] = [(records.chunk_key(message_id, number), None) for number in range(1, count + 1)]
        self._watch(self._write(ops, lazy=True), message_id)

    def _watch(self, written: asyncio.Future[None], message_id: MessageId) -> None:
        """Record the upload for cleanup if its last write fails, because earlier chunks may be stored."""

        def ended(written: asyncio.Future[None]) -> None:
            if written.cancelled() or written.exception() is not None:
                self._keeper.note_cut_off(message_id)

        written.add_done_callback(ended)

    def _add_message(
        self, plan: WritePlan, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> None:
        """Add a new message to a write plan, with the last `chunks` of its body (all if it is small)."""
        message_id = message.envelope.id
        first = message.chunks - len(chunks) + 1
        plan.ops += _put_chunks(message_id, first, chunks)
        plan.size += sum(map(len, chunks))
        plan.add_message(message, deliveries)
        self._bodies.extend(message_id, first, chunks)
        if self._last_id is None or message_id > self._last_id:
            self._last_id = message_id

    def last_message_id(self) -> MessageId | None:
        return self._last_id

    async def keep_keys(self, keys: contract.KeptKeys) -> None:
        ops: list[Op] = []
        for identity, kept in keys:
            ops += _once_ops(identity, kept)
        if ops:
            await self._write(ops)

    async def _forget_keys(self, now: float, most: int, is_used: Callable[[str], bool]) -> None:
        ops: list[Op] = []
        start = self._forgotten
        expired = await self._read(lambda reads: reads.expired(start, now, most))
        for identity, key, is_newer in expired:
            ops.append((key, None))
            if not is_newer and not is_used(identity):
                ops.append((records.once_key(identity), None))
        if ops:
            await self._write(ops, lazy=True)
            self._forgotten = expired[-1][1]

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        reports = [change for change in changes if isinstance(change, OwnMessage)]
        keys = [change.delivery.key for change in changes if not isinstance(change, OwnMessage)]
        stored: Collection[MessageId] = ()
        if reports:
            for report in reports:
                check_own_message(report)
            if doubtful := self._doubtful & {report.message.id for report in reports}:
                stored = await self.read_messages(list(doubtful))
        plan = await self._plan(keys)
        for change in changes:
            if not isinstance(change, OwnMessage):
                plan.change(change.delivery.key, None if isinstance(change, Finish) else change.delivery)
            elif change.message.id not in stored:
                self._add_report(plan, change)
        written = self._submit(plan, settled=keys, lazy=lazy) if plan.transitions else None
        if written is None:
            self._drop_claims(keys)
        elif reports:
            ids = {report.message.id for report in reports}
            self._reporting |= ids
            try:
                await written
            finally:
                self._reporting -= ids
        else:
            await written
        if reports:
            self._doubtful.difference_update(report.message.id for report in reports)

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        existed: dict[DeliveryKey, Delivery] = {}
        for batch in in_batches(keys):
            plan = await self._plan(batch)
            found = {key: old for key in batch if (old := plan.current(key)) is not None}
            for key, old in found.items():
                new = changed(old, change)
                if new != old:
                    plan.change(key, new)
            if plan.transitions:
                await self._submit(plan)
            existed |= found
        return existed

    async def _plan(self, keys: Sequence[DeliveryKey]) -> WritePlan:
        in_flight = self._in_flight
        found = await self._find(keys) if in_flight.unknown(keys, NOTHING) else NOTHING
        return WritePlan(in_flight, found)

    async def _find(self, keys: Sequence[DeliveryKey]) -> ReadResult:
        """Read the states of these deliveries from disk, except for those in memory. The caller must plan its
        write before it awaits anything else.
        """
        in_flight = self._in_flight
        found = ReadResult()
        with in_flight.reading():
            while unknown := in_flight.unknown(keys, found):
                self._health.check_usable()
                since = in_flight.moment
                read = await self._read(lambda reads: reads.states(unknown))
                # Data that changed during the read is read again.
                found.merge(read, unknown)
                found.drop(functools.partial(in_flight.is_stale, since=since))
        return found

    def _add_report(self, plan: WritePlan, report: OwnMessage) -> None:
        self._add_message(plan, report.message, report.deliveries, split(report.body))

    def _submit(
        self, plan: WritePlan, *, settled: Sequence[DeliveryKey] = (), lazy: bool = False
    ) -> asyncio.Future[None]:
        """Submit a planned write to the committer. It takes effect when it is durable, even if no caller
        waits for it.
        """
        claims = self._in_flight.claims
        # This check comes before memory is changed. After a refused write memory would stay ahead of the
        # disk.
        self._health.check_usable()
        plan.seal()
        for key, (old, _) in plan.transitions.items():
            if old is not None and key not in claims:
                self._claims[key.queue].forget(key)
        if plan.removes_message and self._last_id is not None and self._last_id != self._stored_last_id:
            # While the newest message exists, its keys contain its id.
            self._stored_last_id = self._last_id
            plan.ops.append((records.META_LAST_ID, self._last_id.encode("ascii")))
        applied = functools.partial(self._apply, plan, settled)
        return self._write(plan.ops, size=plan.size, lazy=lazy, applied=applied)

    def _apply(self, plan: WritePlan, settled: Sequence[DeliveryKey]) -> None:
        """Update the state in memory after a write has become durable."""
        self._drop_claims(settled)
        stored: dict[QueueName, list[Delivery]] = {}
        for key, (old, new) in plan.transitions.items():
            if self._apply_step(key, old, new) and new is not None:
                stored.setdefault(key.queue, []).append(new)
        for queue, deliveries in stored.items():
            self._give(self._claims[queue], deliveries)
        for message_id, entry in plan.messages.items():
            if self._in_flight.settled(message_id, entry):
                self._bodies.drop(message_id)
                self._keeper.note_removed(message_id)

    def _apply_step(self, key: DeliveryKey, old: Delivery | None, new: Delivery | None) -> bool:
        """Update memory with the change of one delivery, and return whether it may be given to the
        scheduler.
        """
        in_flight, cursors = self._in_flight, self._claims[key.queue]
        self._keeper.counts.move(key, old, new)
        if old is not None and old.next_attempt and (was_due := records.due_time(old)):
            cursors.due_range.gone(records.deferred_key(key, was_due))
        is_latest = in_flight.landed(key, new)
        if key in in_flight.claims:
            in_flight.claims[key] = new
        elif not is_latest:
            return False
        elif new is None:
            cursors.forget(key)
        elif old is None and not new.held:
            return True
        else:
            cursors.add(key, new)
        return False

    def _give(self, cursors: QueueCursors, deliveries: Sequence[Delivery]) -> None:
        """Pass new deliveries to the scheduler. Those that it does not accept stay on disk until they are
        claimed.
        """
        taken = self._on_stored(deliveries, all(map(cursors.is_next, deliveries)))
        for delivery in deliveries[:taken]:
            cursors.note_stored(delivery.key)
            self._in_flight.claims[delivery.key] = delivery
        for delivery in deliveries[taken:]:
            cursors.add(delivery.key, delivery)

    # --- claims

    def has_claim(self, key: DeliveryKey) -> bool:
        return key in self._in_flight.claims

    def claimed_keys(self) -> list[DeliveryKey]:
        return list(self._in_flight.claims)

    def _drop_claims(self, keys: Sequence[DeliveryKey]) -> None:
        pop = self._in_flight.claims.pop
        for key in keys:
            pop(key, None)

    def _reset(self) -> None:
        """Discard all unconfirmed state after a failed write."""
        self._in_flight.reset()
        self._bodies.clear()
        self._stored_last_id = None
        self._doubtful |= self._reporting
        self._claims.reset()

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        in_flight = self._in_flight
        known = in_flight.message(message_id)
        if known is not None and known.message is not None:
            return known.message
        with in_flight.reading():
            since = in_flight.moment
            message, count, body = await self._read(lambda reads: reads.message_and_body(message_id))
            if not in_flight.is_stale(message_id, since):
                in_flight.remember(message_id, count)
                if body is not None:
                    self._bodies.put(message_id, body)
        return message

    def check_claim(self, message_id: MessageId) -> None:
        """Do nothing, because no other relay uses this spool and no claim can be lost."""

    async def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        message = await self.read_message(message_id)
        cached = self._bodies.get(message_id, message.chunks)
        if cached is not None:
            for chunk in cached:
                yield chunk
            return
        async with contextlib.aclosing(self._chunks(message.id, message.chunks)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(self, message_id: MessageId, chunks: int) -> AsyncGenerator[bytes, None]:
        """Yield all chunks of a body in order; `chunks` is their number."""

        def read(first: int) -> Coroutine[None, None, list[bytes]]:
            return self._read(lambda reads: reads.chunks(message_id, first, chunks))

        ahead: asyncio.Task[list[bytes]] | None = None
        try:
            for first in range(1, chunks + 1, READ_CHUNKS):
                group = await (ahead or read(first))
                following = first + READ_CHUNKS
                ahead = asyncio.create_task(read(following)) if following <= chunks else None
                for chunk in group:
                    yield chunk
        finally:
            if ahead is not None:
                # Nobody needs its result or error, because the reader has stopped.
                ahead.cancel()
                await asyncio.wait([ahead])

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncGenerator[Delivery, None]:
        view = await self._read(lambda reads: reads.view())

        def page_at(start: bytes, end: bytes) -> Coroutine[None, None, DeliveryPage]:
            return self._read(lambda _: view.scan_page(start, end, wanted))

        try:
            async for delivery in scanned(page_at, queue, after):
                yield delivery
        finally:
            view.close()

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        cursors = self._claims[queue]
        start = cursors.oldest
        begin, end = start or cursors.fresh_range.start, cursors.fresh_range.end
        first = await self._read(lambda reads: reads.oldest(begin, end, now))
        if first is None:
            return None
        if cursors.oldest == start:
            cursors.oldest = first[0]
        return first[1]

    async def queues(self) -> set[QueueName]:
        return await self._read(lambda reads: reads.queues())

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        counts = self._keeper.counts
        queues = [each for each, some in counts.moves.items() if some.total] if counts.is_whole else None
        return await self._read(lambda reads: reads.deliveries_of(message_id, queues))

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await self._read(lambda reads: reads.messages(ids))

    def counts(self) -> dict[QueueName, contract.QueueCounts]:
        return self._keeper.counts.current()

    def waiting(self, queue: QueueName) -> int:
        return self._keeper.counts.waiting(queue)

    def is_counted(self) -> bool:
        return self._keeper.counts.is_whole

    async def close(self) -> None:
        await self._reservations.close()
        await self._keeper.close()
        self._reset()  # nothing can be read any more, from memory either


def _put_chunks(message_id: MessageId, first: int, chunks: Sequence[bytes]) -> list[Op]:
    return [(records.chunk_key(message_id, number), chunk) for number, chunk in enumerate(chunks, first)]


def _once_ops(identity: str, kept: contract.StoredKey) -> list[Op]:
    return [
        (records.once_key(identity), records.encoded("an idempotency key", kept)),
        (records.once_until_key(identity, kept.until), b""),
    ]
