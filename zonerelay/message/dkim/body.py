"""Hashes a body in DKIM's relaxed form (RFC 6376 3.4.4) while it arrives. No I/O.

The hash does not depend on how the body is cut into pieces; memory holds one piece. The input has CRLF line
ends only, like everything that is stored. `BodyHash` finds the beginning of the body of an arriving message
for `Message.body_hash`: after the first empty line of the message as it is stored, where signers and
verifiers divide it. A message without a header has an empty line in front (`Header.lead`), so all of it is
body; without an empty line there is no body.

Every message that may be signed is hashed, so no work is done per line: whole pieces go through a few
operations on bytes, and octets that may be the end of a line, or of the body, are held back.
"""

from __future__ import annotations

import base64
import hashlib

_INDENT = b" " * 8  # shortens long runs at once, so that few passes are left
_CRLF = b"\r\n"
_BLANK_LINES = 16 * 1024  # blank lines that are hashed at a time


def single_spaces(data: bytes) -> bytes:
    """Replaces every run of spaces and tabs by one space, in linear time."""
    if b"\t" in data:
        data = data.replace(b"\t", b" ")
    if b"  " in data:
        data = data.replace(_INDENT, b" ").replace(b"  ", b" ")
        while b"  " in data:
            data = data.replace(b"  ", b" ")
    return data


class RelaxedBody:
    """The hash of a body. `feed` what follows the empty line after the header, then call `digest`."""

    __slots__ = ("_blank_lines", "_hash", "_is_empty", "_tail")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._is_empty = True  # so far, but for line ends
        self._blank_lines = 0  # line ends held back: at the end of the body they do not count
        self._tail = b""  # begins a line end, perhaps: at most a space and a CR

    def feed(self, piece: bytes) -> None:
        data = self._tail + piece if self._tail else piece
        if b" " in data or b"\t" in data:  # base64 has neither
            data = single_spaces(data).replace(b" \r\n", _CRLF)
        kept = data.rstrip(b" \r\n")
        if kept:
            if self._blank_lines:
                self._hash_blank_lines()
            self._hash.update(kept)
            self._is_empty = False
        end = data.rfind(b"\n") + 1
        if end > len(kept):
            self._blank_lines += data.count(b"\n", len(kept))
            self._tail = data[end:]
        else:
            self._tail = data[len(kept) :]

    def digest(self) -> str:
        """Returns the SHA-256 in base64. More may be fed afterwards, and the digest be taken again."""
        whole = self._hash.copy()
        if not self._is_empty:
            whole.update(_CRLF)  # the last line may lack its end
        return base64.b64encode(whole.digest()).decode("ascii")

    def _hash_blank_lines(self) -> None:
        whole, rest = divmod(self._blank_lines, _BLANK_LINES)
        for _ in range(whole):
            self._hash.update(_CRLF * _BLANK_LINES)
        self._hash.update(_CRLF * rest)
        self._blank_lines = 0


_LINE_END = b"\r\n"
_EMPTY_LINE = b"\r\n\r\n"


class BodyHash:
    """The hash of the body of a whole message. Feed it what follows our own header fields, `Header.lead`
    first.
    """

    __slots__ = ("_body", "_tail")

    def __init__(self) -> None:
        self._body = RelaxedBody()
        self._tail: bytes | None = _LINE_END  # the end of our last field; None once the body has begun

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
