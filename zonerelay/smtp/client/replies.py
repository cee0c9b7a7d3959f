"""Parses a peer's replies incrementally, from bytes to `Reply`.

It is tolerant where servers differ (bare LF, missing text, missing or misplaced enhanced codes, several codes
in one multi-line reply: the last line counts, as in Postfix). Lines without a code from 200 to 599 are
skipped wherever they are, because a 250 that stands behind one must not be lost. A line that is too long is
cut. A reply beyond its limit, or with too many lines to skip, is a `PeerError`: the stream is out of step and
the connection must be closed.

The text is only for display, so characters that could move a cursor or forge a log line are replaced here.

Peers send the same few lines for every message, so short replies of one line are parsed once and remembered.
"""

import functools
import re

from zonerelay.model.reply import Reply

MAX_LINE = 8 * 1024
"""Octets of a line that are kept."""
MAX_REPLY = 64 * 1024
"""Octets of a reply, with what is skipped before it and in it."""
MAX_SKIPPED = 100
"""Lines that are skipped before a reply and in it."""
MAX_SHOWN = 80
# Unread input, twice the longest reply. Only a peer that sends without a command reaches it.
MAX_BACKLOG = 2 * MAX_REPLY
# Remembered replies are bounded in number and bytes, because the peer chooses their text.
MAX_REMEMBERED = 1024
MAX_REMEMBERED_LINE = 128

_LINE = re.compile(rb"\x00*([2-5][0-9][0-9])(?![0-9])([ -]?)(.*)\Z", re.DOTALL)
# RFC 3463 2: class "." subject "." detail, each of up to three digits.
_ENHANCED = re.compile(r"([245])\.([0-9]{1,3}\.[0-9]{1,3})(?: +|\Z)")


class PeerError(Exception):
    """The peer sent something that is not SMTP, so the session cannot continue."""


class ReplyParser:
    """Parses replies incrementally: call `feed`, then `next_reply` until it returns `None`.

    Replies that were complete before the offending bytes are still returned, in order: a `250` for the final
    dot must not be lost because of what follows it.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._at = 0
        self._flooded = False
        self._lines: list[bytes] = []
        self._size = 0
        self._skipped = 0
        self.skipped = ""
        """The first line that was skipped, for people."""

    @property
    def has_input(self) -> bool:
        """Whether received bytes remain that were neither returned as a reply nor skipped."""
        while self._buffer and not self._lines and self._skipped < MAX_SKIPPED:
            end = self._buffer.find(b"\n", self._at) + 1
            line = self._buffer[self._at : end]
            if not end or _LINE.match(line.rstrip(b"\r\n")):
                break
            self._skip(line)
            self._buffer, self._at = (self._buffer, end) if end < len(self._buffer) else (b"", 0)
        return bool(self._buffer or self._lines)

    def feed(self, data: bytes) -> None:
        if not self._buffer:
            self._buffer = data
        elif len(self._buffer) - self._at <= MAX_BACKLOG:
            self._buffer = self._buffer[self._at :] + data
            self._at = 0
        else:
            self._flooded = True

    def next_reply(self) -> Reply | None:
        """Return the next complete reply, or `None` if more bytes are needed. Raise PeerError if the bytes
        are not SMTP.
        """
        buffer, at = self._buffer, self._at
        while (end := buffer.find(b"\n", at)) >= 0:
            end += 1
            line = buffer[at:end]
            if end == len(buffer):
                self._buffer, self._at = b"", 0
            else:
                self._at = end
            ordinary = end - at <= MAX_REMEMBERED_LINE and not (self._lines or self._skipped)
            at = end
            reply = (_whole_reply(line) if ordinary else None) or self._take(line)
            if reply is not None:
                return reply
        if self._flooded or max(self._size, len(self._buffer) - self._at) > MAX_REPLY:
            raise PeerError("the peer sent more than one reply")
        return None

    def _take(self, line: bytes) -> Reply | None:
        match = _LINE.match(line.rstrip(b"\r\n"))
        if match is None:
            self._skip(line)
        else:
            self._size += len(line)
        if self._size > MAX_REPLY:
            raise PeerError("a reply is too long")
        if self._skipped > MAX_SKIPPED:
            raise PeerError(f"more than {MAX_SKIPPED} lines are not replies; the first is: {self.skipped}")
        if match is None:
            return None
        code, mark, text = match.groups()
        self._lines.append(text[:MAX_LINE])
        if mark == b"-":
            return None
        lines, self._lines, self._size, self._skipped = self._lines, [], 0, 0
        return make_reply(int(code), [printable(each) for each in lines])

    def _skip(self, line: bytes) -> None:
        self._size += len(line)
        self._skipped += 1
        self.skipped = self.skipped or printable(line[:MAX_SHOWN].strip()) or "an empty line"


@functools.lru_cache(MAX_REMEMBERED)
def _whole_reply(line: bytes) -> Reply | None:
    """Parse a line as a complete reply, or return `None` if it is only a part of one."""
    match = _LINE.match(line.rstrip(b"\r\n"))
    if match is None or match[2] == b"-":
        return None
    return make_reply(int(match[1]), [printable(match[3])])


def make_reply(code: int, lines: list[str]) -> Reply:
    """Create a reply from its code and lines, and move the enhanced status code from the text to `detail`.

    A code whose class contradicts the reply code is not an enhanced code (RFC 2034 4) and stays in the text.
    """
    first = lines[0]
    match = _ENHANCED.match(first)
    if match is None or int(match[1]) != code // 100:
        return Reply(code, "", "\n".join(lines))
    if len(lines) == 1:
        return Reply(code, match[2], first[match.end() :])
    prefix = f"{match[1]}.{match[2]}"
    texts = [line[len(prefix) :].lstrip(" ") if line.startswith(prefix) else line for line in lines]
    return Reply(code, match[2], "\n".join(texts))


def printable(raw: bytes | str) -> str:
    """Return text that is safe to show and log, without control, format (bidi) and surrogate characters."""
    text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
    return text
