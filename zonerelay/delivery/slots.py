"""How many connections are open: the counts behind the zone's and the destination's limits.

A *slot* is the right to have one connection. It is taken before connecting and given back when the
socket is gone, so connecting, active, idle and closing connections all count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from zonerelay.config.models import ZoneSettings
from zonerelay.routing.nexthop import DestinationKey

_Key = TypeVar("_Key")


class Slot:
    """One connection's place; `release` may be called again."""

    __slots__ = ("_on_release", "destination", "released", "zone")

    def __init__(self, zone: str, destination: DestinationKey, on_release: Callable[[Slot], None]) -> None:
        self.zone = zone
        self.destination = destination
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
        self._to_destination: Counter[DestinationKey] = Counter()
        self._tell = on_release

    def open_in(self, zone: str) -> int:
        return self._in_zone[zone]

    def zone_is_full(self, zone: ZoneSettings) -> bool:
        return self._in_zone[zone.name] >= zone.max_connections

    def destination_is_full(self, zone: ZoneSettings, destination: DestinationKey) -> bool:
        return self._to_destination[destination] >= zone.max_connections_per_destination

    def take(self, zone: ZoneSettings, destination: DestinationKey) -> Slot:
        self._in_zone[zone.name] += 1
        self._to_destination[destination] += 1
        return Slot(zone.name, destination, self._released)

    def _released(self, slot: Slot) -> None:
        _decrement(self._in_zone, slot.zone)
        _decrement(self._to_destination, slot.destination)
        self._tell(slot)


def _decrement(counter: Counter[_Key], key: _Key) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]  # destinations come and go by the million
