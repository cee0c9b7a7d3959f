"""Destinations: lines with a route, their hosts, and one batch for one of them. Pure.

Nothing here awaits, and `now` is a parameter. An `Unrouted` line waits for a look-up of its domain; a
`Destination` has a route, counts its active transactions and knows whether it is suspended.
`selection/round_robin.py` chooses between destinations and applies their limits; `Site` counts the
transactions at the hosts that several lines share.

The look-ups of routes: which domains are asked for next. Pure.

A bounded number of look-ups is under way. Domains of urgent mail come first; those of fresh mail and those of
mail that has been put off alternate (`order.py`), so that a list for ten thousand domains does not stand
before the mail of others. A domain that waits already when fresh or urgent mail comes for it is put there as
well.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from itertools import accumulate

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority
from zonerelay.model.reply import Reply
from zonerelay.queue.destination.backlog import Line
from zonerelay.queue.destination.order import FairQueue
from zonerelay.queue.destination.rates import Pace, Rates, Ticket
from zonerelay.queue.destination.suspension import Suspension
from zonerelay.routing.destinations.route import DestinationKey, DestinationLimits, Route, SiteKey
from zonerelay.smtp.client.reputation import class_of

ROUTE_MIN_USE = 30.0
"""Seconds that a route is used at least, so that a zero TTL does not look up again for every delivery."""

MINUTE = 60.0
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
    exceeds its own, and all together never the largest. `blocked` are lines that found no room.
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
        "active", "before", "begun", "counted", "is_queued", "is_slow", "key", "label", "limits",
        "minute_ends", "most_domains", "pace", "route", "site", "stands_as", "suspension", "usable_until",
    )  # fmt: skip

    def __init__(self, route: Route, site: Site, settings: RetrySettings, *, apart: bool = False) -> None:
        super().__init__(apart=apart)
        self.key = route.destination
        self.site = site
        self.label = self.key.partition(" ")[2] or route.name
        self.active = 0
        self.begun = self.before = 0
        """Transactions that have begun in the minute until `minute_ends`, and in the one before it."""
        self.minute_ends = 0.0
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
        self.limits: DestinationLimits = route.limits_in(zone)
        self.site.changed()
        self.pace: Pace | None = rates.pace(route.site, self.key, self.limits.max_rate)

    def begins(self, tick: float) -> None:
        """Counts a transaction."""
        self.active += 1
        if tick >= self.minute_ends:
            self.before = self.begun if tick < self.minute_ends + MINUTE else 0
            self.begun = 0
            self.minute_ends = (tick // MINUTE + 1) * MINUTE
        self.begun += 1

    def per_minute(self, tick: float) -> int:
        """Transactions in the last sixty seconds, as if those of the minute before had come evenly."""
        left = (self.minute_ends - tick) / MINUTE
        return round(self.begun + self.before * left if left > 0 else self.begun * max(1 + left, 0.0))

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
            last=suspension.reply,
            per_minute=self.per_minute(tick),
            limits=self.limits,
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
    """In its visit (`round_robin.py`): the first may have to open a connection, which the others use."""
    used: float = 0.0
    """Seconds of its visit that were used before, without those of the first."""
    more: bool = False
    """The visit may go on after it."""
    yields: bool = False
    """The visit is over: the batch reached no peer, or another line waits for room at the hosts."""

    @property
    def message_id(self) -> MessageId:
        return self.deliveries[0].message_id


@dataclass(frozen=True, slots=True)
class DestinationStatus:
    """For `status`. `last` is the reason of the last failure to reach any host. `turn_in`: seconds until a
    rate lets the next one go, where mail waits for that. `per_minute`: transactions of late.
    """

    key: DestinationKey
    name: str
    active: int
    waiting: int
    suspended_until: float | None
    last: Reply | None
    per_minute: int
    limits: DestinationLimits
    turn_in: float | None = None

    @property
    def reply(self) -> str:
        """The reason in words, `""` without one."""
        return str(self.last or "")

    @property
    def reply_class(self) -> str:
        """What it means: to find out takes longer than all else here."""
        return "" if self.last is None else class_of(self.last, local=True)


AT_ONCE = 50
AGAIN_AT_ONCE = AT_ONCE // 5

KNOWN = 10_000
"""Domains without a route that are remembered."""


class LookUps:
    """The look-ups of one zone."""

    def __init__(self) -> None:
        self._waiting: FairQueue[Unrouted] = FairQueue()
        self._under_way = 0
        self._failed: OrderedDict[str, None] = OrderedDict()
        """Domains whose last look-up brought no route."""
        self._again: dict[Unrouted, None] = {}
        self._again_under_way: set[str] = set()

    def want(self, line: Unrouted) -> None:
        """Mail has come for the domain of the line."""
        if line.is_looked_up:
            return
        if not self._failed.keys().isdisjoint(line.domains):
            self._again[line] = None
        elif line.urgency is Priority.HIGH:
            if not line.is_hurried:
                line.is_hurried = True
                self._waiting.put_first(line)
        elif not line.sought or (line.has_fresh and not line.sought_fresh):
            line.sought_fresh = line.has_fresh
            self._waiting.append(line)
        line.sought = True

    def sort(self) -> None:
        """Sorts anew: fresh mail may be backlog now."""
        for line in self._waiting.sort():
            line.sought_fresh = False

    def take(self) -> list[str]:
        """Domains to ask for now; each must end in `ended`."""
        domains: list[str] = []
        while self._again and self._under_way < AT_ONCE and len(self._again_under_way) < AGAIN_AT_ONCE:
            line = next(iter(self._again))
            del self._again[line]
            self._begin(line, domains)
            self._again_under_way.update(line.domains)
        while self._waiting and self._under_way < AT_ONCE:
            line = self._waiting.pop()
            if not line.is_looked_up:  # it may have stood in another place as well
                self._begin(line, domains)
        return domains

    def _begin(self, line: Unrouted, domains: list[str]) -> None:
        line.is_looked_up = True
        self._under_way += 1
        domains += line.domains

    def ended(self, domain: str, *, found: bool) -> None:
        self._under_way -= 1
        self._again_under_way.discard(domain)
        if found:
            self._failed.pop(domain, None)
            return
        self._failed[domain] = None
        if len(self._failed) > KNOWN:
            self._failed.popitem(last=False)

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting or self._again)

    def clear(self) -> None:
        """Forgets the domains that wait."""
        self._waiting.clear()
        self._again.clear()
