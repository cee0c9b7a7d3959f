"""The round robin: fair visits to the destinations of a zone, within its limits and rates. Pure.

- Destinations with work wait in a queue and are visited one after the other. There is a queue for each
  priority, and a destination is in that of the most urgent mail that it has; `Precedence` chooses between
  queues. Within a queue destinations with fresh mail and those without it alternate (`order.py`).
- In a zone routed by MX a visit goes on for up to `MOST_IN_VISIT` batches, as long as the later ones take
  less than `VISIT_SECONDS` together: with more destinations than connections each visit costs a new
  connection. It ends at once when other mail waits that is more urgent, or fresh where the destination's own
  is not, or for the same hosts on other terms; only destinations that answer in time go on.
- A destination without room at its hosts leaves the queue and returns, before the one that made room, when
  there is some: lines that share hosts alternate.
- A destination whose rate says later waits aside until then (`next_turn`): it holds no connection of the
  zone meanwhile. Where the zone's own rate says later, all wait, in the order of the queue.
- Where the limits are shared with other workers, a destination for which this worker has no unit waits until
  it is given one (`granted`).
- In a zone routed by MX, destinations that do not answer, or take long, have a part of the connections
  (`probation.py`).
- While new mail needs the processor, destinations without fresh mail stand still at times
  (`backlog_throttle.py`).

`now` is the wall clock, `tick` a monotonic one, needed where a rate is set.

Throttles mail that has waited before, while new mail needs the processor. `BacklogThrottle` is pure.

The order of lines (`order.py`) is of no use where the processor is short: a message of a backlog for many
hosts, with look-ups and a connection of its own, takes five times as much of it as one that comes in and
leaves for a known host, and goes while new mail is being accepted. With 100,000 of them other mail was taken
at a third of its rate. So while the event loop is busy (`BUSY`) and fresh mail
starts at a quarter of the other's rate or more (`SHARE`), the other is given a rate, which is lowered step by
step, to one start for `FRESH_STARTS` of fresh mail (or `LEAST`), and raised when the loop has time again. A
trickle of new mail changes nothing, and without any there is no rate.

That is for bursts. Where it lasts, the other has more and more, after `PATIENCE` seconds as much as it has in
the order of lines: or deferred mail would never leave a relay that has too much to do all day.

There is one throttle for all zones of a worker, which share its processor. It is looked at every `LOOK`
seconds while mail that has waited is being sent.

The table of lines by domain and of destinations by key. Pure.

It makes destinations and forgets them: a provider's hosts are one destination for thousands of domains. Idle
domains and destinations are forgotten when there are many, so memory does not grow with all that was ever
sent to. That is done a few at a time, those that have not been looked at for longest, as others come: to look
at thousands at once would stop the event loop. Promise: nothing is forgotten of which something waits, is
active, was passed over or is suspended.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.limits.worker.allowance import ZoneAllowance
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import STRIDE, Line, Precedence
from zonerelay.queue.destination.destinations import Destination, DestinationStatus, Site, Standing
from zonerelay.queue.destination.order import FRESH_WEIGHT, FairQueue
from zonerelay.queue.destination.probation import Probation
from zonerelay.queue.destination.rates import Rates, Ticket
from zonerelay.queue.destination.suspension import Transition
from zonerelay.routing.destinations.route import DestinationKey, Route, SiteKey

LOOK = 0.1
"""Seconds."""
BUSY = 0.8
"""Of the time the loop's thread runs or waits for a processor. What is missing to 1 are waits for the
interpreter and the disk: a loop that has no time shows 0.85 to 0.95."""
SHARE = 4
FRESH_STARTS = 30
FRESH_STARTS_AT_LAST = FRESH_WEIGHT
PATIENCE = 300.0
LEAST = 50.0
"""Starts a second, whatever comes: new mail would hardly feel it if they were fewer, and it may be other
programs that keep the processors busy.
"""
LOWER = 0.5
RAISE = 1.2
RAISE_BY = 10.0
"""Starts a second, besides."""
MEMORY = 0.2
"""Weight of the last look in a rate: about half a second is remembered."""


class BacklogThrottle:
    """Counts what starts. `is_used_up`: nothing that has waited before may start until the next look."""

    def __init__(self, begun: Callable[[], None] = lambda: None) -> None:
        self.begun = begun
        """Called when mail that has waited starts and no timer of `look` runs."""
        self.rate = math.inf
        """Starts a second that the other mail may have."""
        self.is_used_up = False
        self.is_looked_at = False
        self._left = math.inf
        self._lasted = 0.0
        self._fresh = self._other = 0
        self._fresh_rate = self._other_rate = 0.0

    def started(self, *, is_fresh: bool) -> None:
        """A batch of fresh mail, or of mail that was put off or is backlog."""
        if is_fresh:
            self._fresh += 1
            return
        if not self.is_looked_at:
            # What started without a timer says nothing.
            self.is_looked_at = True
            self._fresh = self._other = 0
            self._fresh_rate = self._other_rate = 0.0
            self.begun()
        self._other += 1
        self._left -= 1
        self.is_used_up = self._left <= 0

    def look(self, seconds: float, busy: float) -> None:
        """So long after the last look, or the beginning, of which the loop was busy for a part."""
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


class ThrottleTimer:
    """Looks in time. `busy` says what part of the time since it was last asked the loop's thread needed a
    processor; `refilled` is called when something may start that might not before.
    """

    def __init__(self, busy: Callable[[], float], refilled: Callable[[], None]) -> None:
        self.throttle = BacklogThrottle(self._begin)
        self._busy = busy
        self._refilled = refilled
        self.seconds = 0.0
        """During which there was a rate."""
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._busy()
        self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looked_at = loop.time()
        if not self._stopped:
            self._timer = loop.call_later(LOOK, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        was_used_up = self.throttle.is_used_up
        passed = max(loop.time() - self._looked_at, LOOK / 2)
        if self.throttle.rate < math.inf:
            self.seconds += passed
        self.throttle.look(passed, self._busy())
        if self.throttle.is_looked_at:
            self._arm(loop)
        if was_used_up:
            self._refilled()


MOST_IN_VISIT = 10
VISIT_SECONDS = 0.25
"""Seconds by which a visit of the longest kind, and one batch more, delays the others each round."""


class RoundRobin:
    """The round robin of one zone. `active` counts transactions."""

    def __init__(
        self,
        zone: ZoneSettings,
        rates: Rates,
        shared: ZoneAllowance | None = None,
        throttle: BacklogThrottle | None = None,
    ) -> None:
        self._most = zone.max_connections
        self._throttle = throttle
        self._shared = shared
        self._ungranted: dict[Destination, None] = {}
        self._has_ended = False
        """Nothing starts any more; wishes for the same lines are those of the zone's successor."""
        self._rates = rates
        self._probation = None if zone.next_hop else Probation(zone.max_connections)
        self._queues: dict[Priority, FairQueue[Destination]] = {each: FairQueue() for each in Priority}
        self._normal = self._queues[Priority.NORMAL]
        self._urgencies = False
        """A destination has been in another queue than the normal one."""
        self._precedence = Precedence()
        self._aside: list[tuple[float, int, Destination]] = []
        self._count = 0
        self._sites: dict[SiteKey, Site] = {}
        self.active = 0
        self.next_turn: float | None = None
        """When `next` is to be asked again although nothing has happened, as a reading of the monotonic
        clock.
        """

    def site(self, key: SiteKey) -> Site:
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(key)
        return site

    def enter(self, destination: Destination) -> None:
        """Takes in a new destination."""
        destination.site.lines[destination] = None
        destination.site.changed()
        if self._probation is not None:
            self._probation.recall(destination)

    def leave(self, destination: Destination) -> None:
        """Forgets a destination of which nothing waits or is active."""
        self._give_up(destination)
        if self._probation is not None:
            self._probation.remember(destination)
        site = destination.site
        site.lines.pop(destination, None)
        site.blocked.pop(destination, None)
        self._ungranted.pop(destination, None)
        site.changed()
        if not site.lines:
            self._sites.pop(site.key, None)

    def clear(self) -> None:
        """Forgets everything that waits, for a stop."""
        for destination in self._ungranted:
            self._give_up(destination)
        self._has_ended = True
        for queue in self._queues.values():
            queue.clear()
        self._aside.clear()
        self._ungranted.clear()
        if self._probation is not None:
            self._probation.clear()
        self.next_turn = None

    def sort(self) -> None:
        """What was fresh may be backlog now (`window.py`)."""
        for queue in self._queues.values():
            queue.sort()
        if self._probation is not None:
            self._probation.sort()

    def offer(self, destination: Destination, now: float, *, new: bool = False) -> None:
        """A destination may have work, or there may be room for it. `new`: it has just got work."""
        if not destination.waiting:
            return
        if destination.is_queued:
            self._hasten(destination)
            return
        # Among several lines one without room is queued all the same: that keeps their order.
        if len(destination.site.lines) > 1 or destination.site.has_room(destination, now):
            destination.is_queued = True
            self._append(destination, new=new and not destination.active)

    def next(self, now: float, tick: float) -> Destination | None:
        """Return the destination that may start a batch now; it leaves the queue until it is
        offered again.
        """
        if self._aside:
            self._bring_back(tick)
        probation = self._probation
        while self.active < self._most:
            if probation and (waiting := probation.next(self._may_go)) is not None:
                self._append(waiting, first=True)
            if not self._normal and not (self._urgencies and self._stands()):
                break
            zone = self._rates.zone
            if zone is not None and zone.due > tick:
                self.next_turn = min(zone.due, self._aside[0][0]) if self._aside else zone.due
                return None
            fresh_only = self._throttle is not None and self._throttle.is_used_up
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
            if probation is not None and not self._is_admitted(destination, probation):
                continue
            if self._shared is not None and not self._is_granted(destination):
                continue
            if destination.pace is not None and not self._is_due(destination, tick):
                continue
            return destination
        self.next_turn = self._aside[0][0] if self._aside else None
        return None

    def start(self, destination: Destination, tick: float) -> Ticket | None:
        """Counts a transaction that starts; returns the ticket to its turns, where there is a rate."""
        destination.begins(tick)
        destination.site.changed()
        self.active += 1
        if self._shared is not None:
            self._shared.started(destination.site.key, destination.key, more=bool(destination.waiting))
        if self._probation is not None:
            self._probation.started(destination)
        if destination.pace is None:
            return None
        ticket = destination.pace.start(tick)
        destination.pace.expect(destination.waiting)
        return ticket

    def end(self, destination: Destination, ticket: Ticket | None, now: float) -> None:
        """Counts a transaction that has ended: lines that waited for its room come first."""
        destination.active -= 1
        destination.site.changed()
        self.active -= 1
        if self._shared is not None:
            self._shared.ended(destination.site.key, destination.key)
        if destination.counted and self._probation is not None:
            self._probation.ended(destination)
        if ticket is not None:
            ticket.end()
        self._unblock(destination.site, now)

    def is_awaited(self, destination: Destination) -> bool:
        """Return whether another line waits for room at its hosts."""
        blocked = destination.site.blocked
        return bool(blocked) and any(line is not destination for line in blocked)

    def goes_on(self, destination: Destination, now: float, tick: float) -> bool:
        """Return whether the visit may go on, before the destinations that wait."""
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
        """Return whether others wait with mail that comes before its own."""
        urgency = destination.urgency
        if self._urgencies and any(STRIDE[each] < STRIDE[urgency] for each in self._stands()):
            return True
        if destination.has_fresh:
            return False
        throttle = self._throttle
        return self._queues[urgency].has_fresh or (throttle is not None and throttle.is_used_up)

    def quick(self, destination: Destination) -> None:
        """The destination has answered in time, for the first time or again."""
        if self._probation is not None and self._probation.quick(destination):
            self._append(destination)

    def changed(self, key: SiteKey, now: float, *, earlier: bool) -> None:
        """A batch for the site took its turn, or ended without one: then the lines there may be due
        `earlier`.
        """
        site = self._sites.get(key)
        if site is not None:
            if earlier:
                self._hurry(site)
            self._unblock(site, now)

    def granted(self, now: float) -> None:
        """Of shared limits there may be more for this worker: units, or turns that are due earlier."""
        if self._shared is not None and self._probation is not None:
            self._probation.resize(-(-self._most // self._shared.holders))
        ungranted, self._ungranted = self._ungranted, {}
        for destination in ungranted:
            if not destination.waiting:
                self._give_up(destination)
            elif destination.is_queued:
                # It asks when its turn comes. A wish made here by a destination that probation has put aside
                # would take the very place that it waits for, for ever.
                continue
            elif self._is_granted(destination):
                self.offer(destination, now)
                if not destination.is_queued:
                    self._give_up(destination)  # it is suspended, or its hosts have no room
        aside, self._aside = self._aside, []
        for entry in sorted(aside):
            self._append(entry[2])

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
        if self._probation is not None:
            self._probation.wishes(destination)
        return False

    def emptied(self, destination: Destination) -> None:
        """What waited there has been taken away: a wish that stayed would keep the place for good that other
        destinations wait for.
        """
        if not destination.waiting:
            self._ungranted.pop(destination, None)
            self._give_up(destination)

    def _give_up(self, destination: Destination) -> None:
        if self._shared is None or self._has_ended:
            return
        self._shared.cancel(destination.site.key, destination.key)
        if self._probation is not None:
            self._probation.gives_up(destination)

    def _append(self, destination: Destination, *, first: bool = False, new: bool = False) -> None:
        """Queues a destination, also one whose mail has gone or is withdrawn."""
        priority = destination.urgency if destination.waiting else Priority.NORMAL
        destination.stands_as = priority
        queue = self._queues[priority]
        self._urgencies = self._urgencies or priority is not Priority.NORMAL
        if first:
            queue.put_first(destination)
        else:
            queue.append(destination, new=new)

    def _hasten(self, destination: Destination) -> None:
        """Something more urgent may have come: the destination moves to the queue of that."""
        stands = destination.stands_as
        if stands is None:
            return
        if STRIDE[destination.urgency] < STRIDE[stands]:
            # A place left behind would be a visit more in each round, for every urgent message one.
            self._queues[stands].remove(destination)
            self._append(destination)
        else:
            self._queues[stands].hasten(destination)

    def _may_go(self, destination: Destination) -> bool:
        """Return whether it may go now: a backlog for thousands of unknown hosts must not go before fresh
        mail.
        """
        if destination.has_fresh or not destination.waiting:
            return True
        if self._throttle is not None and self._throttle.is_used_up:
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

    def _is_admitted(self, destination: Destination, probation: Probation) -> bool:
        """Return whether its standing leaves it room, too. Otherwise it waits where it will be found."""
        if destination.standing is Standing.QUICK:
            return True
        if probation.is_full(destination):
            destination.site.blocked[destination] = None
            return False
        if not probation.admits(destination):
            destination.is_queued = True
            probation.put_aside(destination)
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

    def _hurry(self, site: Site) -> None:
        waiting = [entry for entry in self._aside if entry[2].site is site]
        if waiting:
            for entry in sorted(waiting):
                self._append(entry[2])
            self._aside = [entry for entry in self._aside if entry[2].site is not site]
            heapq.heapify(self._aside)


MAX_DOMAINS = 10_000
MAX_DESTINATIONS = 1000
"""Idle domains and destinations are forgotten when there are more than this."""
LOOKED_AT = 8
"""Destinations looked at for each one that is made: an idle one in eight keeps their number where it is."""
TIDIED = 500
"""Domains and deliveries looked at in one go, when there are too many domains."""


class Destinations:
    """Destinations: `lines` by domain (`""` in a zone that has one next hop), destinations by their key."""

    def __init__(
        self, zone: ZoneSettings, retry: RetrySettings, rates: Rates, round_robin: RoundRobin
    ) -> None:
        self.lines: dict[str, Line] = {}
        # Not a dict: there the search for the first takes longer the more have left from the front.
        self.destinations: OrderedDict[DestinationKey, Destination] = OrderedDict()
        self._zone = zone
        self._retry = retry
        self._rates = rates
        self._round_robin = round_robin
        self._max_domains = MAX_DOMAINS
        self._to_tidy: Iterator[DestinationKey] | None = None

    def destination(self, route: Route, now: float) -> Destination:
        """Return the one that the route leads to, which goes by this route from now on."""
        key = route.destination
        destination = self.destinations.get(key)
        if destination is not None:
            destination.renew(route, self._zone, self._rates, now)
            return destination
        if len(self.destinations) >= MAX_DESTINATIONS:
            self.forget_some(now)
        site = self._round_robin.site(route.site)
        destination = Destination(route, site, self._retry, apart=not self._zone.mixes_domains)
        destination.renew(route, self._zone, self._rates, now)
        self.destinations[key] = destination
        self._round_robin.enter(destination)
        return destination

    def resume(self, key: DestinationKey | None) -> list[Destination]:
        """Lift the suspension of one destination or all; the ones that were troubled."""
        chosen = list(self.destinations.values()) if key is None else [self.destinations.get(key)]
        return [
            destination
            for destination in chosen
            if destination is not None and destination.suspension.resume() is Transition.RESUMED
        ]

    def count(self, now: float) -> tuple[int, int]:
        """Returns how many destinations are suspended and how many are not, of those that `status` tells."""
        suspended = usable = 0
        for each in self.destinations.values():
            is_busy = each.waiting or each.active
            if each.suspension.is_troubled:
                suspended += bool(is_busy or not each.suspension.is_forgettable(now))
            elif is_busy:
                usable += 1
        return suspended, usable

    def status(self, now: float, tick: float = 0.0) -> tuple[DestinationStatus, ...]:
        return tuple(self.each_status(now, tick))

    def each_status(self, now: float, tick: float) -> Iterator[DestinationStatus]:
        """Yields what `status` tells; the destinations may change meanwhile."""
        for each in list(self.destinations.values()):
            if each.waiting or each.active or not each.suspension.is_forgettable(now):
                yield each.status(tick)

    def sort(self, priority: Priority, since: MessageId, *, is_earlier: bool = False) -> int:
        """Of everything that waits what is older than this message is backlog now; how many are new.
        `is_earlier`: than the last one.
        """
        backlogs = (line.backlogs.get(priority) for line in dict.fromkeys(self.lines.values()))
        return sum(
            backlog.sort(since, is_earlier=is_earlier)
            for backlog in backlogs
            if backlog is not None and (backlog.has_fresh or is_earlier)
        )

    # Forgetting

    def tidy(self) -> None:
        """When there are very many domains: keep the routes of those that have something waiting; the others
        are asked for again. Each call does a part of it.
        """
        if self._to_tidy is None:
            if len(self.lines) <= self._max_domains:
                return
            self._to_tidy = iter(list(self.destinations))
        looked_at = 0
        for key in self._to_tidy:
            destination = self.destinations.get(key)
            if destination is not None:
                looked_at += 1 + len(destination.domains) + destination.waiting
                self._tidy_one(destination)
            if looked_at >= TIDIED:
                return
        self._to_tidy = None
        self._max_domains = max(MAX_DOMAINS, 2 * len(self.lines))

    def _tidy_one(self, destination: Destination) -> None:
        if destination.waiting:
            keep = {delivery.domain for delivery in destination} | destination.passed_over
        else:
            keep = destination.passed_over
        for domain in destination.domains.keys() - keep:
            del self.lines[domain], destination.domains[domain]

    def forget_some(self, now: float) -> None:
        for _ in range(min(LOOKED_AT, len(self.destinations))):
            key, destination = next(iter(self.destinations.items()))
            if destination.is_forgettable(now):
                del self.destinations[key]
                self._round_robin.leave(destination)
                for domain in destination.domains:
                    del self.lines[domain]
            else:
                self.destinations.move_to_end(key)

    def clear(self) -> Iterator[None]:
        """Forget everything, a destination at each step; nothing of it is active. They and their hosts refer
        to each other: all that a zone knows would be left for the garbage collector.
        """
        self.lines.clear()
        while self.destinations:
            _, destination = self.destinations.popitem()
            self._round_robin.leave(destination)
            yield
