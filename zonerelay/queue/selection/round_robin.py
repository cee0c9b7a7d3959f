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
"""

from __future__ import annotations

import heapq

from zonerelay.config.settings import ZoneSettings
from zonerelay.limits.worker.allowance import ZoneAllowance
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import STRIDE, Precedence
from zonerelay.queue.destination.destinations import Destination, Site, Standing
from zonerelay.queue.destination.order import FairQueue
from zonerelay.queue.destination.probation import Probation
from zonerelay.queue.destination.rates import Rates, Ticket
from zonerelay.queue.selection.backlog_throttle import BacklogThrottle
from zonerelay.routing.destinations.route import SiteKey

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
        """The destination that may start a batch now; it leaves the queue until it is offered again."""
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
        """Whether another line waits for room at its hosts."""
        blocked = destination.site.blocked
        return bool(blocked) and any(line is not destination for line in blocked)

    def goes_on(self, destination: Destination, now: float, tick: float) -> bool:
        """Whether the visit may go on, before the destinations that wait."""
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
        """Whether others wait with mail that comes before its own."""
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
        """Whether it may go now: a backlog for thousands of unknown hosts must not go before fresh mail."""
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
        """Whether its standing leaves it room, too. Otherwise it waits where it will be found."""
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
