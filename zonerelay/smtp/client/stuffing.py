"""Encodes a body for DATA (dot-stuffing, RFC 5321 4.5.2) or BDAT, in pieces of any size.

Stored bodies have CRLF line ends only (DESIGN rule 5). A bare CR or LF that is found here nevertheless is
normalized as at arrival and never sent on: a peer with other line ends could read it as the end of the
message and the rest as commands.

Some servers drop NUL before they look at a line, and take `<NUL>.` for the end of data (a sequence of the
public SMTP smuggling tests). A dot behind NULs at the beginning of a line gets a space in front. Stuffing is
no remedy: only what follows the NULs tells whether they need it, and they may be many.

A chunk that needs no change is returned without a copy.
"""

import re

from zonerelay.smtp.server.line_ends import CRLF, NUL, LineEnds

# Prepares a stored body for BDAT chunks (RFC 3030): the bytes unchanged, with strict line ends.
#
# No dot is stuffed, because no byte is framing: BDAT is immune to the smuggling that the end of DATA
# invites. For the same reason dots behind NULs get no space as in `DotStuffer`: the peer gets such a line
# unchanged, and answers for it when it sends the message on with DATA.
#
# Line ends are CRLF only (DESIGN rule 5), and the last line has one: without BINARYMIME a message is text,
# and the peer will mostly send it on with DATA. The store promises CRLF; a body that is not known to be
# plain is checked again and normalized as `DotStuffer` does.


class ChunkLines(LineEnds):
    """Ensures that a body sent in BDAT chunks has only CRLF line ends and ends with one. Call `feed` with
    every piece in order, then `finish` once, and send the results. With `plain`, nothing is checked.
    """

    __slots__ = ("_ended", "_plain")

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self._plain = plain
        self._ended = False

    def feed(self, piece: bytes) -> bytes:
        if not self._plain:
            piece = self._strict(piece)
        if piece:
            self._ended = piece.endswith(b"\n")
        return piece

    def finish(self) -> bytes:
        """Return the line end that the last line lacks, or b"" if it has one."""
        if self._held_cr:
            return b" \r\n"
        return b"" if self._ended else CRLF


def as_chunk(body: bytes, *, plain: bool) -> bytes:
    """Return a whole body as one BDAT chunk."""
    if plain and body.endswith(b"\n"):
        return body
    lines = ChunkLines(plain=plain)
    return lines.feed(body) + lines.finish()


END = b".\r\n"

_HIDDEN_DOT = re.compile(rb"(\r\n\x00+)\.")


class DotStuffer(ChunkLines):
    """Applies dot-stuffing to a body sent with DATA. `feed` every chunk in order, then `finish` once; write
    what they return.

    With `plain`, the body needs no changes except at its end.
    """

    __slots__ = ("_only_nul",)

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__(plain=plain)
        self._ended = True
        self._only_nul = False  # true while the unfinished line has NULs only

    def feed(self, piece: bytes) -> bytes:
        starts_line = self._ended
        chunk = super().feed(piece)
        if self._plain or not chunk:
            return chunk
        if self._only_nul or NUL in chunk:
            chunk = self._shielded(chunk, starts_line)
        stuffed = chunk.replace(b"\r\n.", b"\r\n..")
        return b"." + stuffed if starts_line and chunk.startswith(b".") else stuffed

    def finish(self) -> bytes:
        """Return the end of the message: the final dot, preceded by a line end if the last line has none."""
        return super().finish() + END

    def _shielded(self, chunk: bytes, starts_line: bool) -> bytes:
        before = CRLF if starts_line else CRLF + NUL if self._only_nul else b""
        text = before + chunk
        self._only_nul = text.endswith(NUL) and text.rstrip(NUL).endswith(CRLF)
        return _HIDDEN_DOT.sub(rb"\1 .", text)[len(before) :]


def stuffed(body: bytes, *, plain: bool) -> bytes:
    """Apply dot-stuffing to a whole body, and append the final dot. With `plain`, the body has no lines that
    need it.
    """
    if plain:
        return body + (b"\r\n" + END if body and not body.endswith(b"\n") else END)
    stuffer = DotStuffer()
    return stuffer.feed(body) + stuffer.finish()
