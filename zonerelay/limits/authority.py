"""Allocates the connection slots of one zone, and the send times that its rate limits allow, to workers.
Defines the messages between a worker and the limit authority. Pure.

A *slot* is the right to one connection of a destination at a site. It counts in the zone, at the site and for
the destination. A *turn* is a moment at which one MAIL may be written. The *authority* records which owner
has which slots and which turns are assigned. An *owner* is a worker that sends it requests.

A request declares a state, not a change: "of this destination I keep 3 slots and want 5". Repeating it
changes nothing, and an authority that has lost its state believes it. So answers may get lost, and the
authority may be restarted.

`SlotAllocator` assigns slots:

- It assigns slots within the limits of the zone and of the destination. Destinations at one site share these:
  a limit counts the slots of all destinations there whose limit is no larger. For a moment owners may have
  different configurations; the smallest limit of a destination, and of the zone, then applies.
- A free slot goes to the waiting destination with the fewest slots; among equals to the owner with the
  fewest, then to the destination that has waited longest. A destination whose site has no free slot is
  skipped.
- If a limit is used up and a destination waits, an owner with at least two slots more than the waiting owner
  must give slots back until both are equal (`Reclaimer`). The destinations of one owner do the same among
  themselves. If there are fewer slots than waiting owners, the slots circulate: an owner keeps its only slot
  for `QUANTUM`.
- An owner's declaration of what it keeps is accepted, even beyond a limit, because those connections exist.
  Then no slot is assigned, and the excess (after a limit was lowered) is reclaimed from the largest holdings.

Promise: slots are assigned only within the limits, and no destination waits for ever while slots are given
back. The cost of a request grows with what has changed and with the waiting destinations, not with what other
owners have: a worker may hold connections to thousands of destinations and send hundreds of requests per
second.

`ZoneLimits` is the state of one zone: its allocator of slots, its calendars of turns, and their encoding. The
same code decides in every authority: in memory, behind a Unix socket, and over a row or a key that several
machines share. A `Calendar` holds the turns of the rates at one site, or of the whole zone, over all workers:

- Two turns of one destination are at least one interval of that destination apart. Two turns of different
  destinations are at least the shorter of their intervals apart. So no destination exceeds its own rate, and
  all destinations together never exceed the fastest rate.
- Turns are assigned in the order of the requests. A turn may also be assigned in a gap between turns of a
  slower destination.
- The calendar only assigns moments; the owner takes them in time (`worker.py`).
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import Struct

from zonerelay.config.units import Rate
from zonerelay.model.clock import Clock

# The interval between two turns of a rate, and the grace within which a turn may be taken. Pure.
#
# The receiver's clock differs from ours: of two commands the first may be delayed on the way and arrive
# closer to the second. So the interval is computed for a time that is longer by a `margin`. A quarter of the
# margin is the grace; three quarters are for the network and the receiver. If turns are leased (`worker.py`),
# the grace is two fifths, because the time that the answer was on its way reduces it.

MARGIN_LEAST = 0.05
MARGIN_PART = 0.02
GRACE_PART = 0.25
LEASED_GRACE_PART = 0.4


def margin(rate: Rate) -> float:
    """Return the number of seconds added to the period of a rate as a safety margin."""
    return max(MARGIN_LEAST, MARGIN_PART * rate.seconds)


def interval(rate: Rate) -> float:
    return (rate.seconds + margin(rate)) / rate.count


def grace(rate: Rate) -> float:
    """Return how many seconds after its assigned send time a transaction may begin."""
    return GRACE_PART * margin(rate)


def leased_grace(rate: Rate) -> float:
    """Return how many seconds after a send time leased from the authority a transaction may begin."""
    return LEASED_GRACE_PART * margin(rate)


class SlotClaim(Struct, frozen=True, array_like=True):
    """A worker's claim for connection slots to one destination. `keep` is the number of slots that the owner
    goes on using, `back` those that it gives back with this request, and `want` how many it would like to
    have in all. `limit` comes from its configuration.
    """

    site: str
    destination: str
    limit: int
    keep: int = 0
    back: int = 0
    want: int = 0


class TurnRequest(Struct, frozen=True, array_like=True):
    """A request for `count` send times for a destination, `interval` seconds apart. They are also turns of
    the zone if `zone_interval` is set. An interval of 0 means that there is no such rate. No turn is to be
    within the next `after` seconds.
    """

    site: str
    destination: str
    interval: float
    zone_interval: float
    count: int
    after: float = 0.0


class LimitRequest(Struct, frozen=True, array_like=True):
    """A worker's request to the limit authority about one zone. `everything` is true if these are all claims
    of the owner; the answer then contains everything that it has.

    `unused` are turns that the owner will not take, each with its site. A request names them only once,
    because they may belong to another owner afterwards. `known_turns` are turns that the owner was
    assigned, for an authority that may have forgotten them.
    """

    zone_limit: int
    claims: tuple[SlotClaim, ...] = ()
    turns: tuple[TurnRequest, ...] = ()
    unused: tuple[tuple[str, float], ...] = ()
    everything: bool = False
    known_turns: tuple[tuple[TurnRequest, tuple[float, ...]], ...] = ()


class SlotGrant(Struct, frozen=True, array_like=True):
    """The slots that a worker has for one destination, and how many of them it must return even if they are
    in use. `waiters` is the number of destinations that wait because of these slots; idle ones should be
    given back.
    """

    site: str
    destination: str
    slots: int
    revoked: int = 0
    waiters: int = 0


class LimitAnswer(Struct, frozen=True, array_like=True):
    """The authority's response to a request. `now` is the authority's clock, by which `turns` are given, as
    one list for each request for turns.

    `waiters` is the number of destinations that wait because all slots of the zone are assigned. `owners` is
    the number of workers that have slots of the zone or wait for some.
    """

    now: float
    held: tuple[SlotGrant, ...] = ()
    turns: tuple[tuple[float, ...], ...] = ()
    waiters: int = 0
    owners: int = 1


class AuthorityError(Exception):
    """The limit authority did not respond. It may or may not have processed the request."""


class LimitAuthority(Protocol):
    """Interface: grants the limits that several workers share. It belongs to one event loop."""

    @property
    def name(self) -> str:
        """The name of the authority in the operator's status."""

    @property
    def lease(self) -> float | None:
        """The number of seconds after which a silent owner loses its slots, or None if it keeps them as long
        as its process lives.
        """

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        """Connect to the authority. `news` is called with a zone if a new exchange would bring something.
        `gone` is called with the reason when the authority is unreachable. `back` is called when it is
        reachable again and may have forgotten everything, so that everything must be declared again. Raise
        AuthorityError only if it can never be used.
        """

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        """Send a request and return the answer. Only one request per zone may be active at a time. Raise
        AuthorityError.
        """

    async def close(self) -> None:
        """Return all slots to the authority, if it is reachable."""


# The slots


@dataclass(slots=True, eq=False)
class Lease:
    """The connection slots of one worker for one destination. `reported` is what the owner received last: its
    slots, how many of them must be given back, and how many destinations wait for them.
    """

    owner: "Owner" = field(repr=False)
    site: str
    destination: str
    limit: int = 0
    slots: int = 0
    want: int = 0
    since: float = 0.0
    revoked: int = 0
    waiters: int = 0
    reported: tuple[int, int, int] = (0, 0, 0)

    @property
    def left(self) -> int:
        """The number of slots of this lease that are not being reclaimed."""
        return self.slots - self.revoked

    @property
    def needs_request(self) -> bool:
        """Whether the owner should send a request, because its slots have changed or others wait for them."""
        slots, revoked, waiters = self.reported
        return self.slots != slots or self.revoked > revoked or bool(self.waiters and not waiters)


class Owner(msgspec.Struct, eq=False):
    """A worker that has or requests connection slots. `until` is when it loses everything unless it sends a
    request. `waiters_reported` is the last value that it received. `unreported` are leases that may have
    changed since it received them.
    """

    name: str
    zone_limit: int = 0
    until: float = float("inf")
    slots: int = 0
    waiters_reported: int = 0
    leases: dict[tuple[str, str], Lease] = msgspec.field(default_factory=dict)
    unreported: dict[Lease, None] = msgspec.field(default_factory=dict)


QUANTUM = 1.0
"""Seconds for which an owner keeps its only slot."""

_Place = tuple[int, int, Lease]


class Reclaimer:
    """Reclaims connection slots that count towards one limit from the workers that have the most. It counts
    each worker's slots without those already being reclaimed. `mark` is called with each lease that must give
    slots back.
    """

    def __init__(self, leases: Iterable[Lease], mark: Callable[[Lease], None]) -> None:
        # The largest come first. A place may be out of date, because others take from the same leases.
        self._of: dict[Owner, list[_Place]] = {}
        self._held: Counter[Owner] = Counter()
        self._mark = mark
        for number, lease in enumerate(leases):
            self._of.setdefault(lease.owner, []).append((-lease.left, number, lease))
            self._held[lease.owner] += lease.left
        for places in self._of.values():
            heapq.heapify(places)

    def ask(self, waiting: Lease, wanted: int, now: float) -> None:
        """Reclaim up to `wanted` slots for a waiting lease."""
        for more in range(wanted):
            other = self._richest(waiting.owner)
            if other is None:
                # No other owner has more, so one of its own destinations that has more gives way.
                if not self._take(waiting.owner, now, least=waiting.slots + more + 1, spare=waiting):
                    return
            elif self._take(other, now, least=0, spare=None):
                self._held[waiting.owner] += 1
            else:
                return

    def _richest(self, than: Owner) -> Owner | None:
        """Return the owner with the most slots, or None if it has too few to give one up. It must have at
        least two more than `than`, or one while `than` has none.
        """
        mine = self._held[than]
        other = max(
            (each for each in self._of if each is not than), key=lambda each: self._held[each], default=None
        )
        if other is None or (self._held[other] < mine + 2 and (mine or self._held[other] != 1)):
            return None
        return other

    def _take(self, owner: Owner, now: float, *, least: int, spare: Lease | None) -> bool:
        """Reclaim a slot from an owner's largest lease other than `spare`."""
        places = self._of.get(owner, [])
        kept = self._pop(places)
        place = kept
        if kept is not None and kept[2] is spare:
            place = self._pop(places)
            heapq.heappush(places, kept)
        if place is None:
            return False
        _, number, lease = place
        left = lease.left
        is_due = left > 1 or now - lease.since >= QUANTUM
        if left <= 0 or (least and left < least + (least > 1)) or not is_due:
            heapq.heappush(places, place)
            return False
        lease.revoked += 1
        self._mark(lease)
        heapq.heappush(places, (-lease.left, number, lease))
        self._held[owner] -= 1
        return True

    @staticmethod
    def _pop(places: list[_Place]) -> _Place | None:
        """Remove and return the entry of the largest lease, after updating outdated entries, or None."""
        while places:
            negative, number, lease = place = heapq.heappop(places)
            if negative == -lease.left:
                return place
            heapq.heappush(places, (-lease.left, number, lease))
        return None


MAX_RECLAIMED = 8
"""Slots that are reclaimed at once for one waiting destination. More are reclaimed next time."""

MAX_SERVED = 50
"""The number of destinations waiting for the zone's slots for which slots are reclaimed at the same time."""

MAX_WAITING = 200
"""Destinations of one owner that may wait in one zone. The owner requests slots for others when some of these
are served.
"""


class SlotAllocator:
    """Allocates the connection slots of one zone. Call `settle` after every change; it returns the owners
    that have news.
    """

    def __init__(self) -> None:
        self.owners: dict[str, Owner] = {}
        self.waiting: dict[Lease, None] = {}
        self.waiters = 0
        """The number of destinations that wait because all slots of the zone are assigned."""
        self._sites: dict[str, dict[str, dict[str, Lease]]] = {}
        self._marked: dict[Lease, None] = {}
        """Leases with `revoked` or `waiters`."""
        self._to_check: dict[str, None] = {}
        """Sites at which too many slots may be held."""

    # Declarations

    def register(self, name: str, zone_limit: int, until: float) -> Owner:
        owner = self.owners.setdefault(name, Owner(name))
        owner.zone_limit = zone_limit
        owner.until = until
        return owner

    def claim(self, name: str, claim: SlotClaim, now: float) -> None:
        """Apply the claim of a registered owner for connection slots."""
        lease = self.lease(name, claim.site, claim.destination)
        slots = max(lease.slots - claim.back, claim.keep)
        lease.owner.slots += slots - lease.slots
        if slots > lease.slots:
            lease.since = now
        lease.slots = slots
        lease.limit = claim.limit
        lease.want = claim.want
        if lease.want <= slots or claim.back:
            self.waiting.pop(lease, None)
        if lease.want > slots:
            self.waiting.setdefault(lease)
        self._to_check[claim.site] = None

    def lease(self, name: str, site: str, destination: str) -> Lease:
        """Return the lease of a registered owner for a destination. Create it if necessary."""
        owner = self.owners[name]
        lease = owner.leases.get((site, destination))
        if lease is None:
            lease = owner.leases[site, destination] = Lease(owner, site, destination)
            self._sites.setdefault(site, {}).setdefault(destination, {})[name] = lease
            self._to_check[site] = None
        return lease

    def keep_only(self, name: str, claims: Iterable[SlotClaim]) -> None:
        """Remove all leases of an owner except the claimed ones, because it has missed the answers in
        between.
        """
        declared = {(claim.site, claim.destination) for claim in claims}
        for key, lease in list(self.owners[name].leases.items()):
            if key not in declared:
                self._drop(lease)

    def end(self, name: str) -> None:
        """Remove an owner and all its leases."""
        owner = self.owners.get(name)
        if owner is not None:
            for lease in list(owner.leases.values()):
                self._drop(lease)
            del self.owners[name]

    def expire(self, now: float) -> None:
        for name in [name for name, owner in self.owners.items() if owner.until <= now]:
            self.end(name)

    def _drop(self, lease: Lease) -> None:
        owner, site = lease.owner, lease.site
        del owner.leases[site, lease.destination]
        owner.slots -= lease.slots
        owner.unreported.pop(lease, None)
        self.waiting.pop(lease, None)
        self._marked.pop(lease, None)
        destinations = self._sites[site]
        del destinations[lease.destination][owner.name]
        # A destination that was removed may have had a smaller limit, or shared that of another destination.
        self._to_check[site] = None
        if not destinations[lease.destination]:
            del destinations[lease.destination]
            if not destinations:
                del self._sites[site], self._to_check[site]

    # Decisions

    def settle(self, now: float, *, active_after: float = float("-inf")) -> set[str]:
        """Assign free slots, and reclaim those that exceed a limit or that others need more. Return the
        owners that have not been notified yet. An owner whose `until` is before `active_after` gets nothing:
        it may have died while it waited, and would keep the slots from the others for its whole lease.
        """
        self._allocate(now, active_after)
        self.waiters = 0
        for lease in self._marked:
            lease.revoked = lease.waiters = 0
            lease.owner.unreported[lease] = None
        self._marked.clear()
        self._reclaim_excess()
        if self.waiting:
            self._reclaim(now, active_after)
        return {name for name, owner in self.owners.items() if self._needs_request(owner)}

    def report(self, name: str, keys: Iterable[tuple[str, str]] | None) -> list[SlotGrant]:
        """Return the owner's leases that have changed since it received them, and in any case those of `keys`
        (None means all). Empty leases are removed.
        """
        owner = self.owners[name]
        asked = dict.fromkeys(owner.leases if keys is None else keys)
        reported = [lease for key in asked if (lease := owner.leases.get(key)) is not None]
        reported += [lease for lease in owner.unreported if (lease.site, lease.destination) not in asked]
        found = []
        for lease in reported:
            now = (lease.slots, lease.revoked, lease.waiters)
            if now != lease.reported or (lease.site, lease.destination) in asked:
                lease.reported = now
                found.append(SlotGrant(lease.site, lease.destination, *now))
            if not lease.slots and not lease.want:
                self._drop(lease)
        owner.unreported.clear()
        owner.waiters_reported = self.waiters
        if not owner.leases:
            del self.owners[name]
        return found

    def _needs_request(self, owner: Owner) -> bool:
        if owner.slots and self.waiters and not owner.waiters_reported:
            return True
        return any(lease.needs_request for lease in owner.unreported)

    def _mark(self, lease: Lease) -> None:
        """Mark a lease whose slots are being reclaimed or wanted by others, so that its owner is notified."""
        self._marked[lease] = None
        lease.owner.unreported[lease] = None

    # Assigning

    def _active(self, active_after: float) -> list[Lease]:
        """Return the waiting leases of owners that have been active recently."""
        return [lease for lease in self.waiting if lease.owner.until >= active_after]

    def _allocate(self, now: float, active_after: float) -> None:
        left = self._zone_limit() - self._in_use() if self.waiting else 0
        if left <= 0:
            return
        queue = [(*_rank(lease), number, lease) for number, lease in enumerate(self._active(active_after))]
        heapq.heapify(queue)
        while queue and left > 0:
            slots, holds, number, lease = heapq.heappop(queue)
            if (slots, holds) != _rank(lease):
                heapq.heappush(queue, (*_rank(lease), number, lease))
                continue
            if any(used >= most for most, used, _ in self._at_site(lease)):
                continue
            lease.slots += 1
            lease.since = now
            lease.owner.slots += 1
            lease.owner.unreported[lease] = None
            left -= 1
            if lease.slots < lease.want:
                heapq.heappush(queue, (*_rank(lease), number, lease))
            else:
                del self.waiting[lease]

    def _zone_limit(self) -> int:
        return min((owner.zone_limit for owner in self.owners.values() if owner.leases), default=0)

    def _in_use(self) -> int:
        return sum(owner.slots for owner in self.owners.values())

    def _at_site(self, lease: Lease) -> Iterator[tuple[int, int, list[Lease]]]:
        """Yield the limits that apply to a slot of the lease. Each has the number of slots that count towards
        it, and their leases.
        """
        destinations = self._sites[lease.site]
        limits = _limits(destinations)
        own = limits[lease.destination]
        for limit in {limit for limit in limits.values() if limit >= own}:
            there = _up_to(limit, destinations, limits)
            yield limit, sum(each.slots for each in there), there

    # Reclaiming

    def _reclaim_excess(self) -> None:
        excess = self._in_use() - self._zone_limit()
        if excess > 0:
            everywhere = [each for owner in self.owners.values() for each in owner.leases.values()]
            self._revoke(everywhere, excess)
        for site in list(self._to_check):
            destinations = self._sites[site]
            limits = _limits(destinations)
            found = False
            for most in sorted(set(limits.values())):
                there = _up_to(most, destinations, limits)
                found = found or sum(each.slots for each in there) > most
                excess = sum(each.left for each in there) - most
                if excess > 0:
                    self._revoke(there, excess)
            if not found:
                del self._to_check[site]

    def _revoke(self, leases: Collection[Lease], count: int) -> None:
        """Reclaim `count` slots, each from the lease with the most slots."""
        for _ in range(count):
            lease = max(leases, key=lambda each: each.left)
            lease.revoked += 1
            self._mark(lease)

    def _reclaim(self, now: float, active_after: float) -> None:
        waiting = self._active(active_after)
        everywhere: Reclaimer | None = None
        if self._in_use() >= self._zone_limit():
            self.waiters = len(waiting)
            everywhere = Reclaimer(
                (each for owner in self.owners.values() for each in owner.leases.values() if each.slots),
                self._mark,
            )
        for number, lease in enumerate(waiting):
            wanted = min(lease.want - lease.slots, MAX_RECLAIMED)
            if everywhere is not None and number < MAX_SERVED:
                everywhere.ask(lease, wanted, now)
            for most, used, there in self._at_site(lease):
                if used < most:
                    continue
                for other in there:
                    other.waiters += 1
                    self._mark(other)
                Reclaimer(there, self._mark).ask(lease, wanted, now)


def _rank(lease: Lease) -> tuple[int, int]:
    return lease.slots, lease.owner.slots


def _limits(destinations: dict[str, dict[str, Lease]]) -> dict[str, int]:
    return {name: min(each.limit for each in leases.values()) for name, leases in destinations.items()}


def _up_to(most: int, destinations: dict[str, dict[str, Lease]], limits: dict[str, int]) -> list[Lease]:
    """Return the leases of destinations whose limit is not larger than `most`."""
    return [each for name, leases in destinations.items() if limits[name] <= most for each in leases.values()]


LAST_KEPT = 10.0
"""The minimum time in seconds for which the last turn is kept, because a rate that has just become slower is
measured from it.
"""

_ROUNDING = 1e-6
"""Sums of clock readings are not more exact than this."""


class SendTime(Struct, frozen=True, array_like=True, order=True):
    """A time at which a rate limit allows one transaction to a destination, as assigned by the authority.
    `at` is a reading of the authority's clock.
    """

    at: float
    interval: float
    destination: str


class Calendar:
    """The assigned send times of one site or zone in order, without those that are too old to delay a later
    one.
    """

    def __init__(self, turns: list[SendTime] | None = None) -> None:
        self.turns = turns or []
        self._longest = max((turn.interval for turn in self.turns), default=0.0)
        self._full: dict[float, tuple[float, float]] = {}
        """By interval, a period that has no room for another turn, as long as none is removed. With thousands
        of turns a search through all of them for each new one takes seconds.
        """

    @property
    def binds_until(self) -> float:
        return self.turns[-1].at + self._longest if self.turns else float("-inf")

    def earliest(self, at: float, interval: float, destination: str) -> float:
        """Return the earliest send time at or after `at` that can be assigned to a destination."""
        turns, start, is_for_all = self.turns, at, True
        since, until = self._full.get(interval, (at, at))
        index = bisect_left(turns, at - interval, key=_moment)
        while True:
            if since <= at < until:
                at = until
                index = bisect_left(turns, at - interval, key=_moment)
            if index == len(turns) or turns[index].at >= at + interval:
                break
            turn = turns[index]
            apart = min(interval, turn.interval)
            if apart < interval and turn.destination == destination:
                apart, is_for_all = interval, False
            # A turn that did not delay `at` does not delay a later one, so each is checked once.
            if abs(turn.at - at) < apart - _ROUNDING:
                at = turn.at + apart
            index += 1
        if is_for_all and start <= until and since <= at:
            self._full[interval] = min(start, since), max(at, until)
        elif is_for_all and at - start > until - since:
            self._full[interval] = start, at
        return at

    def add(self, at: float, interval: float, destination: str) -> None:
        # This includes turns assigned before this calendar was created, which delay later ones like any
        # other.
        self._longest = max(self._longest, interval)
        insort(self.turns, SendTime(at, interval, destination))

    def has(self, at: float, destination: str) -> bool:
        return any(turn.destination == destination for turn in self.turns[self._moments(at)])

    def remove(self, at: float) -> None:
        del self.turns[self._moments(at)]
        self._full.clear()

    def _moments(self, at: float) -> slice:
        return slice(bisect_left(self.turns, at, key=_moment), bisect_right(self.turns, at, key=_moment))

    def forget(self, now: float) -> None:
        old = bisect_left(self.turns, now - self._longest, key=_moment)
        if old == len(self.turns) and old and self.turns[-1].at > now - LAST_KEPT:
            old -= 1
        del self.turns[:old]
        if not self.turns:
            self._longest = 0.0


def _moment(turn: SendTime) -> float:
    return turn.at


MAX_TURNS = 200
"""The maximum number of turns in one answer to one request."""

MAX_SILENCE = 2.0
"""Seconds. A waiting owner sends requests more often than this. One that is silent for longer gets nothing
until it sends one.
"""

ZONE = ""
"""The name of the zone's own calendar, next to those of its sites."""


class ZoneLimits:
    """The shared limits of one zone: its connection slots and its send times."""

    def __init__(self) -> None:
        self.allocator = SlotAllocator()
        self.calendars: dict[str, Calendar] = {}

    def exchange(
        self, name: str, request: LimitRequest, now: float, *, until: float = float("inf")
    ) -> tuple[LimitAnswer, set[str]]:
        """Apply the request of an owner (the worker `name`) to the limits of this zone. Return the answer,
        and the other owners that should send a request.
        """
        allocator = self.allocator
        allocator.expire(now)
        allocator.register(name, request.zone_limit, until)
        for claim in request.claims:
            allocator.claim(name, claim, now)
        if request.everything:
            allocator.keep_only(name, request.claims)
        news = allocator.settle(now, active_after=until - MAX_SILENCE)
        self._withdraw(request.unused)
        for ask, moments in request.known_turns:
            self._declare(ask, moments)
        if request.turns:
            self._forget(now)  # once, not for each of thousands of destinations
        turns = tuple(self._turns(ask, now) for ask in request.turns)
        declared = None if request.everything else ((each.site, each.destination) for each in request.claims)
        owners = len(allocator.owners)
        held = tuple(allocator.report(name, declared))
        return LimitAnswer(now, held, turns, allocator.waiters, owners), news - {name}

    def end(self, name: str, now: float) -> set[str]:
        """Remove an owner and free its connection slots. Return the owners that should send a request."""
        self.allocator.end(name)
        return self.allocator.settle(now)

    @property
    def is_empty(self) -> bool:
        return not self.allocator.owners and not self.calendars

    @property
    def binds_until(self) -> float:
        """The time until which the assigned send times restrict later ones."""
        return max((calendar.binds_until for calendar in self.calendars.values()), default=float("-inf"))

    # Turns

    def _declare(self, ask: TurnRequest, moments: tuple[float, ...]) -> None:
        """Add send times that an earlier authority has assigned, unless they are already known."""
        for at in moments:
            name, destination = (ask.site, ask.destination) if ask.interval else (ZONE, ZONE)
            if not self._calendar(name).has(at, destination):
                self._add(ask, at)

    def _forget(self, now: float) -> None:
        for calendar in self.calendars.values():
            calendar.forget(now)
        self.calendars = {site: calendar for site, calendar in self.calendars.items() if calendar.turns}

    def _turns(self, ask: TurnRequest, now: float) -> tuple[float, ...]:
        found: list[float] = []
        at = now + ask.after
        while len(found) < min(ask.count, MAX_TURNS):
            at = self._earliest(ask, at)
            self._add(ask, at)
            found.append(at)
        return tuple(found)

    def _earliest(self, ask: TurnRequest, at: float) -> float:
        """Return the first send time at or after `at` that is possible for both the site and the zone."""
        while True:
            before = at
            if ask.interval:
                at = self._calendar(ask.site).earliest(at, ask.interval, ask.destination)
            if ask.zone_interval:
                at = self._calendar(ZONE).earliest(at, ask.zone_interval, ZONE)
            if at == before:
                return at

    def _add(self, ask: TurnRequest, at: float) -> None:
        if ask.interval:
            self._calendar(ask.site).add(at, ask.interval, ask.destination)
        if ask.zone_interval:
            self._calendar(ZONE).add(at, ask.zone_interval, ZONE)

    def _withdraw(self, unused: Collection[tuple[str, float]]) -> None:
        """Remove assigned send times that their owners will not use. A send time of the zone stays if another
        site has the same one.
        """
        for site, at in unused:
            if site in self.calendars:
                self.calendars[site].remove(at)
        if unused and ZONE in self.calendars:
            sites = (calendar for name, calendar in self.calendars.items() if name != ZONE)
            taken = {turn.at for calendar in sites for turn in calendar.turns}
            for at in {at for _, at in unused} - taken:
                self.calendars[ZONE].remove(at)

    def _calendar(self, name: str) -> Calendar:
        return self.calendars.setdefault(name, Calendar())

    # Encoding

    def encode(self) -> bytes:
        allocator = self.allocator
        return msgspec.msgpack.encode(
            _StoredLimits(
                owners=[
                    (name, owner.zone_limit, owner.until, owner.waiters_reported)
                    for name, owner in allocator.owners.items()
                ],
                leases=[
                    (name, *key, each.limit, each.slots, each.want, each.since, each.reported)
                    for name, owner in allocator.owners.items()
                    for key, each in owner.leases.items()
                ],
                waiting=[(each.owner.name, each.site, each.destination) for each in allocator.waiting],
                turns={site: calendar.turns for site, calendar in self.calendars.items()},
            )
        )

    @classmethod
    def decode(cls, data: bytes | None) -> "ZoneLimits":
        """Decode the stored limits of a zone. Without data, no slots and send times are assigned. Raise
        ValueError.
        """
        limits = cls()
        if not data:
            return limits
        written = msgspec.msgpack.decode(data, type=_StoredLimits)
        allocator = limits.allocator
        for name, zone_limit, until, waiters in written.owners:
            allocator.register(name, zone_limit, until).waiters_reported = waiters
        for name, site, destination, limit, slots, want, since, reported in written.leases:
            lease = allocator.lease(name, site, destination)
            lease.limit, lease.slots, lease.want = limit, slots, want
            lease.since, lease.reported = since, reported
            lease.owner.slots += slots
            # What is to be given back is not stored, and is determined again.
            lease.owner.unreported[lease] = None
        allocator.waiting = {allocator.lease(*each): None for each in written.waiting}
        limits.calendars = {site: Calendar(turns) for site, turns in written.turns.items()}
        return limits


class _StoredLimits(msgspec.Struct, frozen=True, array_like=True):
    """A zone's limits as they are stored. New fields may only be appended, with defaults, because nodes of
    several versions read it.
    """

    owners: list[tuple[str, int, float, int]]
    leases: list[tuple[str, str, str, int, int, int, float, tuple[int, int, int]]]
    waiting: list[tuple[str, str, str]]
    turns: dict[str, list[SendTime]]


# The authority in memory: the limits of all zones, and the connected owners. No I/O.


class LimitTable:
    """The shared limits of all zones, in memory. `news(owner, zone)` is called when an owner should send a
    request.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._zones: dict[str, ZoneLimits] = {}
        self._listeners: dict[str, Callable[[str], None]] = {}

    def register(self, owner: str, news: Callable[[str], None]) -> None:
        """Register an owner, and the callback that is called when it should send a request. If several
        processes use one name, the last one counts.
        """
        self._listeners[owner] = news

    def unregister(self, owner: str, news: Callable[[str], None]) -> None:
        """Remove an owner and free all its slots, unless it has registered again with another callback."""
        if self._listeners.get(owner) is not news:
            return
        del self._listeners[owner]
        now = self._clock.monotonic()
        for zone, limits in list(self._zones.items()):
            self._notify(zone, limits.end(owner, now))
            self._drop_empty(zone)

    def exchange(self, owner: str, zone: str, request: LimitRequest) -> LimitAnswer:
        limits = self._zones.setdefault(zone, ZoneLimits())
        answer, news = limits.exchange(owner, request, self._clock.monotonic())
        self._notify(zone, news)
        self._drop_empty(zone)
        return answer

    def _notify(self, zone: str, owners: set[str]) -> None:
        for owner in owners:
            listener = self._listeners.get(owner)
            if listener is not None:
                listener(zone)

    def _drop_empty(self, zone: str) -> None:
        if self._zones[zone].is_empty:
            del self._zones[zone]
