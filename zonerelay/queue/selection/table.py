"""The table of lines by domain and of destinations by key. Pure.

It makes destinations and forgets them: a provider's hosts are one destination for thousands of domains. Idle
domains and destinations are forgotten when there are many, so memory does not grow with all that was ever
sent to. That is done a few at a time, those that have not been looked at for longest, as others come: to look
at thousands at once would stop the event loop. Promise: nothing is forgotten of which something waits, is
active, was passed over or is suspended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import Line
from zonerelay.queue.destination.destinations import Destination, DestinationStatus
from zonerelay.queue.destination.rates import Rates
from zonerelay.queue.destination.suspension import Transition
from zonerelay.queue.selection.round_robin import RoundRobin
from zonerelay.routing.destinations.route import DestinationKey, Route

MAX_DOMAINS = 10_000
MAX_DESTINATIONS = 1000
"""Idle domains and destinations are forgotten when there are more than this."""
LOOKED_AT = 8
"""Destinations looked at for each one that is made: an idle one in eight keeps their number where it is."""
TIDIED = 500
"""Domains and deliveries looked at in one go, when there are too many domains."""


class Destinations:
    """`lines` by domain (`""` in a zone that has one next hop), destinations by their key."""

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
        """The one that the route leads to, which goes by this route from now on."""
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
