"""Hands out the deliveries of a bucket's queue, settles them, and carries out what operators change.

A claim is a mark in the memory of the relay that owns the message: handing out writes nothing. A state that
is not in memory is read before it is handed out, in the turn of its message's changes, so that it is not
older than a write under way. Each outcome and each operator's change is a job for its message's writer.

A settle is cut into groups. A report and the outcomes that it is about are one group: all of it is stored or
none. Outcomes of one message share a write. Outcomes of unrelated messages are stored each by itself: after
a crash, some of them may have to be found out again, as after any settle that was not answered. An outcome of
a delivery that was lost with the lease is dropped, because another relay decides about that delivery now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.body.writer import check_own_message
from zonerelay.store.common.claims.index_claims import IndexClaims
from zonerelay.store.common.write.batches import BatchedUpdate, ChangeOne, changed
from zonerelay.store.contract import Change, Finish, StoreError, Submit
from zonerelay.store.s3.adopt import Walks
from zonerelay.store.s3.keeper import S3Keeper
from zonerelay.store.s3.own_messages import Decide, MessageJob, OpenDeliveries, OwnMessage, OwnMessages
from zonerelay.store.s3.writer import APART, ObjectWriter


class S3Claims(IndexClaims[OwnMessage], BatchedUpdate):
    """The claims of one relay, from handing out to settling."""

    def __init__(self, mine: OwnMessages, writer: ObjectWriter, keeper: S3Keeper, walks: Walks) -> None:
        super().__init__(lambda: mine.index, keeper.check_usable, self._use, self._unuse)
        self._own = mine
        self._writer = writer
        self._keeper = keeper
        self._walks = walks

    async def _use(self, ids: Collection[MessageId]) -> dict[MessageId, OwnMessage]:
        mine, epoch = self._own, self._own.epoch
        held = {message_id: mine.use(message_id) for message_id in ids}
        try:
            unknown = [stored.id for stored in held.values() if not stored.etag]
            if unknown:
                await asyncio.gather(*(self._writer.submit(each, MessageJob(())) for each in unknown))
            if epoch != mine.epoch:
                raise StoreError("the lease on the queue was lost meanwhile")
        except BaseException:
            self._unuse(held.values())
            raise
        return held

    def _unuse(self, held: Iterable[OwnMessage]) -> None:
        for stored in held:
            self._own.drop(stored)

    def _show(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        self._own.show(key, delivery)

    def _handed_out(self, found: Collection[Delivery]) -> None:
        self._own.claims.hand_out(found)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._own.claims.drop(key)
        super().release(keys)

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        del lazy  # what waits for the same message shares its write anyway
        self._keeper.check_usable()
        for change in changes:
            if isinstance(change, Submit):
                check_own_message(change)
        groups = [group for group in groups_of(changes) if self._is_ours(group)]
        written = [self._submit(group) for group in groups]
        await _all_of(written)

    def _is_ours(self, group: Group) -> bool:
        """Without what was lost: what became of our attempt is no longer ours to tell."""
        lost = [key for key in group.changes if key in self._own.claims.lost]
        if lost and len(lost) < len(group.changes) and group.reports:
            for key in lost:
                self._own.claims.drop(key)
            raise StoreError(APART)
        for key in lost:
            self._own.claims.drop(key)
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

    async def _update_batch(self, keys: Sequence[DeliveryKey], change: ChangeOne) -> int:
        self._keeper.check_usable()
        by_message: dict[MessageId, list[DeliveryKey]] = {}
        for key in keys:
            by_message.setdefault(key.message_id, []).append(key)
        foreign = [each for each in by_message if each not in self._own.ids]
        if foreign:
            await self._walks.look_at(foreign)  # what belonged to no relay is ours from here on
        existed: dict[DeliveryKey, bool] = {}
        jobs = [
            (message_id, MessageJob(some, _changer(some, change, existed)))
            for message_id, some in by_message.items()
            if message_id in self._own.ids
        ]
        await _all_of([self._writer.submit(message_id, job) for message_id, job in jobs])
        return sum(existed.values())


def _changer(keys: Sequence[DeliveryKey], change: ChangeOne, existed: dict[DeliveryKey, bool]) -> Decide:
    def decide(state: OpenDeliveries) -> dict[DeliveryKey, Delivery | None]:
        existed.update((key, key in state) for key in keys)
        decided: dict[DeliveryKey, Delivery | None] = {}
        for key in keys:
            if key in state:
                new = changed(state[key], change)
                decided[key] = None
                decided[key if new is None else new.key] = new
        return decided

    return decide


async def _all_of(written: Sequence[asyncio.Future[None]]) -> None:
    """Waits for all of them, and raises the first error."""
    for outcome in await asyncio.gather(*map(asyncio.shield, written), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


@dataclass(slots=True)
class Group:
    """Changes that belong together, by message, the smallest id first: it leads."""

    changes: dict[DeliveryKey, Delivery | None] = field(default_factory=dict)
    reports: list[Submit] = field(default_factory=list)

    @property
    def ids(self) -> list[MessageId]:
        return sorted({key.message_id for key in self.changes})

    def of(self, message_id: MessageId) -> dict[DeliveryKey, Delivery | None]:
        return {key: new for key, new in self.changes.items() if key.message_id == message_id}

    def others(self, message_id: MessageId) -> dict[DeliveryKey, Delivery | None]:
        return {key: new for key, new in self.changes.items() if key.message_id != message_id}


def to_decide(wanted: Mapping[DeliveryKey, Delivery | None]) -> Decide:
    """Returns the decision for wanted changes; it leaves alone deliveries that no longer exist."""
    return lambda state: {key: new for key, new in wanted.items() if key in state}


def groups_of(changes: Sequence[Change]) -> list[Group]:
    wanted: dict[DeliveryKey, Delivery | None] = {}
    for change in changes:
        if isinstance(change, Submit):
            continue
        key = change.delivery.key
        if isinstance(change, Finish):
            wanted[key] = None
        elif key not in wanted or wanted[key] is not None:  # it has left already
            wanted[key] = change.delivery
    found: dict[MessageId, Group] = {}
    for key, new in wanted.items():
        found.setdefault(key.message_id, Group()).changes[key] = new
    apart: list[Group] = []
    for change in changes:
        if isinstance(change, Submit):
            ids = {key.message_id for key in change.about} & found.keys() if change.about else found.keys()
            apart += _join(found, list(ids), change)
    return _distinct([*found.values(), *apart])


def _join(found: dict[MessageId, Group], ids: Iterable[MessageId], report: Submit) -> list[Group]:
    """Makes one group of these; a report about none of them is a group by itself."""
    joined = Group(reports=[report])
    members = _distinct(found[each] for each in ids)
    if not members:
        return [joined]
    for group in members:
        joined.changes |= group.changes
        joined.reports += group.reports
    for each in joined.ids:
        found[each] = joined
    return []


def _distinct(groups: Iterable[Group]) -> list[Group]:
    return list({id(group): group for group in groups}.values())
