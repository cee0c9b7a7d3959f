"""Rates: when the next transaction may begin, where the configuration bounds their number in a time. Pure.

All times are readings of a monotonic clock, handed in. Policy:

- Even spacing: the turns of a rate lie on a grid, one *interval* apart. A turn that is at most the *grace*
  late keeps the grid, so that the delays of a busy machine cost no throughput; after a longer pause the grid
  begins again, so nothing is saved up: after idle hours, and after a start of the process, one goes at once.
- What counts is a MAIL command that is written, whatever is answered, because that is what the receiver sees.
- The receiver's clock is not ours: of two commands the first may be held up on its way and arrive closer to
  the second. The interval is therefore that of a time that is longer by `margin`: a quarter of it is the
  grace, three quarters are for the network and the receiver. Promise: no `seconds` of the receiver's hold
  more than `count`, while delays vary by less than ¾ margin; by less than ⅗ where turns are leased.
- A site's lines may have different rates. A turn of a line counts for its own rate and for every faster one
  there: a line never exceeds its own, all together never the fastest. A line without a rate counts nowhere.
- Where several workers go by the same rates their turns are leased (`limits/worker/allowance.py`): a line has
  `LeasedTurns`, those of its site and its zone in one, in the place of its pacers.
- A batch *starts* when a turn is due and takes it when its connection stands. Starts have a grid of their
  own, so that batches do not wait with an open connection for each other's turns; where connections are slow
  to come, only as many start as will have their turns within `HORIZON`. One that ends without a turn gives
  its start back.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary

from zonerelay.config.units import Rate
from zonerelay.limits.values import grace, interval
from zonerelay.limits.worker.allowance import LeasedTurns
from zonerelay.routing.destinations.route import DestinationKey, SiteKey

HORIZON = 5.0

MAX_BUSY = 1000
"""Sites whose turns are remembered although nothing waits for them; with more, those that are over are
forgotten.
"""

_NEVER = float("-inf")


class Pacer:
    """The turns at one rate. `last`: the time of a turn that was taken before the pacer was made."""

    __slots__ = ("_grace", "_most_pending", "_rate", "interval", "last", "next_start", "next_turn", "pending")

    def __init__(self, rate: Rate, last: float = _NEVER) -> None:
        self._rate: Rate | None = None
        self.last = last
        self.pending = 0
        self.configure(rate)

    def configure(self, rate: Rate) -> None:
        """Go by this rate from now on."""
        if rate == self._rate:
            return
        self._rate = rate
        self.interval = interval(rate)
        self._grace = grace(rate)
        self._most_pending = max(1, int(HORIZON / self.interval))
        self.next_turn = self.next_start = self.last + self.interval

    @property
    def due(self) -> float:
        """When the next batch may start."""
        return max(self.next_start, self.next_turn)

    @property
    def is_crowded(self) -> bool:
        """Enough have started for now: they must have their turns first."""
        return self.pending >= self._most_pending

    def is_over(self, now: float) -> bool:
        """Return whether nothing is lost by starting afresh."""
        return not self.pending and self.due <= now

    def start(self, now: float) -> None:
        self.pending += 1
        self.next_start = self._after(self.next_start, now)

    def give_back(self) -> None:
        """A start that led to nothing."""
        self.pending -= 1
        self.next_start -= self.interval

    def take(self, now: float) -> None:
        """A turn; not before `next_turn`."""
        self.last = now
        self.next_turn = self._after(self.next_turn, now)

    def _after(self, due: float, now: float) -> float:
        return (due if now - due <= self._grace else now) + self.interval


AnyPacer = Pacer | LeasedTurns

Lessor = Callable[[str, str, Rate | None, Rate | None], LeasedTurns]
"""`lessor(site, line, rate, zone_rate)`: the turns that several workers share."""

Changed = Callable[[SiteKey, bool], None]
"""`changed(site, earlier)`: a batch has taken its first turn (`earlier` is false), or has ended without one:
others may start earlier then."""


class SiteRates:
    """The turns at one site, by rate, and the rate of each of its lines as it is now."""

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
    """One line's turns: those of its site and those of the zone."""

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
        """A batch may start, as far as the rates go."""
        return all(pacer.due <= now and not pacer.is_crowded for pacer in self.pacers)

    def expect(self, waiting: int) -> None:
        """So many deliveries of the line wait for their start; known where turns are leased."""
        if self.leased is not None:
            self.leased.expect((self.site.key, self._line), waiting)

    def start(self, now: float) -> Ticket:
        """For a batch that starts now."""
        self._rates.remember(self.site, now)
        return Ticket(self, now)

    def changed(self, *, earlier: bool) -> None:
        self._rates.changed(self.site.key, earlier)


class Ticket:
    """Follows one batch from its start to its turns; `end` is called when the batch is over."""

    __slots__ = ("_pace", "_pending", "_started", "taken")

    def __init__(self, pace: Pace, now: float) -> None:
        self._pace = pace
        self._started = now
        self.taken = False
        # Kept: the configuration may change before it ends, and each pacer must be told of the end.
        self._pending = pace.pacers
        for pacer in self._pending:
            pacer.start(now)

    @property
    def due(self) -> float:
        """When the next turn may be taken."""
        return max((pacer.next_turn for pacer in self._pace.pacers), default=_NEVER)

    @property
    def leased(self) -> LeasedTurns | None:
        """Where others decide about the turns as well, so that `due` may become earlier."""
        return self._pace.leased

    def arrived(self, now: float) -> None:
        """The connection of the batch stands."""
        for pacer in self._pending:
            if isinstance(pacer, LeasedTurns):
                pacer.arrived(now - self._started)

    def take(self, now: float) -> None:
        """Not before `due`."""
        for pacer in self._pace.pacers:
            pacer.take(now)
        if not self.taken:
            self.taken = True
            for pacer in self._pending:
                pacer.pending -= 1
            self._pace.changed(earlier=False)

    def end(self) -> None:
        """Safe to call again."""
        if not self.taken:
            self.taken = True
            for pacer in self._pending:
                pacer.give_back()
            self._pace.changed(earlier=True)


class Rates:
    """The turns of one zone, of which `changed` is told. They outlive the zone's plan when settings are
    replaced, or a reload would reset them.
    """

    def __init__(self) -> None:
        self.changed: Changed = lambda site, earlier: None
        self.used = False
        """Something has ever been limited."""
        self.zone: Pacer | None = None
        self.lessor: Lessor | None = None
        """Set where the turns are shared with other workers."""
        self._zone_rate: Rate | None = None
        # A site is remembered as long as anybody waits for it or it has turns to come.
        self._sites: WeakValueDictionary[SiteKey, SiteRates] = WeakValueDictionary()
        self._busy: dict[SiteKey, SiteRates] = {}
        self._max_busy = MAX_BUSY

    def configure(self, rate: Rate | None) -> None:
        """The zone's own rate."""
        self.used = self.used or rate is not None
        self._zone_rate = rate
        if rate is None or self.lessor is not None:
            self.zone = None
        elif self.zone is None:
            self.zone = Pacer(rate)
        else:
            self.zone.configure(rate)

    def pace(self, site: SiteKey, line: DestinationKey, rate: Rate | None) -> Pace | None:
        """Of a line at a site; `None` when nothing limits it."""
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
        """It is about to have turns."""
        self._busy[site.key] = site
        if len(self._busy) > self._max_busy:
            self._busy = {key: site for key, site in self._busy.items() if not site.is_over(now)}
            self._max_busy = max(MAX_BUSY, 2 * len(self._busy))
