"""How many connections are open: the counts behind the zone's and the destination's limits.

A destination's limit is counted by site: lines of mail for the same hosts share it.

A *slot* is the right to have one connection. It is taken before connecting and given back when the
socket is gone, so connecting, active, idle and closing connections all count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from zonerelay.config.models import ZoneSettings
from zonerelay.routing.nexthop import Limits, SiteKey

_Key = TypeVar("_Key")


class Slot:
    """One connection's place; `release` may be called again."""

    __slots__ = ("_on_release", "released", "site", "zone")

    def __init__(self, zone: str, site: SiteKey, on_release: Callable[[Slot], None]) -> None:
        self.zone = zone
        self.site = site
        self.released = False
        self._on_release = on_release

    def release(self) -> None:
        if not self.released:
            self.released = True
            self._on_release(self)


class Slots:
    """Counts slots; `on_release` is told about each one that is free again."""

    def __init__(self, on_release: Callable[[Slot], None]) -> None:
        self._in_zone: Counter[str] = Counter()
        self._at_site: Counter[SiteKey] = Counter()
        self._tell = on_release

    def open_in(self, zone: str) -> int:
        return self._in_zone[zone]

    def zone_is_full(self, zone: ZoneSettings) -> bool:
        return self._in_zone[zone.name] >= zone.max_connections

    def site_is_full(self, site: SiteKey, limits: Limits) -> bool:
        return self._at_site[site] >= limits.max_connections

    def take(self, zone: ZoneSettings, site: SiteKey) -> Slot:
        self._in_zone[zone.name] += 1
        self._at_site[site] += 1
        return Slot(zone.name, site, self._released)

    def _released(self, slot: Slot) -> None:
        _decrement(self._in_zone, slot.zone)
        _decrement(self._at_site, slot.site)
        self._tell(slot)


def _decrement(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]  # destinations come and go by the million
