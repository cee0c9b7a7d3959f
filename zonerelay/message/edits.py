"""Takes fields out of a header section and puts new ones on top. Sans-IO.

Every octet of the fields that stay is kept as it came, so that signatures over them still hold. A line
that is neither a field nor a continuation ends the header, as in `headers`: nothing behind it is touched. New
values are put on one line first, whatever they hold, so no value can become a field or end the header.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from zonerelay.message.folding import field

# Possessive: what ends the name is what follows it.
_FIELD_NAME = re.compile(rb"([!-9;-~]++)(?:[ \t]|\r\n[ \t])*+:")
_CONTINUES = (b" ", b"\t")


def edit_header(block: bytes, *, add: Sequence[tuple[str, str]] = (), remove: Collection[str] = ()) -> bytes:
    """`block` is complete lines of a header: with its `Header.lead` in front, without our own fields.

    Names to remove are compared without case; added fields come in their order, in ASCII.
    """
    if remove:
        names = frozenset(name.lower().encode("ascii") for name in remove)
        lower = block.lower()
        if any(name in lower for name in names):  # mostly not, and then there are no lines to look at
            block = b"".join(_kept(block, names))
    added = "".join(field(name, " ".join(value.split())) for name, value in add)
    return added.encode("ascii") + block


def _kept(block: bytes, names: frozenset[bytes]) -> Iterator[bytes]:
    start = 0
    keeping: bool | None = None  # None: no field has begun
    while start < len(block):
        end = block.find(b"\r\n", start) + 2
        if end == 1:
            end = len(block)
        if not block.startswith(_CONTINUES, start):
            name = _FIELD_NAME.match(block, start)
            if name is None:
                break
            keeping = name[1].lower() not in names
        elif keeping is None:
            break
        if keeping:
            yield block[start:end]
        start = end
    yield block[start:]
