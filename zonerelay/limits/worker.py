"""Implements the worker's side of shared limits: its slots, its leased send times, and the exchange with the
limit authority.

`ZoneAllowance` has the slots that the worker may use now in one zone, and the slots it requests. The
scheduler checks it before it starts a batch, and the pool before it opens a connection. The result is known
at once. A refusal also records a request, which `LimitKeeper` sends to the authority. Spare slots are given
back when other owners wait for them, or else after `KEEP` seconds, so that the next connection needs no
request.

Promise: the worker never has more connections than slots. If the authority asks for slots back, those in use
are given back as soon as they are free.

`LeasedTurns` are the turns that a worker has leased. If several workers share a rate, they replace the
worker's own pace and answer the questions of a `Pacer` (`queue/destination/destinations`): when the next
batch may start, and when its MAIL may be written. Each answer is a turn that the authority has assigned. A
turn may be taken from its moment until its grace has passed, by the later and the earlier bound of the
authority's clock (`ClockBounds`).

- A worker requests as many turns as batches wait, but at most a *block*. The block doubles when more batches
  wait, halves when turns were unused, and never exceeds the turns of `AHEAD` seconds. The worker requests the
  next block while half of the present one is left.
- A batch starts before its turn by the time that recent connections took, so that its turn has not passed
  when the connection is established. Turns are requested no earlier than such a batch can be ready.
- Turns that no batch needs are given back for other workers. Missed turns are given back as well, with the
  next request, because no transaction used them.

`LimitKeeper` exchanges the allowances of all zones with the authority. No batch waits for an exchange.
Exchanges run in the background, one at a time for each zone, with all requests that have accumulated.
`granted` is called when an exchange has brought slots or turns.

Failure: while the authority is unreachable, the worker continues with the slots it holds. If leases expire,
it stops in time: after the part `SAFE` of a lease without an answer it opens no connection and closes idle
ones, until the authority answers again. Then, and when the authority may have lost its state, the worker
declares everything it holds.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import islice
from weakref import WeakValueDictionary

import msgspec
from msgspec import structs

from zonerelay.config.units import Rate
from zonerelay.limits import authority as limits
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import cancel_all
from zonerelay.telemetry.events.events import Events

CLOCK_MEMORY = 60.0
"""Seconds for which the bounds from an answer are used."""


class ClockBounds:
    """Bounds of the difference between the authority's clock and the worker's, in seconds: `low <= theirs -
    ours <= high`.

    Each answer bounds the difference, because the authority read its clock after the request was sent and
    before the answer arrived. The tightest bounds of the last `CLOCK_MEMORY` seconds count. When a clock is
    set, old and new bounds contradict each other, and only the newest count.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()
        self.low = float("-inf")
        self.high = float("inf")

    def note(self, asked: float, theirs: float, heard: float) -> None:
        low, high = theirs - heard, theirs - asked
        while self._seen and self._seen[0][0] < heard - CLOCK_MEMORY:
            self._seen.popleft()
        if self._seen and (low > self.high or high < self.low):
            self._seen.clear()
        # Only tighter bounds are worth storing.
        is_tighter = low > self.low or high < self.high
        if not self._seen or is_tighter or heard > self._seen[-1][0] + CLOCK_MEMORY / 4:
            self._seen.append((heard, low, high))
        self.low = max(low for _, low, _ in self._seen)
        self.high = min(high for _, _, high in self._seen)

    def window(self, theirs: float, grace: float) -> tuple[float, float]:
        """Return the start and the end, by this worker's clock, of the period in which a send time may be
        used. It begins when the authority's clock has certainly reached `theirs`, and ends while it is
        certainly at most `grace` seconds later.
        """
        return theirs - self.low, theirs + grace - self.high


AHEAD = 0.25
"""Seconds of turns that one worker requests at once, if that is more than one turn. Other workers wait during
this time.
"""

ASK_AGAIN = 1.0
HORIZON = 5.0
TOO_LATE = 0.01
"""Seconds. A turn this close has passed before another worker can get it."""

LEAD_MEMORY = 15.0
"""Seconds in which half of a lead is forgotten, or a few turns if that is longer."""

_FEW = 5

MORE = 1.3

_NEVER = float("-inf")


@dataclass(eq=False, repr=False)
class LeasedTurns:
    """The times at which a worker may send to one rate-limited destination, as leased from the limit
    authority. `site` and `destination` are empty if only the zone has a rate.
    """

    site: str
    destination: str
    rate: InitVar[Rate | None]
    zone_rate: InitVar[Rate | None]
    _: KW_ONLY
    clock: Clock
    bounds: ClockBounds
    wanted: "Callable[[LeasedTurns], None]"

    def __post_init__(self, rate: Rate | None, zone_rate: Rate | None) -> None:
        own, zone = (0.0 if each is None else limits.interval(each) for each in (rate, zone_rate))
        self._request = limits.TurnRequest(self.site, self.destination, own, zone, 0)
        self.interval = max(own, zone)
        self._grace = min(limits.leased_grace(each) for each in (rate, zone_rate) if each is not None)
        self._turns: list[float] = []
        self._waiting: dict[Hashable, int] = {}
        self._demand = 0
        self._unused: list[float] = []
        self._watching: dict[Callable[[], None], bool] = {}
        """The waiters for a turn. The value is true for a further turn of a batch, which `pending` no longer
        counts.
        """
        self._most = max(1, int(AHEAD / self.interval))
        self._block = 1
        self._useless = False
        self._most_pending = max(1, int(HORIZON / self.interval))
        self._lead = 0.0
        self._arrived_at = self.clock.monotonic()
        self.asked = False
        self.pending = 0
        self.last = _NEVER

    # As a Pacer

    def expect(self, destination: Hashable, waiting: int) -> None:
        """Record that `waiting` deliveries of a destination are waiting for the rate limit."""
        # A sum over thousands of destinations that share a zone's rate would be computed for each of them.
        self._demand += waiting - self._waiting.get(destination, 0)
        if waiting:
            self._waiting[destination] = waiting
        else:
            self._waiting.pop(destination, None)
            self._give_back_surplus()

    @property
    def due(self) -> float:
        """The time at which the next batch may start. While that is not known, it is later than now."""
        now = self.clock.monotonic()
        self._drop_missed(now)
        left = len(self._turns) - self._started
        if left <= self._block // 2 and left < self._demand:
            self._ask()
        return self._window(self._started)[0] - self._ahead if left > 0 else now + ASK_AGAIN

    @property
    def next_turn(self) -> float:
        """The time at which the rate limit allows the next transaction."""
        now = self.clock.monotonic()
        self._drop_missed(now)
        if len(self._turns) < max(1, self.pending):
            self._ask()
        return self._window(0)[0] if self._turns else now + ASK_AGAIN

    @property
    def is_crowded(self) -> bool:
        return self.pending >= self._most_pending

    def start(self, now: float) -> None:
        del now
        self.pending += 1

    def give_back(self) -> None:
        """Stop counting a batch that was started but did not begin an SMTP transaction."""
        self.pending -= 1
        self._give_back_surplus()

    def arrived(self, seconds: float) -> None:
        """Record that the connection of a batch was established `seconds` after its start."""
        now = self.clock.monotonic()
        half = max(LEAD_MEMORY, _FEW * self.interval)
        self._lead = max(seconds, self._lead * 0.5 ** ((now - self._arrived_at) / half))
        self._arrived_at = now

    def take(self, now: float) -> None:
        """Record that a transaction uses the next send time. Call it no earlier than `next_turn`."""
        del now
        if self._turns:
            self.last = self._turns.pop(0)

    def watch(self, call: Callable[[], None], *, further: bool) -> None:
        """Call `call` whenever the authority has assigned new send times, until `unwatch` is called.
        `further` is true if the batch has had its first turn.
        """
        self._watching[call] = further

    def unwatch(self, call: Callable[[], None]) -> None:
        self._watching.pop(call, None)

    # As an owner

    def ask(self) -> limits.TurnRequest:
        self.asked = True
        missing = self._started + self._demand - len(self._turns)
        if self._useless:
            self._block = max(1, self._block // 2)
            self._useless = False
        elif missing > self._block:
            self._block = min(2 * self._block, self._most)
        # A batch that has lost its turn needs one at once.
        after = 0.0 if len(self._turns) < self._started else self._ahead
        return structs.replace(self._request, count=max(0, min(missing, self._block)), after=after)

    def given(self, turns: tuple[float, ...]) -> None:
        self.asked = False
        for at in turns:
            insort(self._turns, at)
        self._give_back_surplus()
        for call in self._watching:
            call()

    @property
    def known(self) -> tuple[limits.TurnRequest, tuple[float, ...]] | None:
        """Return the last used send time and the unused ones, for an authority that has lost its state."""
        turns = (*((self.last,) if self.last != _NEVER else ()), *self._turns)
        return (self._request, turns) if turns else None

    def is_forgettable(self, now: float) -> bool:
        """Return whether this state can be discarded, because no send time is assigned, requested or recently
        used.
        """
        self._drop_missed(now)
        if self._started or self._turns or self.asked:
            return False
        return self.last == _NEVER or now - self.bounds.window(self.last, 0.0)[0] > FORGET

    def unused(self) -> tuple[tuple[str, float], ...]:
        """Remove and return the send times that this worker will not use, each with its site."""
        unused, self._unused = self._unused, []
        return tuple((self.site, at) for at in unused)

    # Internals

    @property
    def _started(self) -> int:
        """The number of started batches that have not used a send time yet, or that wait for another one."""
        return self.pending + sum(self._watching.values())

    def _window(self, number: int) -> tuple[float, float]:
        return self.bounds.window(self._turns[number], self._grace)

    @property
    def _ahead(self) -> float:
        """The number of seconds by which a batch starts before its send time. The next connection may take a
        little longer than any before.
        """
        return min(MORE * self._lead, HORIZON)

    def _ask(self) -> None:
        if not self.asked:
            self.wanted(self)

    def _give_back_surplus(self) -> None:
        """Return send times that no batch needs to the authority, if other workers can still use them."""
        surplus = len(self._turns) - self._started - self._demand
        if surplus <= 0:
            return
        now = self.clock.monotonic()
        while surplus and self._window(-1)[0] > now + TOO_LATE:
            self._unused.append(self._turns.pop())
            self._useless = True
            surplus -= 1
        if self._unused:
            self._ask()

    def _drop_missed(self, now: float) -> None:
        while self._turns and self._window(0)[1] < now:
            self._unused.append(self._turns.pop(0))
            self._useless = True
            if not self._started:
                # The expected deliveries have not come.
                self._waiting.clear()
                self._demand = 0


KEEP = 2.0
"""Seconds that slots wait for their next use while no other owner wants them."""

LINGER = 0.1
"""Seconds that slots wait although another owner wants them, because the batch that requested them is about
to start.
"""


class Share(msgspec.Struct, eq=False):
    """A worker's connection slots for one destination, and how many of them it must return when they are
    free. `batches` and `connections` are the counts of the scheduler and the pool.

    `requested` is the number of slots wanted, since `requested_at`. `more` is true if mail waited for the
    destination when its last batch started.
    """

    site: str
    destination: str
    limit: int
    slots: int = 0
    batches: int = 0
    connections: int = 0
    requested: int = 0
    revoked: int = 0
    back: int = 0
    waiters: int = 0
    declared: bool = False
    more: bool = True
    requested_at: float = 0.0
    idle_since: float = 0.0

    @property
    def usable(self) -> int:
        return self.slots - self.revoked

    @property
    def spare(self) -> int:
        return max(0, self.slots - max(self.batches, self.connections))

    @property
    def is_over(self) -> bool:
        return not (self.slots or self.requested or self.back or self.batches or self.connections)

    def give_back(self, count: int) -> None:
        self.slots -= count
        self.back += count
        self.revoked = max(0, self.revoked - count)

    def claim(self, *, wanted: bool) -> limits.SlotClaim:
        """Create the claim for the next request, which also returns slots to the authority. Unless `wanted`
        is true, it does not ask for additional slots.
        """
        back, self.back = self.back, 0
        self.declared = wanted or not self.requested
        want = max(self.requested if wanted else 0, self.slots)
        return limits.SlotClaim(self.site, self.destination, self.limit, self.slots, back, want)


_TurnKey = tuple[str, str, Rate | None, Rate | None]


class ZoneAllowance:
    """The connection slots and send times that a worker has in one zone, and its pending requests for more.
    `changed` is called when there is something to send.
    """

    def __init__(self, name: str, changed: Callable[[], None], monotonic: Callable[[], float]) -> None:
        self.name = name
        self.changed = changed
        self.until: float | None = None
        """The time at which the slots must no longer be used unless the authority answers."""
        self._monotonic = monotonic
        self.zone_limit = 0
        self._zone_limit_declared = 0
        self.waiters = 0
        self.owners = 1
        """The number of workers that share the zone's limits at present."""
        self.named: WeakValueDictionary[_TurnKey, LeasedTurns] = WeakValueDictionary()
        """The turns of each destination, as long as its destination uses them."""
        self.turns: dict[LeasedTurns, None] = {}
        """Recently used turns, which must be declared to a new authority."""
        self.wanted: dict[LeasedTurns, None] = {}
        self.everything = self.due = False
        self.heard = self.asked = _NEVER
        """When the last request was sent that was answered, and when the last one was sent."""
        self.task: asyncio.Task[None] | None = None
        self._shares: dict[tuple[str, str], Share] = {}
        self._dirty: dict[Share, None] = {}
        self._requests: dict[Share, None] = {}

    # Permissions

    def may_start(self, site: str, destination: str, limit: int, zone_limit: int, waiting: int) -> bool:
        """Return whether a batch to a destination with `waiting` deliveries may start. If not, request a
        slot.
        """
        found = self._share(site, destination, limit, zone_limit)
        if found.batches < found.usable and not self.is_closed:
            return True
        self._request(found, found.batches + max(1, min(waiting, found.batches)))
        return False

    def may_connect(self, site: str, destination: str, limit: int, zone_limit: int) -> bool:
        found = self._share(site, destination, limit, zone_limit)
        # A batch that started before the slots were to be given back is allowed.
        if found.connections < found.slots and not self.is_closed:
            return True
        self._request(found, found.connections + 1)
        return False

    def may_keep(self, site: str, destination: str) -> bool:
        """Return whether a connection may stay open after its transaction, because its slot is not needed
        elsewhere.
        """
        found = self._shares.get((site, destination))
        if found is None:
            return True
        is_useless = self._is_wanted(found) and not found.more and found.batches <= 1
        return found.connections <= found.usable and not is_useless and not self.is_closed

    # Events

    def started(self, site: str, destination: str, *, more: bool = True) -> None:
        """Record that a batch has started. `more` is true if further deliveries wait for the destination."""
        found = self._known(site, destination)
        found.batches += 1
        found.more = more

    def ended(self, site: str, destination: str) -> None:
        found = self._known(site, destination)
        found.batches -= 1
        self._freed(found)

    def cancel(self, site: str, destination: str) -> None:
        """Withdraw the request for slots of a destination that has no waiting deliveries. If a started batch
        may have lost its slot with a lease, the request stays.
        """
        found = self._shares.get((site, destination))
        if found is not None and found in self._requests and found.batches <= found.slots:
            self._remove_request(found)
            self._dirty[found] = None
            self.changed()

    def connected(self, site: str, destination: str) -> None:
        self._known(site, destination).connections += 1

    def disconnected(self, site: str, destination: str) -> None:
        found = self._known(site, destination)
        found.connections -= 1
        self._freed(found)

    # Exchange with the authority

    @property
    def wants_exchange(self) -> bool:
        if self.due or self.everything or self.wanted or self._dirty:
            return True
        other_limit = self.zone_limit != self._zone_limit_declared and bool(self._shares)
        return other_limit or any(not share.declared for share in self._first_requests())

    @property
    def is_idle(self) -> bool:
        return not (self._shares or self.turns or self.wants_exchange)

    @property
    def waits(self) -> bool:
        return bool(self._requests)

    @property
    def is_empty(self) -> bool:
        return not self._shares

    @property
    def figures(self) -> tuple[int, int, int]:
        """The numbers of slots held, connections open and slots requested."""
        shares = self._shares.values()
        requested = sum(share.requested - share.slots for share in self._requests)
        return sum(share.slots for share in shares), sum(share.connections for share in shares), requested

    def claims(self, *, everything: bool) -> tuple[limits.SlotClaim, ...]:
        self._zone_limit_declared = self.zone_limit
        heads = dict.fromkeys(self._first_requests())
        shares = self._dirty | heads
        if everything:
            known = self._shares.values()
            shares = {each: None for each in known if each.slots or each.connections or each in heads}
        self._dirty.clear()
        return tuple(share.claim(wanted=share in heads) for share in shares)

    def apply(self, held: tuple[limits.SlotGrant, ...], waiters: int, now: float) -> list[float]:
        """Apply an answer of the limit authority to the slots of this worker. Return the waiting time in
        seconds of each request that was granted at least in part.
        """
        self.waiters = waiters
        waited = []
        for each in held:
            share = self._known(each.site, each.destination)
            before = share.slots
            # Slots that we have begun to give back are not ours, whatever the answer contains.
            share.slots = max(0, each.slots - share.back)
            share.revoked = min(each.revoked, share.slots)
            share.waiters = each.waiters
            if share.slots > before:
                share.idle_since = now
                if share in self._requests:
                    waited.append(now - share.requested_at)
                    # A busy destination requests one more slot, which starts another wait.
                    share.requested_at = now
            if share in self._requests and share.slots >= share.requested:
                self._remove_request(share)
        return waited

    def return_idle(self, now: float) -> None:
        """Give back slots that were reclaimed or that have been idle for a long time."""
        for key, share in list(self._shares.items()):
            spare = share.spare
            patience = LINGER if self._is_wanted(share) else KEEP
            if not spare:
                share.idle_since = now
            elif share.revoked:
                self._give_back(share, min(spare, share.revoked))
            elif share.idle_since + patience <= now:
                self._give_back(share, spare)
            if share.is_over and share not in self._dirty:
                del self._shares[key]

    @property
    def is_crowded(self) -> bool:
        """Whether another worker waits for a slot that this worker has."""
        return any(share.revoked or share.waiters for share in self._shares.values())

    def is_contended(self, site: str, destination: str) -> bool:
        """Return whether another destination or worker waits for the slot of this destination's idle
        connection.
        """
        found = self._shares.get((site, destination))
        return bool(self.waiters or (found is not None and found.waiters))

    def forget_slots(self) -> None:
        """Discard all slots except those in use, because the lease has expired."""
        for share in self._shares.values():
            share.back = 0
            share.slots = share.connections
            share.revoked = 0

    @property
    def is_closed(self) -> bool:
        """Whether no connection may be opened, because the lease may have ended. This also detects that the
        process was stopped for a while.
        """
        return self.until is not None and self._monotonic() >= self.until

    # Internals

    def _share(self, site: str, destination: str, limit: int, zone_limit: int) -> Share:
        found = self._shares.get((site, destination))
        if found is None:
            found = self._shares[site, destination] = Share(site, destination, limit)
        elif found.limit != limit:
            found.limit = limit
            self._dirty[found] = None
            self.changed()
        if zone_limit != self.zone_limit:
            self.zone_limit = zone_limit
            self.changed()
        return found

    def _known(self, site: str, destination: str) -> Share:
        return self._shares.get((site, destination)) or self._share(site, destination, 1, self.zone_limit)

    def _request(self, share: Share, slots: int) -> None:
        slots = min(slots, share.limit)
        if slots <= max(share.requested, share.slots):
            return
        share.requested = slots
        share.requested_at = share.requested_at or self._monotonic()
        share.declared = False
        self._requests[share] = None
        self.changed()

    def _remove_request(self, share: Share) -> None:
        del self._requests[share]
        share.requested = 0
        share.declared = False
        share.requested_at = 0.0

    def _first_requests(self) -> Iterator[Share]:
        """Return the first requests for slots, which are sent to the authority now. Further ones are sent
        when these are granted.
        """
        return islice(self._requests, limits.MAX_WAITING)

    def _freed(self, share: Share) -> None:
        spare = share.spare
        if self.is_closed:
            share.slots = share.connections
        elif spare and share.revoked:
            self._give_back(share, min(spare, share.revoked))
        elif spare and not share.more and self._is_wanted(share):
            self._give_back(share, spare)

    def _is_wanted(self, share: Share) -> bool:
        """Return whether other workers or destinations wait for slots of this destination."""
        return bool(self.waiters or share.waiters)

    def _give_back(self, share: Share, count: int) -> None:
        share.give_back(count)
        self._dirty[share] = None
        self.changed()


TICK = 0.1
"""Seconds between two checks for idle, overdue or expiring items. There is no check while
nothing is leased.
"""

POLL = 0.5
"""Seconds after which a waiting worker sends its request again, because a notice of the authority may have
been lost.
"""

RENEWALS = 3
"""Renewals within one lease."""

SAFE = 2 / 3
"""The part of a lease, since the last renewal was sent, during which its slots are used."""

FORGET = 60.0
"""Seconds for which a destination's turns are remembered after the last one."""


@dataclass(eq=False, repr=False)
class LimitKeeper:
    """Requests, renews and returns a worker's limits at the limit authority in the background, on one event
    loop. `granted(zone)` is called when something may start that was refused before, and `relieve(zone)` when
    idle connections may block others (`ZoneAllowance.is_contended`, `may_keep`).
    """

    authority: limits.LimitAuthority
    clock: Clock
    events: Events
    _: KW_ONLY
    granted: Callable[[str], None]
    relieve: Callable[[str], None]

    def __post_init__(self) -> None:
        self.events.read_limits(self.figures)
        self._zones: WeakValueDictionary[str, ZoneAllowance] = WeakValueDictionary()
        """The zones that are configured, and those of mailboxes, as long as the scheduler uses them."""
        self._busy: dict[ZoneAllowance, None] = {}
        """The zones that have slots or want some. There may be thousands of zones of mailboxes
        that do not.
        """
        self._bounds = ClockBounds()
        self._lost: dict[str, str] = {}
        """The reasons of an outage by zone, and with "" that of the connection. The outage lasts until all
        are gone: a store that accepts no writes still answers zones that need none.
        """
        self._ticking: asyncio.TimerHandle | None = None
        self._running = False

    async def start(self) -> None:
        """Connect to the authority and start the exchange. Raise AuthorityError if the authority can never be
        used.
        """
        self._running = True
        await self.authority.start(self._news, self._back, self._note_lost)

    async def close(self) -> None:
        """Return all slots to the authority."""
        self._running = False
        if self._ticking is not None:
            self._ticking.cancel()
        await cancel_all(*(zone.task for zone in self._zones.values()))
        await self.authority.close()

    @property
    def status(self) -> str:
        """A description of the authority and its state, for the operator's status."""
        reason = self._reason
        which = f", which is unreachable: {reason}" if reason else ""
        return f"leased from {self.authority.name}{which}"

    @property
    def problem(self) -> str | None:
        reason = self._reason
        return f"limits: {self.authority.name} is unreachable: {reason}" if reason else None

    @property
    def _reason(self) -> str:
        return next(iter(self._lost.values()), "")

    def figures(self) -> dict[str, tuple[int, int, int]]:
        """Return, by zone, the numbers of slots held, connections open and slots requested."""
        return {name: zone.figures for name, zone in self._zones.items()}

    def zone(self, name: str) -> ZoneAllowance:
        found = self._zones.get(name)
        if found is None:
            changed = lambda: self._changed(self._zones[name])  # noqa: E731
            found = self._zones[name] = ZoneAllowance(name, changed, self.clock.monotonic)
        return found

    def turns(
        self, zone: str, site: str, destination: str, rate: Rate | None, zone_rate: Rate | None
    ) -> LeasedTurns:
        """Return the leased send times of a destination, or those of the zone if the destination has no rate
        of its own.
        """
        found = self.zone(zone)
        if rate is None:
            site = destination = ""
        key = (site, destination, rate, zone_rate)
        turns = found.named.get(key)
        if turns is None:
            turns = found.named[key] = LeasedTurns(
                site,
                destination,
                rate,
                zone_rate,
                clock=self.clock,
                bounds=self._bounds,
                wanted=lambda wanted: self._want(found, wanted),
            )
        return turns

    # Reasons for an exchange

    def _want(self, zone: ZoneAllowance, turns: LeasedTurns) -> None:
        turns.asked = True
        zone.wanted[turns] = zone.turns[turns] = None
        self._changed(zone)

    def _changed(self, zone: ZoneAllowance) -> None:
        if not self._running:
            return
        self._busy[zone] = None
        if zone.task is None or zone.task.done():
            zone.task = asyncio.get_running_loop().create_task(self._exchange_all(zone))
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        if self._running and self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(TICK, self._tick)

    def _news(self, name: str) -> None:
        zone = self._zones.get(name)
        if zone is not None:
            zone.due = True
            self._changed(zone)

    def _back(self) -> None:
        self._note_back("")
        for name, zone in self._zones.items():
            if zone.is_idle:
                self._note_back(name)
            else:
                zone.everything = True
                self._changed(zone)

    def _tick(self) -> None:
        self._ticking = None
        now = self.clock.monotonic()
        for zone in list(self._busy):
            self._look(zone, now)
            if zone.is_idle:
                del self._busy[zone]
                self._note_back(zone.name)
        if self._busy:
            self._keep_ticking()

    def _look(self, zone: ZoneAllowance, now: float) -> None:
        lease = self.authority.lease
        if zone.is_closed and not zone.is_empty:
            zone.everything = True
            zone.forget_slots()
        zone.return_idle(now)
        if zone.waiters or zone.is_crowded or zone.is_closed:
            self.relieve(zone.name)
        for turns in list(zone.turns):
            if turns.is_forgettable(now):
                del zone.turns[turns]
        silent = now - max(zone.heard, zone.asked)
        renew = lease is not None and not zone.is_empty and silent > lease / RENEWALS
        if renew or (zone.waits and silent > POLL):
            zone.due = True
        if zone.wants_exchange:
            self._changed(zone)

    # The exchange

    async def _exchange_all(self, zone: ZoneAllowance) -> None:
        while zone.wants_exchange and self._running:
            if not await self._exchange(zone):
                return

    async def _exchange(self, zone: ZoneAllowance) -> bool:
        wanted, everything = list(zone.wanted), zone.everything
        request = limits.LimitRequest(
            zone.zone_limit,
            zone.claims(everything=everything),
            tuple(turns.ask() for turns in wanted),
            tuple(each for turns in wanted for each in turns.unused()),
            everything=everything,
            known_turns=tuple(filter(None, (each.known for each in zone.turns))) if everything else (),
        )
        zone.wanted.clear()
        zone.due = zone.everything = False
        sent = zone.asked = self.clock.monotonic()
        try:
            answer = await self.authority.exchange(zone.name, request)
        except Exception as error:  # noqa: BLE001 - turns and slots must be requested again after any error
            zone.everything = True
            zone.wanted.update(dict.fromkeys(wanted))
            known = isinstance(error, limits.AuthorityError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            self._note_lost(reason, zone.name)
            return False
        self._apply(zone, answer, wanted, sent)
        return True

    def _apply(
        self, zone: ZoneAllowance, answer: limits.LimitAnswer, wanted: list[LeasedTurns], sent: float
    ) -> None:
        now = self.clock.monotonic()
        zone.heard = sent
        # A batch that was refused while the allowance was closed has left no request.
        opened = zone.is_closed
        if self.authority.lease is not None:
            zone.until = sent + self.authority.lease * SAFE
        self._bounds.note(sent, answer.now, now)
        zone.owners = answer.owners
        waited = zone.apply(answer.held, answer.waiters, now)
        for turns, given in zip(wanted, answer.turns, strict=True):
            turns.given(given)
        self._note_back("", zone.name)
        for seconds in waited:
            self.events.limit_waited(seconds)
        if opened or answer.held or any(answer.turns):
            self.granted(zone.name)

    def _note_lost(self, reason: str, zone: str = "") -> None:
        is_new = not self._lost
        self._lost[zone] = reason
        if is_new:
            self.events.limits_lost(self.authority.name, reason)

    def _note_back(self, *zones: str) -> None:
        was = bool(self._lost)
        for zone in zones:
            self._lost.pop(zone, None)
        if was and not self._lost:
            self.events.limits_restored(self.authority.name)
