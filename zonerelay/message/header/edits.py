"""Removes and replaces fields of a header section, and adds new ones on top. No I/O.

Fields that stay keep every octet, so that signatures over them remain valid. A line that is neither a field
nor a continuation ends the header, as in `headers`; nothing after it is touched. New values are put on one
line first, so that no value can become a field or end the header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from zonerelay.message.header.folding import field

_COLON = rb"(?:[ \t]|\r\n[ \t])*:"
# A first line that is no field, or a later one that is neither a field nor a continuation.
# Possessive, because the character after a name ends it.
_NO_HEADER = re.compile(rb"\A(?![!-9;-~]++%b)|\r\n(?![ \t]|[!-9;-~]++%b)" % (_COLON, _COLON))
_VALUE = rb"(?:[^\r]++|\r(?!\n(?![ \t])))*(?:\r\n)?"


def edit_header(
    block: bytes,
    *,
    add: Sequence[tuple[str, str]] = (),
    replace: Sequence[tuple[str, str]] = (),
    remove: Collection[str] = (),
) -> bytes:
    """Edits complete lines of a header that begins with its `Header.lead`.

    The order is: remove; replace, where a message has the field (the first of its name is replaced, the
    others go); add, in the order given. Names are compared without case; values are ASCII.
    """
    if remove or replace:
        lower = block.lower()
        removed = frozenset(name.lower().encode("ascii") for name in remove)
        if any(name in lower for name in removed):  # mostly not
            block = _edited(block, removed)
        for name, value in replace:
            key = name.lower().encode("ascii")
            if key in lower:
                block = _edited(block, frozenset((key,)), _new_field(name, value))
    return b"".join(_new_field(name, value) for name, value in add) + block


def change_fields(block: bytes, names: frozenset[bytes], change: Callable[[bytes], bytes]) -> bytes:
    """Replaces each field of these names (in lower case) by what `change` returns, name and line end
    included.
    """
    found = _NO_HEADER.search(block)
    end = found.end() if found is not None else len(block)
    changed = _fields(names).sub(lambda field: change(field[0]), block[:end])
    return changed + block[end:]


def _new_field(name: str, value: str) -> bytes:
    return field(name, " ".join(value.split())).encode("ascii")


def _edited(block: bytes, names: frozenset[bytes], instead: bytes = b"") -> bytes:
    """Puts `instead` in the place of the first such field and removes the others.

    No work is done per line: a header may have tens of thousands.
    """
    found = _NO_HEADER.search(block)
    end = found.end() if found is not None else len(block)
    fields = _fields(names)
    header = block[:end]
    if instead and (first := fields.search(header)) is not None:
        header = header[: first.start()] + instead + fields.sub(b"", header[first.end() :])
    else:
        header = fields.sub(b"", header)
    return header + block[end:]


@lru_cache(maxsize=64)
def _fields(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Returns the pattern of fields with these names, with their continuations."""
    any_name = b"|".join(map(re.escape, names))
    return re.compile(rb"(?:\A|(?<=\r\n))(?:%b)%b%b" % (any_name, _COLON, _VALUE), re.IGNORECASE)
