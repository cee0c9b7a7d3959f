"""Submissions on their way into the database, and what follows when it is known what became of each.

Nothing takes effect before it is durable: until then no delivery with an unwritten outcome is handed out. A
submission that fails leaves everything as it was. When its batch may have been committed all the same, its
new messages are `doubtful`: their clients heard a refusal, so they are removed when the database can be
asked.
"""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.claims.pool import Claims
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres.batch import MessageRows, Status, Submission
from zonerelay.store.postgres.counts import QueueCounter
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.rows import identity

HOT_MESSAGES = 4096
"""Messages whose metadata is kept in memory after acceptance or a read."""


class Submissions:
    """One per store. `messages` and `bodies` hold what was stored or read lately."""

    def __init__(self, keeper: PostgresKeeper, claims: Claims, counter: QueueCounter) -> None:
        self.messages: dict[MessageId, Message] = {}
        self.bodies = BodyCache()
        self.doubtful: dict[int, set[str]] = {}
        self._keeper = keeper
        self._claims = claims
        self._counter = counter
        self._in_flight: dict[Submission, None] = {}
        self._uploading: set[int] = set()

    def take_hold(self, job: Submission) -> None:
        """Keeps these from being handed out until the write is done."""
        job.simple = True
        for key, state in job.changes.items():
            handed = self._claims.handed.get(key)
            if handed is not None:
                job.mine[key] = handed
            elif (pooled := self._claims.zone(key.queue).forget(key)) is not None:
                job.pooled.append(pooled)
            known = self.messages.get(key.message_id)
            if state is None and (known is None or len(known.envelope.recipients) != 1):
                job.simple = False
        self._claims.settling.update(job.changes)

    def arriving(self) -> set[DeliveryKey]:
        """Deliveries that are claimed by the write that stores them, and is under way."""
        return {
            key
            for job in self._in_flight
            for new in (*job.messages, *(report for report, _ in job.reports))
            for key in new.claimed
        }

    def has_upload(self, number: int) -> bool:
        """The body is still arriving, or its end is being written."""
        return number in self._uploading

    def submit(self, job: Submission, *, size: int = 0, lazy: bool = False) -> asyncio.Future[None]:
        """What it means takes effect when it is durable, waited for or not."""
        outcome = job.outcome = asyncio.get_running_loop().create_future()
        self._in_flight[job] = None
        self._uploading.update(number for number, _, _ in job.uploads)
        applied = functools.partial(self._landed, job)
        written = self._keeper.committer.submit([job], size=size, lazy=lazy, applied=applied)
        if written.done() and (error := written.exception()) is not None:
            self._give_up(job, error)
        return outcome

    # --- what became of it

    def _landed(self, job: Submission) -> None:
        """The batch is durable, and the job in it unless it was refused."""
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
            self.forget_message(identity(closed))
        for added in (*job.messages, *(report for report, _ in job.reports)):
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
        if new is None:
            self._counter.move(key.queue, _before(job, key, status), None)
            if key not in job.mine:
                pool.due = 0.0
            return
        self._counter.move(key.queue, _before(job, key, status), new)
        if key not in job.mine:
            pool.due = 0.0
        if not new.held:
            if new.next_attempt > 0:
                pool.due = min(pool.due, new.next_attempt)
            else:
                pool.more = True

    def _land_message(self, new: MessageRows) -> None:
        self._keeper.last_id = max(self._keeper.last_id, new.id)
        self.remember(new.message)
        for delivery in new.deliveries:
            self._counter.move(delivery.queue, None, delivery)
            pool = self._claims.zone(delivery.queue)
            if delivery.key in new.claimed:
                pool.put(delivery)
            elif not delivery.held and delivery.next_attempt > 0:
                pool.due = min(pool.due, delivery.next_attempt)
            elif not delivery.held:
                pool.more = True

    def forget_message(self, message_id: MessageId) -> None:
        self.messages.pop(message_id, None)
        self.bodies.drop(message_id)

    def _let_go(self, job: Submission) -> None:
        """It did not happen."""
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
        for new in job.messages:
            self.doubtful[new.id] = {delivery.queue for delivery in new.deliveries}
        _tell(job, error)

    def _end_uploads(self, job: Submission) -> None:
        """Successful or not: what the database still has of them is dropped in the next round."""
        self._uploading.difference_update(job.dropped, job.ended_uploads())

    def batch_failed(self, error: StoreError) -> None:
        for job in list(self._in_flight):
            self._give_up(job, error)

    def remember(self, message: Message) -> None:
        self.messages[message.id] = message
        if len(self.messages) > HOT_MESSAGES:
            del self.messages[next(iter(self.messages))]

    def clear(self) -> None:
        self.messages.clear()
        self.bodies.clear()


def _before(job: Submission, key: DeliveryKey, status: Status) -> Delivery:
    """The delivery as it was counted: of what counts, the database knows best."""
    known = job.mine.get(key) or job.changes[key]
    if known is None:
        known = Delivery(queue=key.queue, message_id=key.message_id, recipient=key.recipient, created=0.0)
    return replace(known, next_attempt=status.next_attempt, held=status.held)


def _tell(job: Submission, error: BaseException | None) -> None:
    outcome = job.outcome
    if outcome is None or outcome.done():
        return
    if error is None:
        outcome.set_result(None)
        return
    refusal = type(error)(str(error)) if isinstance(error, StoreError) else StoreError(str(error))
    refusal.__cause__ = error
    outcome.set_exception(refusal)
    outcome.exception()  # without a caller the loop must not complain
