"""Reads from the disk queue what memory does not hold: a body, and every delivery as it was at one moment.

A body is read a few chunks at a time from a descriptor that stays open, so a message that an operator drops
meanwhile is read to its end. A walk takes all keys at once and reads states in groups; it keeps what changes
before it gets there, so its memory grows with the changes during the walk, not with the queue's states.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Iterable

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.disk import files
from zonerelay.store.disk.directories import Directories
from zonerelay.store.disk.format import StoredMessage
from zonerelay.store.disk.keeper import DiskKeeper

READ_CHUNKS = 4
"""Chunks read in one go."""
GROUP = 200
"""Deliveries whose files are read in one go."""

_log = logging.getLogger("zonerelay.store")


async def read_chunks(keeper: DiskKeeper, message_id: MessageId) -> AsyncGenerator[bytes, None]:
    """The body in order."""
    descriptor, stored = await keeper.read(_open, message_id)
    try:
        for first in range(0, stored.message.chunks, READ_CHUNKS):
            for chunk in await keeper.reader.run(files.read_chunks, descriptor, stored, first, READ_CHUNKS):
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


class Walk:
    """One walk. `changed` is told of every change while it goes on."""

    def __init__(self, keeper: DiskKeeper, keys: list[DeliveryKey]) -> None:
        self._keeper = keeper
        self._keys = keys
        self._at = 0
        self._before: dict[DeliveryKey, Delivery] = {}

    def changed(self, key: DeliveryKey, old: Delivery | None) -> None:
        """The delivery was `old` until now; only the first change since the start counts."""
        if old is not None and self._at < len(self._keys) and key >= self._keys[self._at]:
            self._before.setdefault(key, old)

    async def deliveries(self) -> AsyncGenerator[Delivery, None]:
        while self._at < len(self._keys):
            group = self._keys[self._at : self._at + GROUP]
            found = await self._read(group)
            for key in group:
                self._at += 1
                delivery = self._before.pop(key, None) or found.get(key)
                if delivery is not None:
                    yield delivery

    async def _read(self, keys: Iterable[DeliveryKey]) -> dict[DeliveryKey, Delivery]:
        ids = dict.fromkeys(key.message_id for key in keys)
        states = await self._keeper.read(files.read_states, list(ids))
        found: dict[DeliveryKey, Delivery] = {}
        for state in states.values():
            if isinstance(state, StoreCorruptError):
                _log.error("left for the operator: %s", state)
            else:
                found |= {delivery.key: delivery for delivery in state}
        return found
