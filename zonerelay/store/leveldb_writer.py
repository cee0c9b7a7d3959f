"""Taking one message's body into the LevelDB spool.

Up to `GROUP_CHUNKS` chunks wait in memory; a message that ends before that is one atomic synced
batch. A longer one is stored in groups while it arrives, each group in a synced batch (DESIGN
rule 1), with one group being written while the next fills: `write` waits when both are full. The
more large uploads there are, the smaller their groups, so that all together stay bounded.

Chunks without `#` do not exist for anybody: abort removes them in the background, and a start
removes what a crash left. After a failed write the message cannot be committed any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message
from zonerelay.store import records
from zonerelay.store.base import CHUNK_SIZE, StoreError
from zonerelay.store.checks import check_deliveries
from zonerelay.store.leveldb_engine import Op

GROUP_CHUNKS = 8
"""Chunks in one synced batch of a large body: 512 KiB."""
UPLOAD_MEMORY = 64 * 1024 * 1024
"""What all large uploads together may hold in memory before their groups shrink."""


class Spool(Protocol):
    """What a writer needs of its store."""

    uploads: int

    def check_writable(self) -> None:
        """Raises StoreError when no new mail may be stored now."""

    def submit_chunks(self, ops: Sequence[Op], size: int) -> asyncio.Future[None]:
        """Write part of a body, synced."""

    def submit_message(
        self, message: Message, deliveries: Sequence[Delivery], chunks: Sequence[Op], body: bytes | None
    ) -> asyncio.Future[None]:
        """Write the rest of a body and make the message exist. `body` is the whole of it if small."""

    def remove_chunks(self, ops: Sequence[Op]) -> None:
        """Remove chunks in the background."""


class LevelDbWriter:
    """A message that is arriving."""

    __slots__ = (
        "_chunks",
        "_done",
        "_envelope",
        "_filled",
        "_numbered",
        "_parts",
        "_size",
        "_spool",
        "_written",
    )

    def __init__(self, spool: Spool, envelope: Envelope) -> None:
        self._spool = spool
        self._envelope = envelope
        self._size = 0
        self._parts: list[bytes] = []  # less than a chunk
        self._filled = 0  # octets in _parts
        self._chunks: list[Op] = []  # whole chunks, not yet submitted
        self._numbered = 0
        self._written: asyncio.Future[None] | None = None
        self._done = False

    async def write(self, chunk: bytes) -> None:
        if self._done:
            raise StoreError("the message was committed or aborted")
        self._size += len(chunk)
        if self._filled == CHUNK_SIZE:
            self._add_chunk(b"".join(self._parts))
            self._parts, self._filled = [], 0
        if self._filled + len(chunk) <= CHUNK_SIZE:
            self._parts.append(chunk)
            self._filled += len(chunk)
        else:
            self._cut(b"".join((*self._parts, chunk)))
        if len(self._chunks) >= self._group_size():
            await self._store_group()

    def _cut(self, data: bytes) -> None:
        """Take whole chunks off `data`; keep the rest, at least one octet, for later."""
        view, start = memoryview(data), 0
        while len(data) - start > CHUNK_SIZE:
            self._add_chunk(bytes(view[start : start + CHUNK_SIZE]))
            start += CHUNK_SIZE
        self._parts = [data[start:]]
        self._filled = len(data) - start

    def _add_chunk(self, data: bytes) -> None:
        self._numbered += 1
        self._chunks.append((records.chunk_key(self._envelope.id, self._numbered), data))

    def _group_size(self) -> int:
        share = UPLOAD_MEMORY // (2 * CHUNK_SIZE * max(1, self._spool.uploads))
        return max(1, min(GROUP_CHUNKS, share))

    async def _store_group(self) -> None:
        if self._written is None:
            self._spool.uploads += 1
        else:
            await self._previous_group()
        self._spool.check_writable()
        chunks, self._chunks = self._chunks, []
        self._written = self._spool.submit_chunks(chunks, len(chunks) * CHUNK_SIZE)

    async def _previous_group(self) -> None:
        if self._written is not None:
            # A session that is cancelled here must not take the group's outcome with it.
            await asyncio.shield(self._written)

    async def commit(
        self,
        deliveries: Sequence[Delivery],
        *,
        headers: tuple[tuple[str, str], ...] = (),
        eight_bit: bool = False,
        plain_lines: bool = False,
        trace: tuple[str, ...] = (),
    ) -> Message:
        if self._done:
            raise StoreError("the message was committed or aborted")
        check_deliveries(self._envelope.id, deliveries)
        self._spool.check_writable()
        await self._previous_group()
        body = b"".join(self._parts) if self._parts else b""
        if body:
            self._add_chunk(body)
        message = Message(
            envelope=self._envelope,
            size=self._size,
            chunks=self._numbered,
            eight_bit=eight_bit,
            plain_lines=plain_lines,
            headers=headers,
            trace=trace,
        )
        whole = body if self._numbered <= 1 else None
        stored = self._spool.submit_message(message, deliveries, self._chunks, whole)
        # From here the message exists or the spool has failed; leaving does not change that.
        self._finish()
        await stored
        return message

    def _finish(self) -> None:
        self._done = True
        self._parts = []
        self._chunks = []
        if self._written is not None:
            self._spool.uploads -= 1

    async def abort(self) -> None:
        if self._done:
            return
        stored = self._numbered - len(self._chunks)
        self._finish()
        if stored:
            message_id = self._envelope.id
            self._spool.remove_chunks(
                [(records.chunk_key(message_id, number), None) for number in range(1, stored + 1)]
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._done:
            await self.abort()
