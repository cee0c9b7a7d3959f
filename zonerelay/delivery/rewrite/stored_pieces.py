"""Reads a stored body that is examined before it is sent: its header, the hash of the rest, then its octets.

One object serves one reading. Pieces that were read for the examination are not read again as long as all of
them are still there (`intact`). Memory holds the pieces of the header and one more. Raises StoreError.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from zonerelay.message.dkim.body import RelaxedBody
from zonerelay.message.dkim.signature import DkimKey, unsigned_fields
from zonerelay.model.message_id import MessageId

# Makes DKIM signatures: slow ones in a thread if a core is free for it, others on the event loop.
#
# RSA with 2048 bits takes as long as all other work for a small message, and releases Python's lock meanwhile
# (from cryptography 49 on), so a thread lets the loop continue. The thread costs some CPU, which is a loss
# where the loop has the only core. All work but the signature is done before the thread starts
# (tests/bench/dkim.py has the figures).


class Signing:
    """One per worker. `beside`: use a thread, which starts with the first slow signature."""

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._thread: ThreadPoolExecutor | None = None

    async def sign(self, header: bytes, body_hash: str, keys: Sequence[DkimKey], *, now: float) -> bytes:
        """Returns the DKIM-Signature fields, as `message.dkim.signature.sign` does."""
        fields = []
        for each in unsigned_fields(header, body_hash, keys, now=now):
            if self._beside and each.key.slow:
                signature = await self._in_thread(each.key, each.digest)
            else:
                signature = each.key.sign(each.digest)
            fields.append(each.signed(signature))
        return b"".join(fields)

    async def _in_thread(self, key: DkimKey, digest: bytes) -> bytes:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dkim")
        return await asyncio.get_running_loop().run_in_executor(self._thread, key.sign, digest)

    def close(self) -> None:
        """Ends the thread. Waiting signatures are cancelled."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


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
