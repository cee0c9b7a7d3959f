"""Formats numbers, times and untrusted text for the terminal. The functions are pure: the time is an
argument.
"""

from datetime import datetime

from zonerelay.config import units
from zonerelay.telemetry.logs.redact import printable

span, size, until = units.span, units.rough_size, units.until
plural, deliveries = units.plural, units.deliveries


def turn(then: float, ready: int, seconds: float, now: float) -> str:
    """Describe the wait for a rate limit: the time of the next transaction and of the last waiting one."""
    return f"waits for a rate limit: {until(then, now)}, the last of {ready:,} in about {span(seconds)}"


def when(then: float) -> str:
    """Format a point in time in the local time zone, with its UTC offset."""
    return datetime.fromtimestamp(then).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def age(seconds: float) -> str:
    """Format the age of the oldest waiting mail, with a dash for 0, which means that none waits."""
    return span(seconds) if seconds else "–"


def amount(quota: str, number: int) -> str:
    """Format a number with the unit of a quota such as `octets_per_day`."""
    return size(number) if quota.startswith("octets") else f"{number:,}"


def short(count: int) -> str:
    """Format a number in at most five characters: `9,999`, `12k`, `1.2M`."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count // 1000}k" if count < 1_000_000 else f"{count / 1_000_000:.1f}M"


def path(sender: str | None) -> str:
    """Format an envelope sender, with `<>` for the null sender and `?` if its message could not be read."""
    if sender is None:
        return "?"
    return clean(sender) or "<>"


def words(*parts: str) -> str:
    """Join the parts that are not empty with spaces."""
    return " ".join(filter(None, parts))


def clean(text: str) -> str:
    """Remove characters that could control a terminal from untrusted text."""
    return printable(text)


def clean_lines(text: str) -> str:
    """Remove characters that could control a terminal, except line ends, from untrusted text."""
    return "\n".join(clean(line) for line in text.split("\n"))
