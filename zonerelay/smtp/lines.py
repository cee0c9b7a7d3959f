"""Command lines out of a byte stream. Sans-IO.

Owns the bytes that have arrived and are not yet a command. Only `<CR><LF>` ends a line (RFC 5321
2.3.8). A bare LF is reported at once as a fault instead of being waited out or taken for a line
end: a person at netcat sees an answer, and text that slipped through somebody's CRLF filter with a
lone LF in it never becomes a command of its own. After that fault the stream has no trustworthy
line structure left and the caller closes.

Memory: at most `limit` octets plus what one `feed` brought; an overlong line is dropped as it
arrives and reported once, when its CRLF does.
"""

from __future__ import annotations

import enum

CR = 0x0D


class LineFault(enum.Enum):
    """What came instead of a line."""

    TOO_LONG = "too long"
    BARE_LF = "bare LF"


class LineReader:
    """`feed` bytes, then call `next` until it returns `None`."""

    __slots__ = ("_buffer", "_dropping", "_limit", "_position")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget everything: what arrived before a TLS handshake may be an attacker's (CVE-2011-0411)."""
        self._buffer = b""
        self._position = 0
        self._dropping = False

    def feed(self, data: bytes) -> None:
        waiting = len(self._buffer) - self._position
        self._buffer = self._buffer[self._position :] + data if waiting else data
        self._position = 0

    @property
    def waiting(self) -> int:
        """Octets that no call of `next` has returned yet."""
        return len(self._buffer) - self._position

    def next(self) -> bytes | LineFault | None:
        """The next line without its CRLF, a fault, or `None` until more is fed."""
        start = self._position
        end = self._buffer.find(b"\n", start)
        if end < 0:
            self._drop_overlong()
            return None
        self._position = end + 1
        dropping, self._dropping = self._dropping, False
        if end == start or self._buffer[end - 1] != CR:
            return LineFault.BARE_LF
        if dropping or end - start >= self._limit:
            return LineFault.TOO_LONG
        return self._buffer[start : end - 1]

    def _drop_overlong(self) -> None:
        if self.waiting > self._limit or (self._dropping and self.waiting):
            self._dropping = True
            # The last octet may be the CR of the line end to come.
            self._buffer = self._buffer[-1:]
            self._position = 0
