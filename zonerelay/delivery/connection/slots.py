"""Counts open connections against the zone's and the destination's limits.

Destinations at the same hosts share a site. A destination's limit counts the connections of all destinations
at the site whose limit is no larger: destinations with equal limits share the limit, a destination never
exceeds its own, and all together never exceed the largest.

When several workers share the limits, an allowance says how much of them is this worker's
(`limits/worker/allowance.py`). It is asked in addition, and hears of every connection.

A *slot* is the right to have one connection. It is taken before connecting and released when the socket is
gone, so connecting, active, idle and closing connections all count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from zonerelay.delivery.peer.connection_key import Terms
from zonerelay.limits.worker.allowance import ZoneAllowance
from zonerelay.model.queue_name import queue_of
from zonerelay.routing.destinations.route import DestinationKey, SiteKey
from zonerelay.telemetry.events.transcript import Record


class Slot:
    """The right to have one connection. `release` may be called again. `record` is that of a transcript."""

    __slots__ = ("_on_release", "line", "record", "released", "site", "zone")

    def __init__(
        self, zone: str, site: SiteKey, line: DestinationKey, on_release: Callable[[Slot], None]
    ) -> None:
        self.zone = zone
        self.site = site
        self.line = line
        self.released = False
        self.record: Record | None = None
        self._on_release = on_release

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._on_release(self)


class _Line:
    """The connections of one destination, and its limit at the latest question."""

    __slots__ = ("limit", "open")

    def __init__(self) -> None:
        self.limit = 0
        self.open = 0


AllowanceOf = Callable[[str], ZoneAllowance]
"""Returns what this worker may use of a zone's limits, by the zone's name."""


class Slots:
    """Counts slots and calls `on_release` for each one that is free again.

    `shared`: the allowances, when other workers go by the same limits.
    """

    def __init__(self, on_release: Callable[[Slot], None], shared: AllowanceOf | None = None) -> None:
        self.shared = shared
        self._in_zone: Counter[str] = Counter()
        self._at_site: dict[SiteKey, dict[DestinationKey, _Line]] = {}
        self._tell = on_release

    def open_in(self, zone: str) -> int:
        return self._in_zone[zone]

    def open_under(self, label: str) -> int:
        """Count the connections of all zones that have this label in metrics."""
        return sum(count for name, count in self._in_zone.items() if queue_of(name).label == label)

    def open_at(self, site: SiteKey) -> int:
        return sum(line.open for line in self._at_site.get(site, {}).values())

    def site_is_full(self, terms: Terms) -> bool:
        lines = self._at_site.get(terms.route.site)
        if lines is None:
            return False
        limit = terms.limits.max_connections
        own = lines.get(terms.route.destination)
        if own is not None:
            own.limit = limit
            if own.open >= limit:
                return True
            if len(lines) == 1:
                return False
        limits = {limit, *(line.limit for line in lines.values() if line.limit >= limit)}
        return any(_open_within(lines, most) >= most for most in limits)

    def is_allowed(self, terms: Terms) -> bool:
        """True when this worker's share of the limits has room for one more connection. Otherwise notes the
        wish.
        """
        if self.shared is None:
            return True
        route, zone = terms.route, terms.zone
        return self.shared(zone.name).may_connect(
            route.site, route.destination, terms.limits.max_connections, zone.max_connections
        )

    def may_keep(self, slot: Slot) -> bool:
        """False when another worker is to have the connection after its transaction."""
        return self.shared is None or self.shared(slot.zone).may_keep(slot.site, slot.line)

    def take(self, terms: Terms) -> Slot:
        route = terms.route
        if self.shared is not None:
            self.shared(terms.zone.name).connected(route.site, route.destination)
        self._in_zone[terms.zone.name] += 1
        line = self._at_site.setdefault(route.site, {}).setdefault(route.destination, _Line())
        line.open += 1
        line.limit = terms.limits.max_connections
        return Slot(terms.zone.name, route.site, route.destination, self._released)

    def _released(self, slot: Slot) -> None:
        self._in_zone[slot.zone] -= 1
        if not self._in_zone[slot.zone]:
            del self._in_zone[slot.zone]
        if self.shared is not None:
            self.shared(slot.zone).disconnected(slot.site, slot.line)
        lines = self._at_site[slot.site]
        lines[slot.line].open -= 1
        if not lines[slot.line].open:
            del lines[slot.line]
            if not lines:
                del self._at_site[slot.site]  # destinations come and go by the million
        self._tell(slot)


def _open_within(lines: dict[DestinationKey, _Line], most: int) -> int:
    return sum(line.open for line in lines.values() if line.limit <= most)
