"""Enforces rates: decides when the next transaction to a destination may begin. Pure.

All times are readings of a monotonic clock, passed as parameters. Policy:

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

from collections.abc import Callable
from weakref import WeakValueDictionary

from zonerelay.config.units import Rate
from zonerelay.limits.values import grace, interval
from zonerelay.limits.worker import LeasedTurns
from zonerelay.routing.destinations.route import DestinationKey, SiteKey

HORIZON = 5.0

MAX_BUSY = 1000
"""Sites whose turns are remembered although nothing waits for them. When there are more, those without
pending turns are forgotten.
"""

_NEVER = float("-inf")


class Pacer:
    """Computes the send times for one rate. `last` is the time of a turn that was taken before the pacer was
    created.
    """

    __slots__ = ("_grace", "_most_pending", "_rate", "interval", "last", "next_start", "next_turn", "pending")

    def __init__(self, rate: Rate, last: float = _NEVER) -> None:
        self._rate: Rate | None = None
        self.last = last
        self.pending = 0
        self.configure(rate)

    def configure(self, rate: Rate) -> None:
        """Apply this rate from now on."""
        if rate == self._rate:
            return
        self._rate = rate
        self.interval = interval(rate)
        self._grace = grace(rate)
        self._most_pending = max(1, int(HORIZON / self.interval))
        self.next_turn = self.next_start = self.last + self.interval

    @property
    def due(self) -> float:
        """The time at which the next batch may start."""
        return max(self.next_start, self.next_turn)

    @property
    def is_crowded(self) -> bool:
        """Whether enough batches have started for now. They must take their turns first."""
        return self.pending >= self._most_pending

    def is_over(self, now: float) -> bool:
        """Return whether nothing is lost by starting again without this state."""
        return not self.pending and self.due <= now

    def start(self, now: float) -> None:
        self.pending += 1
        self.next_start = self._after(self.next_start, now)

    def give_back(self) -> None:
        """Return a start that did not lead to a transaction."""
        self.pending -= 1
        self.next_start -= self.interval

    def take(self, now: float) -> None:
        """Use a send time, not before `next_turn`."""
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
    """The send times at one site, by rate, and the present rate of each of its destinations."""

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
    """The send times of one destination, limited by the rates of its site and of its zone."""

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
        if self.leased is not None:
            return (self.leased,)
        zone = self._rates.zone
        return self.at_site if zone is None else (*self.at_site, zone)

    def is_due(self, now: float) -> bool:
        """Return whether the rates allow a batch to start."""
        return all(pacer.due <= now and not pacer.is_crowded for pacer in self.pacers)

    def expect(self, waiting: int) -> None:
        """Note how many deliveries are waiting to start. Only leased turns use this."""
        if self.leased is not None:
            self.leased.expect((self.site.key, self._line), waiting)

    def start(self, now: float) -> Ticket:
        """Return the ticket of a batch that starts now."""
        self._rates.remember(self.site, now)
        return Ticket(self, now)

    def changed(self, *, earlier: bool) -> None:
        self._rates.changed(self.site.key, earlier)


class Ticket:
    """The send times that one batch waits for and uses. `end` is called when the batch is over."""

    __slots__ = ("_pace", "_pending", "_started", "taken")

    def __init__(self, pace: Pace, now: float) -> None:
        self._pace = pace
        self._started = now
        self.taken = False
        # Kept, because the configuration may change before the batch ends, and each pacer must be notified of
        # the end.
        self._pending = pace.pacers
        for pacer in self._pending:
            pacer.start(now)

    @property
    def due(self) -> float:
        """The next available send time."""
        return max((pacer.next_turn for pacer in self._pace.pacers), default=_NEVER)

    @property
    def leased(self) -> LeasedTurns | None:
        """The leased send times if other workers share the rate, so that `due` may become earlier; otherwise
        None.
        """
        return self._pace.leased

    def arrived(self, now: float) -> None:
        """Note that the connection of the batch is established."""
        for pacer in self._pending:
            if isinstance(pacer, LeasedTurns):
                pacer.arrived(now - self._started)

    def take(self, now: float) -> None:
        """Use a send time, not before `due`."""
        for pacer in self._pace.pacers:
            pacer.take(now)
        if not self.taken:
            self.taken = True
            for pacer in self._pending:
                pacer.pending -= 1
            self._pace.changed(earlier=False)

    def end(self) -> None:
        """End the batch. It can be called more than once."""
        if not self.taken:
            self.taken = True
            for pacer in self._pending:
                pacer.give_back()
            self._pace.changed(earlier=True)


class Rates:
    """The rates of one zone. Changes are reported to `changed`. They outlive the zone's plan when settings
    are replaced; otherwise a reload would reset them.
    """

    def __init__(self) -> None:
        self.changed: Changed = lambda site, earlier: None
        self.used = False
        """Whether anything has ever been limited."""
        self.zone: Pacer | None = None
        self.lessor: Lessor | None = None
        """Set if the turns are shared with other workers."""
        self._zone_rate: Rate | None = None
        # A site is remembered as long as mail waits for it or it has turns to come.
        self._sites: WeakValueDictionary[SiteKey, SiteRates] = WeakValueDictionary()
        self._busy: dict[SiteKey, SiteRates] = {}
        self._max_busy = MAX_BUSY

    def configure(self, rate: Rate | None) -> None:
        """Apply the rate of the zone itself."""
        self.used = self.used or rate is not None
        self._zone_rate = rate
        if rate is None or self.lessor is not None:
            self.zone = None
        elif self.zone is None:
            self.zone = Pacer(rate)
        else:
            self.zone.configure(rate)

    def pace(self, site: SiteKey, line: DestinationKey, rate: Rate | None) -> Pace | None:
        """Return the pace of a destination at a site, or None if no rate applies."""
        known = self._sites.get(site)
        if rate is None and self._zone_rate is None:
            if known is not None:
                known.put(line, None)
            return None
        if known is None:
            known = self._sites[site] = SiteRates(site)
        known.put(line, rate)
        self.used = True
        leased = None if self.lessor is None else self.lessor(site, line, rate, self._zone_rate)
        return Pace(self, known, line, leased)

    def remember(self, site: SiteRates, now: float) -> None:
        """Keep the state of a site that is about to use send times."""
        self._busy[site.key] = site
        if len(self._busy) > self._max_busy:
            self._busy = {key: site for key, site in self._busy.items() if not site.is_over(now)}
            self._max_busy = max(MAX_BUSY, 2 * len(self._busy))
