"""What becomes of deliveries: outcomes, and what operators change, each as a job for its message's writer.

Outcomes of one message share a write; what a report is about is decided in one write with it. An outcome of
what was lost with the lease is dropped: what became of that attempt is no longer ours to tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.batches import in_batches
from zonerelay.store.common.body_chunks import check_own_message
from zonerelay.store.contract import Change, StoreError, Submit
from zonerelay.store.s3.adopt import Walks
from zonerelay.store.s3.keeper import S3Keeper
from zonerelay.store.s3.states import OwnMessages
from zonerelay.store.s3.work import Group, MessageJob, OpenDeliveries, groups_of, to_decide
from zonerelay.store.s3.writer import APART, ObjectWriter

UPDATE_BATCH = 256


class Settling:
    """One per store."""

    def __init__(self, mine: OwnMessages, writer: ObjectWriter, keeper: S3Keeper, walks: Walks) -> None:
        self._mine = mine
        self._writer = writer
        self._keeper = keeper
        self._walks = walks

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        del lazy  # what waits for the same message shares its write anyway
        self._keeper.check_usable()
        for change in changes:
            if isinstance(change, Submit):
                check_own_message(change)
        groups = [group for group in groups_of(changes) if self._is_ours(group)]
        written = [self._submit(group) for group in groups]
        if len(written) == 1:
            await asyncio.shield(written[0])
            return
        for outcome in await asyncio.gather(*map(asyncio.shield, written), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _is_ours(self, group: Group) -> bool:
        """Without what was lost: what became of our attempt is no longer ours to tell."""
        lost = [key for key in group.changes if key in self._mine.claims.lost]
        if lost and len(lost) < len(group.changes) and group.reports:
            for key in lost:
                self._mine.claims.drop(key)
            raise StoreError(APART)
        for key in lost:
            self._mine.claims.drop(key)
            del group.changes[key]
        return bool(group.changes) or not lost

    def _submit(self, group: Group) -> asyncio.Future[None]:
        if not group.changes:
            return self._writer.submit_apart(group.reports)
        leader = group.ids[0]
        wanted = group.of(leader)
        job = MessageJob(
            list(wanted),
            to_decide(wanted),
            settles=True,
            reports=group.reports,
            others=group.others(leader),
        )
        return self._writer.submit(leader, job)

    # --- operators

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
        existed = 0
        for batch in in_batches(keys, UPDATE_BATCH):
            existed += await self._update(batch, change)
        return existed

    async def _update(
        self, keys: Sequence[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> int:
        self._keeper.check_usable()
        by_message: dict[MessageId, list[DeliveryKey]] = {}
        for key in keys:
            by_message.setdefault(key.message_id, []).append(key)
        foreign = [each for each in by_message if each not in self._mine.ids]
        if foreign:
            await self._walks.look_at(foreign)  # nobody's is ours from here on
        existed: dict[DeliveryKey, bool] = {}
        jobs = [
            (message_id, MessageJob(some, _changer(some, change, existed)))
            for message_id, some in by_message.items()
            if message_id in self._mine.ids
        ]
        written = [self._writer.submit(message_id, job) for message_id, job in jobs]
        for outcome in await asyncio.gather(*map(asyncio.shield, written), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        return sum(existed.values())


def _changer(
    keys: Sequence[DeliveryKey],
    change: Callable[[Delivery], Delivery | None],
    existed: dict[DeliveryKey, bool],
) -> Callable[[OpenDeliveries], dict[DeliveryKey, Delivery | None]]:
    def decide(state: OpenDeliveries) -> dict[DeliveryKey, Delivery | None]:
        found: dict[DeliveryKey, Delivery | None] = {}
        for key in keys:
            existed[key] = key in state
            if key in state:
                new = found[key] = change(state[key])
                if new is not None and new.key != key:
                    raise StoreError("a change may not turn a delivery into another one")
        return found

    return decide
