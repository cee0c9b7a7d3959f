"""Reading a body from the disk queue: a few chunks at a time, from a descriptor that stays open.

A message that an operator drops meanwhile is read to its end all the same.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator

from zonerelay.model.message_id import MessageId
from zonerelay.store.disk import files
from zonerelay.store.disk.directories import Directories
from zonerelay.store.disk.format import StoredMessage
from zonerelay.store.disk.keeper import DiskKeeper

READ_CHUNKS = 4
"""Chunks read in one go."""


async def read_chunks(keeper: DiskKeeper, message_id: MessageId) -> AsyncGenerator[bytes, None]:
    """The body in order."""
    descriptor, stored = await keeper.read(_open, message_id)
    try:
        for first in range(0, stored.message.chunks, READ_CHUNKS):
            for chunk in await keeper.read(_read, descriptor, stored, first):
                yield chunk
    finally:
        # Closing is quick unless it frees a large file that was removed; the loop cannot wait for
        # a thread here, because the reader may be leaving with its own task cancelled.
        os.close(descriptor)


def _open(directories: Directories, message_id: MessageId) -> tuple[int, StoredMessage]:
    descriptor = files.open_body(directories, message_id)
    try:
        return descriptor, files.read_tail(descriptor, message_id)
    except BaseException:
        os.close(descriptor)
        raise


def _read(_directories: Directories, descriptor: int, stored: StoredMessage, first: int) -> list[bytes]:
    return files.read_chunks(descriptor, stored, first, READ_CHUNKS)
