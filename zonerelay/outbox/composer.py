"""Composes messages from rows, and keeps recent ones while they are being sent.

The `KEPT` most recently used messages are kept. A small one is composed immediately and kept in memory. A
large one is composed in a thread and kept in an unnamed file. At most one row larger than `_SIDE_BY_SIDE`
bytes is in memory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator
from itertools import takewhile
from typing import TypeAlias

import msgspec

from zonerelay.message.compose import Base64Error, compose_pieces
from zonerelay.message.header import parse_header
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.envelope import Message, MessageId
from zonerelay.outbox.drafts import BadRowError, RowContent, draft_of
from zonerelay.outbox.rows.claims import OutboxReader
from zonerelay.outbox.rows.row import Row
from zonerelay.process.threads import BODIES
from zonerelay.store.contract import CHUNK_SIZE, StoreError

KEPT = 128
"""Each has a chunk (64 KiB) in memory at most, or a file."""
_SIDE_BY_SIDE = 1024 * 1024
_FEW = 4

File: TypeAlias = "tempfile.SpooledTemporaryFile[bytes]"


class ComposedMessage(msgspec.Struct, eq=False):
    """An email message that was composed from an outbox row. A message of one chunk is in `data`, a larger
    one in `file`.
    """

    message: Message
    data: bytes
    file: File | None = None

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the message in chunks."""
        if self.file is None:
            yield self.data
            return
        for start in range(0, self.message.size, CHUNK_SIZE):
            yield await BODIES.run(os.pread, self.file.fileno(), CHUNK_SIZE, start)


class Composer:
    """Composes messages from rows of the outbox. `max_size` is the largest size of a message, in bytes."""

    def __init__(self, reader: OutboxReader, max_size: int) -> None:
        self._reader = reader
        self._max_size = max_size
        self._kept: BoundedDict[MessageId, ComposedMessage] = BoundedDict(KEPT)
        self._few = asyncio.Semaphore(_FEW)
        self._one = asyncio.Lock()

    async def compose(self, row: Row) -> ComposedMessage:
        """Return the message of a row, composed now or kept from before. Raises BadRowError,
        MessageNotFoundError if the row was deleted, or StoreError.
        """
        made = self._kept.get(row.message_id)
        if made is None and row.content is not None:
            made = compose_row(row, row.content, self._max_size)
        elif made is None:
            size = await self._reader.size(row.id)
            async with self._few if size <= _SIDE_BY_SIDE else self._one:
                # Another batch of the message may have composed it meanwhile.
                if (made := self._kept.get(row.message_id)) is None:
                    content = await self._reader.content(row.id)
                    made = await BODIES.run(compose_row, row, content, self._max_size)
        self._kept[row.message_id] = made
        return made

    def forget(self, message_id: MessageId) -> None:
        self._kept.pop(message_id, None)

    def clear(self) -> None:
        self._kept.clear()


def compose_row(row: Row, content: RowContent, max_size: int) -> ComposedMessage:
    """Compose the message of a row from its content columns. Raises BadRowError, or StoreError if there is no
    space for a large message.
    """
    # In memory until the message is large. The last reader closes it.
    file: File = tempfile.SpooledTemporaryFile(CHUNK_SIZE, prefix="zonerelay-outbox-")  # noqa: SIM115
    size, data = 0, b""
    try:
        for piece in compose_pieces(draft_of(row.id, row.created, row.people, content)):
            size += len(piece)
            if size > max_size:
                raise BadRowError(f"the message exceeds max_message_size ({max_size} bytes)")
            file.write(piece)
        file.seek(0)
        header = b"".join(takewhile(lambda line: line != b"\r\n", file))
        if size <= CHUNK_SIZE:
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
