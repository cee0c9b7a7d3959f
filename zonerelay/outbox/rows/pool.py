"""Holds this relay's claims in a shared store: the deliveries that it has handed out to its queue, and a
pool for each zone of those that it has claimed and not handed out yet. No I/O: the engine's `claims` module
asks the store.

When the relay dies, its claims end with its lease in the store, and other relays claim the deliveries.

Mail that was accepted here is claimed in the write that stores it, so that handing it out asks no server. A
pool holds at most `POOL_LIMIT` of a zone; the rest stays unclaimed in the store, for a relay that has room.
`more` says that the store may hold fresh deliveries to claim, `due` when its first deferred one is due: only
then is the store asked. Of what memory and store have, the oldest message comes first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.contract import ClaimLostError
from zonerelay.store.leveldb.ready_order import ReadyOrder

POOL_LIMIT = 1000
"""Deliveries of one zone that are kept claimed without being handed out."""

NEVER = float("inf")


class ZonePool:
    """One zone. `more`: the store may hold fresh deliveries that no relay has claimed; `due`: none that is
    deferred comes due before (0.0: not known); `parked`: it may hold some that were passed over.
    """

    def __init__(self) -> None:
        self.more = True
        self.due = 0.0
        self.parked = True
        self.waiting: dict[DeliveryKey, Delivery] = {}
        self._order = ReadyOrder(self._when_of)

    @property
    def has_room(self) -> bool:
        return len(self.waiting) < POOL_LIMIT

    @property
    def has_fresh(self) -> bool:
        return self._order.fresh.first() is not None

    def doubt(self) -> None:
        """Note that anything may have changed in the store."""
        self.more = self.parked = True
        self.due = 0.0

    def hear_of(self, delivery: Delivery) -> None:
        """Add a delivery that the store has now and no relay has claimed."""
        if delivery.held:
            return
        if delivery.next_attempt > 0:
            self.due = min(self.due, delivery.next_attempt)
        else:
            self.more = True

    def put(self, delivery: Delivery) -> None:
        self.waiting[delivery.key] = delivery
        self._order.push(delivery.key, delivery.next_attempt)

    def forget(self, key: DeliveryKey) -> Delivery | None:
        return self.waiting.pop(key, None)

    def clear(self) -> None:
        self.waiting.clear()
        self._order.refill(())

    def take(self, limit: int, skip: Collection[str], now: float) -> tuple[list[Delivery], list[Delivery]]:
        """Return up to `limit` deliveries, fresh and due in turns; and those met of a domain in `skip`."""
        found: list[Delivery] = []
        passed: list[Delivery] = []
        while len(found) < limit and (key := self._order.pop_next(now)) is not None:
            delivery = self.waiting.pop(key)
            (passed if skip and delivery.domain in skip else found).append(delivery)
        return found, passed

    def take_new(
        self, limit: int, since: MessageId, skip: Collection[str]
    ) -> tuple[list[Delivery], list[Delivery]]:
        """Return, like `take`, from the fresh deliveries of messages from `since` on."""
        found: list[Delivery] = []
        passed: list[Delivery] = []
        while len(found) < limit and (key := self._order.fresh.first_since(since)) is not None:
            self._order.fresh.pop(key)
            delivery = self.waiting.pop(key)
            (passed if skip and delivery.domain in skip else found).append(delivery)
        return found, passed

    def next_due(self) -> float:
        """Return the time at which the first deferred delivery at hand is due."""
        first = self._order.first_due()
        return NEVER if first is None else first[0]

    def _when_of(self, key: DeliveryKey) -> float | None:
        known = self.waiting.get(key)
        return None if known is None else known.next_attempt


class Claims:
    """Everything that this relay's session holds, by zone, and what it has lost but still attempts."""

    def __init__(self) -> None:
        self.zones: dict[QueueName, ZonePool] = {}
        self.handed: dict[DeliveryKey, Delivery] = {}
        # Deliveries whose outcome is being written, and those that an operator is changing.
        self.settling: set[DeliveryKey] = set()
        self.changing: set[DeliveryKey] = set()
        # Given back while an operator was changing them.
        self.let_go: dict[DeliveryKey, Delivery] = {}
        # Handed out under a lease that has ended; an attempt may still be under way.
        self.lost: set[DeliveryKey] = set()
        self._lost_messages: dict[MessageId, int] = {}
        self._messages: dict[MessageId, int] = {}

    def zone(self, name: QueueName) -> ZonePool:
        found = self.zones.get(name)
        if found is None:
            found = self.zones[name] = ZonePool()
        return found

    def hand_out(self, deliveries: Iterable[Delivery]) -> None:
        for delivery in deliveries:
            key = delivery.key
            if key not in self.handed:
                _count(self._messages, key.message_id, 1)
            self.handed[key] = delivery

    def drop(self, key: DeliveryKey) -> Delivery | None:
        """Remove a delivery, and return its state, if it was there."""
        if key in self.lost:
            self.lost.discard(key)
            _count(self._lost_messages, key.message_id, -1)
            return None
        delivery = self.handed.pop(key, None)
        if delivery is not None:
            _count(self._messages, key.message_id, -1)
        return delivery

    def release(self, key: DeliveryKey) -> None:
        delivery = self.drop(key)
        if delivery is None or key in self.settling:
            return  # the write that is under way says what becomes of it
        if key in self.changing:
            self.let_go[key] = delivery
        else:
            self.zone(key.queue).put(delivery)

    def lose(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            if self.drop(key) is not None:
                self.lost.add(key)
                _count(self._lost_messages, key.message_id, 1)

    def regain(self, delivery: Delivery) -> bool:
        """Resume a claim that was lost and is still attempted: that attempt counts again."""
        if delivery.key not in self.lost:
            return False
        self.drop(delivery.key)
        self.hand_out((delivery,))
        return True

    def knows(self, key: DeliveryKey) -> bool:
        """Return whether something is being done with it here, or will be."""
        return (
            key in self.handed
            or key in self.settling
            or key in self.changing
            or key in self.lost
            or key in self.zone(key.queue).waiting
        )

    def check(self, message_id: MessageId, *, holds_lease: bool) -> None:
        """Raises ClaimLostError when what was claimed of the message may be another relay's by now."""
        if message_id in self._lost_messages or (not holds_lease and message_id in self._messages):
            raise ClaimLostError(f"message {message_id}: the lease on it was lost")


def _count(counts: dict[MessageId, int], message_id: MessageId, change: int) -> None:
    left = counts.get(message_id, 0) + change
    if left:
        counts[message_id] = left
    else:
        counts.pop(message_id, None)
