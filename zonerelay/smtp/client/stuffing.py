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

import io
import re

from zonerelay.smtp.server.line_ends import CRLF, NUL, crlf_only

END = b".\r\n"

_CLEAN = (None, "\r\n")
_HIDDEN_DOT = re.compile(rb"(\r\n\x00+)\.")


class DotStuffer:
    """`feed` every chunk in order, then `finish` once; write what they return.

    `normalized` is true after a bare line end or a dot behind NULs.
    """

    def __init__(self) -> None:
        self.normalized = False
        self._line_start = True
        self._held_cr = False
        self._only_nul = False  # true while the unfinished line has NULs only
        # The decoder keeps the set of line ends that it has seen, four times as fast as counting them.
        self._line_ends = io.IncrementalNewlineDecoder(None, False)

    def feed(self, chunk: bytes) -> bytes:
        if self._held_cr:
            chunk = b"\r" + chunk
        # A CR at the end is kept back until the next byte tells whether it is bare.
        self._held_cr = chunk.endswith(b"\r")
        if self._held_cr:
            chunk = chunk[:-1]
        if not chunk:
            return b""
        self._line_ends.decode(chunk.decode("latin-1"), final=True)
        if self._line_ends.newlines not in _CLEAN:
            chunk = self._normalize(chunk)
        starts_line, self._line_start = self._line_start, chunk.endswith(b"\n")
        if self._only_nul or NUL in chunk:
            chunk = self._shielded(chunk, starts_line)
        stuffed = chunk.replace(b"\r\n.", b"\r\n..")
        return b"." + stuffed if starts_line and chunk.startswith(b".") else stuffed

    def finish(self) -> bytes:
        """Returns the end of the message: the end of the last line if it had none, then the lone dot."""
        if self._held_cr:
            self.normalized = True
            return b" \r\n" + END
        return END if self._line_start else b"\r\n" + END

    def _normalize(self, chunk: bytes) -> bytes:
        self.normalized = True
        self._line_ends.reset()
        return crlf_only(chunk)

    def _shielded(self, chunk: bytes, starts_line: bool) -> bytes:
        before = CRLF if starts_line else CRLF + NUL if self._only_nul else b""
        text = before + chunk
        shielded, dots = _HIDDEN_DOT.subn(rb"\1 .", text)
        self.normalized = self.normalized or dots > 0
        self._only_nul = text.endswith(NUL) and text.rstrip(NUL).endswith(CRLF)
        return shielded[len(before) :]


def stuffed(body: bytes, *, plain: bool) -> bytes:
    """Returns a whole body with its end. `plain`: the body needs nothing else."""
    if plain:
        return body + (b"\r\n" + END if body and not body.endswith(b"\n") else END)
    stuffer = DotStuffer()
    return stuffer.feed(body) + stuffer.finish()


class PlainLines:
    """Replaces `DotStuffer` for a body that needs nothing but its end."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b"\r\n"

    def feed(self, chunk: bytes) -> bytes:
        # One octet is enough, because a plain body has no bare LF: LF at its end means CRLF.
        self._tail = chunk[-1:] or self._tail
        return chunk

    def finish(self) -> bytes:
        return END if self._tail.endswith(b"\n") else b"\r\n" + END
