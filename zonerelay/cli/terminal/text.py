"""Numbers, times and strangers' text in a form for people. Pure: the time is passed in."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise

from zonerelay.telemetry.logs.redact import printable

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def span(seconds: float) -> str:
    """A duration in its two largest units: `3s`, `12m`, `3h20m`, `2d4h`. Good enough to decide by."""
    left = max(int(seconds), 0)
    for (name, length), (next_name, next_length) in pairwise(_UNITS):
        if left >= length:
            rest = left % length // next_length
            # Seconds beside minutes would change while one reads them.
            return f"{left // length}{name}" + (f"{rest}{next_name}" if rest and next_name != "s" else "")
    return f"{left}s"


def until(then: float, now: float) -> str:
    """Returns `now`, or the time that is left until `then`."""
    return "now" if then <= now else f"in {span(then - now)}"


def when(then: float) -> str:
    """A point in time, in the operator's own time zone and with its offset."""
    return datetime.fromtimestamp(then).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def size(octets: int) -> str:
    """`812 B`, `4.1 KB`, `20 MB`: rounded, unlike the sizes in a configuration."""
    value = float(octets)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def amount(quota: str, number: int) -> str:
    """What is counted in a quota such as `octets_per_day`."""
    return size(number) if quota.startswith("octets") else f"{number:,}"


def short(count: int) -> str:
    """A number in at most five characters: `9,999`, `12k`, `1.2M`."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count // 1000}k" if count < 1_000_000 else f"{count / 1_000_000:.1f}M"


def path(sender: str | None) -> str:
    """A sender as SMTP writes the null one; `?` when its message could not be read."""
    if sender is None:
        return "?"
    return clean(sender) or "<>"


def clean(text: str) -> str:
    """A stranger's text, unable to move a cursor or to colour a terminal."""
    return printable(text)


def clean_lines(text: str) -> str:
    """Cleans a text of several lines, and keeps its line ends."""
    return "\n".join(clean(line) for line in text.split("\n"))


def plural(count: int, one: str, many: str = "") -> str:
    """`1 delivery`, `12,345 deliveries`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def deliveries(count: int) -> str:
    return plural(count, "delivery", "deliveries")
