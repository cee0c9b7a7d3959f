"""Holds what this relay knows of its own messages in the bucket, and the changes that wait for each of them.

`OwnMessages` has an index entry for each delivery of this relay. The state of a message is in memory while a
task works on it and afterwards as long as there is room; a state that is not in memory is read again. No I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.claims.index import Index
from zonerelay.store.common.claims.pool import Claims
from zonerelay.store.common.write.replies import refuse
from zonerelay.store.contract import Submit
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.objects import Version
from zonerelay.store.s3.records import HeadIntent

OpenDeliveries = Mapping[DeliveryKey, Delivery]
Decide = Callable[[OpenDeliveries], dict[DeliveryKey, Delivery | None]]
"""From the deliveries as they are to those that change, `None` for what leaves."""


def _nothing(_: OpenDeliveries) -> dict[DeliveryKey, Delivery | None]:
    """Nothing changes: the message is only read, if it has to be, and what was decided with it is done."""
    return {}


@dataclass(slots=True, eq=False)
class MessageJob:
    """`keys` is what it may change. `settles`: it ends the claims on them. `reports` and `others` (changes of
    messages of this relay's) are decided together with it.
    """

    keys: Sequence[DeliveryKey]
    decide: Decide = _nothing
    settles: bool = False
    reports: Sequence[Submit] = ()
    others: Mapping[DeliveryKey, Delivery | None] = field(default_factory=dict)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            refuse(self.done, error)
        elif not self.done.done():
            self.done.set_result(None)


HOT_MESSAGES = 10_000
"""Messages whose states stay in memory when no task works on them."""


@dataclass(slots=True, eq=False)
class OwnMessage:
    """One message as it stands in the bucket. `etag` empty: it has to be read; `jobs` are changes that wait
    for the write that is under way (`busy`); `users` counts the tasks that need it to stay.
    """

    id: MessageId
    etag: str = ""
    rev: int = 0
    body: str = ""
    kept: bytes = b""
    message: Message | None = None
    intent: HeadIntent | None = None
    deliveries: dict[DeliveryKey, Delivery] = field(default_factory=dict)
    jobs: list[MessageJob] = field(default_factory=list)
    busy: bool = False
    users: int = 0

    def take(self, version: Version) -> None:
        """Takes in the message as it was read or written. Raises StoreCorruptError."""
        head = version.head
        self.deliveries = spelled.deliveries_of(self.id, head.deliveries)
        self.etag, self.rev, self.body = version.etag, head.rev, head.body
        self.message, self.intent, self.kept = head.message, head.intent, head.kept


class OwnMessages:
    """All messages of this relay; changed only on the event loop."""

    def __init__(self) -> None:
        self.index = Index()
        self.claims = Claims()
        self.bodies = BodyCache()
        self.ids: set[MessageId] = set()
        self.last_id: MessageId | None = None
        # Grows when everything was lost: what was begun before says nothing any more.
        self.epoch = 0
        self._hot: dict[MessageId, OwnMessage] = {}

    def get(self, message_id: MessageId) -> OwnMessage | None:
        return self._hot.get(message_id)

    def message(self, message_id: MessageId) -> Message | None:
        """The metadata of an open message whose state is in memory."""
        stored = self._hot.get(message_id)
        return stored.message if stored is not None and stored.etag and stored.deliveries else None

    def use(self, message_id: MessageId) -> OwnMessage:
        """Keeps the message in memory until `drop`."""
        stored = self._hot.get(message_id)
        if stored is None:
            stored = self._hot[message_id] = OwnMessage(message_id)
        stored.users += 1
        return stored

    def drop(self, stored: OwnMessage) -> None:
        stored.users -= 1
        if not stored.users and not stored.etag:
            self.forget(stored)
        elif len(self._hot) > HOT_MESSAGES:
            self._evict()

    def forget(self, stored: OwnMessage) -> None:
        if self._hot.get(stored.id) is stored:
            del self._hot[stored.id]

    def _evict(self) -> None:
        for stored in [stored for stored in self._hot.values() if not stored.users]:
            if len(self._hot) <= HOT_MESSAGES // 2:
                return
            self.forget(stored)

    # --- what becomes known

    def note_id(self, message_id: MessageId) -> None:
        self.last_id = max(self.last_id or message_id, message_id)

    def show(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        """Takes in a delivery of this relay as the bucket has it."""
        zone = self.index[key.queue]
        if delivery is None:
            zone.remove(key)
            return
        zone.put(key, delivery.created, delivery.next_attempt, held=delivery.held)
        if self.claims.regain(delivery):
            # Lost, found again, and still being attempted here: that attempt counts.
            zone.claim_again(key)

    def take_in(self, message_id: MessageId, version: Version) -> set[QueueName]:
        """Takes in a message that is this relay's now, and returns its zones. Raises StoreCorruptError."""
        stored = self.use(message_id)
        try:
            stored.take(version)
            self.ids.add(message_id)
            self.note_id(message_id)
            for key, delivery in stored.deliveries.items():
                self.show(key, delivery)
            return {key.queue for key in stored.deliveries}
        finally:
            self.drop(stored)

    def lose(self, stored: OwnMessage, more: Iterable[DeliveryKey] = ()) -> list[DeliveryKey]:
        """Forgets a message that is gone or another relay's. Returns the keys that are attempted here."""
        keys = {*stored.deliveries, *more}
        handed = [key for key in keys if key in self.claims.handed]
        for key in keys:
            self.index[key.queue].clear_changes(key)
            self.index[key.queue].remove(key)
        self.leave(stored)
        return handed

    def leave(self, stored: OwnMessage) -> None:
        """Forgets a message that has left."""
        stored.etag = ""
        stored.deliveries = {}
        stored.intent = None
        self.ids.discard(stored.id)
        self.bodies.drop(stored.id)
        self.forget(stored)

    def reset(self) -> list[DeliveryKey]:
        """Forgets everything, because the lease was lost. Returns the keys that are attempted here."""
        handed = list(self.claims.handed)
        self.claims.lose(handed)
        self.index = Index()
        self.ids.clear()
        self._hot.clear()
        self.bodies.clear()
        self.epoch += 1
        return handed
