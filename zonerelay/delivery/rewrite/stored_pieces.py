"""Reads a stored body that is examined before it is sent: its header, the hash of the rest, then its octets.

One object serves one reading. Pieces that were read for the examination are not read again as long as all of
them are still there (`intact`). Memory holds the pieces of the header and one more. Raises StoreError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from zonerelay.message.dkim.body import RelaxedBody
from zonerelay.model.message_id import MessageId

ReadBody = Callable[[MessageId], AsyncIterator[bytes]]
"""Reads a stored body piece by piece. The iterator raises StoreError."""

CheckClaim = Callable[[MessageId], None]
"""Raises ClaimLostError when another relay may be sending the message."""

_CRLF = b"\r\n"
_END = b"\r\n\r\n"


class StoredPieces:
    """Call `header`, then perhaps `body_hash`, then `spliced` once, or `close`."""

    __slots__ = ("_header_size", "_held", "_pieces", "intact")

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces
        self._held: deque[bytes] = deque()
        self._header_size = 0
        self.intact = True
        """False when a part of the body was dropped, so that the body has to be read again."""

    async def header(self, limit: int) -> bytes | None:
        """Returns all fields with the CRLF of the last one; `None` when the end is not within `limit` and one
        piece.

        In a message without an empty line everything is header.
        """
        block = b""
        while piece := await anext(self._pieces, b""):
            self._held.append(piece)
            searched = max(len(block) - len(_END) + 1, 0)
            block = block + piece if block else piece
            end = 0 if block.startswith(_CRLF) else block.find(_END, searched) + len(_CRLF)
            if end != 1:
                self._header_size = end
                return block[:end]
            if len(block) > limit:
                return None
        self._header_size = len(block)
        return block

    async def body_hash(self) -> str:
        """Returns the hash, in DKIM's relaxed form, of the body after the empty line."""
        body = RelaxedBody()
        skipped = self._header_size + len(_CRLF)
        for piece in self._held:
            body.feed(piece[skipped:])
            skipped = max(skipped - len(piece), 0)
        while piece := await anext(self._pieces, b""):
            self.intact = False
            body.feed(piece[skipped:])
            skipped = max(skipped - len(piece), 0)
        return body.digest()

    async def spliced(self, header: bytes, skipped: int) -> AsyncGenerator[bytes, None]:
        """Yields `header`, then the stored body without its first `skipped` octets. No piece is empty."""
        try:
            while piece := await self._next():
                if skipped >= len(piece):
                    skipped -= len(piece)
                    continue
                if skipped:
                    piece, skipped = piece[skipped:], 0
                if header:
                    piece, header = header + piece, b""
                yield piece
            if header:
                yield header
        finally:
            await self.close()

    async def close(self) -> None:
        close = getattr(self._pieces, "aclose", None)  # generators hold resources, plain iterators need not
        if close is not None:
            await close()

    async def _next(self) -> bytes:
        return self._held.popleft() if self._held else await anext(self._pieces, b"")
