"""The memory store with indexes: what it looks through the whole queue for, this one finds at once.

It keeps the contract of `zonerelay.store.contract` (a test compares it with `MemoryStore`, verb by verb) and
needs memory for what is queued only. Bodies are whatever was given; the simulation gives all the same one.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from tests.support.memory_store import MemoryStore
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName

_Fresh = list[DeliveryKey]
_Due = list[tuple[float, DeliveryKey]]


class FreshOrder:
    """The fresh deliveries of one queue, the oldest first, or the oldest of the new ones, in two heaps: one
    for messages from the last `since` of `first_since` on, and one for the rest.
    """

    def __init__(self, is_there: Callable[[DeliveryKey], bool]) -> None:
        self._is_there = is_there
        self._since: MessageId | None = None
        self._old: _Fresh = []
        self._new: _Fresh = []

    def push(self, key: DeliveryKey) -> None:
        is_new = self._since is not None and key.message_id >= self._since
        heapq.heappush(self._new if is_new else self._old, key)

    def first(self) -> DeliveryKey | None:
        both = (self._peek(self._old), self._peek(self._new))
        return min((key for key in both if key is not None), default=None)

    def first_since(self, since: MessageId) -> DeliveryKey | None:
        if since != self._since:
            self._since = since
            keys = [*self._old, *self._new]
            self._old = [key for key in keys if key.message_id < since]
            self._new = [key for key in keys if key.message_id >= since]
            heapq.heapify(self._old)
            heapq.heapify(self._new)
        return self._peek(self._new)

    def pop(self, key: DeliveryKey) -> None:
        """Remove the key that `first` or `first_since` has just returned."""
        heapq.heappop(self._new if self._new and self._new[0] == key else self._old)

    def _peek(self, heap: _Fresh) -> DeliveryKey | None:
        while heap:
            if self._is_there(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None


class _Zone:
    """Heaps may hold keys that were claimed, changed or removed meanwhile; the store's tables decide."""

    def __init__(self, is_fresh: Callable[[DeliveryKey], bool]) -> None:
        self.fresh = FreshOrder(is_fresh)
        self.due: _Due = []
        self.parked: dict[str, tuple[_Fresh, _Due]] = {}
        self.turn_of_due = False


class IndexedStore(MemoryStore):
    """`on_finish` is told of each delivery that leaves."""

    def __init__(self, on_finish: Callable[[Delivery], None] = lambda delivery: None) -> None:
        super().__init__()
        self._on_finish = on_finish
        self._open: Counter[MessageId] = Counter()
        self._zones: defaultdict[QueueName, _Zone] = defaultdict(lambda: _Zone(self._is_fresh))

    def __len__(self) -> int:
        return len(self._deliveries)

    @property
    def claimed(self) -> int:
        return len(self._claimed)

    def __contains__(self, key: DeliveryKey) -> bool:
        return key in self._deliveries

    def add(self, message: Message, chunks: list[bytes], deliveries: Iterable[Delivery]) -> None:
        self.check_writable()
        self._messages[message.id] = (message, chunks)
        new = list(deliveries)
        is_next = all(self._zones[each.key.queue].fresh.first() is None for each in new)
        for delivery in new:
            key = delivery.key
            self._deliveries[key] = delivery
            self._open[message.id] += 1
            self._enter(key, delivery)
        self._last_id = max(self._last_id or message.id, message.id)
        self._give(new, is_next)

    def _enter(self, key: DeliveryKey, delivery: Delivery) -> None:
        """It may be claimed, now or when it is due."""
        if delivery.held:
            return
        zone = self._zones[key.queue]
        if delivery.next_attempt > 0:
            heapq.heappush(zone.due, (delivery.next_attempt, key))
        else:
            zone.fresh.push(key)

    # Handing out

    async def claim(
        self,
        queue: QueueName,
        limit: int,
        *,
        now: float,
        skip_domains: Collection[str] = (),
        since: MessageId | None = None,
        domain: str | None = None,
    ) -> list[Delivery]:
        self.check_writable()
        place = self._zones[queue]
        if domain is not None:
            found = self._unpark(place, domain, limit, now)
        elif since is not None:
            found = self._claim_new(place, limit, since, skip_domains)
        else:
            found = self._claim_ready(place, limit, now, skip_domains)
        return sorted(found, key=lambda delivery: delivery.message_id)

    def _claim_ready(
        self, place: _Zone, limit: int, now: float, skip_domains: Collection[str]
    ) -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < limit and (delivery := self._next(place, now)) is not None:
            if delivery.domain in skip_domains:
                self._park(place, delivery)
            else:
                found.append(delivery)
                self._claimed.add(delivery.key)
        for domain in list(place.parked) if len(found) < limit else ():
            if domain not in skip_domains:
                found += self._unpark(place, domain, limit - len(found), now)
        return found

    def _claim_new(
        self, place: _Zone, limit: int, since: MessageId, skip_domains: Collection[str]
    ) -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < limit and (key := place.fresh.first_since(since)) is not None:
            place.fresh.pop(key)
            delivery = self._deliveries[key]
            if delivery.domain in skip_domains:
                self._park(place, delivery)
            else:
                found.append(delivery)
                self._claimed.add(key)
        return found

    def _next(self, place: _Zone, now: float) -> Delivery | None:
        fresh, due = self._first_fresh(place), self._first_due(place.due)
        if due is not None and due.next_attempt > now:
            due = None
        if fresh is None and due is None:
            return None
        if due is not None and (fresh is None or place.turn_of_due):
            heapq.heappop(place.due)
            place.turn_of_due = False
            return due
        assert fresh is not None
        place.fresh.pop(fresh.key)
        place.turn_of_due = True
        return fresh

    def _park(self, place: _Zone, delivery: Delivery) -> None:
        key = delivery.key
        self._passed_over.add(key)
        fresh, due = place.parked.setdefault(delivery.domain, ([], []))
        if delivery.next_attempt > 0:
            heapq.heappush(due, (delivery.next_attempt, key))
        else:
            heapq.heappush(fresh, key)

    def _unpark(self, place: _Zone, domain: str, limit: int, now: float) -> list[Delivery]:
        found: list[Delivery] = []
        fresh, due = place.parked.get(domain, ([], []))
        while len(found) < limit:
            key = self._pop_parked(fresh, due, now)
            if key is None:
                place.parked.pop(domain, None)
                break
            self._passed_over.discard(key)
            self._claimed.add(key)
            found.append(self._deliveries[key])
        return found

    def _pop_parked(self, fresh: _Fresh, due: _Due, now: float) -> DeliveryKey | None:
        while fresh:
            key = heapq.heappop(fresh)
            if key in self._passed_over and self._deliveries[key].next_attempt <= 0:
                return key
        while due and due[0][0] <= now:
            when, key = heapq.heappop(due)
            if key in self._passed_over and self._deliveries[key].next_attempt == when:
                return key
        return None

    def _first_fresh(self, place: _Zone) -> Delivery | None:
        key = place.fresh.first()
        return None if key is None else self._deliveries[key]

    def _is_fresh(self, key: DeliveryKey) -> bool:
        delivery = self._claimable_now(key)
        return delivery is not None and delivery.next_attempt <= 0

    def _first_due(self, heap: _Due) -> Delivery | None:
        while heap:
            delivery = self._claimable_now(heap[0][1])
            if delivery is not None and delivery.next_attempt == heap[0][0]:
                return delivery
            heapq.heappop(heap)
        return None

    def _claimable_now(self, key: DeliveryKey) -> Delivery | None:
        delivery = self._deliveries.get(key)
        if delivery is None or delivery.held or key in self._claimed or key in self._passed_over:
            return None
        return delivery

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            if key in self._claimed:
                self._claimed.discard(key)
                delivery = self._deliveries.get(key)
                if delivery is not None:
                    self._enter(key, delivery)

    def forget_claims(self) -> None:
        passed_over = list(self._passed_over)
        self._passed_over.clear()
        for key in passed_over:
            self._enter(key, self._deliveries[key])
        self.release(list(self._claimed))

    async def next_due(self, queue: QueueName) -> float | None:
        self.check_writable()
        due = self._first_due(self._zones[queue].due)
        return None if due is None else due.next_attempt

    def oldest_ready(self, queue: QueueName, now: float) -> float | None:
        """Since when the zone's first unclaimed delivery that is due waits."""
        place = self._zones[queue]
        fresh, due = self._first_fresh(place), self._first_due(place.due)
        since = [] if fresh is None else [fresh.created]
        if due is not None and due.next_attempt <= now:
            since.append(due.next_attempt)
        return min(since, default=None)

    # Settling

    def _change(self, key: DeliveryKey, new: Delivery | None) -> None:
        if key not in self._deliveries:
            return
        self._passed_over.discard(key)
        if new is not None:
            self._deliveries[key] = new
            if key not in self._claimed:
                self._enter(key, new)
            return
        delivery = self._deliveries.pop(key)
        self._claimed.discard(key)
        self._on_finish(delivery)
        self._open[key.message_id] -= 1
        if not self._open[key.message_id]:
            del self._open[key.message_id]
            del self._messages[key.message_id]
