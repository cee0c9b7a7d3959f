"""DKIM's hash of the body of a message that is arriving (RFC 6376 3.7), for `Message.body_hash`. Sans-IO.

Owns where that body begins: behind the first empty line of the message as it is stored, which is where
whoever signs and whoever verifies cut it in two. Where the relay has found no header it has put an empty
line in front (`Header.lead`), and all that came is body. Without an empty line there is no body.
"""

from __future__ import annotations

from zonerelay.message.dkim.body import RelaxedBody

_LINE_END = b"\r\n"
_EMPTY_LINE = b"\r\n\r\n"


class BodyHash:
    """Feed it what follows our own header fields, `Header.lead` first, cut in any way."""

    __slots__ = ("_body", "_tail")

    def __init__(self) -> None:
        self._body = RelaxedBody()
        self._tail: bytes | None = _LINE_END  # the last of our fields'; None: the body has begun

    def feed(self, piece: bytes) -> None:
        if self._tail is None:
            self._body.feed(piece)
            return
        seen = self._tail + piece
        end = seen.find(_EMPTY_LINE)
        if end >= 0:
            self._tail = None
            self._body.feed(seen[end + len(_EMPTY_LINE) :])
        else:
            self._tail = seen[1 - len(_EMPTY_LINE) :]

    def digest(self) -> str:
        return self._body.digest()
