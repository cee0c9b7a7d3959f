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
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.common.claims.index import Index
from zonerelay.store.common.claims.pool import Claims
from zonerelay.store.contract import StoreError, Submit
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.objects import Version
from zonerelay.store.s3.records import HeadIntent

OpenDeliveries = Mapping[DeliveryKey, Delivery]
Decide = Callable[[OpenDeliveries], dict[DeliveryKey, Delivery | None]]
"""From the deliveries as they are to those that change, `None` for what leaves."""


@dataclass(slots=True, eq=False)
class MessageJob:
    """`keys` is what it may change. `settles`: it ends the claims on them. `reports` and `others` (changes of
    messages of this relay's) are decided together with it.
    """

    keys: Sequence[DeliveryKey]
    decide: Decide
    settles: bool = False
    reports: Sequence[Submit] = ()
    others: Mapping[DeliveryKey, Delivery | None] = field(default_factory=dict)
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: BaseException | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
            return
        refusal = type(error)(str(error)) if isinstance(error, StoreError) else StoreError(repr(error))
        refusal.__cause__ = error
        self.done.set_exception(refusal)
        self.done.exception()  # without a caller the loop must not complain


HOT_MESSAGES = 10_000
"""Messages whose states stay in memory when no task works on them."""


class OwnMessage:
    """One message as it stands in the bucket. `etag` empty: it has to be read; `jobs` are changes that wait
    for the write that is under way (`busy`); `users` is who needs it to stay.
    """

    __slots__ = (
        "body",
        "busy",
        "deliveries",
        "etag",
        "id",
        "intent",
        "jobs",
        "kept",
        "message",
        "rev",
        "users",
    )

    def __init__(self, message_id: MessageId) -> None:
        self.id = message_id
        self.etag = ""
        self.rev = 0
        self.body = ""
        self.kept = b""
        self.message: Message | None = None
        self.intent: HeadIntent | None = None
        self.deliveries: dict[DeliveryKey, Delivery] = {}
        self.jobs: list[MessageJob] = []
        self.busy = False
        self.users = 0

    def take(self, version: Version) -> None:
        """This is what it says now. Raises StoreCorruptError."""
        head = version.head
        self.deliveries = spelled.deliveries_of(self.id, head.deliveries)
        self.etag, self.rev, self.body = version.etag, head.rev, head.body
        self.message, self.intent, self.kept = head.message, head.intent, head.kept


class OwnMessages:
    """Everything of this relay's: changed only on the event loop."""

    def __init__(self) -> None:
        self.index = Index()
        self.claims = Claims()
        self.bodies = BodyCache()
        self.ids: set[MessageId] = set()
        self.last_id: MessageId | None = None
        # Grows when everything was lost: what was begun before says nothing any more.
        self.epoch = 0
        self._hot: dict[MessageId, OwnMessage] = {}
        self._count = 0

    def get(self, message_id: MessageId) -> OwnMessage | None:
        return self._hot.get(message_id)

    def use(self, message_id: MessageId) -> OwnMessage:
        """It stays until `drop`."""
        stored = self._hot.get(message_id)
        if stored is None:
            stored = self._hot[message_id] = OwnMessage(message_id)
            self._count += 1
        stored.users += 1
        return stored

    def drop(self, stored: OwnMessage) -> None:
        stored.users -= 1
        if not stored.users and not stored.etag:
            self.forget(stored)
        elif self._count > HOT_MESSAGES:
            self._evict()

    def forget(self, stored: OwnMessage) -> None:
        if self._hot.get(stored.id) is stored:
            del self._hot[stored.id]
            self._count -= 1

    def _evict(self) -> None:
        for stored in [stored for stored in self._hot.values() if not stored.users]:
            if self._count <= HOT_MESSAGES // 2:
                return
            self.forget(stored)

    # --- what becomes known

    def note_id(self, message_id: MessageId) -> None:
        self.last_id = max(self.last_id or message_id, message_id)

    def show(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        """This is what the bucket says of one of ours."""
        zone = self.index[key.queue]
        if delivery is None:
            zone.remove(key)
            return
        zone.put(key, delivery.created, delivery.next_attempt, held=delivery.held)
        if self.claims.regain(delivery):
            # Lost, found again, and still being attempted here: that attempt counts.
            zone.claim_again(key)

    def take_in(self, message_id: MessageId, version: Version) -> set[str]:
        """A message is ours; its zones. Raises StoreCorruptError."""
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
        """The message is gone, or another's; the keys that are being attempted here."""
        keys = {*stored.deliveries, *more}
        handed = [key for key in keys if key in self.claims.handed]
        for key in keys:
            self.index[key.queue].clear_changes(key)
            self.index[key.queue].remove(key)
        self.leave(stored)
        return handed

    def leave(self, stored: OwnMessage) -> None:
        """It is over with this message."""
        stored.etag = ""
        stored.deliveries = {}
        stored.intent = None
        self.ids.discard(stored.id)
        self.bodies.drop(stored.id)
        self.forget(stored)

    def reset(self) -> list[DeliveryKey]:
        """The lease was lost, and with it everything; what is being attempted."""
        handed = list(self.claims.handed)
        self.claims.lose(handed)
        self.index = Index()
        self.ids.clear()
        self._hot.clear()
        self._count = 0
        self.bodies.clear()
        self.epoch += 1
        return handed
