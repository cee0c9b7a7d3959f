"""The charts of the overview page: waiting mail from zones to destinations, and mail per minute. No I/O.

The thickness of a band is the square root of its mail, so that one large queue does not hide the others.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt

import msgspec

from zonerelay.operations.answers import DestinationStatus, RelayStatus, ZoneStatus

MOST = 8
WIDTH = 720
LEFT, RIGHT = 12, 240
GAP = 12.0
THICKEST, LEAST = 60.0, 3.0
STEP, PLOT = 12, 90
TITLE = 24.0
"""The room for the name of a zone, above its bar."""


class Node(msgspec.Struct, frozen=True):
    """A bar in the flow chart: a zone or a destination, with its number of deliveries."""

    name: str
    count: str
    kind: str
    x: int
    y: float
    height: float
    text_x: int
    text_y: float


class Band(msgspec.Struct, frozen=True):
    """A band in the flow chart, from a zone to one of its destinations."""

    kind: str
    path: str
    width: float


class Flow(msgspec.Struct, frozen=True):
    """The flow chart of waiting mail."""

    title: str
    nodes: Sequence[Node]
    bands: Sequence[Band]
    height: float
    width: int = WIDTH


def flow_of(status: RelayStatus) -> Flow:
    waiting = sorted(filter(mail_of, status.destinations), key=mail_of, reverse=True)
    shown = waiting[:MOST]
    is_cut = not status.every or status.destinations_total > len(status.destinations)
    for each in status.zones:
        rest = [row for row in waiting[MOST:] if row.zone == each.name]
        if is_cut:
            rest = [_less(each, [row for row in shown if row.zone == each.name])]
        elif len(rest) > 1:
            rest = [_others(each.name, f"{len(rest):,} others", _sums(rest))]
        shown += filter(mail_of, rest)
    most = max(map(mail_of, shown), default=1)
    thick = {id(row): max(LEAST, THICKEST * sqrt(mail_of(row) / most)) for row in shown}
    zones: dict[str, list[DestinationStatus]] = defaultdict(list)
    for row in shown:
        zones[row.zone].append(row)
    totals = {each.name: mail_of(each) for each in status.zones}
    nodes, bands, left_y, right_y = list[Node](), list[Band](), 20.0, 20.0
    for zone, rows in zones.items():
        height = sum(thick[id(row)] for row in rows)
        title_y, left_y, right_y = round(left_y, 1), left_y + TITLE, right_y + TITLE
        at = (LEFT, round(left_y, 1), round(height, 1))
        nodes.append(Node(zone, f"{totals.get(zone, 0):,}", "", *at, LEFT, title_y))
        for row in rows:
            width = thick[id(row)]
            here, there = left_y + width / 2, right_y + width / 2
            half = (LEFT + 10 + RIGHT) / 2
            path = f"M{LEFT + 10} {here:.1f}C{half} {here:.1f} {half} {there:.1f} {RIGHT} {there:.1f}"
            bands.append(Band(kind_of(row), path, round(width, 1)))
            at = (RIGHT, round(right_y, 1), round(width, 1))
            text_at = (RIGHT + 18, round(there, 1))
            nodes.append(Node(row.destination, f"{mail_of(row):,}", kind_of(row), *at, *text_at))
            left_y += width
            right_y += max(width, 12.0) + GAP
        left_y = max(left_y, right_y - GAP) + 2 * GAP
        right_y = left_y
    what = ", ".join(f"{row.destination} {mail_of(row):,} {kind_of(row)}" for row in shown)
    title = f"Queued mail by zone and destination: {what}" if shown else "No mail is queued."
    return Flow(title, nodes, bands, round(max(left_y, right_y, 60.0), 1))


class Plot(msgspec.Struct, frozen=True):
    """The chart of mail per minute: a bar for accepted messages, a line for deliveries. `most` is the largest
    number.
    """

    bars: str
    lines: str
    most: int


def plot_of(status: RelayStatus) -> Plot:
    accepted, delivered = status.accepted_per_minute, status.delivered_per_minute
    most = max(*accepted, *delivered, 1, 1)

    def path(counts: Sequence[int], step: str) -> str:
        begin = WIDTH - STEP * len(counts)
        heights = [round(PLOT * count / most, 1) for count in counts]
        return "".join(f"M{begin + STEP * n} {PLOT - y}{step.format(y)}" for n, y in enumerate(heights) if y)

    return Plot(path(accepted, f"h{STEP - 2}v{{0}}h{2 - STEP}z"), path(delivered, f"h{STEP}"), most)


def _less(zone: ZoneStatus, rows: Sequence[DestinationStatus]) -> DestinationStatus:
    """Return a row for the other destinations of a zone: its counts minus those of these destinations."""
    counts = {name: max(count - _sums(rows)[name], 0) for name, count in _sums([zone]).items()}
    return _others(zone.name, "others", counts)


def _others(zone: str, name: str, counts: Mapping[str, int]) -> DestinationStatus:
    return msgspec.convert(
        {"zone": zone, "destination": name, "hosts": "", "waiting": 0, **counts}, DestinationStatus
    )


def _sums(rows: Iterable[DestinationStatus | ZoneStatus]) -> dict[str, int]:
    names = ("ready", "active", "deferred", "held", "suspended")
    return {name: sum(getattr(row, name) for row in rows) for name in names}


def mail_of(row: DestinationStatus | ZoneStatus) -> int:
    return sum(_sums([row]).values())


def kind_of(row: DestinationStatus) -> str:
    """Return the main reason why the mail of the destination is delayed."""
    if row.suspended_until is not None:
        return "suspended"
    counts = _sums([row])
    counts["ready"] += counts.pop("active")
    return max(counts, key=counts.__getitem__)
