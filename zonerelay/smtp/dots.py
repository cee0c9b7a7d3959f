"""The body of a message as it travels in DATA: end of data, dot-unstuffing, line ends. Sans-IO.

Only `<CR><LF>.<CR><LF>` ends data, and only a dot behind `<CR><LF>` is stuffing (RFC 5321 4.5.2).
A line end is nothing else: servers that took `<LF>.<LF>` or `<CR>.<CR>` for the end let one
message carry a second one past the sender's server (SMTP smuggling, VU#302671). What comes out has
CRLF line ends only: a bare LF becomes CRLF, a bare CR becomes a space, so that no header or body
boundary appears where the sender's server saw none. Both are counted; the caller may refuse.

NUL and other control characters are kept: they end nothing, and a changed octet breaks signatures.

Speed: whole pieces go through the C search methods of `bytes` and one regular expression; no
step is taken per line. Memory: at most four octets are held between pieces.
"""

from __future__ import annotations

import re

END_OF_DATA = b"\r\n.\r\n"
_CRLF = b"\r\n"

# A CR that is bare, or whose LF is followed by a dot. A piece without one has neither an end of data,
# nor stuffing, nor a bare CR. Starts with one literal octet, so the engine looks for it with memchr.
_ODD_CR = re.compile(rb"\r(?!\n(?!\.))")


class BodyReader:
    """Feed wire bytes, take body bytes, until `done`; `rest` is what followed the end of data."""

    __slots__ = ("_held", "_virtual", "bare_cr", "bare_lf", "done", "rest")

    def __init__(self) -> None:
        # DATA's own CRLF is the line end before the body: a first line `.` ends it. Not part of it.
        self._held = _CRLF
        self._virtual = len(_CRLF)
        self.bare_lf = 0
        self.bare_cr = 0
        self.done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """The body bytes that are certain now. Must not be called once `done`."""
        wire = self._held + data
        odd = _ODD_CR.search(wire)
        if odd is None:
            return self._out(self._plain(self._hold_back(wire)))
        end = wire.find(END_OF_DATA, odd.start())
        if end < 0:
            return self._out(self._mended(self._hold_back(wire)))
        self.done = True
        self.rest = wire[end + len(END_OF_DATA) :]
        body = wire[: end + len(_CRLF)]
        # Mostly the first odd CR is the end itself, and nothing before it needs mending.
        return self._out(self._plain(body) if end == odd.start() else self._mended(body))

    def _hold_back(self, wire: bytes) -> bytes:
        """Keep a tail that may be the beginning of an end of data; return what is before it."""
        tail = next((size for size in (4, 3, 2, 1) if wire.endswith(END_OF_DATA[:size])), 0)
        cut = len(wire) - tail
        self._held = wire[cut:]
        return wire[:cut]

    def _plain(self, wire: bytes) -> bytes:
        """A piece in which every CR belongs to a CRLF and no line begins with a dot."""
        # LFs minus CRs. Deleting goes from hit to hit with memchr: twice as fast as count() on lines of text.
        bare_lf = len(wire.replace(b"\r", b"")) - len(wire.replace(b"\n", b""))
        if not bare_lf:
            return wire
        self.bare_lf += bare_lf
        return _normalized(wire)

    def _mended(self, wire: bytes) -> bytes:
        crlf = wire.count(_CRLF)
        bare_lf, bare_cr = wire.count(b"\n") - crlf, wire.count(b"\r") - crlf
        body = wire.replace(b"\r\n.", _CRLF)
        if not bare_lf and not bare_cr:
            return body
        self.bare_lf += bare_lf
        self.bare_cr += bare_cr
        return _normalized(body)

    def _out(self, body: bytes) -> bytes:
        if not self._virtual or not body:
            return body
        body, self._virtual = body[self._virtual :], 0
        return body


def _normalized(body: bytes) -> bytes:
    return body.replace(_CRLF, b"\n").replace(b"\r", b" ").replace(b"\n", _CRLF)
