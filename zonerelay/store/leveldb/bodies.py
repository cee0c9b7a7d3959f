"""Reading a body from the LevelDB spool: in groups of chunks, the next group while one is consumed.

At most two groups are in memory per reader. A chunk that is missing while its message exists is
corruption; one that is missing with its message was dropped by an operator.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.contract import MessageNotFoundError, StoreCorruptError
from zonerelay.store.leveldb.engine import LevelDb
from zonerelay.store.leveldb.reader import SpoolReader
from zonerelay.store.leveldb.scan import unreadable

READ_CHUNKS = 4
"""Chunks read in one go."""


async def read_chunks(reader: SpoolReader, message_id: MessageId, chunks: int) -> AsyncGenerator[bytes, None]:
    """The chunks 1 to `chunks` in order."""
    ahead: asyncio.Task[list[bytes]] | None = None
    try:
        for first in range(1, chunks + 1, READ_CHUNKS):
            if ahead is None:
                group = await reader.read(_read_group, message_id, first, chunks)
            else:
                group = await ahead
            following = first + READ_CHUNKS
            ahead = None
            if following <= chunks:
                ahead = asyncio.create_task(reader.read(_read_group, message_id, following, chunks))
            for chunk in group:
                yield chunk
    finally:
        if ahead is not None:
            # Nobody will ask for it; its error, if any, is nobody's either.
            ahead.cancel()
            await asyncio.wait([ahead])


def _read_group(db: LevelDb, message_id: MessageId, first: int, chunks: int) -> list[bytes]:
    numbers = range(first, min(first + READ_CHUNKS, chunks + 1))
    found: list[bytes] = []
    for number, chunk in zip(
        numbers, db.get_many([records.chunk_key(message_id, number) for number in numbers]), strict=True
    ):
        if chunk is None:
            if db.get(records.exists_key(message_id)) is None:
                raise MessageNotFoundError(f"message {message_id} was removed while it was read")
            lost = StoreCorruptError(f"message {message_id}: chunk {number} of {chunks} is missing")
            raise unreadable(db, lost)
        found.append(chunk)
    return found
