"""Orders the mail that is queued in memory for one destination. Pure.

A `DestinationQueue` has a `Backlog` for each priority, and each backlog has two `MessageQueue`s: fresh mail,
and mail that was deferred or is backlog (`zone/window.py`). The two take turns, and each sends its oldest
message first. So a single message overtakes a hundred thousand that have become due together, or a list of a
million, and these still get half of what their destination accepts.

Between priorities (`Precedence`) urgent mail goes first, but no mail waits for ever, by stride scheduling
(Waldspurger and Weihl 1995): while all priorities have mail, of 31 picks 25 are high, 5 normal and 1 bulk. A
priority without mail accumulates no credit, and one that gets mail is picked at once or after the present
one. So a long bulk queue hardly delays urgent mail, and bulk mail still progresses slowly during a flood of
urgent mail.

Between destination queues that wait for the same resource, a connection or a route lookup (`FairQueue`),
`FRESH_WEIGHT` lines with fresh mail go for each of the others. So a sender with an ordinary amount of mail
hardly notices a long queue that is being sent at the same time, and the queue gets all remaining capacity.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Generic, TypeVar

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import MessageId, Priority, domain_of

STRIDE = {Priority.HIGH: 1, Priority.NORMAL: 5, Priority.BULK: 25}


class Precedence:
    """Chooses by weight between the priorities of queued mail, so that none of them starves."""

    __slots__ = ("_at", "_now")

    def __init__(self) -> None:
        self._at: dict[Priority, int] = {}
        self._now = 0

    def pick(self, waiting: Iterable[Priority]) -> Priority:
        """Return the priority whose turn it is among those with waiting mail. There must be at least one."""
        now, places = self._now, self._at
        # The stride breaks ties: urgent mail goes first.
        at, stride, chosen = min((max(places.get(each, 0), now), STRIDE[each], each) for each in waiting)
        self._now = at
        places[chosen] = at + stride
        return chosen


class MessageQueue:
    """A queue of deliveries that are grouped by message, oldest message first. Callers check that it is not
    empty (`bool`) before they take one.

    With `apart`, each domain of a message is a group of its own.
    """

    __slots__ = ("_apart", "_groups", "_order")

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        # A group of several is keyed by recipient, because an operator may withdraw thousands, one after the
        # other.
        self._groups: dict[str, Delivery | dict[str, Delivery]] = {}
        self._order: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, delivery: Delivery) -> None:
        name = self._group_of(delivery) if self._apart else delivery.message_id
        group = self._groups.get(name)
        if group is None:
            self._groups[name] = delivery
            heapq.heappush(self._order, name)
        elif isinstance(group, dict):
            group[delivery.recipient] = delivery
        else:
            both: dict[str, Delivery] = {group.recipient: group, delivery.recipient: delivery}
            self._groups[name] = both

    def take(self, limit: int, domains: int = 1) -> list[Delivery]:
        """Remove and return up to `limit` deliveries of the oldest message. With `apart`, they belong to at
        most `domains` domains.
        """
        taken = self._take_group(limit)
        while self._apart and domains > 1 and len(taken) < limit and self._next() == taken[0].message_id:
            taken += self._take_group(limit - len(taken))
            domains -= 1
        return taken

    def _take_group(self, limit: int) -> list[Delivery]:
        # Withdrawing leaves names in the heap, because removing them there would need a scan.
        while (name := self._order[0]) not in self._groups:
            heapq.heappop(self._order)
        group = self._groups[name]
        if not isinstance(group, dict) or len(group) <= limit:
            heapq.heappop(self._order)
            self._forget(name)
            return _all(group)
        taken = list(islice(group.values(), limit))
        for delivery in taken:
            del group[delivery.recipient]
        return taken

    def remove(self, key: DeliveryKey) -> Delivery | None:
        """Remove a delivery and return it, or return None if it is not in the queue."""
        name = self._group_of(key) if self._apart else key.message_id
        group = self._groups.get(name)
        if isinstance(group, dict):
            delivery = group.pop(key.recipient, None)
            if group:
                return delivery
        else:
            delivery = group if group is not None and group.recipient == key.recipient else None
            if delivery is None:
                return None
        self._forget(name)
        return delivery

    def _forget(self, name: str) -> None:
        del self._groups[name]
        if not self._groups:
            # Frees their memory, and forgets the names of withdrawn mail.
            self._groups.clear()
            self._order.clear()

    def __iter__(self) -> Iterator[Delivery]:
        for name in sorted(self._groups):
            yield from _all(self._groups[name])

    def drain(self) -> list[Delivery]:
        """Remove and return all deliveries, oldest message first."""
        deliveries = list(self)
        self._groups.clear()
        self._order.clear()
        return deliveries

    @staticmethod
    def _group_of(one: Delivery | DeliveryKey) -> str:
        """Return the name of a delivery's group, which is its message and domain, for use with `apart`. Names
        sort as messages do, because ids have a fixed length.
        """
        return f"{one.message_id} {domain_of(one.recipient)}"

    def _next(self) -> str:
        """Return the message id of the next group, or "" if there is none."""
        while self._order and self._order[0] not in self._groups:
            heapq.heappop(self._order)
        return self._order[0].partition(" ")[0] if self._order else ""


def _all(group: Delivery | dict[str, Delivery]) -> list[Delivery]:
    return list(group.values()) if isinstance(group, dict) else [group]


_NO_MAIL = MessageQueue()
"""Takes the place of rows without mail, which would be a seventh of the memory of a suspended destination."""


class Backlog:
    """The queued deliveries of one priority to a destination, in message order. `domains` are those of the
    line.

    `passed_over` are the domains that claims skip because this backlog is long enough. The store holds more
    for them. `is_new` is true if the last delivery added was new (`zone/window.py`), so what the store holds
    after it is new, too. With `apart`, the deliveries that are taken together have one domain.
    """

    __slots__ = (
        "_again",
        "_again_is_next",
        "_apart",
        "_fresh",
        "domains",
        "is_new",
        "passed_over",
        "waiting",
    )

    def __init__(self, domains: Collection[str], *, apart: bool = False) -> None:
        self._apart = apart
        self._fresh = self._again = _NO_MAIL
        self._again_is_next = False
        self.waiting = 0
        self.domains = domains
        self.is_new = False
        self.passed_over: dict[str, None] = {}

    @property
    def has_fresh(self) -> bool:
        """Whether mail that is not backlog is waiting for its first attempt."""
        return bool(self._fresh)

    def add(self, delivery: Delivery, since: MessageId | None = None) -> None:
        """Add a delivery to the fresh mail, or, if it was attempted before or is backlog, to the other mail.
        Messages older than `since` are backlog (`zone/window.py`).
        """
        if delivery.next_attempt > 0 or (since is not None and delivery.message_id < since):
            self._again = self._again or MessageQueue(apart=self._apart)
            self._again.add(delivery)
        else:
            self._fresh = self._fresh or MessageQueue(apart=self._apart)
            self._fresh.add(delivery)
            self.is_new = since is not None
        self.waiting += 1

    def take(self, limit: int, domains: int = 1) -> tuple[Delivery, ...]:
        """Remove and return up to `limit` deliveries of the oldest message, taking fresh and other mail in
        turn. At least one must wait. `domains` is how many domains of a message go together although they are
        apart.
        """
        is_again = bool(self._again) and (self._again_is_next or not self._fresh)
        self._again_is_next = not is_again
        taken = (self._again if is_again else self._fresh).take(limit, domains)
        self.waiting -= len(taken)
        return tuple(taken)

    def sort(self, since: MessageId, *, is_earlier: bool = False) -> int:
        """Move mail older than this message to the backlog, and return the number of remaining new
        deliveries. `is_earlier` is true if the message is older than at the last call, so that backlog may
        become new.
        """
        sorted_anew = self._fresh.drain() + (self._again.drain() if is_earlier else [])
        self.is_new = False
        self.waiting -= len(sorted_anew)
        for delivery in sorted_anew:
            self.add(delivery, since)
        return sum(each.next_attempt <= 0 and each.message_id >= since for each in sorted_anew)

    def remove(self, key: DeliveryKey) -> Delivery | None:
        """Remove a delivery and return it, or return None if it is not in the queue."""
        delivery = self._fresh.remove(key) or self._again.remove(key)
        if delivery is not None:
            self.waiting -= 1
        return delivery

    def drain(self) -> list[Delivery]:
        """Remove and return all deliveries, oldest message first."""
        self.waiting = 0
        drained = sorted(self._fresh.drain() + self._again.drain(), key=attrgetter("message_id"))
        self._fresh = self._again = _NO_MAIL
        return drained

    def __iter__(self) -> Iterator[Delivery]:
        return heapq.merge(self._fresh, self._again, key=attrgetter("message_id"))


class DestinationQueue:
    """The queued deliveries to one destination, and their domains. `apart` has the same meaning as in
    `Backlog`.
    """

    __slots__ = ("_apart", "_precedence", "backlogs", "domains", "waiting")

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        # Not a set: the garbage collector inspects every set, but no dict that contains only strings.
        self.domains: dict[str, None] = {}
        self.waiting = 0
        self.backlogs: dict[Priority, Backlog] = {}
        """The backlogs by priority. Some may be empty."""
        self._precedence: Precedence | None = None

    def backlog(self, priority: Priority) -> Backlog:
        backlog = self.backlogs.get(priority)
        if backlog is None:
            backlog = self.backlogs[priority] = Backlog(self.domains, apart=self._apart)
        return backlog

    def add(self, delivery: Delivery, priority: Priority, since: MessageId | None = None) -> None:
        self.backlog(priority).add(delivery, since)
        self.waiting += 1

    def take(self, limit: int, domains: int = 1) -> tuple[Priority, tuple[Delivery, ...]]:
        """Remove and return up to `limit` deliveries of the oldest message of the next priority. At least one
        must wait. `domains` has the same meaning as in `Backlog.take`.
        """
        backlogs = self.backlogs
        if len(backlogs) == 1:  # the usual case
            ((priority, backlog),) = backlogs.items()
        else:
            self._precedence = self._precedence or Precedence()
            priority = self._precedence.pick(each for each, backlog in backlogs.items() if backlog.waiting)
            backlog = backlogs[priority]
        deliveries = backlog.take(limit, domains)
        self.waiting -= len(deliveries)
        return priority, deliveries

    def remove(self, key: DeliveryKey, priority: Priority) -> Delivery | None:
        """Remove a delivery and return it, or return None if it is not in the queue."""
        backlog = self.backlogs.get(priority)
        delivery = None if backlog is None else backlog.remove(key)
        if delivery is not None:
            self.waiting -= 1
        return delivery

    def drain(self, priority: Priority) -> list[Delivery]:
        """Remove and return all deliveries of one priority, the oldest message first."""
        deliveries = self.backlog(priority).drain()
        self.waiting -= len(deliveries)
        return deliveries

    @property
    def has_fresh(self) -> bool:
        """Whether new mail, which is not backlog, is waiting for its first attempt."""
        return any(backlog.has_fresh for backlog in self.backlogs.values())

    @property
    def passed_over(self) -> set[str]:
        return {domain for backlog in self.backlogs.values() for domain in backlog.passed_over}

    @property
    def urgency(self) -> Priority:
        """The highest priority of the queued mail. Some mail must wait."""
        if len(self.backlogs) == 1:
            (priority,) = self.backlogs
            return priority
        return min(
            (each for each, backlog in self.backlogs.items() if backlog.waiting), key=STRIDE.__getitem__
        )

    def __iter__(self) -> Iterator[Delivery]:
        for backlog in self.backlogs.values():
            yield from backlog


FRESH_WEIGHT = 7
"""Lines with fresh mail that go for each of the others. A ratio of one to one was too low for mail that
arrives as fast as it can be sent: with a million queued messages it was delivered at a tenth of its rate
until the backlog was gone.
"""

_Line = TypeVar("_Line", bound=DestinationQueue)


class FairQueue(Generic[_Line]):
    """A queue of destination queues, which returns those with fresh mail more often than the others. Each is
    in order of arrival, except that every second selection of fresh mail prefers `new` ones.
    """

    __slots__ = ("_first", "_fresh", "_fresh_taken", "_may_overtake", "_new", "_other")

    # Not deques, because a line that leaves early must be found quickly. And a dict can be checked for
    # emptiness without a call of Python code, which happens a dozen times per message.

    def __init__(self) -> None:
        self._first: OrderedDict[_Line, None] = OrderedDict()
        self._fresh: OrderedDict[_Line, None] = OrderedDict()
        self._new: OrderedDict[_Line, None] = OrderedDict()
        """Those of the fresh ones that are new."""
        self._other: OrderedDict[_Line, None] = OrderedDict()
        self._may_overtake = True
        self._fresh_taken = 0
        """Lines with fresh mail that went since the last line without."""

    def __bool__(self) -> bool:
        return bool(self._fresh or self._other or self._first)

    def append(self, waiting: _Line, *, new: bool = False) -> None:
        """Add a destination queue. `new` is true if no mail of it was waiting or being sent when its mail
        arrived; this matters only for fresh mail.
        """
        if waiting.has_fresh:
            self._fresh[waiting] = None
            if new:
                self._new[waiting] = None
        else:
            self._other[waiting] = None

    def put_first(self, waiting: _Line) -> None:
        """Add a destination queue at the front."""
        self._first[waiting] = None

    def hasten(self, waiting: _Line) -> None:
        """Treat a waiting destination queue as one with fresh mail, if fresh mail has arrived for it."""
        if waiting.has_fresh and self._other.pop(waiting, self) is None:
            self._fresh[waiting] = None

    def sort(self) -> None:
        """Treat waiting destination queues that no longer have fresh mail as ones without it."""
        for each in [each for each in self._fresh if not each.has_fresh]:
            del self._fresh[each]
            self._new.pop(each, None)
            self._other[each] = None

    @property
    def has_fresh(self) -> bool:
        """Whether a destination queue that has fresh mail, or was added by `put_first`, is waiting."""
        return bool(self._fresh or self._first)

    @property
    def fresh_is_next(self) -> bool:
        """Whether a destination queue with fresh mail would be returned next."""
        return bool(self._fresh) and self._fresh_taken < FRESH_WEIGHT

    def pop(self, *, fresh_only: bool = False) -> _Line:
        """Remove and return the next destination queue. At least one must be waiting, and for `fresh_only`
        `has_fresh` must be true.
        """
        if self._first:
            waiting = self._first.popitem(last=False)[0]
            self._fresh_taken = self._fresh_taken + 1 if waiting.has_fresh else 0
            return waiting
        if self._other and not fresh_only and (self._fresh_taken >= FRESH_WEIGHT or not self._fresh):
            self._fresh_taken = 0
            return self._other.popitem(last=False)[0]
        self._fresh_taken += 1
        waiting = next(iter(self._fresh))
        if self._new and waiting not in self._new:
            self._may_overtake = not self._may_overtake
            if not self._may_overtake:
                waiting = next(iter(self._new))
        del self._fresh[waiting]
        self._new.pop(waiting, None)
        return waiting

    def remove(self, waiting: _Line) -> None:
        """Remove a destination queue, if it is waiting here."""
        for each in (self._first, self._fresh, self._new, self._other):
            each.pop(waiting, None)

    def clear(self) -> None:
        for each in (self._first, self._fresh, self._new, self._other):
            each.clear()
