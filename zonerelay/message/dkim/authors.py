"""Finds the author's domain in From, as signing needs it. No I/O.

The first address counts. The name before it may be in any encoding, or lack the end of a quote. A header with
two From fields has no author (RFC 5322 3.6), because readers disagree which one to show. A field longer than
`MAX_FROM` octets has no author either.
"""

from __future__ import annotations

import re

from zonerelay.message.dkim.signature import relaxed_fields
from zonerelay.model.address_list import read_addresses

MAX_FROM = 16 * 1024

_FROM = frozenset((b"from",))
_DOMAIN = r"""[^\s"(),:;<>@\\\[\]\ufffd]++"""
_PLAIN = re.compile(rf"""[^"(),:;<>@\\\x1b\ufffd]*+<[^\s"(),:;<>@\\]++@({_DOMAIN})>""")
_BARE = re.compile(rf"""[^\s"(),:;<>@\\]++@({_DOMAIN})""")
# Of an address that is none because of what is before the @.
_LAST = re.compile(rf"@[ \t]*({_DOMAIN})[ \t]*(?:>[^@]*)?\Z")


def author_domain(header: bytes) -> str:
    """Returns the domain as it is written, perhaps in U-labels; `""` when none can be read."""
    values = relaxed_fields(header, _FROM).get(b"from", ())
    if len(values) != 1 or len(values[0]) > MAX_FROM:
        return ""
    value = values[0].decode("utf-8", "replace")
    plain = _PLAIN.fullmatch(value) or _BARE.fullmatch(value)
    if plain is not None:
        return plain[1]
    for entry in read_addresses(value).entries:
        domain = _LAST.search(f"@{entry.address.rpartition('@')[2]}" if "@" in entry.address else entry.text)
        if domain is not None:
            return domain[1]
    return ""
