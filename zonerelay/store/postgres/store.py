"""The PostgreSQL store: `Store` over one database, which several relays may share.

This module plans a change from what is known, hands it to the group committer, and lets claims and counts
follow when it is durable. Every write of an outcome names this relay's session, so an outcome of a delivery
that another node has taken over changes nothing.

Nothing takes effect before it is durable: until then no delivery with an unwritten outcome is handed out, and
a submission that fails leaves everything as it was. When the fate of a write is unknown, its submitters get
StoreError. Its new messages are doubtful: their clients heard a refusal, so the store removes them when the
database is back. Its outcomes are written again by their submitters.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.process.tasks import cancel_all
from zonerelay.store.common import records
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.body.writer import BodyWriter, NewMessage, check_own_message, split
from zonerelay.store.common.claims.pool import Claims
from zonerelay.store.common.reading import read_each
from zonerelay.store.common.write.batches import BatchedUpdate, ChangeOne
from zonerelay.store.common.write.replies import refuse
from zonerelay.store.contract import (
    CHUNK_SIZE,
    SHARED,
    Change,
    Finish,
    KeptKeys,
    Once,
    Postpone,
    StoreError,
    Submit,
)
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.batch import MessageRows, Submission, change_deliveries
from zonerelay.store.postgres.claims import PostgresClaims
from zonerelay.store.postgres.counts import QueueCounter
from zonerelay.store.postgres.keeper import PostgresHooks, PostgresKeeper
from zonerelay.store.postgres.reader import QueueReader
from zonerelay.store.postgres.rows import identity, number, queue_in
from zonerelay.store.surroundings import Surroundings

HOT_MESSAGES = 4096
"""Messages whose metadata is kept in memory after acceptance or a read."""
_RECORD_SIZE = 200
FORGET_EVERY, FORGET = 10.0, 10_000
"""Seconds between two looks for expired idempotency keys while messages with keys come, and how many go."""


class PostgresStore(QueueReader, BatchedUpdate):
    """Built by `open_postgres`; belongs to the event loop that was running then."""

    def __init__(self, keeper: PostgresKeeper, around: Surroundings) -> None:
        super().__init__(keeper)
        self.uploads = 0
        self.node = keeper.node
        self._on_news = around.on_news
        self._now = around.clock.now
        claims = self._database = PostgresClaims(keeper, around.on_lost)
        counter = self._counter = QueueCounter(keeper)
        self._claims: Claims = claims.claims
        # What was stored or read lately.
        self._messages: dict[MessageId, Message] = {}
        self._bodies = BodyCache()
        self._in_flight: dict[Submission, None] = {}
        self._uploading: set[int] = set()
        self._doubtful: dict[int, set[QueueName]] = {}
        self._forget_at = 0.0
        self._forgetting: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        keeper.hooks = PostgresHooks(
            failed=self._batch_failed,
            resync=self._resync,
            reconcile=self._reconcile,
            on_news=self._news_of,
            all_zones=self._news_of_all,
        )
        self.claim, self.claim_new = claims.claim, claims.claim_new
        self.claim_domain, self.release = claims.claim_domain, claims.release
        self.next_due, self.has_ready = claims.next_due, claims.has_ready
        self.counts, self.is_counted = counter.current, counter.is_counted
        self.check_writable = keeper.check_usable
        health = keeper.health
        self.unhealthy, self.problems, self.usable = health.unhealthy, health.problems, health.usable
        self.probe = keeper.probe

    async def start(self) -> None:
        """Raises StoreError. Counting goes on behind it."""
        await self._keeper.start()
        await self._keeper.reap()
        ((last,),) = await self._keeper.ask(sql.LAST_ID)
        self._keeper.last_id = last or 0
        await self._counter.start()

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        key = number(message_id)
        self._bodies.extend(message_id, first, chunks)
        job = Submission(uploads=[(key, place, chunk) for place, chunk in enumerate(chunks, first)])
        return self._submit(job, size=len(chunks) * CHUNK_SIZE)

    async def submit_once(
        self, once: Once, message_id: MessageId, submit: Callable[[], asyncio.Future[None]]
    ) -> asyncio.Future[None]:
        if (now := self._now()) >= self._forget_at:
            self._forget_at = now + FORGET_EVERY
            self._forgetting = asyncio.get_running_loop().create_task(self._forget_keys(now))
        return submit()

    async def keep_keys(self, keys: KeptKeys) -> None:
        rows = [(name, kept.digest, number(kept.message_id), kept.until) for name, kept in keys]
        if rows:
            await self._keeper.ask(sql.KEEP, *map(list, zip(*rows, strict=True)), self._now())

    async def _forget_keys(self, now: float) -> None:
        with contextlib.suppress(StoreError):  # the keeper tells of a database that fails
            await self._keeper.ask(sql.FORGET_KEPT, now, FORGET)

    def submit_message(self, given: NewMessage) -> asyncio.Future[None]:
        message, deliveries, chunks, beside, once = given
        new = MessageRows(message, deliveries, chunks, self._keeps, once)
        job = Submission(messages=[new], news=self._to_share(new))
        for report in beside:
            added = MessageRows(report.message, report.deliveries, split(report.body), self._keeps)
            job.reports.append((added, report.about))
        self._bodies.extend(message.id, message.chunks - len(chunks) + 1, chunks)
        return self._submit(job, size=_size(new))

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._bodies.drop(message_id)
        self._submit(Submission(dropped=[number(message_id)]), lazy=True)

    def _keeps(self, delivery: Delivery) -> bool:
        """Whether the write itself claims it, so that handing it out needs no statement."""
        return delivery.is_due(0.0) and self._claims.zone(delivery.queue).has_room

    def _to_share(self, new: MessageRows) -> set[QueueName]:
        """Returns queues with more than this relay keeps at hand: other relays may have room."""
        return {each.queue for each in new.deliveries if each.key not in new.claimed and each.is_due(0.0)}

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        self._keeper.check_usable()
        job = Submission()
        lost: list[DeliveryKey] = []
        for change in changes:
            if isinstance(change, Submit):
                check_own_message(change)
                new = MessageRows(change.message, change.deliveries, split(change.body), self._keeps)
                job.reports.append((new, change.about))
            elif change.delivery.key in self._claims.lost:
                lost.append(change.delivery.key)
            else:
                self._plan(job, change)
        for key in lost:
            # Another node has it: what became of our attempt is no longer ours to tell.
            self._claims.drop(key)
        if job.changes or job.reports:
            self._take_hold(job)
            await self._submit(job, size=_job_size(job), lazy=lazy)

    def _plan(self, job: Submission, change: Finish | Postpone) -> None:
        key = change.delivery.key
        if key in job.changes and job.changes[key] is None:
            return  # it has left already
        if isinstance(change, Finish):
            job.changes[key] = None
        else:
            job.encoded[key] = records.encode_delivery(change.delivery)
            job.changes[key] = change.delivery

    # --- what becomes of a submission

    def _take_hold(self, job: Submission) -> None:
        """Keeps these from being handed out until the write is done."""
        job.simple = True
        for key, state in job.changes.items():
            handed = self._claims.handed.get(key)
            if handed is not None:
                job.mine[key] = handed
            elif (pooled := self._claims.zone(key.queue).forget(key)) is not None:
                job.pooled.append(pooled)
            known = self._messages.get(key.message_id)
            if state is None and (known is None or len(known.envelope.recipients) != 1):
                job.simple = False
        self._claims.settling.update(job.changes)

    def _arriving(self) -> set[DeliveryKey]:
        """Returns deliveries claimed by a write that stores them and is under way."""
        return {key for job in self._in_flight for new in job.added for key in new.claimed}

    def _has_upload(self, number: int) -> bool:
        """Returns whether the body is still arriving, or its end is being written."""
        return number in self._uploading

    def _submit(self, job: Submission, *, size: int = 0, lazy: bool = False) -> asyncio.Future[None]:
        """Hands the job to the committer. It takes effect when it is durable, with or without a caller that
        waits.
        """
        outcome = job.outcome = asyncio.get_running_loop().create_future()
        self._in_flight[job] = None
        self._uploading.update(number for number, _, _ in job.uploads)
        applied = functools.partial(self._landed, job)
        written = self._keeper.committer.submit([job], size=size, lazy=lazy, applied=applied)
        if written.done() and (error := written.exception()) is not None:
            self._give_up(job, error)
        return outcome

    def _landed(self, job: Submission) -> None:
        """Applies a job of a durable batch, unless the database refused the job."""
        if self._in_flight.pop(job, self) is self:
            return
        self._end_uploads(job)
        if job.error is not None:
            self._let_go(job)
            _tell(job, job.error)
            return
        for key, new in job.changes.items():
            self._land_change(job, key, new)
        for closed in job.closed:
            self._forget_message(identity(closed))
        for added in job.added:
            if added.stored:
                self._land_message(added)
        _tell(job, None)

    def _land_change(self, job: Submission, key: DeliveryKey, new: Delivery | None) -> None:
        claims = self._claims
        claims.settling.discard(key)
        claims.drop(key)
        status = job.done.get(key)
        if status is None:
            return  # it was gone, or is another node's now
        pool = claims.zone(key.queue)
        self._counter.move(key.queue, status, new)
        if key not in job.mine:
            pool.due = 0.0
        if new is not None:
            pool.hear_of(new)

    def _land_message(self, new: MessageRows) -> None:
        self._keeper.last_id = max(self._keeper.last_id, new.id)
        self._remember(new.message)
        for delivery in new.deliveries:
            self._counter.move(delivery.queue, None, delivery)
            pool = self._claims.zone(delivery.queue)
            if delivery.key in new.claimed:
                pool.put(delivery)
            else:
                pool.hear_of(delivery)

    def _forget_message(self, message_id: MessageId) -> None:
        self._messages.pop(message_id, None)
        self._bodies.drop(message_id)

    def _let_go(self, job: Submission) -> None:
        """Puts back the deliveries of a job that did not happen."""
        claims = self._claims
        claims.settling.difference_update(job.changes)
        for delivery in job.pooled:
            claims.zone(delivery.queue).put(delivery)
        for key, delivery in job.mine.items():
            if key not in claims.handed and key not in claims.lost:
                claims.zone(key.queue).put(delivery)

    def _give_up(self, job: Submission, error: BaseException) -> None:
        self._in_flight.pop(job, None)
        self._end_uploads(job)
        self._let_go(job)
        # A message with a key that is stored after all is what its client will ask for again.
        for new in (new for new in job.messages if new.once is None):
            self._doubtful[new.id] = {delivery.queue for delivery in new.deliveries}
        _tell(job, error)

    def _end_uploads(self, job: Submission) -> None:
        """Forgets uploads that have ended; the next round drops what the database still has of them."""
        self._uploading.difference_update(job.dropped, job.ended_uploads())

    def _batch_failed(self, error: StoreError) -> None:
        for job in list(self._in_flight):
            self._give_up(job, error)

    def _remember(self, message: Message) -> None:
        self._messages[message.id] = message
        if len(self._messages) > HOT_MESSAGES:
            del self._messages[next(iter(self._messages))]

    # --- what the keeper tells

    async def _resync(self, new_session: bool) -> None:
        """Forgets what memory says and believes the database, which is back."""
        async with self._database.exclusive:
            await self.forget(self._doubtful)
            self._doubtful.clear()
            self._messages.clear()
            self._bodies.clear()
            await self._database.resync(new_session=new_session)
            await self._counter.start()

    async def _reconcile(self) -> None:
        """Gives back what the database holds for this relay without its knowing: claims, parts of bodies."""
        await self._database.give_back_strays(self._arriving)
        uploads = await self._keeper.ask(sql.UPLOADS, self._keeper.session)
        if given_up := [number for (number,) in uploads if not self._has_upload(number)]:
            await self._keeper.ask(sql.DROP_UPLOADS, given_up, self._keeper.session)
        for (zone,) in await self._keeper.ask(sql.BUSY, self._now()):
            self._news_of(queue_in(zone))

    def _news_of(self, queue: QueueName) -> None:
        """Tells of mail that other nodes have left: the claims hear of it first, then the scheduler."""
        self._claims.zone(queue).doubt()
        self._on_news(queue)

    def _news_of_all(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._tell_all())

    async def _tell_all(self) -> None:
        with contextlib.suppress(StoreError):  # once the database is back, all zones hear of it
            for queue in await self.queues():
                self._news_of(queue)

    # --- operators

    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        # Cancelled in the middle of its commit it would be in doubt.
        return await self._database.finish(self._update(keys, change))

    async def _update(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        self._keeper.check_usable()
        claims = self._claims
        async with self._database.exclusive:
            claims.changing.update(keys)
            pooled = [d for key in keys if (d := claims.zone(key.queue).forget(key)) is not None]
            claims.let_go.update({delivery.key: delivery for delivery in pooled})
            try:
                async with self._keeper.transaction() as fetch:
                    found = await change_deliveries(
                        fetch,
                        keys,
                        change,
                        session=self._keeper.session,
                        keeps=lambda key: key not in claims.let_go,
                    )
                for key, (old, new) in found.steps.items():
                    self._land_update(key, old, new, kept=key in found.kept)
            finally:
                claims.changing.difference_update(keys)
                for key in keys:
                    if (left := claims.let_go.pop(key, None)) is not None:
                        claims.zone(key.queue).put(left)
        return found.existed

    def _land_update(self, key: DeliveryKey, old: Delivery, new: Delivery | None, *, kept: bool) -> None:
        claims = self._claims
        self._counter.move(key.queue, old, new if new is None or new.key == key else None)
        claims.zone(key.queue).doubt()
        let_go = claims.let_go.pop(key, None)
        if new is not None and new.key != key:
            claims.drop(key)
            self._counter.move(new.queue, None, new)
            claims.zone(new.queue).doubt()
        elif new is None:
            claims.drop(key)
            self._forget_message(key.message_id)
        elif key in claims.handed:
            claims.handed[key] = new
        elif kept and let_go is not None:
            # It was given back meanwhile, and the database still says that it is ours.
            claims.zone(key.queue).put(new)

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        self.check_claim(message_id)
        known = self._messages.get(message_id)
        if known is not None:
            return known
        message, body = await self.message(message_id)
        if body is not None:
            self._bodies.put(message_id, body)
        return message

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        message = await self.read_message(message_id)
        chunks = self._bodies.get(message_id, message.chunks)
        if chunks is not None:
            for chunk in chunks:
                yield chunk
            return
        async for chunk in self.chunks(message_id, message.chunks):
            self.check_claim(message_id)
            yield chunk

    def check_claim(self, message_id: MessageId) -> None:
        self._keeper.check_open()
        self._claims.check(message_id, holds_lease=self._keeper.holds_lease)

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await read_each(self.read_message, ids)

    async def left_over(self) -> str:
        return SHARED

    def last_message_id(self) -> MessageId | None:
        return identity(self._keeper.last_id) if self._keeper.last_id else None

    # --- the end

    async def close(self) -> None:
        await cancel_all(self._forgetting)
        await self._database.close()
        await self._counter.stop()
        await self._keeper.close()


def _tell(job: Submission, error: BaseException | None) -> None:
    assert job.outcome is not None
    if error is not None:
        refuse(job.outcome, error)
    elif not job.outcome.done():
        job.outcome.set_result(None)


def _size(new: MessageRows) -> int:
    body = len(new.body or b"") + sum(len(data) for _, data in new.chunks)
    return body + len(new.metadata) + _RECORD_SIZE * len(new.rows)


def _job_size(job: Submission) -> int:
    return sum(_size(new) for new, _ in job.reports) + _RECORD_SIZE * len(job.changes)
