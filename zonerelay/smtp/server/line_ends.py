"""Line ends inside a message: CRLF and nothing else (DESIGN rule 5). Sans-IO.

A bare LF becomes CRLF; a bare CR becomes a space, so that no header or body boundary appears where the
sender's server saw none. NUL and other control characters are kept: they end no line, and a changed octet
breaks signatures. Shared by the ways in (`BodyReader`, `ChunkReader`) and the way out (`DotStuffer`).
"""

from __future__ import annotations

import io

CRLF = b"\r\n"
MAX_LINE = 998
"""Octets of a line without its CRLF that every receiver takes (RFC 5321 4.5.3.1.6, RFC 5322 2.1.1)."""
NUL = b"\x00"

_CLEAN = (None, "\r\n")


def crlf_only(body: bytes) -> bytes:
    """No CR of a CRLF may be missing at the beginning, nor its LF at the end."""
    return body.replace(CRLF, b"\n").replace(b"\r", b" ").replace(b"\n", CRLF)


class LineEnds:
    """What a reader of bodies knows about lines. `bare_lf` and `bare_cr` count what was changed.

    `has_long`: a line is longer than MAX_LINE.
    """

    __slots__ = ("_length", "_line_ends", "bare_cr", "bare_lf", "dotted", "has_bare", "has_long")

    def __init__(self) -> None:
        # It keeps the set of line ends it has seen, faster than any search of bytes for bare ones.
        self._line_ends = io.IncrementalNewlineDecoder(None, False)
        self.bare_lf = 0
        self.bare_cr = 0
        self.has_bare = False
        self.dotted = False
        self.has_long = False
        self._length = 0  # of the line that the next octets belong to

    @property
    def is_plain(self) -> bool:
        """So far it can be sent as it is: CRLF line ends only, no line that needs a dot in front."""
        return not (self.dotted or self.has_bare)

    def _clean(self, body: bytes) -> bytes:
        """CRLF line ends only. No CRLF may be cut in two by the ends of `body`."""
        if NUL in body:
            self.dotted = True  # perhaps: DotStuffer will tell which lines
        lines = body.split(b"\n")
        if self._length + len(lines[0]) > MAX_LINE + 1 or len(max(lines, key=len)) > MAX_LINE + 1:
            self.has_long = True
        self._length = len(lines[-1]) if len(lines) > 1 else self._length + len(body)
        self._line_ends.decode(body.decode("latin-1"), final=True)
        if self._line_ends.newlines in _CLEAN:
            return body
        self.has_bare = True
        self._line_ends.reset()
        crlf = body.count(CRLF)
        self.bare_lf += body.count(b"\n") - crlf
        self.bare_cr += body.count(b"\r") - crlf
        return crlf_only(body)


# The body of a message as it travels in DATA: end of data, dot-unstuffing, line ends. Sans-IO.
#
# Only `<CR><LF>.<CR><LF>` ends data, and only a dot behind `<CR><LF>` is stuffing (RFC 5321 4.5.2).
# A line end is nothing else: servers that took `<LF>.<LF>` or `<CR>.<CR>` for the end let one
# message carry a second one past the sender's server (SMTP smuggling, VU#302671). What comes out has
# CRLF line ends only: a bare LF becomes CRLF, a bare CR becomes a space, so that no header or body
# boundary appears where the sender's server saw none (line_ends.py). Both are counted; the caller may refuse.
#
# Speed: whole pieces go through C searches; no step is taken per line. Most pieces hold no dot behind a
# line end and CRLFs only, and two passes find that out. Memory: at most four octets are held between pieces.

END_OF_DATA = b"\r\n.\r\n"

_DOTTED = b"\r\n."
_DOT = 0x2E
_TAILS = tuple(END_OF_DATA[:size] for size in (4, 3, 2, 1))


class BodyReader(LineEnds):
    """Feed wire bytes, take body bytes, until `done`; `rest` is what followed the end of data."""

    __slots__ = ("_held", "_virtual", "done", "rest")

    def __init__(self) -> None:
        super().__init__()
        # DATA's own CRLF is the line end before the body: a first line `.` ends it. Not part of it.
        self._held = CRLF
        self._virtual = len(CRLF)
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """The body bytes that are certain now. Must not be called once `done`.

        `dotted` is true from the first line on that begins with a dot, or the first NUL (stuffing.py).
        """
        if self._virtual and self._held == CRLF and data and data[0] != _DOT:
            # Nothing came before, and the line end before the body decides nothing: no need to copy
            # the body behind it.
            self._held, self._virtual = b"", 0
        wire = self._held + data
        # From the end: rfind skips ahead where find looks at every octet.
        last = wire.rfind(_DOTTED)
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
        """Keep a tail that may be the beginning of an end of data; return what is before it."""
        if not wire.endswith(_TAILS):
            self._held = b""
            return wire
        cut = len(wire) - next(len(tail) for tail in _TAILS if wire.endswith(tail))
        self._held = wire[cut:]
        return wire[:cut]

    def _unstuffed(self, wire: bytes) -> bytes:
        if wire.rfind(_DOTTED) < 0:
            return self._clean(wire)
        self.dotted = True
        # The dot goes first: no line end begins or ends with it, so none is made or lost.
        return self._clean(wire.replace(_DOTTED, CRLF))

    def _out(self, body: bytes) -> bytes:
        """Return the body without the line end that is not part of it."""
        if body:
            body, self._virtual = body[self._virtual :], 0
        return body
