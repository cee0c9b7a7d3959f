"""The chart of the overview: waiting mail from its zone to its destination, by what stops it. No I/O.

The thickness of a band is the square root of its mail, so that one large queue does not hide the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import msgspec

from zonerelay.operations.answers import DestinationStatus, RelayStatus

MOST = 8
WIDTH = 720
LEFT, RIGHT = 200, 470
GAP = 12.0
THICKEST, LEAST = 60.0, 3.0


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    count: str
    kind: str
    x: int
    y: float
    height: float
    is_left: bool

    @property
    def text_x(self) -> int:
        return self.x - 8 if self.is_left else self.x + 18

    @property
    def text_y(self) -> float:
        return round(self.y + self.height / 2, 1)


@dataclass(frozen=True, slots=True)
class Band:
    kind: str
    path: str
    width: float


@dataclass(frozen=True, slots=True)
class Flow:
    title: str
    nodes: Sequence[Node]
    bands: Sequence[Band]
    height: float
    width: int = WIDTH


def flow_of(status: RelayStatus) -> Flow:
    waiting = sorted(filter(mail_of, status.destinations), key=mail_of, reverse=True)
    shown = waiting[:MOST]
    others: dict[str, list[DestinationStatus]] = defaultdict(list)
    for each in waiting[MOST:]:
        others[each.zone].append(each)
    shown += [_together(some) for some in others.values()]
    most = max(map(mail_of, shown), default=1)
    thick = {id(each): max(LEAST, THICKEST * sqrt(mail_of(each) / most)) for each in shown}
    zones: dict[str, list[DestinationStatus]] = defaultdict(list)
    for each in shown:
        zones[each.zone].append(each)
    totals = {
        zone.name: zone.ready + zone.active + zone.deferred + zone.held + zone.suspended
        for zone in status.zones
    }
    nodes, bands, left_y, right_y = list[Node](), list[Band](), 20.0, 20.0
    for zone, rows in zones.items():
        height = sum(thick[id(row)] for row in rows)
        nodes.append(
            Node(zone, f"{totals.get(zone, 0):,}", "", LEFT, round(left_y, 1), round(height, 1), True)
        )
        for row in rows:
            width = thick[id(row)]
            here, there = left_y + width / 2, right_y + width / 2
            half = (LEFT + 10 + RIGHT) / 2
            path = f"M{LEFT + 10} {here:.1f}C{half} {here:.1f} {half} {there:.1f} {RIGHT} {there:.1f}"
            bands.append(Band(kind_of(row), path, round(width, 1)))
            count = f"{mail_of(row):,}"
            nodes.append(
                Node(row.destination, count, kind_of(row), RIGHT, round(right_y, 1), round(width, 1), False)
            )
            left_y += width
            right_y += max(width, 12.0) + GAP
        left_y = max(left_y, right_y - GAP) + 2 * GAP
        right_y = left_y
    what = ", ".join(f"{row.destination} {mail_of(row):,} {kind_of(row)}" for row in shown)
    title = f"Mail that waits, by zone and destination: {what}" if shown else "No mail waits."
    return Flow(title, nodes, bands, round(max(left_y, right_y, 60.0), 1))


def _together(rows: Sequence[DestinationStatus]) -> DestinationStatus:
    """Return one row for the destinations of a zone that have no separate band."""
    counts = ("ready", "active", "deferred", "held", "suspended")
    return msgspec.structs.replace(
        rows[0],
        destination=f"{len(rows):,} others",
        suspended_until=None,
        **{name: sum(getattr(row, name) for row in rows) for name in counts},
    )


def mail_of(row: DestinationStatus) -> int:
    return row.ready + row.active + row.deferred + row.held + row.suspended


def kind_of(row: DestinationStatus) -> str:
    """Return what stops most of the destination's mail."""
    if row.suspended_until is not None:
        return "suspended"
    counts = {
        "ready": row.ready + row.active,
        "deferred": row.deferred,
        "held": row.held,
        "suspended": row.suspended,
    }
    return max(counts, key=lambda kind: counts[kind])
