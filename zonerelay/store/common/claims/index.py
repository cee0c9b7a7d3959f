"""Indexes every delivery of a queue in memory, and says which of them can be handed out next. No I/O.

A file system cannot be asked what is due, so every delivery has an entry here, and its state is read from
its file only when it is handed out. An entry costs about 500 octets (docs/disk-queue.md): the index
is bounded by the queue, not by a window. Entries follow what is durable; one that is claimed or is being
changed right now is in no heap; the end of the claim or change puts it back.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from zonerelay.model.address import domain_of
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common.claims.ready_order import ReadyOrder
from zonerelay.store.contract import QueueCounts

_SLACK = 1000
"""Entries that changed their place stay behind in heaps; this many more than twice the rest are swept out."""
_numbers = itertools.count(1)
"""Of claims: no two are alike, whatever zone and index they are in."""


@dataclass(slots=True, eq=False)
class Entry:
    """One delivery: where it stands, and why it is not handed out now. `claim` is 0 without a claim."""

    key: DeliveryKey
    created: float
    next_attempt: float
    held: bool
    claim: int = 0
    changing: int = 0
    parked: bool = False

    @property
    def is_idle(self) -> bool:
        return not (self.claim or self.changing or self.held)

    @property
    def is_placed(self) -> bool:
        """It may be handed out, at its time."""
        return not (self.claim or self.changing or self.held or self.parked)


class ZoneIndex:
    """The deliveries of one zone."""

    def __init__(self) -> None:
        self.entries: dict[DeliveryKey, Entry] = {}
        self.counts = QueueCounts()
        self._order = ReadyOrder(self._when_of)
        self._parked: dict[str, list[DeliveryKey]] = {}
        self._by_age: list[DeliveryKey] = []
        self._unborn: list[tuple[float, DeliveryKey]] = []

    # --- what becomes durable

    def put(self, key: DeliveryKey, created: float, next_attempt: float, *, held: bool) -> None:
        """The delivery was stored in this state."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = Entry(key, created, next_attempt, held)
            heapq.heappush(self._by_age, key)
        else:
            self.counts.count(entry.next_attempt, held=entry.held, step=-1)
            entry.created, entry.next_attempt, entry.held = created, next_attempt, held
            entry.parked = False
        self.counts.count(next_attempt, held=held)
        self.place(entry)

    def remove(self, key: DeliveryKey) -> None:
        """The delivery left."""
        entry = self.entries.pop(key, None)
        if entry is None:
            return
        self.counts.count(entry.next_attempt, held=entry.held, step=-1)
        ages = self._by_age
        while ages and ages[0] not in self.entries:
            heapq.heappop(ages)
        if len(ages) > 2 * len(self.entries) + _SLACK:
            self._by_age = [other for other in ages if other in self.entries]
            heapq.heapify(self._by_age)

    def place(self, entry: Entry) -> None:
        """Let it be handed out, if nothing stands against it."""
        if not entry.is_placed:
            return
        self._order.push(entry.key, entry.next_attempt)
        if len(self._order) > 2 * len(self.entries) + _SLACK:
            placed = (each for each in self.entries.values() if each.is_placed)
            self._order.refill((each.next_attempt, each.key) for each in placed)

    # --- handing out

    def take(self, limit: int, skip: Collection[str], now: float) -> list[DeliveryKey]:
        """Claim up to `limit` that are due. Fresh and due ones alternate, so that neither starves the other;
        those of a domain in `skip` are parked.
        """
        found: list[DeliveryKey] = []
        while len(found) < limit and (key := self._order.pop_next(now)) is not None:
            self._take(self.entries[key], skip, found)
        if len(found) < limit:
            self._take_unparked(limit, skip, now, found)
        return found

    def take_new(self, limit: int, since: MessageId, skip: Collection[str]) -> list[DeliveryKey]:
        """Like `take`, from the fresh deliveries of messages from `since` on."""
        found: list[DeliveryKey] = []
        while len(found) < limit and (key := self._order.fresh.first_since(since)) is not None:
            self._order.fresh.pop(key)
            self._take(self.entries[key], skip, found)
        return found

    def _take(self, entry: Entry, skip: Collection[str], found: list[DeliveryKey]) -> None:
        if skip and (domain := domain_of(entry.key.recipient)) in skip:
            entry.parked = True
            heapq.heappush(self._parked.setdefault(domain, []), entry.key)
        else:
            entry.claim = next(_numbers)
            found.append(entry.key)

    def take_domain(self, domain: str, limit: int, now: float) -> list[DeliveryKey]:
        """Claim up to `limit` of what was parked of one domain."""
        found: list[DeliveryKey] = []
        self._take_parked(domain, limit, now, found)
        return found

    def _take_unparked(self, limit: int, skip: Collection[str], now: float, found: list[DeliveryKey]) -> None:
        """From domains that are no longer skipped, in case `take_domain` is not called for them."""
        for domain in [domain for domain in self._parked if domain not in skip]:
            self._take_parked(domain, limit, now, found)

    def _take_parked(self, domain: str, limit: int, now: float, found: list[DeliveryKey]) -> None:
        heap = self._parked.get(domain, [])
        while heap and len(found) < limit:
            entry = self.entries.get(heapq.heappop(heap))
            if entry is None or not entry.parked or not entry.is_idle:
                continue
            entry.parked = False
            if entry.next_attempt > now:  # the clock was set back
                self.place(entry)
            else:
                entry.claim = next(_numbers)
                found.append(entry.key)
        if not heap:
            self._parked.pop(domain, None)

    def release(self, key: DeliveryKey) -> None:
        """Give a claim back."""
        entry = self.entries.get(key)
        if entry is not None and entry.claim:
            entry.claim = 0
            self.place(entry)

    def claim_of(self, key: DeliveryKey) -> int:
        entry = self.entries.get(key)
        return 0 if entry is None else entry.claim

    def claim_again(self, key: DeliveryKey) -> None:
        """It is being attempted here, under a claim that was lost."""
        self.entries[key].claim = next(_numbers)

    def drop_claim(self, key: DeliveryKey) -> None:
        """The claim ends with the change that is being applied, which will place the entry."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.claim = 0

    def begin_change(self, key: DeliveryKey) -> None:
        entry = self.entries.get(key)
        if entry is not None:
            entry.changing += 1

    def end_change(self, key: DeliveryKey) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.changing:
            entry.changing -= 1

    def is_changing(self, key: DeliveryKey) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.changing > 0

    def clear_changes(self, key: DeliveryKey) -> None:
        """The writes that were under way have failed."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.changing = 0

    # --- looking

    def has_ready(self) -> bool:
        return self._order.fresh.first() is not None

    def next_due(self) -> float | None:
        first = self._order.first_due()
        return None if first is None else first[0]

    def oldest(self, now: float) -> float | None:
        """`created` of the first delivery that is not held back by its sender at `now`."""
        while self._unborn and self._unborn[0][0] <= now:
            heapq.heappush(self._by_age, heapq.heappop(self._unborn)[1])
        while self._by_age:
            entry = self.entries.get(self._by_age[0])
            if entry is not None and entry.created <= now:
                return entry.created
            key = heapq.heappop(self._by_age)
            if entry is not None:
                heapq.heappush(self._unborn, (entry.created, key))
        return None

    def _when_of(self, key: DeliveryKey) -> float | None:
        entry = self.entries.get(key)
        return entry.next_attempt if entry is not None and entry.is_placed else None


class Index(dict[QueueName, ZoneIndex]):
    """Zones by name, made when they are first asked for."""

    def __missing__(self, name: QueueName) -> ZoneIndex:
        zone = self[name] = ZoneIndex()
        return zone

    def show(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        """This is durable."""
        zone = self[key.queue]
        if delivery is None:
            zone.remove(key)
        else:
            zone.put(key, delivery.created, delivery.next_attempt, held=delivery.held)

    def sorted_keys(self, queue: QueueName | None) -> list[DeliveryKey]:
        """Queue by queue, in the order of messages; without `queue` those of mail."""
        names: Iterable[QueueName] = (
            sorted(each for each in self if each.is_mail) if queue is None else [queue]
        )
        return [key for name in names if name in self for key in sorted(self[name].entries)]

    def queues(self) -> set[QueueName]:
        return {name for name, zone in self.items() if zone.entries}

    def counts(self) -> Iterator[tuple[QueueName, QueueCounts]]:
        """Yield the counts of each queue, those of webhooks too."""
        for name, zone in self.items():
            counts = zone.counts
            yield name, QueueCounts(counts.ready, counts.deferred, counts.held)
