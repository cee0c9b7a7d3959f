"""What an intent says: worded before the write that decides, carried out after it, as often as need be.

Carrying one out twice changes nothing: a message that it makes is made only if it is not there, and a
delivery is changed only if nobody has tried it since.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.body_chunks import split
from zonerelay.store.contract import StoreError, Submit
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.client import ConflictError, MissingError
from zonerelay.store.s3.objects import Objects
from zonerelay.store.s3.records import INLINE_LIMIT, HeadIntent, Report, Step
from zonerelay.store.s3.states import OwnMessages
from zonerelay.store.s3.work import MessageJob, OpenDeliveries

RACES = 8


class Intents:
    """One per store. `session` is whose the messages are that are made; `change` changes one of ours."""

    def __init__(
        self,
        objects: Objects,
        mine: OwnMessages,
        session: Callable[[], str],
        change: Callable[[MessageId, MessageJob], asyncio.Future[None]],
    ) -> None:
        self._objects = objects
        self._mine = mine
        self._session = session
        self._change = change

    async def word(
        self, reports: Sequence[Submit], others: Mapping[DeliveryKey, Delivery | None]
    ) -> HeadIntent:
        """Large bodies are stored now. Raises StoreError."""
        return HeadIntent(
            reports=tuple([await self._word_report(report) for report in reports]),
            steps=tuple(self._word_step(key, new) for key, new in others.items()),
        )

    async def _word_report(self, report: Submit) -> Report:
        found = spelled.rows({d.key: d for d in report.deliveries}.values())
        message = msgspec.Raw(records.encode_message(report.message))
        if len(report.body) <= INLINE_LIMIT:
            return Report(message=message, deliveries=found, inline=report.body)
        key = self._objects.keys.body(report.message.id, self._session())
        await self._objects.bucket.put(key, report.body)
        return Report(message=message, deliveries=found, body=key)

    def _word_step(self, key: DeliveryKey, new: Delivery | None) -> Step:
        known = self._mine.claims.handed.get(key)
        return Step(
            key.message_id,
            records.field(key.queue).decode("ascii"),
            spelled.recipient_field(key),
            known.attempts if known is not None else 0,
            None if new is None else msgspec.Raw(records.encode_delivery(new)),
        )

    # --- doing it

    async def carry_out(self, intent: HeadIntent) -> None:
        """Raises StoreError; then it is to be done again."""
        for report in intent.reports:
            await self._make(report)
        by_message: dict[MessageId, list[Step]] = {}
        for step in intent.steps:
            by_message.setdefault(MessageId(step.message_id), []).append(step)
        for message_id, steps in by_message.items():
            await self._take_steps(message_id, steps)

    async def make(self, reports: Sequence[Submit]) -> None:
        """Messages by themselves. Raises StoreError."""
        for report in reports:
            await self._make(await self._word_report(report))

    async def _make(self, report: Report) -> None:
        message_id = report.message_id
        if message_id in self._mine.ids:
            return
        try:
            version = await self._objects.create(message_id, report.head(self._session()), report.inline)
        except ConflictError:
            found = await self._objects.find(message_id)
            if found is None or found.head.owner != self._session():
                return
            version = found
        if not report.body:
            self._mine.bodies.extend(message_id, 1, split(report.inline))
        self._mine.take_in(message_id, version)

    async def _take_steps(self, message_id: MessageId, steps: Sequence[Step]) -> None:
        wanted = {spelled.key_of(step.message_id, step): step for step in steps}

        def decide(state: OpenDeliveries) -> dict[DeliveryKey, Delivery | None]:
            return {
                key: None if step.record is None else records.decode_record(key, bytes(step.record))
                for key, step in wanted.items()
                if key in state and state[key].attempts == step.attempts
            }

        if message_id in self._mine.ids:
            await self._change(message_id, MessageJob(list(wanted), decide, settles=True))
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
