"""Finds and parses the header section of a message, and edits its fields. No I/O.

The scanner holds the first bytes of a message until the header is complete, so that our own fields can be
put in front. Its input comes from `BodyReader`: CRLF line ends only.

All readers must see the same header; otherwise one of them sees a field that was not checked:

- A line that is neither a field nor a continuation ends the header, as in Postfix, and gets an empty line in
  front, because some readers continue after it and others take the rest for the body. The same holds for a
  message without any header: `lead` is then an empty line between our fields and the message (a first line
  that begins with a blank would otherwise continue our last field).
- `lead` is `Mailbox-Line: ` before an mbox "From " line, so that the fields below it remain header fields.
- Some readers drop NUL, some every control character: `controls` says that the header contains a NUL, or a
  control character in a text that is a field's name without it. The scanner removes them if the listener is
  configured so, and changes nothing else. Control characters stay in values, because ISO-2022-JP has ESC (RFC
  1468).

Memory: at most `max_size` bytes and one piece. Field values that are stored for display are limited to
`MAX_METADATA`.

The module also replaces addresses in the header fields that hold addresses (RFC 5322 3.4).

It finds each addr-spec in all forms that readers accept: in angle brackets after a name or alone, in
groups, between comments, with a route, quoted, in UTF-8 (RFC 6532), folded anywhere, with blanks where RFC
822 allowed them. Everything between the addresses keeps its bytes: names, encoded words, comments, folds,
and comments between the parts of an address.

Bad syntax stays unchanged: an element of a list that is no address, and a whole field with an unterminated
quoted string, comment or bracket, or with a control character. Nothing is guessed. The tokens are those of
`model/address_list`.

A fold is added after a comma where longer addresses would make a line longer than RFC 5322 2.1.1 allows. The
time is linear in the length of the field, for any content.
"""

import re
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence, Set
from contextlib import aclosing
from functools import lru_cache

import msgspec
from msgspec import structs

from zonerelay.model.address_list import JUNK, MAX_ADDRESS, ROUTE, SPEC, Span, tokenize
from zonerelay.model.envelope import Envelope, path

# Makes foreign text fit for a header field or a paragraph of a message of ours.
#
# The result has no control characters and no line longer than RFC 5322 2.1.1 allows, for any input.

WIDTH = 76
# A longer run without a space is broken: RFC 5322 2.1.1 allows 998 bytes, and UTF-8 has up to 4 a character.
MAX_WORD = 900
MAX_WORD_UTF8 = 240


def one_line(text: str, *, limit: int, ascii_only: bool = False) -> str:
    """Convert a text to one line of at most `limit` characters: white space becomes a space, unprintable
    characters `?`.
    """
    text = " ".join(text[: 4 * limit].split())
    if not text.isprintable() or (ascii_only and not text.isascii()):
        text = "".join(c if c.isprintable() and (not ascii_only or c.isascii()) else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 4] + " ..."


def wrap(text: str, width: int = WIDTH) -> list[str]:
    """Wrap a text between words, and return at least one line. A word too long for any line is broken, and
    spaces between words become one.
    """
    if len(text) <= min(width, MAX_WORD_UTF8) and "  " not in text and text.strip(" ") == text:
        return [text]
    return filled((f" {word}" for word in _breakable(text)), width)


def filled(pieces: Iterable[str], width: int) -> list[str]:
    """Join strings to lines of at most `width` characters, and return at least one line. The blank at the
    beginning of a line is removed.
    """
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.removeprefix(" ")
    return lines


def field(name: str, value: str) -> str:
    """Format a header field, folded (RFC 5322 2.2.3) and with its final CRLF."""
    return "\r\n ".join(wrap(f"{name}: {value}")) + "\r\n"


def crlf(data: bytes) -> bytes:
    """Convert all line ends to CRLF, and add a missing one at the end."""
    data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\r\n")
    return data if data.endswith(b"\r\n") else data + b"\r\n"


def fits_lines(data: bytes) -> bool:
    """Return whether a body can be sent unencoded, because it has no NUL and no overlong line."""
    return b"\0" not in data and all(len(line) <= MAX_LINE for line in data.split(b"\r\n"))


def _breakable(text: str) -> list[str]:
    words: list[str] = []
    for word in text.split(" "):
        most = MAX_WORD if word.isascii() else MAX_WORD_UTF8
        words += [word[i : i + most] for i in range(0, len(word), most)]
    return words


MAX_METADATA = 32 * 1024
MAX_FIELD_NAME = 998  # RFC 5322 2.1.1: nothing longer fits a line

EMPTY_LINE = b"\r\n"
MAILBOX_LINE = b"Mailbox-Line: "

_END = b"\r\n\r\n"
_CONTROLS = rb"\x00-\x08\x0b\x0c\x0e-\x1f\x7f"  # in a class; not those of line ends and blanks
_CONTROL_OCTETS = bytes({*range(0x20), 0x7F} - set(b"\t\r\n"))
_FIELD_START = re.compile(rb"[!-9;-~]+[ \t]*:")
_FIRST_LINE = re.compile(rb"[!-9;-~]{1,%d}[ \t]{0,%d}:|>?From " % (MAX_FIELD_NAME, MAX_FIELD_NAME))
# Possessive: a control character may belong to either part.
_FIRST_LINE_PART = re.compile(
    rb"[!-9;-~%b]{0,%d}+[ \t%b]{0,%d}+\Z|\r\Z" % (_CONTROLS, MAX_FIELD_NAME, _CONTROLS, MAX_FIELD_NAME)
)
_CLOUDED_FIRST_LINE = re.compile(
    rb"[!-9;-~%b]{1,%d}+[ \t%b]{0,%d}+:" % (_CONTROLS, MAX_FIELD_NAME, _CONTROLS, MAX_FIELD_NAME)
)
_CLOUDED_NAME = re.compile(rb"^[!-9;-~%b]++[ \t%b]*+:" % (_CONTROLS, _CONTROLS), re.MULTILINE)
# Possessive, because each part ends where the next begins, so backtracking finds nothing.
_FIELD = re.compile(r"^([!-9;-~]++) *+: *+(.*+)\n", re.MULTILINE)
_AUTHOR = re.compile(r"^from *:(.*)", re.MULTILINE | re.IGNORECASE)
# The start of a complete line that is neither field, continuation nor empty.
_STRAY_LINE = re.compile(rb"\r\n(?![ \t\r]|[!-9;-~]++(?:[ \t]|\r\n[ \t])*:)(?=[^\r]*\r)")
# Bytes that could move a cursor or forge a log line are replaced: no blank and no part of a name (a byte
# that UTF-8 never has becomes U+FFFD). Tabs are blanks; LF stays to split at.
_VISIBLE = bytes(
    0x20 if b == 0x09 else b if b == 0x0A or (b >= 0x20 and b != 0x7F) else 0xFF for b in range(256)
)
# The header as readers see it that take control characters for blanks, or some of them for line ends.
_BLANKED = bytes(b if b in b"\n" or (b >= 0x20 and b != 0x7F) else 0x20 for b in range(256))
_SPLIT = bytes(0x0A if b in b"\x0b\x0c\x1c\x1d\x1e" else _BLANKED[b] for b in range(256))
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")

Fields = tuple[tuple[str, str], ...]


class HeaderTooLargeError(Exception):
    """The header section is longer than the listener accepts."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """The parsed header section of a message. `fields` are in order, unfolded, undecoded (RFC 2047 is for
    readers), limited in size.
    """

    fields: Fields = ()
    names: frozenset[str] = frozenset()
    received: int = 0
    lead: bytes = b""
    controls: bool = False

    def without(self, dropped: Set[str]) -> "Header":
        """Return the header without the fields in `dropped`, whose names are in lower case."""
        fields = tuple(field for field in self.fields if field[0].lower() not in dropped)
        return structs.replace(self, fields=fields, names=self.names - dropped)


async def read_header(pieces: AsyncGenerator[bytes, None], limit: int) -> tuple[bytes, bool]:
    """Read the header section of a stored message. Return all fields with the CRLF of the last one and true;
    or what was read and false, if the end is not within `limit` and one piece. A message without an empty
    line is all header.
    """
    block = b""
    async with aclosing(pieces):
        async for piece in pieces:
            searched = max(len(block) - len(_END) + 1, 0)
            block = block + piece if block else piece
            end = 0 if block.startswith(EMPTY_LINE) else block.find(_END, searched) + len(EMPTY_LINE)
            if end != 1:
                return block[:end], True
            if len(block) > limit:
                return block, False
    return block, True


class HeaderScanner:
    """Parses a header section incrementally, until `header` is set. `held` is the message so far, including
    body bytes.

    `size` is the number of its bytes that are header, without the empty line after it.
    """

    __slots__ = ("_begins_well", "_max_size", "_removes_controls", "header", "held", "size")

    def __init__(self, max_size: int, *, removes_controls: bool = False) -> None:
        self._max_size = max_size
        self._removes_controls = removes_controls
        self._begins_well = False
        self.held: bytes | bytearray = b""
        self.header: Header | None = None
        self.size = 0

    def feed(self, piece: bytes) -> None:
        """Process the next bytes of the message. Raise HeaderTooLargeError if its header is too large."""
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
            self._break_off(self._stray_line())
        elif end > 0:
            self._found(end)
        elif end == 0:
            clouded = _CLOUDED_FIRST_LINE.match(self.held) is not None
            self.header = Header(
                lead=b"" if self.held.startswith(EMPTY_LINE) else EMPTY_LINE, controls=clouded
            )
        if self._removes_controls and self.header is not None and self.header.controls:
            self._remove_controls()

    def finish(self) -> Header:
        """Process the end of the message. If no end of the header was found, all of it is header, because a
        message may have no body.
        """
        if self.header is None:
            if _FIRST_LINE.match(self.held):
                self._found(len(self.held))
            else:
                self.header = Header(lead=EMPTY_LINE)
        assert self.header is not None
        if self._removes_controls and self.header.controls:
            self._remove_controls()
            return self.finish()
        return self.header

    def _found(self, end: int) -> None:
        """Set the header, which ends here, unless it contains an invalid line."""
        header, is_whole = _parsed(bytes(self.held[:end]))
        stray = None if is_whole else _STRAY_LINE.search(self.held, 0, end)
        if stray is not None:
            self._break_off(stray.start() + 2)
        else:
            self.size, self.header = end, header

    def _break_off(self, end: int) -> None:
        """End the header before an invalid line, with which the body begins."""
        held = bytes(self.held)
        line = held[end : held.find(EMPTY_LINE, end)]
        header = parse_header(held[:end])
        if header.controls or b"\0" in line or _CLOUDED_NAME.match(line):
            header = structs.replace(header, controls=True)
        else:
            self.held = held[:end] + EMPTY_LINE + held[end:]
        self.size, self.header = end, header

    def _remove_controls(self) -> None:
        """Remove control characters from the header and parse it again, because it may end elsewhere now."""
        held = bytes(self.held)
        if self._begins_well:
            end = held.find(_END, 0, self._max_size)
            end = end if end >= 0 else min(len(held), self._max_size)
            head = held[:end].replace(b"\0", b"")
            head = _CLOUDED_NAME.sub(lambda name: name[0].translate(None, _CONTROL_OCTETS), head)
        else:
            end = held.find(b":") + 1
            head = held[:end].translate(None, _CONTROL_OCTETS)
        self.held, self.header, self.size, self._begins_well = b"", None, 0, False
        self.feed(head + held[end:])

    def _end(self, searched: int) -> int:
        """Return the length of the header including the CRLF of its last field, or -1 while it is unknown."""
        if not self._begins_well:
            if _FIRST_LINE.match(self.held):
                self._begins_well = True
            elif not _FIRST_LINE_PART.match(self.held):
                return 0
        end = self.held.find(_END, searched)
        return end + 2 if end >= 0 else -1

    def _stray_line(self) -> int:
        """Return the position of the first line that is not part of a header field, where the body begins."""
        stray = _STRAY_LINE.search(self.held, 0, self._max_size)
        if stray is None:
            raise HeaderTooLargeError
        return stray.start() + 2


def parse_header(block: bytes) -> Header:
    """Parse a header section from its first field (or an mbox line) to the CRLF of its last field."""
    return _parsed(block)[0]


def _parsed(block: bytes) -> tuple[Header, bool]:
    """Parse a header section, and return whether every line in it is part of a field."""
    lead = b""
    controls = b"\0" in block
    if not _FIELD_START.match(block):
        lead = MAILBOX_LINE
        block = block.partition(b"\r\n")[2]
    unfolded = _unfolded(block, _VISIBLE)
    fields = _FIELD.findall(unfolded)
    is_whole = len(fields) == unfolded.count("\n")
    if not is_whole:
        fields = _before_stray_line(unfolded)
    names = [name.lower() for name, _ in fields]
    header = Header(
        fields=_capped(fields, len(block)),
        names=frozenset(names),
        received=names.count("received"),
        lead=lead,
        controls=controls,
    )
    return header, is_whole


def all_fields(block: bytes) -> Fields:
    """Return all fields of a header section, without a limit on their size."""
    return tuple(_FIELD.findall(_unfolded(block, _VISIBLE)))


def authors(header: Header, held: bytes) -> list[str]:
    """Return the values of all From fields that any mail reader might find in `held`, for checks of the
    author.

    These may be more than those in `header`: other software reads more than MAX_METADATA bytes, and accepts
    other white space and line ends.
    """
    if not header.names and header.lead != MAILBOX_LINE:
        return []  # the relay puts an empty line before it
    block = held.partition(_END)[0]
    text = _unfolded(block, _BLANKED)
    found = _AUTHOR.findall(text)
    dropped = block.translate(None, _CONTROL_OCTETS)
    if len(dropped) != len(block):
        found += _AUTHOR.findall(_unfolded(dropped, _BLANKED))
        found += _AUTHOR.findall(_unfolded(block, _SPLIT))
    if _LINE_ENDS.search(text):
        found += _AUTHOR.findall(_LINE_ENDS.sub("\n", text))
    return found


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


# Writes the fields that the relay puts in front of a message: Received, Date and Message-ID.
#
# Received is RFC 5321 4.4; Date and Message-ID are added when they are missing (RFC 6409 8). What the client
# said about itself becomes text in our own field, so every character outside a domain or an address literal
# becomes `?` and can neither end the field nor open a comment. The recipient is named only when there is
# exactly one: otherwise a blind copy would show (RFC 5321 7.2).

_MAX_HELO = 255
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9.:_\[\]-]")
_NOT_IN_UTF8_NAME = re.compile(r"[^\w.:\[\]-]")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("", "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def trace_fields(envelope: Envelope, header: Header, *, hostname: str, hide_client: bool = False) -> bytes:
    """Return the Received field and missing fields to add before a message, followed by `header.lead`."""
    date = rfc5322_date(envelope.created)
    fields = received(envelope, date, hostname=hostname, hide_client=hide_client)
    if "date" not in header.names:
        fields += f"Date: {date}\r\n"
    if lacks_author(envelope, header):
        fields += f"From: {path(envelope.sender)}\r\n"
    if "message-id" not in header.names:
        fields += f"Message-ID: <{envelope.id}@{hostname}>\r\n"
    return fields.encode() + header.lead


def lacks_author(envelope: Envelope, header: Header) -> bool:
    """Return whether the relay must add From: it is missing, the client may relay, and the sender is not null
    (RFC 6409 8.1).
    """
    return "from" not in header.names and bool(envelope.sender) and not envelope.origin.stranger


def received(envelope: Envelope, date: str, *, hostname: str, hide_client: bool = False) -> str:
    origin = envelope.origin
    recipients = envelope.recipients
    if hide_client:
        # The grammar demands a from clause; this one hides the client.
        client = "localhost (client hidden)"
    else:
        client = _from_client(origin.helo, origin.client_address, envelope.smtputf8)
    protocol = f"{origin.protocol} ({origin.tls})" if origin.tls else origin.protocol
    only_for = f"\r\n\tfor {path(recipients[0].address)}" if len(recipients) == 1 else ""
    return (
        f"Received: from {client}\r\n"
        f"\tby {hostname} with {protocol} id {envelope.id}{only_for};\r\n\t{date}\r\n"
    )


def rfc5322_date(timestamp: float) -> str:
    """Format a Unix time as in `Mon, 20 Nov 2023 17:53:01 +0000`, in any locale."""
    return _date(int(timestamp))


@lru_cache(maxsize=16)
def _date(timestamp: int) -> str:
    year, month, day, hour, minute, second, weekday, _, _ = time.gmtime(timestamp)
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month]} {year} {hour:02}:{minute:02}:{second:02} +0000"


@lru_cache(maxsize=256)
def _from_client(helo: str, address: str, utf8: bool) -> str:
    """Return the client for a Received field: the Extended-Domain with TCP-info of RFC 5321 4.4. A client on
    a Unix socket has no address.
    """
    name = (_NOT_IN_UTF8_NAME if utf8 else _NOT_IN_NAME).sub("?", helo[:_MAX_HELO])
    if not address:
        return f"{name} (local)"
    return f"{name} ([IPv6:{address}])" if ":" in address else f"{name} ([{address}])"


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
    """Add, replace and remove fields in a header section that begins with its `Header.lead`.

    The order is: remove; replace, if the message has the field (the first one is replaced, and others with
    its name are removed); add, in the order given. Names are compared without case; values are ASCII.
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
    """Replace each field with one of these names (in lower case) by the result of `change`."""
    found = _NO_HEADER.search(block)
    end = found.end() if found is not None else len(block)
    changed = _fields(names).sub(lambda field: change(field[0]), block[:end])
    return changed + block[end:]


def _new_field(name: str, value: str) -> bytes:
    return field(name, " ".join(value.split())).encode("ascii")


def _edited(block: bytes, names: frozenset[bytes], instead: bytes = b"") -> bytes:
    """Replace the first of these fields with `instead`, and remove the others."""
    left = [instead]
    return change_fields(block, names, lambda _: left.pop() if left else b"")


@lru_cache(maxsize=64)
def _fields(names: frozenset[bytes]) -> re.Pattern[bytes]:
    """Return a pattern that matches fields with these names, including folded lines."""
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
    """Change the addresses in the address fields of a header section. Return the same object when nothing is
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
    """Change the addresses in one field, given from its name to its last line end."""
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
    """Split the value of a field into tokens; return none if the field is malformed."""
    letters, spans = tokenize(text[start:])
    if JUNK in letters:
        return "", []
    return letters, [(begin + start, end + start) for begin, end in spans]


def _changes(text: str, local: list[Span], domain: list[Span], change: Change) -> list[tuple[int, int, str]]:
    """Return the replacements that change one address: positions and new text of the parts that differ."""
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
