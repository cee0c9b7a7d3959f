"""The memory store with indexes: what it looks through the whole queue for, this one finds at once.

It keeps the contract of `zonerelay.store.contract` and needs memory for what is queued only. Bodies are
whatever was given; the simulation gives all the same one.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from tests.support.memory_store import MemoryStore
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import Mailbox, Message, MessageId


@dataclass
class _Waiting:
    """Deliveries that nobody has claimed: the fresh ones by message, the others by due time."""

    fresh: SortedDict[DeliveryKey, Delivery] = field(default_factory=SortedDict)
    due: SortedDict[tuple[float, DeliveryKey], Delivery] = field(default_factory=SortedDict)

    def add(self, delivery: Delivery) -> None:
        if delivery.next_attempt > 0:
            self.due[delivery.next_attempt, delivery.key] = delivery
        else:
            self.fresh[delivery.key] = delivery

    def discard(self, delivery: Delivery) -> None:
        self.fresh.pop(delivery.key, None)
        self.due.pop((delivery.next_attempt, delivery.key), None)

    def first_fresh(self) -> Delivery | None:
        return self.fresh.peekitem(0)[1] if self.fresh else None

    def first_due(self, now: float) -> Delivery | None:
        if not self.due or self.due.peekitem(0)[0][0] > now:
            return None
        return self.due.peekitem(0)[1]


@dataclass
class _Queue:
    ready: _Waiting = field(default_factory=_Waiting)
    parked: defaultdict[str, _Waiting] = field(default_factory=lambda: defaultdict(_Waiting))
    """What was passed over, by domain."""
    turn_of_due: bool = False

    def next(self, now: float) -> Delivery | None:
        """Fresh ones and those that are due take turns."""
        fresh, due = self.ready.first_fresh(), self.ready.first_due(now)
        chosen = due if fresh is None or (due is not None and self.turn_of_due) else fresh
        if chosen is not None:
            self.turn_of_due = chosen is fresh
        return chosen


class IndexedStore(MemoryStore):
    """`on_finish` is told of each delivery that leaves."""

    def __init__(self, on_finish: Callable[[Delivery], None] = lambda delivery: None) -> None:
        super().__init__()
        self._on_finish = on_finish
        self._open: Counter[MessageId] = Counter()
        self._queues: defaultdict[QueueName, _Queue] = defaultdict(_Queue)

    def __len__(self) -> int:
        return len(self._deliveries)

    def add(self, message: Message, chunks: list[bytes], deliveries: Iterable[Delivery]) -> None:
        self.check_writable()
        self._messages[message.id] = (message, chunks)
        new = list(deliveries)
        is_next = not any(self._queues[each.queue].ready.fresh for each in new)
        for delivery in new:
            self._deliveries[delivery.key] = delivery
            self._open[message.id] += 1
            self._enter(delivery)
        self._last_id = max(self._last_id or message.id, message.id)
        self._give(new, is_next)

    def _give(self, new: Iterable[Delivery], is_next: bool) -> None:
        given = list(new)
        super()._give(given, is_next)
        for each in given:
            if each.key in self._claimed:
                self._queues[each.queue].ready.discard(each)

    def _enter(self, delivery: Delivery) -> None:
        """It may be claimed, now or when it is due."""
        if not delivery.held:
            self._queues[delivery.queue].ready.add(delivery)

    def _leave(self, delivery: Delivery) -> None:
        queue = self._queues[delivery.queue]
        (queue.parked[delivery.domain] if delivery.key in self._passed_over else queue.ready).discard(
            delivery
        )
        self._passed_over.discard(delivery.key)

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
        place = self._queues[queue]
        if domain is not None:
            found = self._unpark(place, domain, limit, now)
        elif since is not None:
            found = self._claim_new(place, DeliveryKey(queue, since, Mailbox("")), limit, skip_domains)
        else:
            found = self._claim_ready(place, limit, now, skip_domains)
        return sorted(found, key=lambda delivery: delivery.message_id)

    def _claim_ready(
        self, place: _Queue, limit: int, now: float, skip_domains: Collection[str]
    ) -> list[Delivery]:
        found: list[Delivery] = []
        while len(found) < limit and (delivery := place.next(now)) is not None:
            self._take(place, delivery, found, skip_domains)
        for domain in list(place.parked) if len(found) < limit else ():
            if domain not in skip_domains:
                found += self._unpark(place, domain, limit - len(found), now)
        return found

    def _claim_new(
        self, place: _Queue, first: DeliveryKey, limit: int, skip_domains: Collection[str]
    ) -> list[Delivery]:
        found: list[Delivery] = []
        fresh = place.ready.fresh
        while len(found) < limit and (at := fresh.bisect_left(first)) < len(fresh):
            self._take(place, fresh.peekitem(at)[1], found, skip_domains)
        return found

    def _take(
        self, place: _Queue, delivery: Delivery, found: list[Delivery], skip_domains: Collection[str]
    ) -> None:
        self._leave(delivery)
        if delivery.domain in skip_domains:
            self._passed_over.add(delivery.key)
            place.parked[delivery.domain].add(delivery)
        else:
            self._claimed.add(delivery.key)
            found.append(delivery)

    def _unpark(self, place: _Queue, domain: str, limit: int, now: float) -> list[Delivery]:
        found: list[Delivery] = []
        parked = place.parked[domain]
        while len(found) < limit and (delivery := parked.first_fresh() or parked.first_due(now)) is not None:
            self._take(place, delivery, found, ())
        if not (parked.fresh or parked.due):
            del place.parked[domain]
        return found

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            if key in self._claimed:
                self._claimed.discard(key)
                if key in self._deliveries:
                    self._enter(self._deliveries[key])

    def forget_claims(self) -> None:
        for key in list(self._passed_over):
            self._leave(self._deliveries[key])
            self._enter(self._deliveries[key])
        self.release(list(self._claimed))

    async def next_due(self, queue: QueueName) -> float | None:
        self.check_writable()
        due = self._queues[queue].ready.due
        return due.peekitem(0)[0][0] if due else None

    # Settling

    def _change(self, key: DeliveryKey, new: Delivery | None) -> None:
        delivery = self._deliveries.get(key)
        if delivery is None:
            return
        if key not in self._claimed:
            self._leave(delivery)
        if new is not None:
            self._deliveries[key] = new
            if key not in self._claimed:
                self._enter(new)
            return
        del self._deliveries[key]
        self._claimed.discard(key)
        self._on_finish(delivery)
        self._open[key.message_id] -= 1
        if not self._open[key.message_id]:
            del self._open[key.message_id]
            del self._messages[key.message_id]
