"""Times and sizes in a form for people. Pure."""

from __future__ import annotations

from datetime import datetime

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def span(seconds: float) -> str:
    """The two largest units: `3s`, `12m`, `3h20m`, `2d4h`."""
    left = max(int(seconds), 0)
    for index, (name, length) in enumerate(_UNITS[:-1]):
        if left >= length:
            following, short = _UNITS[index + 1]
            rest = left % length // short
            return f"{left // length}{name}" + (f"{rest}{following}" if rest and following != "s" else "")
    return f"{left}s"


def when(then: float) -> str:
    return datetime.fromtimestamp(then).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def size(octets: int) -> str:
    value = float(octets)
    for unit in ("B", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"
