"""Writes the changes of messages: one conditional write for each message, however many changes wait for it.

A decision over several messages is written into the object of the first of them: the write that holds the new
state of that message also holds an intent with everything else. From then on the decision is made. The intent
is carried out at once, or later by any relay that finds it. Carrying it out twice changes nothing: a message
is made only if it is not there, and a delivery is changed only if it has not been attempted since.

A write whose condition fails is looked into. When the object is this relay's own earlier write, whose answer
was lost, the write goes on from there. When it is another relay's, the message is lost: the changes are
dropped and `lost` is told. After a write without an answer the message is read before it is written again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.process.tasks import Tasks
from zonerelay.store.common import records
from zonerelay.store.common.body.writer import split
from zonerelay.store.contract import StoreCorruptError, StoreError, Submit
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import ConflictError, MissingError, UnsureError
from zonerelay.store.s3.keeper import S3Keeper
from zonerelay.store.s3.objects import Objects
from zonerelay.store.s3.own_messages import MessageJob, OpenDeliveries, OwnMessage, OwnMessages
from zonerelay.store.s3.records import INLINE_LIMIT, Head, HeadIntent, Report, Step
from zonerelay.store.surroundings import Surroundings

RACES = 8
"""How often a write is tried again because another writer was faster."""

_log = logging.getLogger("zonerelay.store")


class ObjectWriter:
    """One per store."""

    def __init__(self, objects: Objects, mine: OwnMessages, keeper: S3Keeper, around: Surroundings) -> None:
        self._objects = objects
        self._mine = mine
        self._nodes = keeper.nodes
        self._check = keeper.check_usable
        self._lost = around.on_lost
        self._now = around.clock.monotonic
        self._observe = around.observe_commit
        self.litter: set[str] = set()
        """Bodies that no message names any more and that could not be removed yet."""
        self.unfinished: set[MessageId] = set()
        """Messages with an intent that is not carried out to its end."""
        self._doubtful: set[MessageId] = set()
        self._made: set[MessageId] = set()
        self._tasks = Tasks()
        self.drain = self._tasks.drain

    def submit(self, message_id: MessageId, job: MessageJob) -> asyncio.Future[None]:
        """Queues a job, which runs to its end with or without a caller that waits. The future is done when it
        is durable.
        """
        for key in job.keys:
            self._mine.index[key.queue].begin_change(key)
        stored = self._mine.use(message_id)
        stored.jobs.append(job)
        if not stored.busy:
            stored.busy = True
            self._tasks.start(self._work(stored))
        else:
            self._mine.drop(stored)
        return job.done

    async def _work(self, stored: OwnMessage) -> None:
        try:
            while stored.jobs:
                jobs, stored.jobs = stored.jobs, []
                epoch = self._mine.epoch
                try:
                    await self._write(stored, jobs)
                except Exception as error:  # noqa: BLE001 - every caller that waits must hear of it
                    if epoch == self._mine.epoch:
                        self._give_up(jobs)
                    for job in jobs:
                        job.end(error)
        finally:
            stored.busy = False
            self._mine.drop(stored)

    def _give_up(self, jobs: Iterable[MessageJob]) -> None:
        """Leaves everything as it was, because the write failed or its fate is unknown."""
        for job in jobs:
            for key in job.keys:
                zone = self._mine.index[key.queue]
                zone.end_change(key)
                entry = zone.entries.get(key)
                if entry is not None:
                    zone.place(entry)

    # --- one write

    async def _write(self, stored: OwnMessage, jobs: list[MessageJob]) -> None:
        epoch = self._mine.epoch
        for _ in range(RACES):
            self._check()
            if not await self.refresh(stored):
                await self._without(stored, jobs)
                return
            if stored.intent is not None:
                await self.finish(stored)
                continue
            try:
                if await self._write_once(stored, jobs, epoch):
                    return
            except (ConflictError, MissingError):
                stored.etag = ""
        raise StoreError(f"message {stored.id}: others are always faster")

    async def refresh(self, stored: OwnMessage) -> bool:
        """Reads the message if it is not in memory. Returns false when it is gone, or another relay's."""
        if stored.etag:
            return True
        version = await self._objects.find(stored.id)
        if version is None:
            return False
        if not self._nodes.alone and version.head.owner != self._nodes.session:
            return False
        stored.take(version)
        return True

    async def _write_once(self, stored: OwnMessage, jobs: list[MessageJob], epoch: int) -> bool:
        steps, left = _plan(stored.deliveries, jobs)
        reports = [r for job in jobs for r in job.reports if r.message.id not in self._made]
        others = {key: new for job in jobs for key, new in job.others.items()}
        if steps or reports or others:
            intent = await self.word_intent(reports, others) if reports or others else None
            reported = [report.message.id for report in reports]
            try:
                await self._put(stored, left, intent)
            except UnsureError:
                stored.etag = ""
                self._doubtful.update(reported)
                raise
            if epoch != self._mine.epoch:
                return True  # another relay owns it now; what was written is true
            if intent is not None:
                await self._finish_soon(stored)
            self._made.difference_update(reported)
        self._apply(stored, jobs, steps)
        return True

    async def _put(
        self, stored: OwnMessage, left: dict[DeliveryKey, Delivery], intent: HeadIntent | None
    ) -> None:
        head = Head(
            format=spelled.FORMAT,
            owner=self._nodes.session,
            rev=stored.rev + 1,
            message=stored.message,
            deliveries=spelled.rows(left.values()),
            body=stored.body,
            intent=intent,
            kept=stored.kept,
        )
        started = self._now()
        if head.is_over:
            await self._objects.remove(stored.id, head, etag=stored.etag)
            stored.etag = ""
            if head.body:
                self.throw_away(head.body)
        else:
            version = await self._objects.replace(stored.id, head, await self.tail(stored), etag=stored.etag)
            stored.etag, stored.rev = version.etag, head.rev
        self._observe(self._now() - started)
        stored.deliveries, stored.intent = left, intent

    async def tail(self, stored: OwnMessage) -> bytes:
        """Returns the body behind the head. Raises ConflictError when that is another's by now."""
        message = stored.message
        if message is None or stored.body or not message.size:
            return b""
        known = self._mine.bodies.get(stored.id, message.chunks)
        if known is not None:
            return b"".join(known)
        whole = await self._objects.read_whole(stored.id)
        if whole.etag != stored.etag:
            raise ConflictError(f"message {stored.id} has changed")
        if whole.tail is None or len(whole.tail) != message.size:
            raise StoreCorruptError(f"message {stored.id}: its body is cut off")
        return whole.tail

    # --- intents

    async def _finish_soon(self, stored: OwnMessage) -> None:
        """Carries out the intent, or leaves that for later: the decision is durable already."""
        try:
            await self.finish(stored)
        except StoreError as error:
            _log.warning("message %s: what was decided with it is done later: %s", stored.id, error)
            self.unfinished.add(stored.id)

    async def finish_new(self, message_id: MessageId) -> None:
        """Carries out the intent that a message was stored with, or leaves that for later."""
        try:
            await self.submit(message_id, MessageJob(()))
        except StoreError as error:
            _log.warning("message %s: what was stored with it is done later: %s", message_id, error)
            self.unfinished.add(message_id)

    async def finish(self, stored: OwnMessage) -> None:
        """Carries out the intent and forgets it. Raises StoreError; the intent is still there then."""
        intent = stored.intent
        if intent is None:
            return
        await self._carry_out(intent)
        for report in intent.reports:
            if report.message_id in self._doubtful:
                self._made.add(report.message_id)
                self._doubtful.discard(report.message_id)
        try:
            await self._put(stored, dict(stored.deliveries), None)
        except (ConflictError, MissingError, UnsureError):
            stored.etag = ""
            raise
        self.unfinished.discard(stored.id)

    def finish_left(self) -> None:
        """Tries once more to carry out the intents that are left."""
        for message_id in list(self.unfinished):
            self.submit(message_id, MessageJob(()))

    def submit_apart(self, reports: Sequence[Submit]) -> asyncio.Future[None]:
        """Stores messages that belong to no other change. The future raises StoreError."""
        return self._tasks.start(self._make_all(reports))

    async def word_intent(
        self, reports: Sequence[Submit], others: Mapping[DeliveryKey, Delivery | None]
    ) -> HeadIntent:
        """Returns the intent, and stores the large bodies in it now. Raises StoreError."""
        return HeadIntent(
            reports=tuple([await self._word_report(report) for report in reports]),
            steps=tuple(self._word_step(key, new) for key, new in others.items()),
        )

    async def _word_report(self, report: Submit) -> Report:
        found = spelled.rows({d.key: d for d in report.deliveries}.values())
        message = msgspec.Raw(records.encode_message(report.message))
        if len(report.body) <= INLINE_LIMIT:
            return Report(message=message, deliveries=found, inline=report.body)
        key = self._objects.keys.body(report.message.id, self._nodes.session)
        await self._objects.bucket.put(key, report.body)
        return Report(message=message, deliveries=found, body=key)

    def _word_step(self, key: DeliveryKey, new: Delivery | None) -> Step:
        known = self._mine.claims.handed.get(key)
        return Step(
            key.message_id,
            records.field(key.queue.text).decode("ascii"),
            spelled.recipient_field(key),
            known.attempts if known is not None else 0,
            spelled.GONE if new is None else msgspec.Raw(records.encode_delivery(new)),
        )

    async def _carry_out(self, intent: HeadIntent) -> None:
        """Raises StoreError; then it is to be done again."""
        for report in intent.reports:
            await self._make(report)
        by_message: dict[MessageId, list[Step]] = {}
        for step in intent.steps:
            by_message.setdefault(MessageId(step.message_id), []).append(step)
        for message_id, steps in by_message.items():
            await self._take_steps(message_id, steps)

    async def _make_all(self, reports: Sequence[Submit]) -> None:
        """Makes messages that belong to no other change. Raises StoreError."""
        for report in reports:
            await self._make(await self._word_report(report))

    async def _make(self, report: Report) -> None:
        message_id = report.message_id
        if message_id in self._mine.ids:
            return
        try:
            version = await self._objects.create(message_id, report.head(self._nodes.session), report.inline)
        except ConflictError:
            found = await self._objects.find(message_id)
            if found is None or found.head.owner != self._nodes.session:
                return
            version = found
        if not report.body:
            self._mine.bodies.extend(message_id, 1, split(report.inline))
        self._mine.take_in(message_id, version)

    async def _take_steps(self, message_id: MessageId, steps: Sequence[Step]) -> None:
        wanted = {spelled.key_of(step.message_id, step): step for step in steps}

        def decide(state: OpenDeliveries) -> dict[DeliveryKey, Delivery | None]:
            return {
                key: None if step.record == spelled.GONE else records.decode_record(key, bytes(step.record))
                for key, step in wanted.items()
                if key in state and state[key].attempts == step.attempts
            }

        if message_id in self._mine.ids:
            await self.submit(message_id, MessageJob(list(wanted), decide, settles=True))
            return
        for _ in range(RACES):
            try:
                version = await self._objects.read_whole(message_id)
            except MissingError:
                return
            state = spelled.deliveries_of(message_id, version.head.deliveries)
            changed = decide(state)
            if not changed:
                return
            left = [d for key, d in {**state, **changed}.items() if d is not None]
            head = msgspec.structs.replace(
                version.head, rev=version.head.rev + 1, deliveries=spelled.rows(left)
            )
            try:
                if head.is_over:
                    await self._objects.remove(message_id, head, etag=version.etag)
                else:
                    await self._objects.replace(message_id, head, version.tail or b"", etag=version.etag)
            except (ConflictError, MissingError):
                continue
            return
        raise StoreError(f"message {message_id}: others are always faster")

    # --- what became of it

    def _apply(
        self, stored: OwnMessage, jobs: Iterable[MessageJob], steps: dict[DeliveryKey, Delivery | None]
    ) -> None:
        mine = self._mine
        for job in jobs:
            for key in job.keys:
                if job.settles:
                    mine.claims.drop(key)
                    mine.index[key.queue].drop_claim(key)
                mine.index[key.queue].end_change(key)
            for key in job.keys:
                # Also what stays as it was: a claim of it may have ended.
                mine.show(key, stored.deliveries.get(key))
        for key in steps:
            mine.show(key, stored.deliveries.get(key))
            if stored.deliveries.get(key) is None:
                mine.claims.drop(key)
        if not stored.deliveries and stored.intent is None:
            mine.leave(stored)
        for job in jobs:
            job.end()

    async def _without(self, stored: OwnMessage, jobs: list[MessageJob]) -> None:
        """Ends the jobs of a message that is gone, or another relay's: nothing of it changes any more."""
        mine = self._mine
        settled = {key for job in jobs if job.settles for key in job.keys}
        was_mine = stored.id in mine.ids
        # An operator has dropped it here: what is to be said about that is said all the same.
        reports = [] if was_mine else [report for job in jobs for report in job.reports]
        handed = set(mine.lose(stored, [key for job in jobs for key in job.keys])) - settled
        for key in settled:
            mine.claims.drop(key)
        if handed:
            mine.claims.lose(handed)
            self._lost(handed)
        if was_mine and settled:
            _log.warning("message %s was settled after its claim was lost, or is gone", stored.id)
        self.unfinished.discard(stored.id)
        await self._make_all(reports)
        for job in jobs:
            job.end(StoreError(APART) if job.others else None)

    def throw_away(self, key: str) -> None:
        """Removes a body that no message names any more."""
        self.litter.add(key)
        self._tasks.start(self._remove(key))

    async def _remove(self, key: str) -> None:
        try:
            await self._objects.bucket.delete(key)
        except StoreError as error:
            _log.warning("a body that is not needed any more is removed later: %s", error)
        else:
            self.litter.discard(key)

    async def clean(self) -> None:
        """Removes the bodies that could not be removed before. Raises StoreError."""
        for key in list(self.litter):
            await self._objects.bucket.delete(key)
            self.litter.discard(key)


APART = "some claims were lost: what belongs together must be settled by itself"


def _plan(
    deliveries: dict[DeliveryKey, Delivery], jobs: Iterable[MessageJob]
) -> tuple[dict[DeliveryKey, Delivery | None], dict[DeliveryKey, Delivery]]:
    """Returns the changes, and the deliveries that are left."""
    left = dict(deliveries)
    steps: dict[DeliveryKey, Delivery | None] = {}
    for job in jobs:
        for key, new in job.decide(left).items():
            if left.get(key) == new:
                continue
            steps[key] = new
            if new is None:
                del left[key]
            else:
                left[key] = new
    return steps, left
