"""Dot-stuffing (RFC 5321 4.5.2), incrementally, over any split of the body.

Stored bodies have CRLF line ends only (DESIGN rule 5). A bare CR or LF that is found here nevertheless is
normalized as at arrival and never sent on: a peer with other line ends could read it as the end of the
message and the rest as commands.

Some servers drop NUL before they look at a line, and take `<NUL>.` for the end of data (a sequence of the
public SMTP smuggling tests). A dot behind NULs at the beginning of a line gets a space in front. Stuffing is
no remedy: only what follows the NULs tells whether they need it, and they may be many.

A chunk that needs no change is returned without a copy.
"""

from __future__ import annotations

import re

from zonerelay.smtp.client.chunk_lines import ChunkLines
from zonerelay.smtp.server.line_ends import CRLF, NUL

END = b".\r\n"

_HIDDEN_DOT = re.compile(rb"(\r\n\x00+)\.")


class DotStuffer(ChunkLines):
    """`feed` every chunk in order, then `finish` once; write what they return.

    `plain`: the body needs nothing but its end.
    """

    __slots__ = ("_only_nul", "_plain")

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__(plain=plain)
        self._plain = plain
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
        """Returns the end of the message: the end of the last line if it had none, then the lone dot."""
        return super().finish() + END

    def _shielded(self, chunk: bytes, starts_line: bool) -> bytes:
        before = CRLF if starts_line else CRLF + NUL if self._only_nul else b""
        text = before + chunk
        self._only_nul = text.endswith(NUL) and text.rstrip(NUL).endswith(CRLF)
        return _HIDDEN_DOT.sub(rb"\1 .", text)[len(before) :]


def stuffed(body: bytes, *, plain: bool) -> bytes:
    """Returns a whole body with its end. `plain`: the body needs nothing else."""
    if plain:
        return body + (b"\r\n" + END if body and not body.endswith(b"\n") else END)
    stuffer = DotStuffer()
    return stuffer.feed(body) + stuffer.finish()
