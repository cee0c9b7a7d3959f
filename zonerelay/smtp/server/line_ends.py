"""Reads message bodies with strict line ends: only CRLF ends a line. Sans-IO.

A bare LF becomes CRLF; a bare CR becomes a space, so that no header or body boundary appears where the
sender's server saw none. NUL and other control characters are kept: they end no line, and a changed byte
breaks signatures. Shared by the ways in (`BodyReader`, `ChunkReader`) and the way out (`DotStuffer`).
"""

import io
import re

from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError

CRLF = b"\r\n"
MAX_LINE = 998
"""Octets of a line without its CRLF that every receiver takes (RFC 5321 4.5.3.1.6, RFC 5322 2.1.1)."""
NUL = b"\x00"

_CLEAN = (None, "\r\n")


def crlf_only(body: bytes) -> bytes:
    """Convert bare line ends in a body to CRLF. The body must not begin or end within a CRLF."""
    return body.replace(CRLF, b"\n").replace(b"\r", b" ").replace(b"\n", CRLF)


class LineEnds:
    """Counts the bare line ends in a body while converting them to CRLF. `bare_lf` and `bare_cr` count the
    bare ones that were changed.

    `has_long` means that a line is longer than MAX_LINE.
    """

    __slots__ = ("_held_cr", "_length", "_line_ends", "bare_cr", "bare_lf", "dotted", "has_bare", "has_long")

    def __init__(self) -> None:
        # It keeps the set of line ends it has seen, faster than any search of bytes for bare ones.
        self._line_ends = io.IncrementalNewlineDecoder(None, False)
        self.bare_lf = 0
        self.bare_cr = 0
        self.has_bare = False
        self.dotted = False
        self.has_long = False
        self._length = 0  # of the line that the next bytes belong to
        self._held_cr = False

    @property
    def is_plain(self) -> bool:
        """Whether the body can be sent unmodified so far: only CRLF line ends, and no leading dots."""
        return not (self.dotted or self.has_bare)

    def _strict(self, piece: bytes, *, is_last: bool = False) -> bytes:
        """Convert the line ends of a piece of any size to CRLF. A CR at its end is held back until the next
        byte shows whether it is bare.
        """
        if self._held_cr:
            piece = b"\r" + piece
        self._held_cr = piece.endswith(b"\r") and not is_last
        return self._clean(piece[:-1] if self._held_cr else piece)

    def _clean(self, body: bytes) -> bytes:
        """Convert bare line ends to CRLF. `body` must not begin or end within a CRLF."""
        if NUL in body:
            self.dotted = True  # perhaps: DotStuffer will tell which lines
        self._measure(body)
        self._line_ends.decode(body.decode("latin-1"), final=True)
        if self._line_ends.newlines in _CLEAN:
            return body
        self.has_bare = True
        self._line_ends.reset()
        crlf = body.count(CRLF)
        self.bare_lf += body.count(b"\n") - crlf
        self.bare_cr += body.count(b"\r") - crlf
        return crlf_only(body)

    def _measure(self, body: bytes) -> None:
        """Look for lines longer than MAX_LINE, skipping as many short lines as possible at a time."""
        size, find = len(body), body.rfind
        end = -1
        reach = MAX_LINE + 2 - self._length
        while reach <= size:
            end = find(b"\n", end + 1, reach)
            if end < 0:
                self.has_long = True
                break
            reach = end + MAX_LINE + 3
        last = find(b"\n")
        self._length = size - last - 1 if last >= 0 else self._length + size


# The body of a message as it travels in DATA: end of data, dot-unstuffing, line ends. Sans-IO.
#
# Only `<CR><LF>.<CR><LF>` ends data, and only a dot behind `<CR><LF>` is stuffing (RFC 5321 4.5.2).
# A line end is nothing else: servers that took `<LF>.<LF>` or `<CR>.<CR>` for the end let one
# message carry a second one past the sender's server (SMTP smuggling, VU#302671). What comes out has
# CRLF line ends only: a bare LF becomes CRLF, a bare CR becomes a space, so that no header or body
# boundary appears where the sender's server saw none (line_ends.py). Both are counted; the caller may refuse.
#
# Speed: whole pieces go through C searches; no step is taken per line. Most pieces hold no dot behind a
# line end and CRLFs only, and two passes find that out. Memory: at most four bytes are held between pieces.

END_OF_DATA = b"\r\n.\r\n"

_DOTTED = b"\r\n."
_DOT = 0x2E
_TAILS = tuple(END_OF_DATA[:size] for size in (4, 3, 2, 1))


def _last_dotted(wire: bytes) -> int:
    """Return the position of the CRLF before the last line that begins with a dot, or -1.

    Base64 has no dots, and a search for one byte takes a fiftieth of one for three. `rfind` skips ahead
    where `find` looks at every byte.
    """
    return wire.rfind(_DOTTED) if b"." in wire else -1


class BodyReader(LineEnds):
    """Reads a message body after DATA until `done`; `rest` contains the bytes after the end of data."""

    __slots__ = ("_held", "_virtual", "done", "rest")

    def __init__(self) -> None:
        super().__init__()
        # DATA's own CRLF is the line end before the body: a first line `.` ends it. Not part of it.
        self._held = CRLF
        self._virtual = len(CRLF)
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Process received bytes, and return the part of the body that they complete. It must not be called
        after `done` is set.

        `dotted` is true from the first line on that begins with a dot, or the first NUL (stuffing.py).
        """
        if self._virtual and self._held == CRLF and data and data[0] != _DOT:
            # Nothing came before, and the line end before the body decides nothing: no need to copy
            # the body behind it.
            self._held, self._virtual = b"", 0
        wire = self._held + data
        last = _last_dotted(wire)
        if last < 0:
            body = self._clean(self._hold_back(wire))
        elif wire.endswith(END_OF_DATA) and wire.rfind(_DOTTED, 0, last) < 0:
            self.done = True
            body = self._clean(wire[: last + len(CRLF)])
        else:
            body = self._feed_dotted(wire)
        return self._out(body) if self._virtual else body

    def _feed_dotted(self, wire: bytes) -> bytes:
        end = wire.find(END_OF_DATA)
        if end < 0:
            return self._unstuffed(self._hold_back(wire))
        self.done = True
        self.rest = wire[end + len(END_OF_DATA) :]
        return self._unstuffed(wire[: end + len(CRLF)])

    def _hold_back(self, wire: bytes) -> bytes:
        """Keep back a tail that may be the beginning of the end of data, and return the bytes before it."""
        if not wire.endswith(_TAILS):
            self._held = b""
            return wire
        cut = len(wire) - next(len(tail) for tail in _TAILS if wire.endswith(tail))
        self._held = wire[cut:]
        return wire[:cut]

    def _unstuffed(self, wire: bytes) -> bytes:
        if _last_dotted(wire) < 0:
            return self._clean(wire)
        self.dotted = True
        # The dot goes first: no line end begins or ends with it, so none is made or lost.
        return self._clean(wire.replace(_DOTTED, CRLF))

    def _out(self, body: bytes) -> bytes:
        """Return the body without the CRLF of the DATA command, which is not part of it."""
        if body:
            body, self._virtual = body[self._virtual :], 0
        return body


# The body of a message as it travels in BDAT: chunks of announced size (RFC 3030 2). Sans-IO.
#
# Nothing in the bytes is framing: `<CR><LF>.<CR><LF>` is two lines of text, and a dot at the beginning of
# a line is not stuffing. Line ends are treated as in DATA (line_ends.py) with the same counters: BINARYMIME
# is not offered, so a body is text whose lines end with CRLF (RFC 3030 2), and a bare CR or LF is as
# dangerous here as there: the next hop is mostly reached with DATA. A chunk may end anywhere, between CR
# and LF as well.
#
# A size that cannot be read loses the framing for good: what follows might be a body, which must not run as
# commands, so the caller closes after answering (`parse_bdat` raises CommandError).
#
# Memory: one byte is held between pieces, a CR that may be half a line end.

MAX_SIZE_DIGITS = 20  # as SIZE (RFC 1870 3); more bytes than any size limit lets in

_ARGUMENT = re.compile(rf"([0-9]{{1,{MAX_SIZE_DIGITS}}})(?: +(LAST))?", re.ASCII | re.IGNORECASE)


def parse_bdat(argument: str) -> tuple[int, bool]:
    """Parse the argument of BDAT, `size [LAST]`."""
    match = _ARGUMENT.fullmatch(argument)
    if match is None:
        raise CommandError(Reply(501, "5.4", "Syntax: BDAT size [LAST]"))
    return int(match[1]), match[2] is not None


class ChunkReader(LineEnds):
    """Reads a body from BDAT chunks. Call `begin` for every BDAT command, then `feed` until `chunk_done`;
    `done` is set after the last chunk.

    `feed` must be called at least once for each chunk, with nothing if nothing has come: that ends a
    chunk of no bytes, and the last one may yield the line end that its body lacked.
    `rest` is what followed the chunk: commands.
    """

    __slots__ = ("_last", "_left", "_line_start", "chunk_done", "done", "rest")

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self._last = False
        self._line_start = True
        self.chunk_done = True
        self.done = False
        self.rest = b""

    def begin(self, size: int, last: bool) -> None:
        """Start a chunk after its BDAT command. It must not be called before the previous chunk is
        complete.
        """
        assert self.chunk_done
        assert not self.done
        self._left = size
        self._last = last
        self.chunk_done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Process received bytes, and return the body bytes that are final. It must not be called after
        `chunk_done` is set.
        """
        left = self._left - len(data)
        if left <= 0:
            if left:
                self.rest = data[left:]
                data = data[:left]
            left = 0
            self.chunk_done = True
            self.done = self._last
        self._left = left
        return self._body(data) if data or self.done else b""

    def _body(self, piece: bytes) -> bytes:
        body = self._strict(piece, is_last=self.done)
        if body:
            if not self.dotted:
                self.dotted = (self._line_start and body.startswith(b".")) or _last_dotted(body) >= 0
            self._line_start = body.endswith(b"\n")
        if self.done and not self._line_start:
            body += CRLF
        return body
