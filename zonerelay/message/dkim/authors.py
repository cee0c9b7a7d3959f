"""Finds the author's domain in From, as signing needs it. No I/O.

The first address counts. A header with two From fields has no author (RFC 5322 3.6), because readers disagree
which one to show. A field longer than `MAX_FROM` octets has no author either.
"""

from __future__ import annotations

import re

from zonerelay.message.dkim.signature import relaxed_fields

MAX_FROM = 64 * 1024

_FROM = frozenset((b"from",))
_PLAIN = re.compile(r"""[^"(),:;<>@\\]*+<[^\s"(),:;<>@\\]++@([^\s"(),:;<>@\\\[\]]++)>""")
_BARE = re.compile(r"""[^\s"(),:;<>@\\]++@([^\s"(),:;<>@\\\[\]]++)""")
_DOMAIN = re.compile(r"""[^\s"(),:;<>@\\\[\]]++""")
# A quoted string, a pair outside of one, a parenthesis, or anything else.
_TOKEN = re.compile(r"""("(?:[^"\\]++|\\.)*"?)|(\\.?)|([()])|[^"\\()]++""", re.DOTALL)
# What comes before the colon of a group; then a mailbox, in angle brackets or not.
_MAILBOX = re.compile(r"(?:[^<>,;:@]*+:)?([^<>,;]*+)(?:<([^<>]*+)>?)?[^,;]*+[,;]?")


def author_domain(header: bytes) -> str:
    """Returns the domain as it is written, perhaps in U-labels; `""` when none can be read."""
    values = relaxed_fields(header, _FROM).get(b"from", ())
    if len(values) != 1 or len(values[0]) > MAX_FROM:
        return ""
    try:
        return _first_domain(values[0].decode("utf-8"))
    except UnicodeDecodeError:
        return ""


def _first_domain(value: str) -> str:
    plain = _PLAIN.fullmatch(value) or _BARE.fullmatch(value)
    if plain is not None:
        return plain[1]
    text = _without_comments(value)
    position = 0
    while position < len(text):
        mailbox = _MAILBOX.match(text, position)
        assert mailbox is not None
        address = mailbox[1] if mailbox[2] is None else mailbox[2]
        domain = "".join(address.rpartition("@")[2].split()) if "@" in address else ""
        if _DOMAIN.fullmatch(domain):
            return domain
        position = max(mailbox.end(), position + 1)
    return ""


def _without_comments(value: str) -> str:
    """Replaces quoted strings by one letter, comments (nested ones too) by a space."""
    kept: list[str] = []
    depth = 0
    for token in _TOKEN.finditer(value):
        if token[3]:
            depth = depth + 1 if token[3] == "(" else max(depth - 1, 0)
            kept.append(" ")
        elif not depth:
            kept.append("q" if token[1] or token[2] else token[0])
    return "".join(kept)
