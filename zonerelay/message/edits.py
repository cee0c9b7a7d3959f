"""Takes fields out of a header section and puts new ones on top. Sans-IO.

Every octet of the fields that stay is kept as it came, so that signatures over them still hold. A line
that is neither a field nor a continuation ends the header, as in `headers`: nothing behind it is touched. New
values are put on one line first, whatever they hold, so no value can become a field or end the header.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache

from zonerelay.message.folding import field

_COLON = rb"(?:[ \t]|\r\n[ \t])*+:"
# A first line that is no field, or a later one that is neither a field nor a continuation.
# Possessive: what ends a name is what follows it.
_NO_HEADER = re.compile(rb"\A(?![!-9;-~]++%b)|\r\n(?![ \t]|[!-9;-~]++%b)" % (_COLON, _COLON))
_VALUE = rb"(?:[^\r]++|\r(?!\n(?![ \t])))*+(?:\r\n)?"


def edit_header(block: bytes, *, add: Sequence[tuple[str, str]] = (), remove: Collection[str] = ()) -> bytes:
    """`block` is complete lines of a header: with its `Header.lead` in front, without our own fields.

    Names to remove are compared without case; added fields come in their order, in ASCII.
    """
    if remove:
        names = frozenset(name.lower().encode("ascii") for name in remove)
        lower = block.lower()
        if any(name in lower for name in names):  # mostly not
            block = _without(block, names)
    added = "".join(field(name, " ".join(value.split())) for name, value in add)
    return added.encode("ascii") + block


def _without(block: bytes, names: frozenset[bytes]) -> bytes:
    """No step is taken per line: a header may have tens of thousands."""
    found = _NO_HEADER.search(block)
    end = found.end() if found is not None else len(block)
    return _fields(names).sub(b"", block[:end]) + block[end:]


@lru_cache(maxsize=64)
def _fields(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Fields of these names, each with its continuations."""
    any_name = b"|".join(map(re.escape, names))
    return re.compile(rb"(?:\A|(?<=\r\n))(?:%b)%b%b" % (any_name, _COLON, _VALUE), re.IGNORECASE)
