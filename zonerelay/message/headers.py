"""The header section of an arriving message: where it ends and what is in it. Sans-IO.

Owns the first bytes of a body until the header is complete, so that our own fields can be put in front
of it. Takes what `BodyReader` gives: CRLF line ends only. Changes nothing in the message.

A relay meets messages without a header, or with one that breaks off at a line that can be neither a
field nor a continuation. Fields behind such a line do not count. `lead` is what must stand between
our fields and the message so that the two do not run into each other (Postfix does the same):

- an empty line before a body without any header (a first line that begins with a blank would
  otherwise continue our last field);
- `Mailbox-Line: ` before an mbox "From " line, so that the fields below it remain header fields.

Memory: at most `max_size` octets and one piece. Field values kept for people are capped at `MAX_METADATA`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_METADATA = 32 * 1024
MAX_FIELD_NAME = 998  # RFC 5322 2.1.1: nothing longer fits a line

EMPTY_LINE = b"\r\n"
MAILBOX_LINE = b"Mailbox-Line: "

_END = b"\r\n\r\n"
_FIELD_START = re.compile(rb"[!-9;-~]+[ \t]*:")
_FIRST_LINE = re.compile(rb"[!-9;-~]{1,%d}[ \t]{0,%d}:|>?From " % (MAX_FIELD_NAME, MAX_FIELD_NAME))
_FIRST_LINE_PART = re.compile(rb"[!-9;-~]{0,%d}[ \t]{0,%d}\Z|\r\Z" % (MAX_FIELD_NAME, MAX_FIELD_NAME))
# Possessive: each part ends where the next begins, so there is nothing to go back for.
_FIELD = re.compile(r"^([!-9;-~]++) *+: *+(.*+)\n", re.MULTILINE)
_AUTHOR = re.compile(r"^from *:(.*)", re.MULTILINE | re.IGNORECASE)
# The start of a complete line that is neither field, continuation nor empty.
_STRAY_LINE = re.compile(rb"\r\n(?![ \t\r]|[!-9;-~]+[ \t]*:)(?=[^\r]*\r)")
# What could move a cursor or forge a log line: no blank and no part of a name (an octet that UTF-8 never
# has becomes U+FFFD). Tabs are blanks; LF stays to split at.
_VISIBLE = bytes(
    0x20 if b == 0x09 else b if b == 0x0A or (b >= 0x20 and b != 0x7F) else 0xFF for b in range(256)
)
# As readers see it that drop them.
_LENIENT = bytes(b if b in b"\n" or (b >= 0x20 and b != 0x7F) else 0x20 for b in range(256))

Fields = tuple[tuple[str, str], ...]


class HeaderTooLargeError(Exception):
    """The header section is longer than the listener takes."""


@dataclass(frozen=True, slots=True)
class Header:
    """What the header says. `fields` are in order, unfolded, undecoded (RFC 2047 is for readers), capped."""

    fields: Fields = ()
    names: frozenset[str] = frozenset()
    received: int = 0
    lead: bytes = b""

    def has(self, name: str) -> bool:
        """`name` in lower case."""
        return name in self.names


class HeaderScanner:
    """`feed` pieces until `header` is there; `held` is everything fed so far, body bytes included.

    `size` is how many octets of it are the header, without the empty line behind it.
    """

    __slots__ = ("_begins_well", "_max_size", "header", "held", "size")

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._begins_well = False
        self.held: bytes | bytearray = b""
        self.header: Header | None = None
        self.size = 0

    def feed(self, piece: bytes) -> None:
        """Raises `HeaderTooLargeError`."""
        if self.held:
            searched = max(len(self.held) - len(_END) + 1, 0)
            if isinstance(self.held, bytes):
                self.held = bytearray(self.held)
            self.held += piece
        else:
            # Mostly the first piece holds the whole header: no copy of it is made.
            searched = 0
            self.held = piece
        end = self._end(searched)
        if end > self._max_size or (end < 0 and len(self.held) > self._max_size):
            end = self._stray_line()
        if end > 0:
            self.size = end
            self.header = parse_header(bytes(self.held[:end]))
        elif end == 0:
            self.header = Header(lead=b"" if self.held.startswith(EMPTY_LINE) else EMPTY_LINE)

    def finish(self) -> Header:
        """The message is over: all of it is header if no end came, for a message may have no body."""
        if self.header is None:
            if _FIRST_LINE.match(self.held):
                self.size = len(self.held)
                self.header = parse_header(bytes(self.held))
            else:
                self.header = Header(lead=EMPTY_LINE)
        return self.header

    def _end(self, searched: int) -> int:
        """Length of the header with the CRLF of its last field; -1 while unknown."""
        if not self._begins_well:
            if _FIRST_LINE.match(self.held):
                self._begins_well = True
            elif not _FIRST_LINE_PART.match(self.held):
                return 0
        end = self.held.find(_END, searched)
        return end + 2 if end >= 0 else -1

    def _stray_line(self) -> int:
        """No header ends within the limit: perhaps a body began without an empty line before it."""
        stray = _STRAY_LINE.search(self.held, 0, self._max_size)
        if stray is None:
            raise HeaderTooLargeError
        return stray.start() + 2


def parse_header(block: bytes) -> Header:
    """`block` begins with a field (or an mbox line) and ends with the CRLF of its last one."""
    lead = b""
    if not _FIELD_START.match(block):
        lead = MAILBOX_LINE
        block = block.partition(b"\r\n")[2]
    unfolded = _unfolded(block, _VISIBLE)
    fields = _FIELD.findall(unfolded)
    if len(fields) != unfolded.count("\n"):
        fields = _before_stray_line(unfolded)
    names = [name.lower() for name, _ in fields]
    return Header(
        fields=_capped(fields, len(block)),
        names=frozenset(names),
        received=names.count("received"),
        lead=lead,
    )


def authors(header: Header, held: bytes) -> list[str]:
    """What every From field says that any reader could find in `held`, for whoever has to check them all.

    Not only those in `header`: other parsers go on behind a stray line, and keep more than MAX_METADATA.
    """
    if not header.names and header.lead != MAILBOX_LINE:
        return []  # we put an empty line before it
    return _AUTHOR.findall(_unfolded(held.partition(_END)[0], _LENIENT))


def _unfolded(block: bytes, table: bytes) -> str:
    text = block.translate(table, b"\r").decode("utf-8", "replace")
    return text.replace("\n ", " ")  # tabs are blanks by now


def _before_stray_line(text: str) -> list[tuple[str, str]]:
    fields: list[tuple[str, str]] = []
    position = 0
    while match := _FIELD.match(text, position):
        fields.append((match[1], match[2]))
        position = match.end()
    return fields


def _capped(fields: list[tuple[str, str]], size: int) -> Fields:
    if size <= MAX_METADATA:
        return tuple(fields)
    kept = []
    room = MAX_METADATA
    for name, value in fields:
        room -= len(name.encode()) + len(value.encode()) + 4
        if room < 0:
            break
        kept.append((name, value))
    return tuple(kept)
