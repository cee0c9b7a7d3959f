"""Which replies a conversation is owed: a plain reading of what the client sent beside what it was answered.

Knows only RFC 5321, 3030, 4954 and 3207: a line is answered once, a body once at its end, a chunk once behind
its octets. It believes the server's codes and checks that each has its place.
"""

from __future__ import annotations

import re

END_OF_DATA = b"\r\n.\r\n"

_BDAT = re.compile(rb"BDAT +([0-9]{1,20})(?: +LAST)? *\Z", re.IGNORECASE)


def split_replies(out: bytes) -> list[bytes]:
    """Whole replies, with all their lines."""
    replies, lines = [], []
    for line in out.split(b"\r\n")[:-1]:
        lines.append(line)
        if line[3:4] != b"-":
            replies.append(b"\n".join(lines))
            lines = []
    assert not lines, "a reply has no end"
    return replies


class Account:
    """Goes through the client's octets, one reply at a time. `over`: TLS begins, and nothing can be read."""

    def __init__(self, sent: bytes) -> None:
        self._left = sent
        self._in_body = False
        self._in_exchange = False  # the next line is a SASL response, whatever it looks like
        self.over = False

    def take(self, reply: bytes) -> bool:
        """Whether this reply was owed."""
        if self._in_body:
            return self._take_body()
        line, end, self._left = self._left.partition(b"\n")
        if not end:
            return False
        code = reply[:3]
        chunk = None if self._in_exchange else _BDAT.match(line.removesuffix(b"\r"))
        self._in_exchange = code == b"334"
        if code == b"354":
            self._in_body = True
        elif chunk is not None:
            size = int(chunk[1])
            whole, self._left = size <= len(self._left), self._left[size:]
            return whole
        elif code == b"220" and line.upper().startswith(b"STARTTLS"):
            self.over = True
        return True

    def owes_nothing(self) -> bool:
        """No command and no body is there whole without its answer."""
        if self._in_body:
            return END_OF_DATA not in b"\r\n" + self._left
        line, end, rest = self._left.partition(b"\n")
        chunk = None if self._in_exchange else _BDAT.match(line.removesuffix(b"\r"))
        return not end or (chunk is not None and int(chunk[1]) > len(rest))

    def _take_body(self) -> bool:
        _, end, self._left = (b"\r\n" + self._left).partition(END_OF_DATA)
        self._in_body = False
        return end != b""
