"""Translates a search of captured mail, in Mailpit's syntax, to an SQL condition. Pure.

    from:@example.org to:bob subject:"your order" has:attachment is:unread after:2026-11-01 larger:1M -word

Everything given must match; `-` or `!` in front excludes. A word without a name is looked for in subject,
addresses, file names and text. Upper and lower case are one.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

MAX_QUERY = 1000

_TERM = re.compile(r'([-!]?)(?:([a-z-]+):)?("[^"]*"|\S+)', re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([km])b?|b)?", re.IGNORECASE)
_COLUMNS = {
    "to": "to_", "from": "from_", "cc": "cc", "bcc": "bcc", "reply-to": "reply_to", "subject": "subject",
    "message-id": "message_id", "tag": "tags",
}  # fmt: skip
_ADDRESSED = ("to_", "from_", "cc", "bcc", "reply_to")
_FLAGS = {
    "is:read": "is_read", "is:unread": "NOT is_read", "is:tagged": "tags <> '[]'",
    "has:attachment": "attachments > 0", "has:attachments": "attachments > 0",
    "has:inline": "inline > 0", "has:inlines": "inline > 0",
}  # fmt: skip


class SearchError(ValueError):
    """The text is not a valid search; the error says what to write."""


def condition(query: str, tz: str = "") -> tuple[str, list[object]]:
    """Return the condition and its values. Raise SearchError if the query is not valid."""
    if len(query) > MAX_QUERY:
        raise SearchError(f"a search may have at most {MAX_QUERY} characters")
    parts, values = ["1"], list[object]()
    for exclude, name, text in _TERM.findall(query):
        value = text.strip('"')
        if not value:
            continue
        part, given = _term(name.lower(), value, f"{name}:{text}" if name else value, tz)
        parts.append(f"NOT ({part})" if exclude else part)
        values += given
    return " AND ".join(parts), values


def _term(name: str, value: str, whole: str, tz: str) -> tuple[str, list[object]]:
    if (flag := _FLAGS.get(f"{name}:{value.lower()}")) is not None:
        return flag, []
    if name in _COLUMNS:
        return _like(_COLUMNS[name], value)
    if name == "addressed":
        return " OR ".join(_like(each, "")[0] for each in _ADDRESSED), [_pattern(value)] * len(_ADDRESSED)
    if name in ("after", "before"):
        return ("at >= ?" if name == "after" else "at <= ?"), [_time(value, tz)]
    if name in ("larger", "smaller") and (found := _SIZE.fullmatch(value)):
        unit = {"k": 1024, "m": 1024 * 1024}.get((found[2] or "").lower(), 1)
        return ("size > ?" if name == "larger" else "size < ?"), [int(float(found[1]) * unit)]
    return _like("words", whole.lower())


def _like(column: str, value: str) -> tuple[str, list[object]]:
    return rf"{column} LIKE ? ESCAPE '\'", [_pattern(value)]


def _pattern(value: str) -> str:
    return "%{}%".format(re.sub(r"([\\%_])", r"\\\1", value))


def _time(value: str, tz: str) -> float:
    try:
        zone: tzinfo = ZoneInfo(tz) if tz else UTC
    except (ValueError, OSError, KeyError) as error:
        raise SearchError(f"{tz} is not a time zone; expected a name such as Europe/Berlin") from error
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError) as error:
        raise SearchError(f'{value} is not a date; expected "2026-11-25" or "2026-11-25T18:00:00"') from error
