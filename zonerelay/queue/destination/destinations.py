"""Where claimed deliveries wait in memory: a line per destination, in it a backlog per priority, oldest
message first.

Pure bookkeeping: nothing here awaits, and `now` is a parameter. A `Backlog` holds deliveries grouped by
message; an `Unrouted` line waits for a look-up of its domain; a `Destination` has a route, counts its
active transactions and knows whether it is suspended. `selection/round_robin.py` chooses between
destinations and applies their limits; `Site` counts the transactions at the hosts that several lines share.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.priority import Priority
from zonerelay.queue.destination.precedence import STRIDE, Precedence
from zonerelay.queue.destination.rows import Row
from zonerelay.queue.destination.suspension import Suspension
from zonerelay.queue.selection.rates import Pace, Rates, Ticket
from zonerelay.routing.destinations.nexthop import DestinationKey, Limits, Route, SiteKey

ROUTE_MIN_USE = 30.0
"""Seconds that a route is used at least, so that a zero TTL does not look up again for every delivery."""

LONG = 3.0
"""Seconds. Most servers take less for a message. With 15, those that take five or ten were as quick as those
that take a tenth of one, and where connections were short held nearly all that were kept free for these.
"""


class Standing(enum.Enum):
    """How a destination has answered lately: what it may have of the zone's connections (`probation.py`)."""

    QUICK = enum.auto()
    NEW = enum.auto()
    FAILING = enum.auto()
    SLOW = enum.auto()


class Backlog:
    """The deliveries of one priority in a line, in message order (`rows.py`). `domains` are the line's.

    `passed_over` are the domains that claims skip because this backlog is long enough; the store
    holds more for them. `is_new`: what came last was new (`window.py`), so what the store holds behind it
    is, too. `apart`: what is taken together has one domain.
    """

    __slots__ = (
        "_again",
        "_apart",
        "_fresh",
        "_turn_of_again",
        "domains",
        "is_new",
        "passed_over",
        "waiting",
    )

    def __init__(self, domains: Collection[str], *, apart: bool = False) -> None:
        self._apart = apart
        # Only while they are needed: there are many destinations, and at most of them nothing waits in one.
        self._fresh: Row | None = None
        self._again: Row | None = None
        self._turn_of_again = False
        self.waiting = 0
        self.domains = domains
        self.is_new = False
        self.passed_over: dict[str, None] = {}

    @property
    def has_fresh(self) -> bool:
        """Mail waits that is tried for the first time, and is no backlog."""
        return bool(self._fresh)

    def add(self, delivery: Delivery, since: MessageId | None = None) -> None:
        """`since`: what is older is backlog (`window.py`)."""
        if delivery.next_attempt > 0 or (since is not None and delivery.message_id < since):
            if self._again is None:
                self._again = Row(apart=self._apart)
            self._again.add(delivery)
        else:
            if self._fresh is None:
                self._fresh = Row(apart=self._apart)
            self._fresh.add(delivery)
            self.is_new = since is not None
        self.waiting += 1

    def take(self, limit: int, domains: int = 1) -> tuple[Delivery, ...]:
        """Up to `limit` deliveries of the oldest message, of fresh ones and others by turns; the backlog must
        not be empty. `domains`: how many of a message go together although they are apart.
        """
        is_again = bool(self._again) and (self._turn_of_again or not self._fresh)
        self._turn_of_again = not is_again
        row = self._again if is_again else self._fresh
        assert row is not None
        taken = row.take(limit, domains)
        self.waiting -= len(taken)
        self._tidy()
        return tuple(taken)

    def sort(self, since: MessageId, *, is_earlier: bool = False) -> int:
        """What is older than this message is backlog now; how many are new. `is_earlier`: than the last
        one, so that what was backlog may be new.
        """
        again = list(self._again or ()) if is_earlier else []
        if is_earlier:
            self._again = None
        sorted_anew = [*(self._fresh or ()), *again]
        self._fresh = None
        self.is_new = False
        self.waiting -= len(sorted_anew)
        for delivery in sorted_anew:
            self.add(delivery, since)
        return sum(each.next_attempt <= 0 and each.message_id >= since for each in sorted_anew)

    def remove(self, key: DeliveryKey) -> Delivery | None:
        """Forget one delivery; `None` when it is not waiting here."""
        for row in self._rows():
            delivery = row.remove(key)
            if delivery is not None:
                self.waiting -= 1
                self._tidy()
                return delivery
        return None

    def drain(self) -> list[Delivery]:
        """Everything that waits, oldest message first; it is empty afterwards."""
        deliveries = list(self)
        self._fresh = self._again = None
        self.waiting = 0
        return deliveries

    def __iter__(self) -> Iterator[Delivery]:
        return heapq.merge(*self._rows(), key=_message_id)

    def _rows(self) -> Iterator[Row]:
        if self._fresh is not None:
            yield self._fresh
        if self._again is not None:
            yield self._again

    def _tidy(self) -> None:
        if not self._fresh:
            self._fresh = None
        if not self._again:
            self._again = None


class Line:
    """What waits to go one way, and the domains it belongs to. `apart`: as in `Backlog`."""

    __slots__ = ("_apart", "_backlogs", "_precedence", "domains", "waiting")

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        # No set: the garbage collector looks at every one of those, and at no dict of words.
        self.domains: dict[str, None] = {}
        self.waiting = 0
        self._backlogs: dict[Priority, Backlog] = {}
        self._precedence: Precedence | None = None

    def backlog(self, priority: Priority) -> Backlog:
        backlog = self._backlogs.get(priority)
        if backlog is None:
            backlog = self._backlogs[priority] = Backlog(self.domains, apart=self._apart)
        return backlog

    @property
    def backlogs(self) -> Mapping[Priority, Backlog]:
        """Those that there are; some may be empty."""
        return self._backlogs

    def add(self, delivery: Delivery, priority: Priority, since: MessageId | None = None) -> None:
        self.backlog(priority).add(delivery, since)
        self.waiting += 1

    def take(self, limit: int, domains: int = 1) -> tuple[Priority, tuple[Delivery, ...]]:
        """Up to `limit` deliveries of the oldest message of the priority whose turn it is. One must wait.
        `domains`: as in `Backlog.take`.
        """
        backlogs = self._backlogs
        if len(backlogs) == 1:  # as nearly everywhere
            ((priority, backlog),) = backlogs.items()
        else:
            if self._precedence is None:
                self._precedence = Precedence()
            priority = self._precedence.pick(each for each, backlog in backlogs.items() if backlog.waiting)
            backlog = backlogs[priority]
        deliveries = backlog.take(limit, domains)
        self.waiting -= len(deliveries)
        return priority, deliveries

    def remove(self, key: DeliveryKey, priority: Priority) -> Delivery | None:
        """Forget one delivery; `None` when it is not waiting here."""
        backlog = self._backlogs.get(priority)
        delivery = None if backlog is None else backlog.remove(key)
        if delivery is not None:
            self.waiting -= 1
        return delivery

    def drain(self, priority: Priority) -> list[Delivery]:
        """All of one priority, oldest message first."""
        deliveries = self.backlog(priority).drain()
        self.waiting -= len(deliveries)
        return deliveries

    @property
    def has_fresh(self) -> bool:
        """Mail waits that is tried for the first time, and is no backlog."""
        return any(backlog.has_fresh for backlog in self._backlogs.values())

    @property
    def passed_over(self) -> set[str]:
        return {domain for backlog in self._backlogs.values() for domain in backlog.passed_over}

    @property
    def urgency(self) -> Priority:
        """The highest priority that waits; something must."""
        if len(self._backlogs) == 1:
            (priority,) = self._backlogs
            return priority
        return min(
            (each for each, backlog in self._backlogs.items() if backlog.waiting), key=STRIDE.__getitem__
        )

    def __iter__(self) -> Iterator[Delivery]:
        for backlog in self._backlogs.values():
            yield from backlog


class Unrouted(Line):
    """The deliveries of one domain that wait for its route."""

    __slots__ = ("is_hurried", "is_looked_up", "sought", "sought_fresh")

    def __init__(self, domain: str) -> None:
        super().__init__()
        self.domains[domain] = None
        self.sought = False
        """A look-up is wanted or under way; the others say where it waits (`route_lookups.py`)."""
        self.sought_fresh = False
        self.is_hurried = False
        self.is_looked_up = False


class Site:
    """The hosts that one or several lines of a zone go to.

    Several have the same hosts and other terms (another TLS demand, other limits). A line's limit counts the
    transactions of all lines there whose limit is no larger: lines with equal limits share it, a line never
    exceeds its own, and all together never the largest. `blocked` are lines that had their turn and no room.
    """

    __slots__ = ("_counts", "blocked", "key", "lines")

    def __init__(self, key: SiteKey) -> None:
        self.key = key
        self.lines: dict[Destination, None] = {}
        self.blocked: dict[Destination, None] = {}
        # How many are active of lines with at most this limit. Kept: a provider's hosts may have hundreds of
        # lines, and each asks whenever one transaction ends.
        self._counts: list[tuple[int, int]] | None = None

    def changed(self) -> None:
        """Another line, another limit, or another number of active transactions."""
        self._counts = None

    def has_room(self, destination: Destination, now: float) -> bool:
        """Another transaction of the line may start."""
        limit = destination.limits.max_connections
        if destination.active >= destination.suspension.limit(limit, now):
            return False
        if len(self.lines) == 1:
            return True
        if self._counts is None:
            self._counts = self._counted()
        return all(active < most for most, active in self._counts if most >= limit)

    def _counted(self) -> list[tuple[int, int]]:
        active: dict[int, int] = {}
        for line in self.lines:
            limit = line.limits.max_connections
            active[limit] = active.get(limit, 0) + line.active
        limits = sorted(active)
        return list(zip(limits, accumulate(active[limit] for limit in limits), strict=True))


class Destination(Line):
    """A line with a route: what limits, rates and suspension apply to."""

    __slots__ = (
        "active",
        "counted",
        "is_queued",
        "is_slow",
        "key",
        "label",
        "limits",
        "most_domains",
        "pace",
        "route",
        "site",
        "stands_as",
        "suspension",
        "usable_until",
    )

    def __init__(self, route: Route, site: Site, settings: RetrySettings, *, apart: bool = False) -> None:
        super().__init__(apart=apart)
        self.key = route.destination
        self.site = site
        self.label = self.key.partition(" ")[2] or route.name
        self.active = 0
        self.is_queued = False
        self.stands_as: Priority | None = None
        """In which of the zone's rings (`round_robin.py`)."""
        self.counted: tuple[Standing, ...] = ()
        """Transactions that were started while little good was known of it (`probation.py`)."""
        self.is_slow = False
        """The last attempt took long, whatever came of it."""
        self.most_domains = 1
        """In a batch, where domains are apart: more when the hosts announce it (RFC 9422)."""
        self.suspension = Suspension(settings)
        self.usable_until = 0.0

    @property
    def standing(self) -> Standing:
        if self.suspension.is_proven:
            return Standing.SLOW if self.is_slow else Standing.QUICK
        return Standing.FAILING if self.is_slow or self.suspension.is_troubled else Standing.NEW

    def renew(self, route: Route, zone: ZoneSettings, rates: Rates, now: float) -> None:
        """Go by this route from now on."""
        self.route = route
        until = max(route.expires, now + ROUTE_MIN_USE)
        # One domain's look-up must not prolong another's route: that one may demand TLS by tomorrow.
        self.usable_until = min(until, self.usable_until) if self.domains else until
        self.limits: Limits = route.limits_in(zone)
        self.site.changed()
        self.pace: Pace | None = rates.pace(route.site, self.key, self.limits.max_rate)

    def status(self, tick: float) -> DestinationStatus:
        """`tick` is a monotonic clock's reading."""
        suspension = self.suspension
        pacers = self.pace.pacers if self.waiting and self.pace is not None else ()
        due = max((pacer.due for pacer in pacers), default=tick)
        return DestinationStatus(
            key=self.key,
            name=self.route.name,
            active=self.active,
            waiting=self.waiting,
            suspended_until=suspension.until if suspension.is_troubled else None,
            reply=str(suspension.reply or ""),
            turn_in=due - tick if due > tick else None,
        )

    def is_forgettable(self, now: float) -> bool:
        if self.waiting or self.active or not self.suspension.is_forgettable(now):
            return False
        return not any(backlog.passed_over for backlog in self._backlogs.values())


@dataclass(slots=True, eq=False)
class Work:
    """One batch to attempt now: deliveries of one message for one destination."""

    destination: Destination
    route: Route
    deliveries: tuple[Delivery, ...]
    epoch: int
    ticket: Ticket | None = None
    """To its turns, where there is a rate."""
    seconds: float = 0.0
    """How long the attempt took, once it is over."""
    number: int = 1
    """In its turn (`round_robin.py`): the first may have to open a connection, which the others use."""
    used: float = 0.0
    """Seconds of its turn that were used before, without those of the first."""
    more: bool = False
    """The turn may go on after it."""
    yields: bool = False
    """The turn is over: it reached out to nobody, or another line waits for room at the hosts."""

    @property
    def message_id(self) -> MessageId:
        return self.deliveries[0].message_id


@dataclass(frozen=True, slots=True)
class DestinationStatus:
    """For `status`. `reply` is the reason of the last failure to reach any host, `""` if none. `turn_in`:
    seconds until a rate lets the next one go, where mail waits for that.
    """

    key: DestinationKey
    name: str
    active: int
    waiting: int
    suspended_until: float | None
    reply: str
    turn_in: float | None = None


def _message_id(delivery: Delivery) -> MessageId:
    return delivery.message_id
