"""The PostgreSQL store: `Store` over one database, which several relays may share.

This module plans a change from what is known, hands it to the group committer, and lets claims and counts
follow when it is durable. Every write of an outcome names this relay's session, so an outcome of a delivery
that another node has taken over changes nothing.

When the fate of a write is unknown, its submitters get StoreError. Its new messages are removed when the
database is back, and its outcomes are written again by their submitters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.body.chunks import check_own_message, split
from zonerelay.store.common.body.writer import BodyWriter
from zonerelay.store.common.claims.pool import Claims
from zonerelay.store.common.reading import read_each
from zonerelay.store.common.write.batches import in_batches
from zonerelay.store.contract import (
    CHUNK_SIZE,
    SHARED,
    Change,
    Finish,
    Postpone,
    QueueCounts,
    StoreError,
    Submit,
    Wanted,
    everybody,
)
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.batch import MessageRows, Submission, change_deliveries
from zonerelay.store.postgres.claims import PostgresClaims
from zonerelay.store.postgres.counts import QueueCounter
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.reader import PostgresReader
from zonerelay.store.postgres.rows import identity, number
from zonerelay.store.postgres.submissions import Submissions

UPDATE_BATCH = 256
"""Deliveries that an operator's bulk change rewrites in one transaction."""
_RECORD_SIZE = 200


class PostgresStore:
    """Built by `open_postgres`; belongs to the event loop that was running then."""

    def __init__(
        self,
        keeper: PostgresKeeper,
        claims: PostgresClaims,
        reader: PostgresReader,
        counter: QueueCounter,
    ) -> None:
        self.uploads = 0
        self._keeper = keeper
        self._database = claims
        self._claims: Claims = claims.claims
        self._reader = reader
        self._counter = counter
        self._submissions = Submissions(keeper, claims.claims, counter)
        self._bodies = self._submissions.bodies
        keeper.on_failure = self._submissions.batch_failed
        keeper.resync = self._resync
        self.check_writable = keeper.check_usable
        self.unhealthy = keeper.unhealthy
        self.problems = keeper.problems
        self.usable = keeper.usable
        self.probe = keeper.probe

    # --- taking mail

    def begin(self, envelope: Envelope) -> BodyWriter:
        return BodyWriter(self, envelope)

    def submit_chunks(
        self, message_id: MessageId, first: int, chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        key = number(message_id)
        self._bodies.extend(message_id, first, chunks)
        job = Submission(uploads=[(key, place, chunk) for place, chunk in enumerate(chunks, first)])
        return self._submissions.submit(job, size=len(chunks) * CHUNK_SIZE)

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[bytes]
    ) -> asyncio.Future[None]:
        new = MessageRows(message, deliveries, chunks, self._keeps)
        job = Submission(messages=[new], news=self._to_share(new))
        self._remember_body(message, chunks)
        return self._submissions.submit(job, size=_size(new))

    def remove_chunks(self, message_id: MessageId, count: int) -> None:
        self._bodies.drop(message_id)
        self._submissions.submit(Submission(dropped=[number(message_id)]), lazy=True)

    def _keeps(self, delivery: Delivery) -> bool:
        """Whether the write itself claims it, so that handing it out needs no statement."""
        ready = not delivery.held and delivery.next_attempt <= 0
        return ready and self._claims.zone(delivery.queue).has_room

    def _to_share(self, new: MessageRows) -> set[str]:
        """Zones with more than we can keep at hand: others may have room."""
        return {
            delivery.queue
            for delivery in new.deliveries
            if delivery.key not in new.claimed and not delivery.held and delivery.next_attempt <= 0
        }

    def _remember_body(self, message: Message, chunks: Sequence[bytes]) -> None:
        if message.chunks <= 1:
            self._bodies.put(message.id, chunks[0] if chunks else b"")
        else:
            self._bodies.extend(message.id, message.chunks - len(chunks) + 1, chunks)

    # --- handing out

    async def claim(
        self, zone: str, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        self._keeper.check_usable()
        return await self._database.claim(zone, limit, skip_domains, now)

    async def claim_new(
        self, zone: str, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        self._keeper.check_usable()
        return await self._database.claim_new(zone, limit, since, skip_domains)

    async def claim_domain(self, zone: str, domain: str, limit: int, *, now: float) -> list[Delivery]:
        del now  # they were due when they were passed over
        self._keeper.check_usable()
        return await self._database.claim_domain(zone, domain, limit)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        self._database.release(keys)

    async def next_due(self, zone: str) -> float | None:
        self._keeper.check_usable()
        return await self._database.next_due(zone)

    def has_ready(self, zone: str) -> bool:
        pool = self._claims.zone(zone)
        return pool.more or pool.has_fresh

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
            self._submissions.take_hold(job)
            await self._submissions.submit(job, size=_job_size(job), lazy=lazy)

    def _plan(self, job: Submission, change: Finish | Postpone) -> None:
        key = change.delivery.key
        if key in job.changes and job.changes[key] is None:
            return  # it has left already
        if isinstance(change, Finish):
            job.changes[key] = None
        else:
            job.encoded[key] = records.encode_delivery(change.delivery)
            job.changes[key] = change.delivery

    async def _resync(self, new_session: bool) -> None:
        """The database is back: it says what is true."""
        async with self._database.exclusive:
            await self._reader.forget(self._submissions.doubtful)
            self._submissions.doubtful.clear()
            self._submissions.clear()
            await self._database.resync(new_session=new_session)
            await self._counter.start()

    async def reconcile(self) -> None:
        """Gives back what the database holds for this relay without its knowing: claims, parts of bodies."""
        await self._database.give_back_strays(self._submissions.arriving)
        uploads = await self._keeper.ask(sql.UPLOADS, self._keeper.session)
        if given_up := [number for (number,) in uploads if not self._submissions.has_upload(number)]:
            await self._keeper.ask(sql.DROP_UPLOADS, given_up, self._keeper.session)

    # --- operators

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
        existed = 0
        for batch in in_batches(keys, UPDATE_BATCH):
            # Cancelled in the middle of its commit it would be in doubt.
            existed += await self._database.finish(self._update(batch, change))
        return existed

    async def _update(
        self, keys: Sequence[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
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
        self._counter.move(key.queue, old, new)
        claims.zone(key.queue).doubt()
        let_go = claims.let_go.pop(key, None)
        if new is None:
            claims.drop(key)
            self._submissions.forget_message(key.message_id)
        elif key in claims.handed:
            claims.handed[key] = new
        elif kept and let_go is not None:
            # It was given back meanwhile, and the database still says that it is ours.
            claims.zone(key.queue).put(new)

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        self._check_claim(message_id)
        known = self._submissions.messages.get(message_id)
        if known is not None:
            return known
        message, body = await self._reader.message(message_id)
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
        async for chunk in self._reader.chunks(message_id, message.chunks):
            self._check_claim(message_id)
            yield chunk

    def _check_claim(self, message_id: MessageId) -> None:
        """Another node may be sending what we had claimed: nothing more of it may leave here."""
        self._keeper.check_open()
        claims = self._claims
        if claims.is_lost(message_id) or (not self._keeper.holds_lease and claims.is_handed_out(message_id)):
            raise StoreError(f"message {message_id}: the lease on it has run out")

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await read_each(self.read_message, ids)

    async def scan(self, zone: str | None = None, *, wanted: Wanted = everybody) -> AsyncIterator[Delivery]:
        self._keeper.check_usable()
        async for delivery in self._reader.scan(zone):
            if wanted(delivery.recipient):
                yield delivery

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        return await self._reader.deliveries_of(message_id)

    async def oldest(self, zone: str, *, now: float) -> float | None:
        return await self._reader.oldest(zone, now)

    async def zones(self) -> set[str]:
        return await self._reader.zones()

    def counts(self) -> dict[str, QueueCounts]:
        return self._counter.current()

    def is_counted(self) -> bool:
        return self._counter.is_counted

    async def left_over(self) -> str:
        return SHARED

    @property
    def node(self) -> int:
        return self._keeper.node

    def last_message_id(self) -> MessageId | None:
        return identity(self._keeper.last_id) if self._keeper.last_id else None

    # --- the end

    async def close(self) -> None:
        await self._database.close()
        await self._counter.stop()
        await self._keeper.close()
        self._submissions.clear()


def _size(new: MessageRows) -> int:
    body = len(new.body or b"") + sum(len(data) for _, data in new.chunks)
    return body + len(new.metadata) + _RECORD_SIZE * len(new.rows)


def _job_size(job: Submission) -> int:
    return sum(_size(new) for new, _ in job.reports) + _RECORD_SIZE * len(job.changes)
