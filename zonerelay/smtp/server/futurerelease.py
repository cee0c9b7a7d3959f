"""Parses the parameters that ask to keep a message for later (RFC 4865 3): HOLDFOR, HOLDUNTIL.

Only the grammar is here; code that has a clock decides how far ahead is too far, and what a time in the past
means. `None` stands for a keyword without a value, which both refuse. The RFC has no `;C` or `;R` behind the
value (that is DELIVERBY, RFC 2852), so they are refused as well.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone

from zonerelay.smtp.server.paths import command_error

MAX_HOLD_FOR = 999_999_999  # seconds, RFC 4865 3: one to nine digits, the first of them not 0

_SECONDS = re.compile(r"[1-9][0-9]{0,8}", re.ASCII)
# RFC 3339 5.6 (the RFC's own word for it was lost; erratum 2040 says that it means this).
_DATE_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(\.\d{1,20})?(?:Z|([+-])(\d\d):([0-5]\d))",
    re.ASCII | re.IGNORECASE,
)
_LEAP_SECOND = 60


def parse_hold_for(value: str | None) -> int:
    """Return seconds."""
    if value is None or not _SECONDS.fullmatch(value):
        raise command_error(501, "5.4", f"HOLDFOR is 1 to {MAX_HOLD_FOR} seconds")
    return int(value)


def parse_hold_until(value: str | None) -> float:
    """Return a Unix time."""
    match = _DATE_TIME.fullmatch(value or "")
    if match is None:
        raise command_error(501, "5.4", "HOLDUNTIL is a date and time with its zone, as 2030-01-31T09:00:00Z")
    *parts, fraction, sign, hours, minutes = match.groups()
    year, month, day, hour, minute, second = map(int, parts)
    # Clocks show no 60th second; the one behind the 59th is the same moment to Unix time.
    leap = 1 if second == _LEAP_SECOND else 0
    try:
        zone = _zone(sign, hours, minutes) if sign else UTC
        at = datetime(year, month, day, hour, minute, second - leap, tzinfo=zone)
    except ValueError:
        raise command_error(501, "5.4", "HOLDUNTIL is no date that exists") from None
    return at.timestamp() + leap + float(fraction or 0)


def _zone(sign: str, hours: str, minutes: str) -> timezone:
    offset = timedelta(hours=int(hours), minutes=int(minutes))
    return timezone(-offset if sign == "-" else offset)
