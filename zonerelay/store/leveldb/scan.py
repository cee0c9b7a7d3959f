"""Scans key ranges of the spool. Everything here blocks and runs in the store's reader thread."""

from __future__ import annotations

import itertools
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from zonerelay.model.envelope import first_at, is_message_id
from zonerelay.model.queue_name import QueueName
from zonerelay.store import records
from zonerelay.store.contract import EveryNth, StoreCorruptError, Wanted
from zonerelay.store.keys import port
from zonerelay.store.keys.port import KeyPage, Row, page_of
from zonerelay.store.leveldb.damage.losses import Loss, identity_of
from zonerelay.store.leveldb.engine import View
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.queue.reads import DeliveryPage, QueueReads

T = TypeVar("T")

SAMPLED_ROWS = 20_000
"""The number of rows that one page of a sample steps over."""


def run_through(work: Coroutine[Any, Any, T]) -> T:  # Any: nothing is sent
    """Run a coroutine that never waits, such as one that uses `SpoolKeys`, and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


class SpoolKeys:
    """Reads the keys of an open spool through the partition interface. Every method blocks. Damaged records
    are omitted from pages.
    """

    def __init__(self, db: LevelDb, view: View | None = None) -> None:
        self._db = db
        self._view = view

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return self._db.get_many(keys, self._view)

    async def page(
        self, start: bytes, end: bytes, *, rows: int = port.PAGE_ROWS, values: bool = True
    ) -> KeyPage:
        return page_of(self._db.rows(start, end, limit=rows + 1, values=values, view=self._view), rows)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        return self._db.last_key(start, end)


class SpoolReads(QueueReads):
    """Reads the queue of a spool with few LevelDB operations. Every method blocks."""

    def __init__(self, db: LevelDb, view: View | None = None) -> None:
        super().__init__(SpoolKeys(db, view), lambda text: db.on_unreadable(text))
        self.name = str(db.path)
        self._db = db
        self._view = view

    async def view(self) -> SpoolReads:
        return SpoolReads(self._db, self._db.snapshot())

    def close(self) -> None:
        if self._view is not None:
            self._view.close()

    async def _each(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = self._db.get_each(keys, self._view)
        return [None if isinstance(value, StoreCorruptError) else value for value in found]

    async def _look_up(self, key: bytes) -> bytes | None:
        return self._db.get(key, self._view)

    async def _some(self, start: bytes, end: bytes, most: int) -> tuple[Iterable[Row], None]:
        return self._db.rows(start, end, limit=most, view=self._view), None

    async def _rows(self, start: bytes, end: bytes, limit: int, *, values: bool = True) -> Iterable[Row]:
        return self._db.rows(start, end, limit=limit, values=values, view=self._view)

    async def _chunks(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self.keys.get(keys)  # LevelDb has reported the damage

    async def scan_page(self, start: bytes, end: bytes, wanted: Wanted) -> DeliveryPage:
        if not isinstance(wanted, EveryNth):
            return await super().scan_page(start, end, wanted)
        # One more row than is returned, with which the next page begins.
        limit = max(1, SAMPLED_ROWS // wanted.every) + 1
        rows = list(self._db.sampled(start, end, wanted.gap, limit=limit, view=self._view))
        low = rows.pop()[0] if len(rows) == limit else None
        return DeliveryPage(list(self._decoded(rows)), low, [])

    async def queues(self) -> set[QueueName]:
        start, end = records.WEBHOOK_PREFIX, records.after(records.DELIVERY_PREFIX)
        keys = self._db.first_keys(start, end, lambda key: b"%b %b!" % tuple(key.split(b" ", 2)[:2]))
        return {key.queue for _, key in self._parsed(keys)}

    async def _noted_last_id(self) -> str:
        """Return the stored id. If it is unreadable, derive one from the time of the last run, so that no id
        is used twice.
        """
        db = self._db
        try:
            raw = db.get(records.META_LAST_ID)
        except StoreCorruptError:
            return first_at(db.last_used)
        noted = (raw or b"").decode("ascii", "replace")
        if raw is None or is_message_id(noted):
            return noted
        instead = first_at(db.last_used)
        db.losses.tell(
            Loss(
                id=identity_of(b"last-id %b" % raw),
                what=f"the record of the last message id was unreadable ({noted[:20]!r}), {instead} was"
                " written in its place; no mail is in it, but what took it may have taken more",
            )
        )
        db.write([[(records.META_LAST_ID, instead.encode("ascii"))]])
        return instead

    async def _first_keys(self, start: bytes, end: bytes, most: int) -> list[bytes]:
        """Raise StoreCorruptError if a `#` may be in damaged data."""
        keys = self._db.first_keys(start, end, lambda key: key.rpartition(b" ")[0] + b"!", strict=True)
        return list(itertools.islice(keys, most))

    async def left_over(self) -> str:
        if found := await super().left_over():
            return found
        foreign = self._db.foreign_files()
        if not foreign:
            return ""
        return f"files in {self.name} that do not belong to the database: {', '.join(foreign[:3])}"
