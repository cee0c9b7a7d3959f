"""Takes fields out of a header section, puts others in their place, and new ones on top. Sans-IO.

Every octet of the fields that stay is kept as it came, so that signatures over them still hold. A line
that is neither a field nor a continuation ends the header, as in `headers`: nothing behind it is touched. New
values are put on one line first, whatever they hold, so no value can become a field or end the header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from zonerelay.message.header.folding import field

_COLON = rb"(?:[ \t]|\r\n[ \t])*+:"
# A first line that is no field, or a later one that is neither a field nor a continuation.
# Possessive: what ends a name is what follows it.
_NO_HEADER = re.compile(rb"\A(?![!-9;-~]++%b)|\r\n(?![ \t]|[!-9;-~]++%b)" % (_COLON, _COLON))
_VALUE = rb"(?:[^\r]++|\r(?!\n(?![ \t])))*+(?:\r\n)?"


def edit_header(
    block: bytes,
    *,
    add: Sequence[tuple[str, str]] = (),
    replace: Sequence[tuple[str, str]] = (),
    remove: Collection[str] = (),
) -> bytes:
    """`block` is complete lines of a header, with its `Header.lead` in front.

    In this order: remove; replace, where a message has the field: the first of its name, the others go; add,
    in the order given. Names are compared without case, values are ASCII.
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
    """Each field of these names (in lower case) is what `change` makes of it, with its name and line end."""
    found = _NO_HEADER.search(block)
    end = found.end() if found is not None else len(block)
    changed = _fields(names).sub(lambda field: change(field[0]), block[:end])
    return changed + block[end:]


def _new_field(name: str, value: str) -> bytes:
    return field(name, " ".join(value.split())).encode("ascii")


def _edited(block: bytes, names: frozenset[bytes], instead: bytes = b"") -> bytes:
    """`instead` of the first such field, nothing of the others.

    No step is taken per line: a header may have tens of thousands.
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
    """Fields of these names, each with its continuations."""
    any_name = b"|".join(map(re.escape, names))
    return re.compile(rb"(?:\A|(?<=\r\n))(?:%b)%b%b" % (any_name, _COLON, _VALUE), re.IGNORECASE)
