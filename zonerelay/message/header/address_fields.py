"""Replaces addresses in the header fields that hold addresses (RFC 5322 3.4). No I/O.

The module finds each addr-spec in all forms that readers accept: in angle brackets after a name or alone, in
groups, between comments, with a route, quoted, in UTF-8 (RFC 6532), folded anywhere, with blanks where RFC
822 allowed them. Everything between the addresses keeps its bytes: names, encoded words, comments, folds,
and comments between the parts of an address.

Bad syntax stays unchanged: an element of a list that is no address, and a whole field with an unterminated
quoted string, comment or bracket, or with a control character. Nothing is guessed. The tokens are those of
`model/address_list`.

A fold is added after a comma where longer addresses would make a line longer than RFC 5322 2.1.1 allows. The
time is linear in the length of the field, for any content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache

from zonerelay.message.header.headers import field
from zonerelay.model.address_list import JUNK, MAX_ADDRESS, ROUTE, SPEC, Span, tokenize

# Removes and replaces fields of a header section, and adds new ones on top. No I/O.
#
# Fields that stay keep every byte, so that signatures over them remain valid. A line that is neither a field
# nor a continuation ends the header, as in `headers`; nothing after it is touched. New values are put on one
# line first, so that no value can become a field or end the header.

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
    """Edit complete lines of a header that begins with its `Header.lead`.

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
    """Replace each field with one of these names (in lower case) by the result of `change`, including name
    and line end.
    """
    found = _NO_HEADER.search(block)
    end = found.end() if found is not None else len(block)
    changed = _fields(names).sub(lambda field: change(field[0]), block[:end])
    return changed + block[end:]


def _new_field(name: str, value: str) -> bytes:
    return field(name, " ".join(value.split())).encode("ascii")


def _edited(block: bytes, names: frozenset[bytes], instead: bytes = b"") -> bytes:
    """Replace the first such field with `instead` and remove the others."""
    left = [instead]
    return change_fields(block, names, lambda _: left.pop() if left else b"")


@lru_cache(maxsize=64)
def _fields(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Return the pattern of fields with these names, with their continuations."""
    any_name = b"|".join(map(re.escape, names))
    return re.compile(rb"(?:\A|(?<=\r\n))(?:%b)%b%b" % (any_name, _COLON, _VALUE), re.IGNORECASE)


ADDRESS_FIELDS = frozenset(
    (
        *(b"from", b"sender", b"reply-to", b"to", b"cc"),
        *(b"resent-from", b"resent-sender", b"resent-reply-to", b"resent-to", b"resent-cc"),
    )
)
MAX_OCTETS = 64 * 1024
"""Octets of address fields in one message; fields beyond stay unchanged. The limit allows some 1,500
addresses: ten times as many would make other mail wait.
"""
MAX_ADDRESSES = 4000
"""Addresses of one message: the octets alone could be ten times as many short addresses."""

MAX_LINE = 998

Change = Callable[[str], str]
"""Returns the address for an address: `local@domain`, quotes included; the same where nothing changes."""

# An address begins and ends where a list's or group's element does.
_ELEMENT = re.compile(rf"(?<![^,;:])(?:[wql.@]*+<{ROUTE}({SPEC})>|({SPEC}))(?![^,;:])")


def change_addresses(header: bytes, change: Change) -> bytes:
    """Change the addresses in complete lines of a header section. Return the same object when nothing is
    different.
    """
    octets, addresses = MAX_OCTETS, MAX_ADDRESSES

    def changed(field: bytes) -> bytes:
        nonlocal octets, addresses
        octets -= len(field)
        addresses -= field.count(b"@")
        return change_field(field, change) if octets >= 0 and addresses >= 0 else field

    return change_fields(header, ADDRESS_FIELDS, changed)


def change_field(field: bytes, change: Change) -> bytes:
    """Change a field, given from its name to its last line end."""
    if b"@" not in field:
        return field
    text = field.decode("utf-8", "surrogateescape")
    start = text.index(":") + 1
    letters, spans = _tokens(text, start)
    pieces: list[str] = []
    taken = 0
    for element in _ELEMENT.finditer(letters):
        first, end = element.span(1) if element[1] is not None else element.span(2)
        at = letters.index("@", first)
        for begin, after, new in _changes(text, spans[first:at], spans[at + 1 : end], change):
            pieces += (text[taken:begin], new)
            taken = after
    if not pieces:
        return field
    pieces.append(text[taken:])
    return _without_long_lines("".join(pieces))


def _tokens(text: str, start: int) -> tuple[str, list[Span]]:
    """Return the tokens from `start` on; none when the field is malformed."""
    letters, spans = tokenize(text[start:])
    if JUNK in letters:
        return "", []
    return letters, [(begin + start, end + start) for begin, end in spans]


def _changes(text: str, local: list[Span], domain: list[Span], change: Change) -> list[tuple[int, int, str]]:
    """Return the replacements: the parts of an address that differ."""
    parts = (local, domain)
    if domain[-1][1] - local[0][0] > MAX_ADDRESS:
        return []
    given = ["".join([text[begin:end] for begin, end in part]).replace("\r\n", "") for part in parts]
    address = "@".join(given)
    if not address.isascii() and not address.isprintable():  # bytes that are not UTF-8
        return []
    wanted = change(address).rpartition("@")
    return [
        (part[0][0], part[-1][1], new)
        for part, old, new in zip(parts, given, wanted[::2], strict=True)
        if new != old
    ]


def _without_long_lines(text: str) -> bytes:
    field = text.encode("utf-8", "surrogateescape")
    if max(map(len, field.split(b"\r\n"))) <= MAX_LINE:
        return field
    letters, spans = _tokens(text, text.index(":") + 1)
    ends = [end for letter, (_, end) in zip(letters, spans, strict=True) if letter == ","]
    folded: list[bytes] = []
    column = 0
    for begin, end in zip([0, *ends], [*ends, len(text)], strict=True):
        piece = text[begin:end].encode("utf-8", "surrogateescape")
        if folded and column + len(piece.partition(b"\r\n")[0]) > MAX_LINE:
            piece = b"\r\n " + piece
        folded.append(piece)
        line = piece.rfind(b"\n") + 1
        column = len(piece) - line if line else column + len(piece)
    return b"".join(folded)
