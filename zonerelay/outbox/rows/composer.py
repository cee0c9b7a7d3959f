"""Composes messages from rows and keeps them while they are being sent.

A small message is composed immediately and kept in memory; the least recently used one is dropped first. A
large one is composed in a thread and kept in an unnamed file. A row is read only after `room` has granted it
memory: at most one row larger than `_SIDE_BY_SIDE` bytes is in memory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from itertools import takewhile
from typing import TypeAlias

import msgspec

from zonerelay.message.compose.compose import compose_pieces
from zonerelay.message.compose.mime import Base64Error
from zonerelay.message.header.headers import parse_header
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.outbox.database.sql import INLINE
from zonerelay.outbox.drafts import BadRowError, RowContent, draft_of
from zonerelay.outbox.rows.row import Row
from zonerelay.process.threads import BODIES
from zonerelay.store.contract import CHUNK_SIZE, StoreError

MEMORY = 8 * 1024 * 1024
FILES = 64
_LARGE = 4 * INLINE
_SIDE_BY_SIDE = 1024 * 1024
_FEW = 4

File: TypeAlias = "tempfile.SpooledTemporaryFile[bytes]"


class ComposedMessage(msgspec.Struct, eq=False):
    """A message composed from a row. A small one is in `data`, a large one in `file`."""

    message: Message
    data: bytes
    file: File | None = None


class Composer:
    """Composes messages from rows of the outbox. `max_size` is the largest size of a message, in bytes."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._kept: OrderedDict[MessageId, ComposedMessage] = OrderedDict()
        self._octets = 0
        self._files = 0
        self._few = asyncio.Semaphore(_FEW)
        self._one = asyncio.Lock()

    def room(self, size: int) -> AbstractAsyncContextManager[None]:
        """Return a lock for a row of `size` bytes. Hold it while the row is read and composed."""
        return self._few if size <= _SIDE_BY_SIDE else self._one

    def known(self, message_id: MessageId) -> ComposedMessage | None:
        found = self._kept.get(message_id)
        if found is not None:
            self._kept.move_to_end(message_id)
        return found

    async def make(self, row: Row, content: RowContent) -> ComposedMessage:
        """Compose the message of a row. Raises BadRowError, or StoreError if there is no space for a large
        one.
        """
        if _length(content) <= INLINE:
            made = self._compose(row, content)
        else:
            made = await BODIES.run(self._compose, row, content)
        self._keep(row.message_id, made)
        return made

    def forget(self, message_id: MessageId) -> None:
        made = self._kept.pop(message_id, None)
        if made is not None:
            self._octets -= len(made.data)
            self._files -= made.file is not None

    def clear(self) -> None:
        self._kept.clear()
        self._octets = self._files = 0

    def _keep(self, message_id: MessageId, made: ComposedMessage) -> None:
        self.forget(message_id)
        self._kept[message_id] = made
        self._octets += len(made.data)
        self._files += made.file is not None
        while self._octets > MEMORY or self._files > FILES:
            self.forget(next(iter(self._kept)))

    def _compose(self, row: Row, content: RowContent) -> ComposedMessage:
        # In memory until the message is large. The last reader closes it.
        file: File = tempfile.SpooledTemporaryFile(_LARGE, prefix="zonerelay-outbox-")  # noqa: SIM115
        size, data = 0, b""
        try:
            for piece in compose_pieces(draft_of(row.id, row.created, row.people, content)):
                size += len(piece)
                if size > self._max_size:
                    raise BadRowError(f"the message exceeds max_message_size ({self._max_size} bytes)")
                file.write(piece)
            file.seek(0)
            header = b"".join(takewhile(lambda line: line != b"\r\n", file))
            if size <= _LARGE:
                file.seek(0)
                data = file.read()
                file.close()
        except (Base64Error, BadRowError) as error:
            file.close()
            raise BadRowError(str(error)) from None
        except OSError as error:
            file.close()
            raise StoreError(
                f"a large message of the outbox cannot be written to a file: {error.strerror}"
            ) from error
        message = Message(
            envelope=row.envelope(),
            size=size,
            chunks=-(-size // CHUNK_SIZE),
            headers=parse_header(header).fields,
            trace=("protocol=outbox", f"row={row.id}"),
        )
        return ComposedMessage(message, data, None if data else file)


async def read(made: ComposedMessage) -> AsyncIterator[bytes]:
    if made.file is None:
        for start in range(0, len(made.data), CHUNK_SIZE):
            yield made.data[start : start + CHUNK_SIZE]
        return
    for start in range(0, made.message.size, CHUNK_SIZE):
        yield await BODIES.run(os.pread, made.file.fileno(), CHUNK_SIZE, start)


def _length(content: RowContent) -> int:
    texts = (content.text, content.html, content.headers, content.attachments, content.subject)
    return sum(len(text) for text in texts if text)
