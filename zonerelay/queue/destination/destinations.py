"""Manages the destinations of a zone: their sites, rates, suspensions and route lookups. Pure.

Nothing here awaits, and `now` is a parameter. An `UnroutedMail` line waits for a look-up of its domain. A
`Destination` has a route, counts its active transactions and knows whether it is suspended. `selection.py`
chooses between destinations and applies their limits. `Site` counts the transactions at the hosts that
several lines share.

`RouteLookups` chooses the domains to look up next. The number of concurrent look-ups is bounded. Domains of
urgent mail come first. Domains of fresh mail and those of deferred mail alternate (`backlog.py`), so that a
list for ten thousand domains does not delay the mail of others. If fresh or urgent mail arrives for a domain
that waits already, the domain is queued with the fresh or urgent ones.

`Suspension` suspends a destination after failures, and decides when the relay may connect to it again.

    open ──a batch finds no host that replies──▶ suspended ──its time is over──▶ probing ──success──▶ open
                                                    ▲                               │
                                                    └────── failure, twice as long ─────┘

If there is no free connection for a probe, the suspension begins again with the same duration.

A failure of a transaction that began before the present suspension is no news and changes nothing. Nor does a
failure while other transactions are active suspend the destination (a peer may reply 421 to the third
connection). It lowers the connection limit to the number of those others, and no more connections are opened.
If they fail as well, the last failure suspends the destination, as one failure, and the lowered limit is
discarded. Successes raise a lowered limit again; each time it was raised in vain, more of them are needed.

Rates decide when the next transaction may begin. All their times are readings of a monotonic clock, passed as
parameters. Policy:

- Even spacing: the turns of a rate lie on a grid, one *interval* apart. A turn that is late by at most the
  *grace* keeps the grid, so the delays of a busy machine cost no throughput. After a longer pause the grid
  starts again, so no credit accumulates: after idle hours, and after a start of the process, one transaction
  may begin at once.
- The MAIL command is counted when it is written, whatever the reply is, because that is what the receiver
  sees.
- The receiver's clock differs from ours: of two commands the first may be delayed on the way and arrive
  closer to the second. So the interval is computed for a time that is longer by `margin`. A quarter of the
  margin is the grace; three quarters are for the network and the receiver. Promise: no period of `seconds` at
  the receiver contains more than `count` transactions while delays vary by less than ¾ margin, or by less
  than ⅗ if turns are leased.
- The lines of a site may have different rates. A turn of a line counts for its own rate and for every faster
  one at the site. So a line never exceeds its own rate, and all lines together never exceed the fastest. A
  line without a rate is not counted.
- If several workers share the rates, turns are leased (`limits/worker.py`). A line then has
  `LeasedTurns`, which combine those of its site and its zone, instead of its pacers.
- A batch *starts* when a turn is due, and takes the turn when its connection is established. Starts have
  their own grid, so that batches do not wait with an open connection for each other's turns. If connections
  are established slowly, only as many batches start as will have their turns within `HORIZON`. A batch that
  ends without a turn gives its start back.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate
from weakref import WeakValueDictionary

import msgspec

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.config.units import Rate
from zonerelay.limits.authority import grace, interval
from zonerelay.limits.worker import LeasedTurns
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import MessageId, Priority
from zonerelay.model.reply import TLS_REQUIRED, Outcome, Reply, Scope, Verdict
from zonerelay.queue.destination.backlog import DestinationQueue, FairQueue
from zonerelay.routing.addresses import organization
from zonerelay.routing.destinations.route import DestinationKey, DestinationLimits, Route, SiteKey

HORIZON = 5.0

MAX_BUSY = 1000
"""Sites whose turns are remembered although nothing waits for them. When there are more, those without
pending turns are forgotten.
"""

_NEVER = float("-inf")


class Pacer:
    """Computes when transactions may start under one rate limit. `last` is the time of a turn that was taken
    before the pacer was created.
    """

    __slots__ = ("_grace", "_most_pending", "interval", "last", "next_start", "next_turn", "pending", "rate")

    def __init__(self, rate: Rate, last: float = _NEVER) -> None:
        self.rate = rate
        self.last = last
        self.pending = 0
        self.interval = interval(rate)
        self._grace = grace(rate)
        self._most_pending = max(1, int(HORIZON / self.interval))
        self.next_turn = self.next_start = self.last + self.interval

    @property
    def due(self) -> float:
        """The earliest time at which the rate limit allows the next batch to start."""
        return max(self.next_start, self.next_turn)

    @property
    def is_crowded(self) -> bool:
        """Whether the maximum number of started batches is waiting for the rate limit."""
        return self.pending >= self._most_pending

    def is_over(self, now: float) -> bool:
        """Return whether this state can be discarded, because it no longer delays a transaction."""
        return not self.pending and self.due <= now

    def start(self, now: float) -> None:
        self.pending += 1
        self.next_start = self._after(self.next_start, now)

    def give_back(self) -> None:
        """Remove a started batch from the count, because it has ended without a transaction."""
        self.pending -= 1
        self.next_start -= self.interval

    def take(self, now: float) -> None:
        """Record that a transaction starts at `now`, which must not be before `next_turn`."""
        self.last = now
        self.next_turn = self._after(self.next_turn, now)

    def _after(self, due: float, now: float) -> float:
        return (due if now - due <= self._grace else now) + self.interval


AnyPacer = Pacer | LeasedTurns

Lessor = Callable[[str, str, Rate | None, Rate | None], LeasedTurns]
"""`lessor(site, line, rate, zone_rate)` returns the turns that several workers share."""

Changed = Callable[[SiteKey, bool], None]
"""`changed(site, earlier)` reports that a batch has taken its first turn (`earlier` is false), or has ended
without one, so that others may start earlier.
"""


class SiteRates:
    """The rate limits at one site, and which of them applies to each destination at the site."""

    __slots__ = ("__weakref__", "_pacers", "_rate_of", "key")

    def __init__(self, key: SiteKey) -> None:
        self.key = key
        self._pacers: dict[Rate, Pacer] = {}
        self._rate_of: dict[DestinationKey, Rate] = {}

    def put(self, line: DestinationKey, rate: Rate | None) -> None:
        if rate is None:
            self._rate_of.pop(line, None)
            return
        self._rate_of[line] = rate
        if rate not in self._pacers:
            last = max((pacer.last for pacer in self._pacers.values()), default=_NEVER)
            self._pacers[rate] = Pacer(rate, last)

    def pacers(self, line: DestinationKey) -> tuple[Pacer, ...]:
        rate = self._rate_of.get(line)
        if rate is None:
            return ()
        own = self._pacers[rate].interval
        return tuple(pacer for pacer in self._pacers.values() if pacer.interval <= own)

    def is_over(self, now: float) -> bool:
        return all(pacer.is_over(now) for pacer in self._pacers.values())


class Pace:
    """The times at which one destination may send, according to the rate limits of its site and its zone.
    `leased` are the send times that other workers have granted it if they share the rates; they may become
    earlier at any time.
    """

    __slots__ = ("_line", "_rates", "leased", "site")

    def __init__(
        self, rates: Rates, site: SiteRates, line: DestinationKey, leased: LeasedTurns | None = None
    ) -> None:
        self._rates = rates
        self.site = site
        self._line = line
        self.leased = leased

    @property
    def at_site(self) -> tuple[AnyPacer, ...]:
        return self.site.pacers(self._line) if self.leased is None else (self.leased,)

    @property
    def pacers(self) -> tuple[AnyPacer, ...]:
        zone = self._rates.zone  # None if turns are leased
        return self.at_site if zone is None else (*self.at_site, zone)

    def is_due(self, now: float) -> bool:
        """Return whether the rate limits allow a batch to start now."""
        return all(pacer.due <= now and not pacer.is_crowded for pacer in self.pacers)

    def expect(self, waiting: int) -> None:
        """Report how many deliveries of the destination are waiting for a send time. Only `leased` uses
        this.
        """
        if self.leased is not None:
            self.leased.expect((self.site.key, self._line), waiting)

    def start(self, now: float) -> Ticket:
        """Count a batch that starts now, and return its `Ticket`."""
        self._rates.remember(self.site, now)
        return Ticket(self, now)

    def changed(self, *, earlier: bool) -> None:
        self._rates.changed(self.site.key, earlier)


class Ticket:
    """A started batch that is counted in the rate limits, from its start to its end. `end` is called when the
    batch is over.
    """

    __slots__ = ("_pending", "_started", "pace", "taken")

    def __init__(self, pace: Pace, now: float) -> None:
        self.pace = pace
        self._started = now
        self.taken = False
        # Kept, because the configuration may change before the batch ends, and each pacer must be notified of
        # the end.
        self._pending = pace.pacers
        for pacer in self._pending:
            pacer.start(now)

    @property
    def due(self) -> float:
        """The earliest time at which the rate limits allow the next transaction of the batch."""
        return max((pacer.next_turn for pacer in self.pace.pacers), default=_NEVER)

    def arrived(self, now: float) -> None:
        """Record that the connection of the batch is established."""
        if self.pace.leased is not None:
            self.pace.leased.arrived(now - self._started)

    def take(self, now: float) -> None:
        """Record that a transaction of the batch starts at `now`, which must not be before `due`."""
        for pacer in self.pace.pacers:
            pacer.take(now)
        if not self.taken:
            self.taken = True
            for pacer in self._pending:
                pacer.pending -= 1
            self.pace.changed(earlier=False)

    def end(self) -> None:
        """Give back the send time of a batch that has ended without using it. It can be called more than
        once.
        """
        if not self.taken:
            self.taken = True
            for pacer in self._pending:
                pacer.give_back()
            self.pace.changed(earlier=True)


class Rates:
    """The rate limits of one zone and of the sites that it sends to. `changed` is called when a send time
    changes. The rates outlive the zone's plan when settings are replaced; otherwise a reload would reset
    them.
    """

    def __init__(self) -> None:
        self.changed: Changed = lambda site, earlier: None
        self.zone: Pacer | None = None
        self.lessor: Lessor | None = None
        """Set if the turns are shared with other workers."""
        self._zone_rate: Rate | None = None
        # A site is remembered as long as mail waits for it or it has turns to come.
        self._sites: WeakValueDictionary[SiteKey, SiteRates] = WeakValueDictionary()
        self._busy: dict[SiteKey, SiteRates] = {}
        self._max_busy = MAX_BUSY

    def configure(self, rate: Rate | None) -> None:
        """Set the rate limit for all mail of the zone together."""
        self._zone_rate = rate
        if rate is None or self.lessor is not None:
            self.zone = None
        elif self.zone is None or self.zone.rate != rate:
            self.zone = Pacer(rate, _NEVER if self.zone is None else self.zone.last)

    def pace(self, site: SiteKey, line: DestinationKey, rate: Rate | None) -> Pace | None:
        """Return the `Pace` of a destination at a site, or None if no rate limit applies to it."""
        known = self._sites.get(site)
        if rate is None and self._zone_rate is None:
            if known is not None:
                known.put(line, None)
            return None
        if known is None:
            known = self._sites[site] = SiteRates(site)
        known.put(line, rate)
        leased = None if self.lessor is None else self.lessor(site, line, rate, self._zone_rate)
        return Pace(self, known, line, leased)

    def remember(self, site: SiteRates, now: float) -> None:
        """Keep the rate limit state of a site in memory, because a batch to the site is starting."""
        self._busy[site.key] = site
        if len(self._busy) > self._max_busy:
            self._busy = {key: site for key, site in self._busy.items() if not site.is_over(now)}
            self._max_busy = max(MAX_BUSY, 2 * len(self._busy))


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


MOST_PATIENCE = 64
"""How many times as many successes are needed to raise a limit that was raised in vain again and again,
because each try defers a message.
"""


PUT_OFF_RATE = 200.0
"""Deliveries per second that are put off for one destination. Each costs a write and a log line, so hundreds
of thousands for a dead host would delay other mail after every probe.
"""
PUT_OFF_MOST = 1000
"""Deliveries that are put off in one suspension. Of the others, only those that may expire or owe a warning
are put off.
"""


class Transition(enum.Enum):
    """The effect of an event on the suspension of a destination."""

    NONE = enum.auto()
    SUSPENDED = enum.auto()
    RESUMED = enum.auto()


class Suspension(msgspec.Struct, eq=False, gc=False):
    """The suspension state of one destination.

    It refers to nothing that refers to it, so the garbage collector need not inspect thousands of them
    (`gc=False`).
    """

    _settings: RetrySettings
    _failures: int = 0
    _ceiling: int | None = None
    _since_raise: int = 0
    _raised: bool = False
    _patience: int = 1
    _last_place: float = 0.0
    _is_over: bool = False
    since: float = 0.0
    until: float = 0.0
    put_off: int = 0
    """Deliveries put off since the suspension began."""
    epoch: int = 0
    is_proven: bool = False
    """Whether the last that the peer did was to reply about some mail."""
    reply: Reply | None = None

    def is_suspended(self, now: float) -> bool:
        # the clock was set back
        return self.since <= now < self.until and not self._is_over

    def end(self) -> None:
        """End the suspension; the next delivery is a probe. This holds even if the clock is set back
        later.
        """
        self._is_over = True

    @property
    def is_failing(self) -> bool:
        """Whether the destination is suspended or being probed."""
        return self._failures > 0

    def is_forgettable(self, now: float) -> bool:
        """Return whether this state can be discarded, because there was no failure recently."""
        return not self._failures or now >= self.until + self._longest()

    def limit(self, configured: int, now: float) -> int:
        """Return how many transactions with the destination may be active now."""
        if self._failures:
            return 0 if self.is_suspended(now) else 1
        return configured if self._ceiling is None else min(configured, self._ceiling)

    def duration(self) -> float:
        """Return the duration in seconds of the current or the last suspension."""
        return min(self._settings.suspend_min * 2.0 ** min(self._failures - 1, 30), self._longest())

    def _longest(self) -> float:
        return max(self._settings.suspend_min, self._settings.suspend_max)

    def place(self) -> float:
        """Return the time for the next attempt of a deferred delivery; the times are spread at
        `PUT_OFF_RATE`.
        """
        self._last_place = max(self._last_place, self.until) + 1 / PUT_OFF_RATE
        return self._last_place

    def failed(self, epoch: int, reply: Reply, others: int, now: float) -> Transition:
        """Record that a transaction reached no host while `others` other transactions were active."""
        self.reply = reply
        if epoch != self.epoch:
            return Transition.NONE
        if others and not self._failures:
            self._lower_ceiling(others)
            return Transition.NONE
        self._failures += 1
        self.epoch += 1
        self.is_proven = False
        self._ceiling, self._raised, self._patience = None, False, 1
        self.wait(now)
        return Transition.SUSPENDED

    def succeeded(self, epoch: int) -> Transition:
        """Record that a peer replied, whatever the reply was."""
        if self._failures:
            # A connection from before the suspension proves nothing about new ones.
            self.is_proven = epoch == self.epoch
            return self.resume() if self.is_proven else Transition.NONE
        self.is_proven = True
        if self._ceiling is not None:
            self._raise_ceiling(self._ceiling)
        return Transition.NONE

    def learn(self, outcomes: Sequence[Outcome], *, epoch: int, others: int, now: float) -> Transition:
        """Update the suspension from the outcomes of a delivery attempt. Without outcomes it contacted no
        peer.
        """
        if outcomes and outcomes[0].verdict is Verdict.DELIVERED:
            return self.succeeded(epoch)
        failure = _host_failure(outcomes)
        if failure is not None:
            return self.failed(epoch, failure.reply, others, now)
        if not any(_talked(outcome) for outcome in outcomes):
            return Transition.NONE
        transition = self.succeeded(epoch)
        # The peer stopped replying in the middle of the transaction. This does not count if it replied to
        # everything and a message requires more TLS than it offers.
        if all(outcome.local and outcome.reply.detail != TLS_REQUIRED for outcome in outcomes):
            self.is_proven = False
        return transition

    def take_at_most(self, connections: int) -> None:
        """Record that the hosts accept mail on this number of connections but refused it on one more."""
        if not self._failures and (self._ceiling is None or connections < self._ceiling):
            self._lower_ceiling(connections)

    def wait(self, now: float) -> None:
        """Restart the suspension, because the probe failed or no connection was free for it."""
        self._is_over = False
        self.put_off = 0
        if now < self.since:
            self._last_place = 0.0  # the clock was set back
        self.since = now
        self.until = now + self.duration()

    def resume(self) -> Transition:
        """Lift the suspension, because a probe succeeded or an operator requested it."""
        if not self._failures:
            return Transition.NONE
        self._failures = 0
        self.until = 0.0
        return Transition.RESUMED

    def _lower_ceiling(self, others: int) -> None:
        if self._raised:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._ceiling, self._since_raise, self._raised = others, 0, False

    def _raise_ceiling(self, ceiling: int) -> None:
        self._since_raise += 1
        if self._since_raise >= ceiling * self._patience:
            if self._raised:
                self._patience = 1
            self._ceiling, self._since_raise, self._raised = ceiling + 1, 0, True


def suspended(reply: Reply | None) -> Reply:
    """Return the reply for a delivery that is deferred because its destination is suspended after `reply`."""
    return Reply(451, "4.1", f"delivery temporarily suspended: {reply}")


def _talked(outcome: Outcome) -> bool:
    """Return whether the outcome shows that a host replied, whatever its reply was."""
    if outcome.scope is Scope.HOST:
        return outcome.verdict is not Verdict.DEFERRED
    return outcome.scope is Scope.RECIPIENT or outcome.scope is Scope.MESSAGE


def _host_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the first outcome if no host replied to the batch; otherwise None."""
    if not outcomes or outcomes[0].scope is not Scope.HOST:
        return None
    if all(outcome.scope is Scope.HOST and not _talked(outcome) for outcome in outcomes):
        return outcomes[0]
    return None


class Standing(enum.Enum):
    """How well a destination has responded recently, which limits its share of the zone's connections."""

    QUICK = enum.auto()
    NEW = enum.auto()
    FAILING = enum.auto()
    SLOW = enum.auto()


class UnroutedMail(DestinationQueue):
    """The deliveries to one domain whose route is being looked up."""

    __slots__ = ("is_looked_up", "share")

    def __init__(self, domain: str) -> None:
        super().__init__()
        self.domains[domain] = None
        self.share: str | None = None
        """The lookups that count together with this one, or None while none is wanted."""
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
        """Discard the cached numbers of active transactions, because one of them or a limit has changed."""
        self._counts = None

    def has_room(self, destination: Destination, now: float) -> bool:
        """Return whether the connection limits at the site allow this destination another transaction."""
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
        "minute_ends", "most_domains", "pace", "route", "site", "stands_as", "suspension", "usable_since",
        "usable_until",
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
        self.usable_since = self.usable_until = 0.0

    @property
    def standing(self) -> Standing:
        if self.suspension.is_proven:
            return Standing.SLOW if self.is_slow else Standing.QUICK
        return Standing.FAILING if self.is_slow or self.suspension.is_failing else Standing.NEW

    def renew(self, route: Route, zone: ZoneSettings, rates: Rates, now: float) -> None:
        """Replace the destination's route, and with it its limits and rate."""
        self.route = route
        self.usable_since = now
        until = max(route.expires, now + ROUTE_MIN_USE)
        # The look-up of one domain must not prolong the route of another, which may require TLS by tomorrow.
        self.usable_until = min(until, self.usable_until) if self.domains else until
        self.limits: DestinationLimits = route.limits_in(zone)
        self.site.changed()
        self.pace: Pace | None = rates.pace(route.site, self.key, self.limits.max_rate)

    def is_usable(self, now: float) -> bool:
        """Return whether the route has not expired. If the clock was set back, it counts as expired."""
        return self.usable_since <= now < self.usable_until

    def begins(self, tick: float) -> None:
        """Count a transaction that starts now."""
        self.active += 1
        if tick >= self.minute_ends:
            self.before = self.begun if tick < self.minute_ends + MINUTE else 0
            self.begun = 0
            self.minute_ends = (tick // MINUTE + 1) * MINUTE
        self.begun += 1

    def per_minute(self, tick: float) -> int:
        """Estimate the number of transactions started in the last 60 seconds."""
        left = (self.minute_ends - tick) / MINUTE
        return round(self.begun + self.before * left if left > 0 else self.begun * max(1 + left, 0.0))

    def turn_in(self, tick: float) -> float | None:
        """Return the seconds until the rate limits allow the next transaction, or None if no mail is waiting
        for that.
        """
        pacers = self.pace.pacers if self.waiting and self.pace is not None else ()
        due = max((pacer.due for pacer in pacers), default=tick)
        return due - tick if due > tick else None

    @property
    def suspended_until(self) -> float | None:
        return self.suspension.until if self.suspension.is_failing else None

    def is_forgettable(self, now: float) -> bool:
        if self.waiting or self.active or not self.suspension.is_forgettable(now):
            return False
        return not any(backlog.passed_over for backlog in self.backlogs.values())


class Work(msgspec.Struct, eq=False):
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
SHARE = AT_ONCE // 5
"""Concurrent look-ups of the names of one organization, and of all domains whose last look-up returned no
route. Their name servers may be silent.
"""
NO_ROUTE = "no route"

KNOWN = 10_000
"""Domains without a route that are remembered."""


class RouteLookups:
    """The route lookups of one zone that are waiting or in progress."""

    def __init__(self) -> None:
        self._waiting: FairQueue[UnroutedMail] = FairQueue()
        self._under_way: dict[str, str] = {}
        """The share of each domain that is being looked up."""
        self._active: Counter[str] = Counter()
        self._held_back: dict[str, OrderedDict[UnroutedMail, None]] = {}
        """Lookups that wait until fewer of their share are under way."""
        self._failed: BoundedDict[str, None] = BoundedDict(KNOWN)
        """Domains whose last look-up returned no route."""

    def want(self, line: UnroutedMail) -> None:
        """Queue the route lookup for a domain that has new mail."""
        if line.is_looked_up:
            return
        if line.urgency is Priority.HIGH:
            self._waiting.put_first(line)
        elif line.share is not None:
            self._waiting.hasten(line)
        else:
            self._waiting.append(line)
        if line.share is None:
            (domain,) = line.domains
            line.share = NO_ROUTE if domain in self._failed else organization(domain)

    def sort(self) -> None:
        """Move the lookups of domains that no longer have fresh mail behind those of domains that have."""
        self._waiting.sort()

    def take(self) -> list[str]:
        """Return the domains to be looked up now. Each look-up must end in `ended`."""
        domains: list[str] = []
        while self._waiting and len(self._under_way) < AT_ONCE:
            line = self._waiting.pop()
            share = line.share
            if line.is_looked_up or share is None:  # the line may have been queued twice
                continue
            if self._active[share] >= SHARE:
                self._held_back.setdefault(share, OrderedDict())[line] = None
                continue
            line.is_looked_up = True
            self._active[share] += 1
            self._under_way.update(dict.fromkeys(line.domains, share))
            domains += line.domains
        return domains

    def ended(self, domain: str, *, found: bool) -> None:
        share = self._under_way.pop(domain)
        self._active[share] -= 1
        held_back = self._held_back.pop(share, OrderedDict())
        while held_back:
            line = held_back.popitem(last=False)[0]
            if not line.is_looked_up:
                self._waiting.put_first(line)
                self._held_back[share] = held_back
                break
        if not self._active[share]:
            del self._active[share]
        if found:
            self._failed.pop(domain, None)
        else:
            self._failed[domain] = None

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def clear(self) -> None:
        """Discard all waiting lookups."""
        self._held_back.clear()
        self._waiting.clear()
