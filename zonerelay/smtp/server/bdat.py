"""The body of a message as it travels in BDAT: chunks of announced size (RFC 3030 2). Sans-IO.

Nothing in the octets is framing: `<CR><LF>.<CR><LF>` is two lines of text, and a dot at the beginning of a
line is not stuffing. Line ends are treated as in DATA (line_ends.py) with the same counters: BINARYMIME is
not offered, so a body is text whose lines end with CRLF (RFC 3030 2), and a bare CR or LF is as dangerous
here as there: the next hop is mostly reached with DATA. A chunk may end anywhere, between CR and LF as well.

A size that cannot be read loses the framing for good: what follows might be a body, which must not run as
commands, so the caller closes after answering (`parse_bdat` raises CommandError).

Memory: one octet is held between pieces, a CR that may be half a line end.
"""

from __future__ import annotations

import re

from zonerelay.model.reply import Reply
from zonerelay.smtp.server.line_ends import CRLF, LineEnds
from zonerelay.smtp.server.paths import CommandError

MAX_SIZE_DIGITS = 20  # as SIZE (RFC 1870 3); more octets than any size limit lets in

_ARGUMENT = re.compile(rf"([0-9]{{1,{MAX_SIZE_DIGITS}}})(?: +(LAST))?", re.ASCII | re.IGNORECASE)


def parse_bdat(argument: str) -> tuple[int, bool]:
    """`size [LAST]`."""
    match = _ARGUMENT.fullmatch(argument)
    if match is None:
        raise CommandError(Reply(501, "5.4", "Syntax: BDAT size [LAST]"))
    return int(match[1]), match[2] is not None


class ChunkReader(LineEnds):
    """`begin` for every BDAT command, then `feed` until `chunk_done`; after the last chunk it is `done`.

    `feed` must be called at least once for each chunk, with nothing if nothing has come: that ends a
    chunk of no octets, and the last one may yield the line end that its body lacked.
    `rest` is what followed the chunk: commands.
    """

    __slots__ = ("_held_cr", "_last", "_left", "_line_start", "chunk_done", "done", "rest")

    def __init__(self) -> None:
        super().__init__()
        self._left = 0
        self._last = False
        self._held_cr = False
        self._line_start = True
        self.chunk_done = True
        self.done = False
        self.rest = b""

    def begin(self, size: int, last: bool) -> None:
        """A BDAT command was read. Must not be called before the chunk of another is done."""
        assert self.chunk_done
        assert not self.done
        self._left = size
        self._last = last
        self.chunk_done = False
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """The body bytes that are certain now. Must not be called once `chunk_done`."""
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
        if self._held_cr:
            piece = b"\r" + piece
        self._held_cr = piece.endswith(b"\r") and not self.done
        body = self._clean(piece[:-1] if self._held_cr else piece)
        if body:
            if not self.dotted:
                self.dotted = (self._line_start and body.startswith(b".")) or body.rfind(b"\r\n.") >= 0
            self._line_start = body.endswith(b"\n")
        if self.done and not self._line_start:
            body += CRLF
        return body
