"""Parses and formats durations and sizes such as "30s", "5m", "1.5h", "5d", "64 KB" and "50 MB".

A number without a unit is refused, because it could mean seconds or minutes; only 0 needs no unit. Sizes are
powers of 1024. Every parser raises ValueError with a text that explains what to write instead. Every
formatter writes a text from which its parser reads the same value.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise

import msgspec

from zonerelay.config.problems import quoted, unusable

_NUMBER_AND_UNIT = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", re.ASCII)

_SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_OCTETS = {"TB": 1024**4, "GB": 1024**3, "MB": 1024**2, "KB": 1024, "B": 1}
_OCTETS_BY_ANY_NAME = {
    **{name.lower(): octets for name, octets in _OCTETS.items()},
    **{f"{name[0].lower()}ib": octets for name, octets in _OCTETS.items() if len(name) == 2},
}

DURATION_EXAMPLE = '"30s", "5m", "2h" or "5d"'
RATE_EXAMPLE = '"100/1m", "10/1s" or "5000/1h"'
SIZE_EXAMPLE = '"64 KB", "50 MB" or "1 GB"'


class Rate(msgspec.Struct, frozen=True):
    """An event rate: at most `count` events in any period of `seconds`."""

    count: int
    seconds: float

    @property
    def interval(self) -> float:
        """The interval in seconds between events that are evenly distributed."""
        return self.seconds / self.count

    def __str__(self) -> str:
        return f"{self.count}/{format_duration(self.seconds)}"


def parse_rate(value: object) -> Rate:
    """Parse a rate such as `"100/1m"` or `"10/s"`. Raise ValueError if it is invalid."""
    count, slash, time = str(value).replace(" ", "").partition("/")
    if not isinstance(value, str) or not slash or not re.fullmatch(r"[1-9]\d{0,8}", count, re.ASCII):
        raise unusable(str(value), "a rate", f"a rate such as {RATE_EXAMPLE}")
    seconds = parse_duration(time if time[:1].isdigit() else f"1{time}")
    if not 0.1 <= seconds <= 86_400:
        raise ValueError(f"{quoted(value)}: the period must be from 100ms to 1d, such as {RATE_EXAMPLE}")
    return Rate(int(count), seconds)


def parse_duration(value: str | float) -> float:
    """Parse a duration, and return it in seconds. Units are ms, s, m, h and d."""
    return _parsed(value, "duration", DURATION_EXAMPLE, "time; use ms, s, m, h or d", _SECONDS)


def parse_size(value: str | float) -> int:
    """Parse a size, and return it in bytes. Units are B, KB, MB, GB and TB (also KiB, MiB, …, with the same
    meaning), in any case.
    """
    return round(_parsed(value, "size", SIZE_EXAMPLE, "size; use B, KB, MB or GB", _OCTETS_BY_ANY_NAME))


def _parsed(value: str | float, kind: str, example: str, known: str, units: Mapping[str, float]) -> float:
    shown = quoted(value) if isinstance(value, str) else str(value)
    match = _NUMBER_AND_UNIT.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{shown} is not a {kind} such as {example}")
    number, unit = float(match[1]), match[2]
    if not unit and number == 0:
        return 0.0
    if not unit:
        raise ValueError(f"{shown} has no unit; expected a {kind} such as {example}")
    factor = units.get(unit if units is _SECONDS else unit.lower())
    if factor is None:
        raise ValueError(f"{quoted(unit)} is not a unit of {known}, as in {example}")
    return number * factor


def format_duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives a whole number: 90.0 is "90s", 7200.0 is "2h"."""
    if seconds == 0:
        return "0s"
    for unit, length in _SECONDS.items():
        count = round(seconds / length)
        if count and abs(count * length - seconds) < 1e-9:
            return f"{count}{unit}"
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def span(seconds: float) -> str:
    """Format a duration roughly, in its two largest units: `3s`, `12m`, `3h20m`, `2d4h`."""
    left = max(int(seconds), 0)
    units = [(name, int(length)) for name, length in _SECONDS.items() if length >= 1]
    for (name, length), (next_name, next_length) in pairwise(units):
        if left >= length:
            rest = left % length // next_length
            # Seconds next to minutes would change while one reads them.
            return f"{left // length}{name}" + (f"{rest}{next_name}" if rest and next_name != "s" else "")
    return f"{left}s"


def exact_span(seconds: float) -> str:
    """Format a duration under an hour exactly, such as `45s` or `4m12s`, and a longer one as `span` does."""
    left = max(int(seconds), 0)
    minutes, rest = divmod(left, 60)
    return f"{minutes}m{rest:02}s" if 0 < minutes < 60 else span(left)


def until(then: float, now: float) -> str:
    """Format the time until `then`, as `now` or `in 5m`."""
    return "now" if then <= now else f"in {span(then - now)}"


def plural(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: `1 delivery`, `12,345 deliveries`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def deliveries(count: int) -> str:
    return plural(count, "delivery", "deliveries")


def when(then: float) -> str:
    """Format a point in time in the local time zone."""
    return datetime.fromtimestamp(then).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def rough_size(octets: int) -> str:
    """Format a size roughly, unlike the sizes in a configuration: `812 B`, `4.1 KB`, `20 MB`."""
    value = float(octets)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def format_size(octets: int) -> str:
    """Format a size in the largest unit that gives a whole number: 52428800 is "50 MB"."""
    for unit, length in _OCTETS.items():
        if octets >= length and octets % length == 0:
            return f"{octets // length} {unit}"
    return f"{octets} B"
