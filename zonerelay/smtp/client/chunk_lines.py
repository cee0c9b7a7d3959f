"""Prepares a stored body for BDAT chunks (RFC 3030): the octets unchanged, with strict line ends.

No dot is stuffed, because no octet is framing: BDAT is immune to the smuggling that the end of DATA invites.
For the same reason dots behind NULs get no space as in `DotStuffer`: the peer gets such a line unchanged, and
answers for it when it sends the message on with DATA.

Line ends are CRLF only (DESIGN rule 5), and the last line has one: without BINARYMIME a message is text, and
the peer will mostly send it on with DATA. The store promises CRLF; a body that is not known to be plain is
checked again and normalized as `DotStuffer` does.
"""

from __future__ import annotations

import io

from zonerelay.smtp.server.line_ends import CRLF, crlf_only

_CLEAN = (None, "\r\n")


class ChunkLines:
    """`feed` every piece in order, then `finish` once; send what they return. `plain`: skip the check."""

    __slots__ = ("_ended", "_held_cr", "_line_ends")

    def __init__(self, *, plain: bool) -> None:
        self._ended = False
        self._held_cr = False
        self._line_ends = None if plain else io.IncrementalNewlineDecoder(None, False)

    def feed(self, piece: bytes) -> bytes:
        if self._line_ends is not None:
            piece = self._strict(piece, self._line_ends)
        if piece:
            self._ended = piece.endswith(b"\n")
        return piece

    def finish(self) -> bytes:
        """Returns the end of the last line, if it had none."""
        if self._held_cr:
            return b" \r\n"
        return b"" if self._ended else CRLF

    def _strict(self, piece: bytes, line_ends: io.IncrementalNewlineDecoder) -> bytes:
        if self._held_cr:
            piece = b"\r" + piece
        # A CR at the end is kept back until the next octet tells whether it is bare.
        self._held_cr = piece.endswith(b"\r")
        if self._held_cr:
            piece = piece[:-1]
        line_ends.decode(piece.decode("latin-1"), final=True)
        if line_ends.newlines in _CLEAN:
            return piece
        line_ends.reset()
        return crlf_only(piece)


def as_chunk(body: bytes, *, plain: bool) -> bytes:
    """Returns a whole body as one chunk."""
    if plain and body.endswith(b"\n"):
        return body
    lines = ChunkLines(plain=plain)
    return lines.feed(body) + lines.finish()
