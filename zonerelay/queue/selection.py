"""Selects the next destination of a zone, within the connection limits and rates. Pure, except for the timer
of the throttle.

Round robin (`RoundRobin`):

- Destinations with work wait in a queue and are visited in turn. There is one queue per priority; a
  destination waits in that of its most urgent mail. `Precedence` chooses between the queues. Within a queue,
  destinations with fresh mail alternate with those without it (`backlog.py`).
- In a zone routed by MX a visit has up to `MOST_IN_VISIT` batches, as long as the later ones take less than
  `VISIT_SECONDS` together, because each visit costs a new connection when there are more destinations than
  connections. It ends early if more urgent mail waits, if fresh mail waits and the destination has none, or
  if mail for the same hosts waits on other terms. Only destinations that answer quickly are visited with more
  than one batch.
- A destination without a free connection at its hosts leaves the queue. It returns when one is freed, ahead
  of the destination that freed it, so that lines that share hosts alternate.
- A destination whose rate allows nothing now waits aside until `next_turn` and holds no connection of the
  zone. If the rate of the zone itself allows nothing, all destinations wait in order.
- If limits are shared with other workers, a destination for which this worker has no connection slot waits
  until it is granted one (`granted`).
- In a zone routed by MX, destinations that do not answer, or answer slowly, may use only a part of the
  connections (`SlowStart`).
- While new mail needs the CPU, destinations without fresh mail pause at times (`BacklogThrottle`).

`now` is the wall clock. `tick` is a monotonic clock.

Slow start (`SlowStart`): limits how many of a zone's connections are used for destinations that do not
respond or respond late. A host that accepts a connection and says nothing keeps it for minutes; a host that
takes a message and does not answer keeps it for ten. So in a zone that is routed by MX every destination has
a standing:

- QUICK: it answered the last attempt in time. Nothing here limits it.
- NEW: the relay has not heard from it yet. It has one connection until it answers, so that as many dead hosts
  as possible are found at a time, and mail for the good ones between them goes (haraka/Haraka#2507).
- FAILING: it did not answer the last attempt, or it is suspended. It has one connection, too.
- SLOW: it answered the last attempt after more than `LONG` seconds. Only the sums below limit it.

Of the zone's connections

- NEW destinations together take five eighths at most;
- FAILING ones a quarter at most, and an eighth at most while a NEW one waits;
- FAILING and SLOW ones together a half at most;
- NEW, FAILING and SLOW ones together three quarters at most.

A destination without room waits here. A connection that is given back goes to the waiting destinations in
rotation: to NEW ones with fresh mail, to NEW ones without it, to FAILING and SLOW ones.

Promise: QUICK destinations find a quarter of the zone's connections that no other destination takes, and NEW
ones find a quarter that no FAILING or SLOW one takes. NEW ones come before FAILING ones because, when
thousands of domains die together, the attempts at them would otherwise take every connection that a healthy
host without a standing needs (seen in ten million simulated deliveries: the queue never became shorter
again).

Workers that share the zone's connections each apply the parts to their own share of them. A destination that
was admitted and waits for its worker to be given a connection counts as if it had that connection; otherwise
the worker would be given connections for destinations that may not use them.

A standing outlives its destination in memory, for up to `KNOWN` destinations; otherwise a zone with more
destinations than memory keeps would take each of them for NEW again and again.

Throttle (`BacklogThrottle`): limits the backlog while new mail needs the CPU. The order of lines does not
help when the CPU is the bottleneck: a message of a backlog for many hosts, with its own look-ups and
connection, needs five times as much CPU as a message that arrives and leaves for a known host, and competes
with the acceptance of new mail. With a backlog of 100,000 messages, other mail was accepted at a third of its
usual rate. So while the event loop is busy (`BUSY`) and fresh mail starts at a quarter of the backlog's rate
or more (`SHARE`), the backlog is given a rate. Fresh mail for a suspended host counts as well, although it
does not start: where every host is dead, the probes of 50,000 domains halved the rate of acceptance. The rate
is lowered in steps, to one start for `FRESH_STARTS` starts of fresh mail (but not below `LEAST`), and is
raised when the loop has time again. A trickle of new mail changes nothing, and without new mail there is no
rate.

That is meant for bursts. Under lasting load the share of the backlog grows until, after `PATIENCE` seconds,
it is the same as in the order of lines. Otherwise deferred mail would never leave a relay that is busy all
day.

All zones of a worker share one throttle, because they share the CPU. It is updated every `LOOK` seconds while
backlog is being sent.
"""

import asyncio
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable

from zonerelay.config.settings import ZoneSettings
from zonerelay.limits.worker import ZoneAllowance
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.envelope import Priority
from zonerelay.queue.destination.backlog import FRESH_WEIGHT, STRIDE, FairQueue, Precedence
from zonerelay.queue.destination.destinations import Destination, Rates, Site, Standing, Ticket
from zonerelay.routing.destinations.route import DestinationKey, SiteKey

LOOK = 0.1
"""Seconds between two updates of the throttle."""
BUSY = 0.8
"""The busy share of time from which the throttle acts. It is the time that the loop's thread runs or waits
for a CPU. The rest is spent waiting for the interpreter and the disk: a saturated loop shows 0.85 to 0.95.
"""
SHARE = 4
FRESH_STARTS = 30
FRESH_STARTS_AT_LAST = FRESH_WEIGHT
PATIENCE = 300.0
LEAST = 50.0
"""Backlog starts per second that are always allowed. New mail would hardly benefit from fewer, and other
programs may be what keeps the CPUs busy.
"""
LOWER = 0.5
RAISE = 1.2
RAISE_BY = 10.0
"""Starts per second, in addition to the factor."""
MEMORY = 0.2
"""Weight of the last update in a moving average; about half a second is remembered."""


class BacklogThrottle:
    """Limits the rate at which transactions with old mail (backlog) start while new mail needs the CPU. While
    `is_used_up` is true, no backlog may start until the next update.

    `busy` returns the share of the time since its last call for which the loop's thread needed a CPU. Without
    it nothing is limited. `refilled` is called when something may start that could not start before.
    """

    def __init__(
        self, busy: Callable[[], float] | None = None, refilled: Callable[[], None] = lambda: None
    ) -> None:
        self._busy = busy
        self._refilled = refilled
        self.seconds = 0.0
        """Seconds for which the backlog had a rate."""
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.rate = math.inf
        """Starts per second that the backlog may have."""
        self.is_used_up = False
        self.is_looked_at = False
        self._left = math.inf
        self._lasted = 0.0
        self._fresh = self._other = 0
        self._fresh_rate = self._other_rate = 0.0

    def started(self, *, is_fresh: bool) -> None:
        """Count the start of a batch, of fresh mail or of backlog (including deferred mail). Fresh mail that
        is deferred without an attempt, because its host is suspended, is counted too.
        """
        if is_fresh:
            self._fresh += 1
            return
        if not self.is_looked_at:
            # Counts from the time without a timer are meaningless.
            self.is_looked_at = True
            self._fresh = self._other = 0
            self._fresh_rate = self._other_rate = 0.0
            if self._busy is not None:
                self._busy()
                self._arm(asyncio.get_running_loop())
        self._other += 1
        self._left -= 1
        self.is_used_up = self._left <= 0

    def look(self, seconds: float, busy: float) -> None:
        """Update the permitted rate from the starts in the last `seconds`. `busy` is the share of this time
        for which the loop was busy.
        """
        self.is_looked_at = self._other > 0 or self.rate < math.inf
        self._fresh_rate += (self._fresh / seconds - self._fresh_rate) * MEMORY
        self._other_rate += (self._other / seconds - self._other_rate) * MEMORY
        self._fresh = self._other = 0
        more = seconds if self.rate < math.inf else -seconds
        self._lasted = min(max(0.0, self._lasted + more), PATIENCE)
        self.rate = self._next_rate(busy)
        self._left = self.rate * seconds
        self.is_used_up = False

    def _next_rate(self, busy: float) -> float:
        fresh, other = self._fresh_rate, self._other_rate
        if fresh < 1 or fresh * SHARE < other:
            return math.inf
        if busy >= BUSY:
            less = (FRESH_STARTS - FRESH_STARTS_AT_LAST) * self._lasted / PATIENCE
            return max(LEAST, fresh / (FRESH_STARTS - less), min(self.rate, other) * LOWER)
        rate = self.rate * RAISE + RAISE_BY
        return math.inf if rate > (fresh + other) * SHARE else rate

    def stop(self) -> None:
        self._busy = None
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looked_at = loop.time()
        self._timer = loop.call_later(LOOK, self._on_time, loop)

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        was_used_up = self.is_used_up
        passed = max(loop.time() - self._looked_at, LOOK / 2)
        if self.rate < math.inf:
            self.seconds += passed
        assert self._busy is not None
        self.look(passed, self._busy())
        if self.is_looked_at:
            self._arm(loop)
        if was_used_up:
            self._refilled()


MOST_IN_VISIT = 10
VISIT_SECONDS = 0.25
"""Seconds by which the longest kind of visit, and one more batch, delays the other destinations in each
round.
"""


KNOWN = 20_000
"""Standings that are remembered."""


class SlowStart:
    """Limits the connections of one zone to destinations that have not responded yet or respond slowly.
    `most` is the zone's connection limit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._active: Counter[Standing] = Counter()
        self._wishing: dict[Destination, Standing] = {}
        self._rows: tuple[tuple[Standing, OrderedDict[Destination, None]], ...] = (
            (Standing.NEW, OrderedDict()),  # with fresh mail
            (Standing.NEW, OrderedDict()),  # without fresh mail
            (Standing.FAILING, OrderedDict()),
            (Standing.SLOW, OrderedDict()),
        )
        self._at = 0
        self._past: BoundedDict[DestinationKey, bool] = BoundedDict(KNOWN)

    def _eighths(self, count: int) -> int:
        """Return `count` eighths of the zone's connection limit, but at least 1."""
        return max(1, self.most * count // 8)

    def __bool__(self) -> bool:
        """Return whether a destination is waiting until slow start allows it a connection."""
        return any(row for _, row in self._rows)

    def admits(self, destination: Destination) -> bool:
        """Return whether slow start allows a destination another transaction."""
        return destination in self._wishing or self._has_room(destination.standing)

    def _has_room(self, kind: Standing) -> bool:
        active = self._active
        new, failing, slow = active[Standing.NEW], active[Standing.FAILING], active[Standing.SLOW]
        if kind is Standing.QUICK:
            return True
        if new + failing + slow >= self._eighths(6):
            return False
        if kind is Standing.NEW:
            return new < self._eighths(5)
        if failing + slow >= self._eighths(4):
            return False
        new_wait = self._rows[0][1] or self._rows[1][1]
        return kind is Standing.SLOW or failing < self._eighths(1 if new_wait else 2)

    def put_aside(self, destination: Destination) -> None:
        """Add a destination to those that wait until slow start allows them a connection."""
        new = 0 if destination.has_fresh else 1
        number = {Standing.FAILING: 2, Standing.SLOW: 3}.get(destination.standing, new)
        self._rows[number][1][destination] = None

    def sort(self) -> None:
        """Move waiting destinations whose fresh mail has become backlog to those without fresh mail."""
        fresh, other = self._rows[0][1], self._rows[1][1]
        for destination in [each for each in fresh if not each.has_fresh]:
            del fresh[destination]
            other[destination] = None

    def next(self, may_go: Callable[[Destination], bool]) -> Destination | None:
        """Remove and return a waiting destination that may have a connection now, or return None."""
        for _ in self._rows:
            kind, row = self._rows[self._at]
            self._at = (self._at + 1) % len(self._rows)
            if row and self._has_room(kind) and may_go(destination := next(iter(row))):
                del row[destination]
                return destination
        return None

    def wishes(self, destination: Destination) -> None:
        """Count a destination as using a connection while it waits for a slot that all workers share."""
        kind = destination.standing
        if kind is not Standing.QUICK and destination not in self._wishing:
            self._wishing[destination] = kind
            self._active[kind] += 1

    def gives_up(self, destination: Destination) -> None:
        """Stop counting a destination as waiting for a connection slot, because it no longer needs one."""
        kind = self._wishing.pop(destination, None)
        if kind is not None:
            self._active[kind] -= 1

    def started(self, destination: Destination) -> None:
        self.gives_up(destination)
        kind = destination.standing
        if kind is not Standing.QUICK:
            destination.counted += (kind,)
            self._active[kind] += 1

    def ended(self, destination: Destination) -> None:
        """Record that one of the transactions of a destination has ended."""
        while len(destination.counted) > destination.active:
            self._uncount(destination)

    def quick(self, destination: Destination) -> bool:
        """Stop limiting a destination, because it has responded in time. Return true if it
        was waiting here.
        """
        self.gives_up(destination)
        while destination.counted:
            self._uncount(destination)
        return any(row.pop(destination, self) is None for _, row in self._rows)

    def _uncount(self, destination: Destination) -> None:
        self._active[destination.counted[-1]] -= 1
        destination.counted = destination.counted[:-1]

    # The memory of past standings

    def remember(self, destination: Destination) -> None:
        """Remember how well a destination has responded, because it is about to be removed from memory."""
        kind = destination.standing
        if kind is Standing.QUICK or kind is Standing.SLOW:
            self._past[destination.key] = destination.is_slow

    def recall(self, destination: Destination) -> None:
        """Restore how well a destination has responded, because it is used again."""
        is_slow = self._past.pop(destination.key, None)
        if is_slow is not None:
            destination.suspension.is_proven, destination.is_slow = True, is_slow

    def clear(self) -> None:
        for _, row in self._rows:
            row.clear()


class RoundRobin:
    """Selects the next destination of one zone by round robin. `active` is the number of active
    transactions.
    """

    def __init__(
        self, zone: ZoneSettings, rates: Rates, shared: ZoneAllowance | None, throttle: BacklogThrottle
    ) -> None:
        self._most = zone.max_connections
        self._throttle = throttle
        self._shared = shared
        self._ungranted: dict[Destination, None] = {}
        self._has_ended = False
        """Nothing starts any more; requests for slots of the same lines belong to the zone's successor."""
        self._rates = rates
        self._slow_start = SlowStart(zone.max_connections)
        self._starts_slowly = not zone.next_hop
        """Whether slow start limits the destinations: a zone with one next hop has no other to protect."""
        self._queues: dict[Priority, FairQueue[Destination]] = {each: FairQueue() for each in Priority}
        self._normal = self._queues[Priority.NORMAL]
        self._urgencies = False
        """A destination has been in a queue other than the normal one."""
        self._precedence = Precedence()
        self._aside: list[tuple[float, int, Destination]] = []
        self._count = 0
        self._sites: dict[SiteKey, Site] = {}
        self.active = 0
        self.next_turn: float | None = None
        """The reading of the monotonic clock at which `next` is to be called again even if nothing has
        happened.
        """

    def site(self, key: SiteKey) -> Site:
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(key)
        return site

    def enter(self, destination: Destination) -> None:
        """Add a new destination."""
        destination.site.lines[destination] = None
        destination.site.changed()
        self._slow_start.recall(destination)

    def leave(self, destination: Destination) -> None:
        """Remove a destination without queued or active mail."""
        self._give_up(destination)
        self._slow_start.remember(destination)
        site = destination.site
        site.lines.pop(destination, None)
        site.blocked.pop(destination, None)
        self._ungranted.pop(destination, None)
        site.changed()
        if not site.lines:
            self._sites.pop(site.key, None)

    def clear(self) -> None:
        """Remove all queued destinations, for a shutdown."""
        for destination in self._ungranted:
            self._give_up(destination)
        self._has_ended = True
        for queue in self._queues.values():
            queue.clear()
        self._aside.clear()
        self._ungranted.clear()
        self._slow_start.clear()
        self.next_turn = None

    def sort(self) -> None:
        """Move queued destinations whose fresh mail has become backlog to those without fresh mail
        (`zone/window.py`).
        """
        for queue in self._queues.values():
            queue.sort()
        self._slow_start.sort()

    def offer(self, destination: Destination, now: float, *, new: bool = False) -> None:
        """Queue a destination if it has mail and may start transactions. `new` is true if its mail is new."""
        if not destination.waiting:
            return
        if destination.is_queued:
            self._hasten(destination)
            return
        # If several lines share the hosts, a line is queued even without a free connection, which keeps their
        # order.
        if len(destination.site.lines) > 1 or destination.site.has_room(destination, now):
            destination.is_queued = True
            self._append(destination, new=new and not destination.active)

    def next(self, now: float, tick: float) -> Destination | None:
        """Return the destination that may start a batch now, or None. It leaves the queue until it is offered
        again.
        """
        if self._aside:
            self._bring_back(tick)
        starts_slowly, slow_start = self._starts_slowly, self._slow_start
        while self.active < self._most:
            if starts_slowly and slow_start and (waiting := slow_start.next(self._may_go)) is not None:
                self._append(waiting, first=True)
            if not self._normal and not (self._urgencies and self._stands()):
                break
            zone = self._rates.zone
            if zone is not None and zone.due > tick:
                self.next_turn = min(zone.due, self._aside[0][0]) if self._aside else zone.due
                return None
            fresh_only = self._throttle.is_used_up
            if fresh_only and not self._stands(fresh_only=True):
                break
            destination = self._pop(fresh_only=fresh_only)
            if not destination.waiting:
                self._give_up(destination)
                continue
            if not destination.site.has_room(destination, now):
                self._give_up(destination)
                destination.site.blocked[destination] = None
                continue
            if starts_slowly and not self._is_admitted(destination):
                continue
            if self._shared is not None and not self._is_granted(destination):
                continue
            if destination.pace is not None and not self._is_due(destination, tick):
                continue
            return destination
        self.next_turn = self._aside[0][0] if self._aside else None
        return None

    def start(self, destination: Destination, tick: float) -> Ticket | None:
        """Count a starting transaction. Return its ticket if a rate applies to the destination."""
        destination.begins(tick)
        destination.site.changed()
        self.active += 1
        if self._shared is not None:
            self._shared.started(destination.site.key, destination.key, more=bool(destination.waiting))
        if self._starts_slowly:
            self._slow_start.started(destination)
        if destination.pace is None:
            return None
        ticket = destination.pace.start(tick)
        destination.pace.expect(destination.waiting)
        return ticket

    def end(self, destination: Destination, ticket: Ticket | None, now: float) -> None:
        """Count a transaction that has ended. Destinations that were waiting for a connection to its hosts
        come first.
        """
        destination.active -= 1
        destination.site.changed()
        self.active -= 1
        if self._shared is not None:
            self._shared.ended(destination.site.key, destination.key)
        if destination.counted:
            self._slow_start.ended(destination)
        if ticket is not None:
            ticket.end()
        self._unblock(destination.site, now)

    def is_awaited(self, destination: Destination) -> bool:
        """Return whether another destination is waiting for a connection to the same hosts."""
        return any(line is not destination for line in destination.site.blocked)

    def goes_on(self, destination: Destination, now: float, tick: float) -> bool:
        """Return whether another batch may follow on the destination's connection before other destinations'
        batches.
        """
        return (
            destination.waiting > 0
            and destination.standing is Standing.QUICK
            and self.active < self._most
            and destination.site.has_room(destination, now)
            and not self._is_preceded(destination)
            and (destination.pace is None or destination.pace.is_due(tick))
            and (self._shared is None or self._is_granted(destination))
        )

    def _is_preceded(self, destination: Destination) -> bool:
        """Return whether another destination has mail that must be sent before this destination's."""
        urgency = destination.urgency
        if self._urgencies and any(STRIDE[each] < STRIDE[urgency] for each in self._stands()):
            return True
        if destination.has_fresh:
            return False
        return self._queues[urgency].has_fresh or self._throttle.is_used_up

    def quick(self, destination: Destination) -> None:
        """Record that the destination has answered in time."""
        if self._slow_start.quick(destination):
            self._append(destination)

    def changed(self, key: SiteKey, now: float, *, earlier: bool) -> None:
        """Queue destinations of a site again, because a batch has used its send time or has given it back. In
        the second case other destinations there may be due `earlier`.
        """
        site = self._sites.get(key)
        if site is not None:
            if earlier:
                self._hurry([entry for entry in self._aside if entry[2].site is site])
            self._unblock(site, now)

    def granted(self, now: float) -> None:
        """Queue destinations again, because shared limits may allow this worker more slots or earlier send
        times.
        """
        if self._shared is not None:
            self._slow_start.most = -(-self._most // self._shared.owners)
        ungranted, self._ungranted = self._ungranted, {}
        for destination in ungranted:
            if not destination.waiting:
                self._give_up(destination)
            elif destination.is_queued:
                # It requests a slot when its turn comes. A request made here for a destination that was put
                # aside would occupy the very slot that the destination waits for, for ever.
                continue
            elif self._is_granted(destination):
                self.offer(destination, now)
                if not destination.is_queued:
                    self._give_up(destination)  # it is suspended, or its hosts have no free connection
        self._hurry(self._aside)

    def _is_granted(self, destination: Destination) -> bool:
        assert self._shared is not None
        if self._shared.may_start(
            destination.site.key,
            destination.key,
            destination.limits.max_connections,
            self._most,
            destination.waiting,
        ):
            return True
        self._ungranted[destination] = None
        if self._starts_slowly:
            self._slow_start.wishes(destination)
        return False

    def emptied(self, destination: Destination) -> None:
        """Cancel a destination's request for a connection slot after its mail was withdrawn. Otherwise the
        request would keep the slot from other destinations permanently.
        """
        if not destination.waiting:
            self._ungranted.pop(destination, None)
            self._give_up(destination)

    def _give_up(self, destination: Destination) -> None:
        if self._shared is None or self._has_ended:
            return
        self._shared.cancel(destination.site.key, destination.key)
        self._slow_start.gives_up(destination)

    def _append(self, destination: Destination, *, first: bool = False, new: bool = False) -> None:
        """Add a destination to the queue of its highest priority, even if it no longer has waiting mail."""
        priority = destination.urgency if destination.waiting else Priority.NORMAL
        destination.stands_as = priority
        queue = self._queues[priority]
        self._urgencies = self._urgencies or priority is not Priority.NORMAL
        if first:
            queue.put_first(destination)
        else:
            queue.append(destination, new=new)

    def _hasten(self, destination: Destination) -> None:
        """Move a queued destination to the queue of its most urgent mail."""
        stands = destination.stands_as
        if stands is None:
            return
        if STRIDE[destination.urgency] < STRIDE[stands]:
            # An entry left behind would cost one more visit per round for every urgent message.
            self._queues[stands].remove(destination)
            self._append(destination)
        else:
            self._queues[stands].hasten(destination)

    def _may_go(self, destination: Destination) -> bool:
        """Return whether a destination may start now. A backlog for thousands of unknown hosts must not start
        while fresh mail is next, or while the throttle stops backlog.
        """
        if destination.has_fresh or not destination.waiting:
            return True
        if self._throttle.is_used_up:
            return False
        return not self._queues[destination.urgency].fresh_is_next

    def _stands(self, *, fresh_only: bool = False) -> list[Priority]:
        return [
            priority for priority, queue in self._queues.items() if (queue.has_fresh if fresh_only else queue)
        ]

    def _pop(self, *, fresh_only: bool) -> Destination:
        if self._urgencies:
            stands = self._stands(fresh_only=fresh_only)
            priority = stands[0] if len(stands) == 1 else self._precedence.pick(stands)
        else:
            priority = Priority.NORMAL
        destination = self._queues[priority].pop(fresh_only=fresh_only)
        destination.is_queued = False
        destination.stands_as = None
        return destination

    def _is_admitted(self, destination: Destination) -> bool:
        """Return whether slow start allows a destination a connection now. If not, add the destination to
        those that wait.
        """
        if destination.standing is Standing.QUICK:
            return True
        if destination.active and not destination.suspension.is_proven:  # it has one until it answers
            destination.site.blocked[destination] = None
            return False
        if not self._slow_start.admits(destination):
            destination.is_queued = True
            self._slow_start.put_aside(destination)
            return False
        return True

    def _unblock(self, site: Site, now: float) -> None:
        if site.blocked:
            blocked, site.blocked = site.blocked, {}
            for destination in blocked:
                self.offer(destination, now)

    # Rates

    def _is_due(self, destination: Destination, tick: float) -> bool:
        assert destination.pace is not None
        destination.pace.expect(destination.waiting)
        pacers = destination.pace.at_site
        due = max((pacer.due for pacer in pacers), default=tick)
        if due > tick:
            destination.is_queued = True
            self._count += 1
            heapq.heappush(self._aside, (due, self._count, destination))
            return False
        if any(pacer.is_crowded for pacer in pacers):
            destination.site.blocked[destination] = None
            return False
        return True

    def _bring_back(self, tick: float) -> None:
        while self._aside and self._aside[0][0] <= tick:
            self._append(heapq.heappop(self._aside)[2])

    def _hurry(self, waiting: list[tuple[float, int, Destination]]) -> None:
        """Queue destinations that were waiting for a send time."""
        if waiting:
            for entry in sorted(waiting):
                self._append(entry[2])
            self._aside = sorted(set(self._aside).difference(waiting))
