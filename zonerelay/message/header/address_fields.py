"""Replaces addresses in the header fields that hold addresses (RFC 5322 3.4). No I/O.

The module finds each addr-spec in all forms that readers accept: in angle brackets after a name or alone, in
groups, between comments, with a route, quoted, in UTF-8 (RFC 6532), folded anywhere, with blanks where RFC
822 allowed them. Everything between the addresses keeps its octets: names, encoded words, comments, folds,
and comments between the parts of an address.

Bad syntax stays unchanged: an element of a list that is no address, and a whole field with an unterminated
quoted string, comment or bracket, or with a control character. Nothing is guessed.

A fold is added after a comma where longer addresses would make a line longer than RFC 5322 2.1.1 allows. The
time is linear in the length of the field, for any content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from zonerelay.message.header.edits import change_fields

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

MAX_ADDRESS = 320  # RFC 5321 4.5.3.1: 64 octets, "@", 255. No address is longer
MAX_LINE = 998

Change = Callable[[str], str]
"""Returns the address for an address: `local@domain`, quotes included; the same where nothing changes."""

_ATOM = rb"[^\x00-\x20\x7f()<>\[\]:;@\\,.\"]++"
# In this order: blanks, a comment without others in it, a comment, a word (dots included where they are
# between its parts), a quoted string, a domain literal, anything that stands for itself.
_TOKEN = re.compile(
    rb"([ \t\r\n]++|\([^()\\]*+\))|(\()|(%b(?:\.%b)*)"
    rb'|("(?:[^"\\]|\\.)*+")|(\[(?:[^\[\]\\]|\\.)*+\])|([<>:;@,.])' % (_ATOM, _ATOM),
    re.DOTALL,
)
_BLANK, _COMMENT, _WORD, _QUOTED, _LITERAL, _SPECIAL = range(1, 7)
_LETTERS = {_WORD: "w", _QUOTED: "q", _LITERAL: "l"}
_IN_COMMENT = re.compile(rb"[^()\\]++|\\.|[()]", re.DOTALL)

# A pattern over one letter for each token. An address begins and ends where a list's or group's element does.
# No group is possessive: Python before 3.11.5, Debian 12's among them, goes on where such a group has failed.
_SPEC = r"([wq](?:\.[wq])*@(?:w(?:\.w)*|l))"
_ELEMENT = re.compile(rf"(?<![^,;:])(?:[wql.@]*+<(?:@[wl.,@]*+:)?{_SPEC}>|{_SPEC})(?![^,;:])")

_Token = tuple[str, int, int]


def change_addresses(header: bytes, change: Change) -> bytes:
    """Changes complete lines of a header section. Returns the same object when nothing is different."""
    octets, addresses = MAX_OCTETS, MAX_ADDRESSES

    def changed(field: bytes) -> bytes:
        nonlocal octets, addresses
        octets -= len(field)
        addresses -= field.count(b"@")
        return change_field(field, change) if octets >= 0 and addresses >= 0 else field

    return change_fields(header, ADDRESS_FIELDS, changed)


def change_field(field: bytes, change: Change) -> bytes:
    """Changes a field, given from its name to its last line end."""
    start = field.find(b":") + 1
    if field.find(b"@", start) < 0:
        return field
    tokens = _tokens(field, start)
    pieces: list[bytes] = []
    taken = 0
    for element in _ELEMENT.finditer("".join([letter for letter, _, _ in tokens])):
        first, end = element.span(1) if element[1] is not None else element.span(2)
        for begin, after, text in _changes(field, tokens[first:end], change):
            pieces += (field[taken:begin], text)
            taken = after
    if not pieces:
        return field
    pieces.append(field[taken:])
    return _without_long_lines(b"".join(pieces))


def _changes(field: bytes, tokens: list[_Token], change: Change) -> list[tuple[int, int, bytes]]:
    """Returns the replacements: the parts of an address that differ."""
    if tokens[-1][2] - tokens[0][1] > MAX_ADDRESS:
        return []
    at = next(number for number, token in enumerate(tokens) if token[0] == "@")
    parts = tokens[:at], tokens[at + 1 :]
    try:
        local, domain = (_text(field, part) for part in parts)
    except UnicodeDecodeError:
        return []
    wanted = change(f"{local}@{domain}").rpartition("@")
    return [
        (part[0][1], part[-1][2], new.encode())
        for part, old, new in zip(parts, (local, domain), wanted[::2], strict=True)
        if new != old
    ]


def _text(field: bytes, part: list[_Token]) -> str:
    """Returns the tokens without folds and without what stands between them."""
    octets = b"".join([field[begin:end] for _, begin, end in part])
    return octets.replace(b"\r\n", b"").decode()


def _tokens(field: bytes, position: int) -> list[_Token]:
    """Returns the tokens without blanks and comments; none when the field is malformed."""
    tokens: list[_Token] = []
    while position < len(field):
        match = _TOKEN.match(field, position)
        if match is None:
            return []
        kind, begin, position = match.lastindex, position, match.end()
        if kind == _COMMENT:
            position = _behind_comment(field, position)
            if position < 0:
                return []
        elif kind == _SPECIAL:
            tokens.append((chr(field[begin]), begin, position))
        elif kind != _BLANK:
            assert kind is not None
            tokens.append((_LETTERS[kind], begin, position))
    return tokens


def _behind_comment(field: bytes, position: int) -> int:
    """Returns the end of the comment that begins before `position`; -1 when it has none."""
    depth = 1
    for match in _IN_COMMENT.finditer(field, position):
        octet = match[0]
        if octet == b"(":
            depth += 1
        elif octet == b")":
            depth -= 1
            if not depth:
                return match.end()
    return -1


def _without_long_lines(field: bytes) -> bytes:
    if max(map(len, field.split(b"\r\n"))) <= MAX_LINE:
        return field
    ends = [end for letter, _, end in _tokens(field, field.find(b":") + 1) if letter == ","]
    folded: list[bytes] = []
    column = 0
    for begin, end in zip([0, *ends], [*ends, len(field)], strict=True):
        piece = field[begin:end]
        if folded and column + len(piece.partition(b"\r\n")[0]) > MAX_LINE:
            piece = b"\r\n " + piece
        folded.append(piece)
        line = piece.rfind(b"\n") + 1
        column = len(piece) - line if line else column + len(piece)
    return b"".join(folded)
