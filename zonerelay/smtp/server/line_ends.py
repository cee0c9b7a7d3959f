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
