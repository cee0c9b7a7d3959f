"""Gives back the space of many messages that were removed: a big drop, an expiry, a backlog delivered.

LevelDB compacts by itself only where it is written to, so the bodies of a dropped queue would stay on disk,
and its tombstones in the way of every walk. The range is compacted in slices, in a thread of its own, with
pauses: while LevelDB does as it is told it does nothing else, and acceptance would come to a stop when new
tables have piled up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from zonerelay.model.message_id import MessageId
from zonerelay.process.threads import STORE
from zonerelay.store.common import records
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.spool import LevelDb

MANY = 20_000
"""Messages that have to be gone before it is worth while."""
SHARE = 4
"""And one for so many deliveries that are left: those are written anew."""
SLICE = 16 * 1024 * 1024
MOST_SLICES = 64
PAUSE = 0.2
"""Seconds between two slices."""

_log = logging.getLogger("zonerelay.store")


class Compactor:
    """One per open spool. `left` says how many deliveries there are."""

    def __init__(self, db: LevelDb, left: Callable[[], int]) -> None:
        self._thread = ReaderThreads(db, "spool-compactor")
        self._left = left
        self._count = 0
        self.removed: tuple[MessageId, MessageId] | None = None
        """The first and the last of the messages whose space can be had back."""
        self._seen = 0
        self._task: asyncio.Task[None] | None = None

    def note_removed(self, message_id: MessageId) -> None:
        self._count += 1
        first, last = self.removed or (message_id, message_id)
        self.removed = (min(first, message_id), max(last, message_id))

    def look(self) -> None:
        """Asked every second: begins when many are gone and no more are being removed at present."""
        is_quiet = self._count - self._seen < MANY // 10
        self._seen = self._count
        if not is_quiet or self.removed is None or self._count < max(MANY, self._left() // SHARE):
            return
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(*self.removed))
            self._count = self._seen = 0
            self.removed = None

    async def close(self) -> None:
        """Ends after the slice that is being compacted."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await STORE.run(self._thread.stop)

    async def _run(self, first: MessageId, last: MessageId) -> None:
        try:
            size = await self._thread.read(LevelDb.size, *whole(first, last))
            for start, stop in slices(first, last, min(MOST_SLICES, 1 + size // SLICE)):
                await self._thread.read(LevelDb.compact, start, stop)
                await asyncio.sleep(PAUSE)
        except StoreError as error:
            _log.warning("the space of removed messages is not given back yet: %s", error)


def whole(first: MessageId, last: MessageId) -> tuple[bytes, bytes]:
    return records.message_prefix(first), records.after(records.message_prefix(last))


def slices(first: MessageId, last: MessageId, count: int) -> list[tuple[bytes, bytes]]:
    """The keys of messages from the first to the last in parts, then the small records of all."""
    low, high = int(first, 16), int(last, 16)
    step = max(1, -(-(high - low + 1) // count))
    starts = [records.message_prefix(MessageId(f"{number:016x}")) for number in range(low, high + 1, step)]
    stops = [*starts[1:], whole(first, last)[1]]
    others = (records.DELIVERY_PREFIX, records.WEBHOOK_PREFIX, records.DEFERRED_PREFIX, records.DOMAIN_PREFIX)
    return [*zip(starts, stops, strict=True), *((prefix, records.after(prefix)) for prefix in others)]
