"""Manages destinations: their hosts, their batches, and the lookups of their routes. Pure.

Nothing here awaits, and `now` is a parameter. An `UnroutedMail` line waits for a look-up of its domain. A
`Destination` has a route, counts its active transactions and knows whether it is suspended. `selection.py`
chooses between destinations and applies their limits. `Site` counts the transactions at the hosts that
several lines share.

`RouteLookups` chooses the domains to look up next. The number of concurrent look-ups is bounded. Domains of
urgent mail come first. Domains of fresh mail and those of deferred mail alternate (`backlog.py`), so that a
list for ten thousand domains does not delay the mail of others. If fresh or urgent mail arrives for a domain
that waits already, the domain is also queued with the fresh or urgent ones.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import accumulate

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import DestinationQueue, FairQueue
from zonerelay.queue.destination.rates import Pace, Rates, Ticket
from zonerelay.queue.destination.suspension import Suspension
from zonerelay.routing.destinations.route import DestinationLimits, Route, SiteKey

ROUTE_MIN_USE = 30.0
"""The minimum time in seconds for which a route is used, so that a TTL of zero does not cause a look-up for
every delivery.
"""

MINUTE = 60.0
LONG = 3.0
"""Seconds after which an answer is slow. Most servers need less for a message. With 15, servers that need
five or ten seconds counted as being as quick as those that need a tenth of one, and held nearly all
connections reserved for the quick ones.
"""


class Standing(enum.Enum):
    """How a destination has responded recently, which limits its share of the zone's connections."""

    QUICK = enum.auto()
    NEW = enum.auto()
    FAILING = enum.auto()
    SLOW = enum.auto()


class UnroutedMail(DestinationQueue):
    """The deliveries to one domain whose route is being looked up."""

    __slots__ = ("is_hurried", "is_looked_up", "sought", "sought_fresh")

    def __init__(self, domain: str) -> None:
        super().__init__()
        self.domains[domain] = None
        self.sought = False
        """Whether a look-up is wanted or in progress. The other flags say where the line waits."""
        self.sought_fresh = False
        self.is_hurried = False
        self.is_looked_up = False


class Site:
    """A set of hosts that one or several destination queues of a zone send to.

    Several lines can have the same hosts but other terms (another TLS requirement, other limits). The limit
    of a line counts the transactions of all lines at the site whose limit is no larger. So lines with equal
    limits share the limit, a line never exceeds its own, and all together never exceed the largest. `blocked`
    are lines that found no free connection.
    """

    __slots__ = ("_counts", "blocked", "key", "lines")

    def __init__(self, key: SiteKey) -> None:
        self.key = key
        self.lines: dict[Destination, None] = {}
        self.blocked: dict[Destination, None] = {}
        # How many transactions are active of lines with at most this limit. Cached, because a provider's
        # hosts may have hundreds of lines, and each is checked whenever a transaction ends.
        self._counts: list[tuple[int, int]] | None = None

    def changed(self) -> None:
        """Note that a line, a limit or the number of active transactions has changed."""
        self._counts = None

    def has_room(self, destination: Destination, now: float) -> bool:
        """Return whether another transaction may start at the site."""
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


class Destination(DestinationQueue):
    """A destination queue with a known route. Limits, rates and suspension apply to it."""

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
        """Transactions that have begun in the minute until `minute_ends`, and in the minute before it."""
        self.minute_ends = 0.0
        self.is_queued = False
        self.stands_as: Priority | None = None
        """The priority of the zone's queue in which it waits (`selection.py`)."""
        self.counted: tuple[Standing, ...] = ()
        """Transactions that were started while the destination was not known to be quick."""
        self.is_slow = False
        """Whether the last attempt took long, whatever its outcome was."""
        self.most_domains = 1
        """The number of domains in a batch if domains are apart. It is more than 1 if the hosts announce it
        (RFC 9422).
        """
        self.suspension = Suspension(settings)
        self.usable_until = 0.0

    @property
    def standing(self) -> Standing:
        if self.suspension.is_proven:
            return Standing.SLOW if self.is_slow else Standing.QUICK
        return Standing.FAILING if self.is_slow or self.suspension.is_failing else Standing.NEW

    def renew(self, route: Route, zone: ZoneSettings, rates: Rates, now: float) -> None:
        """Use this route from now on."""
        self.route = route
        until = max(route.expires, now + ROUTE_MIN_USE)
        # The look-up of one domain must not prolong the route of another, which may require TLS by tomorrow.
        self.usable_until = min(until, self.usable_until) if self.domains else until
        self.limits: DestinationLimits = route.limits_in(zone)
        self.site.changed()
        self.pace: Pace | None = rates.pace(route.site, self.key, self.limits.max_rate)

    def begins(self, tick: float) -> None:
        """Count the start of a transaction."""
        self.active += 1
        if tick >= self.minute_ends:
            self.before = self.begun if tick < self.minute_ends + MINUTE else 0
            self.begun = 0
            self.minute_ends = (tick // MINUTE + 1) * MINUTE
        self.begun += 1

    def per_minute(self, tick: float) -> int:
        """Return the transactions of the last sixty seconds, assuming that those of the minute before were
        evenly spaced.
        """
        left = (self.minute_ends - tick) / MINUTE
        return round(self.begun + self.before * left if left > 0 else self.begun * max(1 + left, 0.0))

    def turn_in(self, tick: float) -> float | None:
        """Return the seconds until a rate allows the next transaction, if mail waits for it."""
        pacers = self.pace.pacers if self.waiting and self.pace is not None else ()
        due = max((pacer.due for pacer in pacers), default=tick)
        return due - tick if due > tick else None

    @property
    def suspended_until(self) -> float | None:
        return self.suspension.until if self.suspension.is_failing else None

    def is_forgettable(self, now: float) -> bool:
        if self.waiting or self.active or not self.suspension.is_forgettable(now):
            return False
        return not any(backlog.passed_over for backlog in self._backlogs.values())


@dataclass(slots=True, eq=False)
class Work:
    """A batch to attempt now: deliveries of one message to one destination."""

    destination: Destination
    route: Route
    deliveries: tuple[Delivery, ...]
    epoch: int
    ticket: Ticket | None = None
    """The ticket to its turns, if there is a rate."""
    seconds: float = 0.0
    """The duration of the attempt, once it is over."""
    number: int = 1
    """Its number in the visit (`selection.py`). The first batch may have to open a connection, which the
    others use.
    """
    used: float = 0.0
    """Seconds that earlier batches of the visit took, without the first."""
    more: bool = False
    """Whether the visit may continue after it."""
    yields: bool = False
    """Whether the visit is over, because the batch reached no peer or another line waits for a connection at
    the hosts.
    """

    @property
    def message_id(self) -> MessageId:
        return self.deliveries[0].message_id


AT_ONCE = 50
AGAIN_AT_ONCE = AT_ONCE // 5

KNOWN = 10_000
"""Domains without a route that are remembered."""


class RouteLookups:
    """The route lookups of one zone."""

    def __init__(self) -> None:
        self._waiting: FairQueue[UnroutedMail] = FairQueue()
        self._under_way = 0
        self._failed: BoundedDict[str, None] = BoundedDict(KNOWN)
        """Domains whose last look-up returned no route."""
        self._again: dict[UnroutedMail, None] = {}
        self._again_under_way: set[str] = set()

    def want(self, line: UnroutedMail) -> None:
        """Queue the route lookup for newly arrived mail."""
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
        """Sort the waiting lookups again after fresh mail has become backlog."""
        for line in self._waiting.sort():
            line.sought_fresh = False

    def take(self) -> list[str]:
        """Return the domains to be looked up now. Each look-up must end in `ended`."""
        domains: list[str] = []
        while self._again and self._under_way < AT_ONCE and len(self._again_under_way) < AGAIN_AT_ONCE:
            line = next(iter(self._again))
            del self._again[line]
            self._begin(line, domains)
            self._again_under_way.update(line.domains)
        while self._waiting and self._under_way < AT_ONCE:
            line = self._waiting.pop()
            if not line.is_looked_up:  # the line may have been queued twice
                self._begin(line, domains)
        return domains

    def _begin(self, line: UnroutedMail, domains: list[str]) -> None:
        line.is_looked_up = True
        self._under_way += 1
        domains += line.domains

    def ended(self, domain: str, *, found: bool) -> None:
        self._under_way -= 1
        self._again_under_way.discard(domain)
        if found:
            self._failed.pop(domain, None)
        else:
            self._failed[domain] = None

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting or self._again)

    def clear(self) -> None:
        """Forget the domains that wait."""
        self._waiting.clear()
        self._again.clear()
