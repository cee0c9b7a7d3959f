"""Keeps keys in a LevelDB database: one partition, one directory, one process.

The lock of the directory is the fence and the lease in one: another process cannot open it. Opening, judging
and mending of the directory, damaged blocks, and what is durable when, are those of `store/leveldb`. Epoch,
mark and position are in three keys that begin with NUL, so that a batch whose sync failed is recognised once
the database was opened again.

On a full disk the room that was kept back (`reserve`) is given up, and the next `enter` opens the database
again. What is damaged is reported to `on_damage`, is an error for `get`, and is passed over by `page`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zonerelay.process.threads import STORE
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.common.keeper.reader_threads import ReaderThreads
from zonerelay.store.common.write.group_commit import Failed, WriterThread
from zonerelay.store.common.write.replies import refuse
from zonerelay.store.contract import StoreFullError
from zonerelay.store.keys.port import (
    NOTHING,
    PAGE_OCTETS,
    PAGE_ROWS,
    Batch,
    FencedError,
    KeyPage,
    KeyRange,
    Peer,
    Position,
    Row,
    State,
    page_of,
)
from zonerelay.store.leveldb.engine import AtomicBatch, Op
from zonerelay.store.leveldb.spool import LevelDb

MARK, EPOCH, POSITION = b"\0mark", b"\0epoch", b"\0position"
LARGE_BATCH = 256 * 1024
"""Bytes from which a batch is put together in the writer thread. plyvel releases the interpreter at each
record, so small batches are put together on the event loop.
"""


class _Job(NamedTuple):
    batch: AtomicBatch | None
    made_of: Batch
    done: asyncio.Future[None]


class LevelDbEngine:
    """The database in `directory`. `reserve` is how many bytes are kept back for a full disk."""

    lease = 0.0

    def __init__(
        self,
        directory: Path,
        *,
        write_buffer: int = 4 * 1024 * 1024,
        reserve: int = 0,
        on_damage: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.directory = directory
        self.write_buffer = write_buffer
        self.reserve = reserve
        self.on_damage = on_damage

    def keeper(self, node: int) -> LevelDbKeys:
        return LevelDbKeys(self)

    async def peers(self) -> list[Peer]:
        return []

    async def close(self) -> None:
        """Nothing is open here."""


class LevelDbKeys:
    """The one partition. `db` is the database with its losses and damage."""

    def __init__(self, engine: LevelDbEngine) -> None:
        self.db = LevelDb(engine.directory, write_buffer=engine.write_buffer)
        self.db.on_damage = engine.on_damage
        self._engine = engine
        self._ballast: Ballast | None = None
        self._threads = ReaderThreads(self.db, "keys-reader")
        self._writer: WriterThread[_Job, _Job] = WriterThread("keys-writer", self._write, self._written)
        self._writing: _Job | None = None
        self._epoch = 0
        self._is_open = False
        self._is_suspect = self._was_full = False

    # --- reading

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._threads.read(LevelDb.get_many, keys)

    async def page(
        self,
        start: bytes,
        end: bytes,
        *,
        rows: int = PAGE_ROWS,
        octets: int = PAGE_OCTETS,
        values: bool = True,
    ) -> KeyPage:
        return await self._threads.read(_page, KeyRange(start, end), rows, octets, values)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        return await self._threads.read(LevelDb.last_key, start, end)

    # --- entering

    async def look(self) -> State | None:
        if not self._is_open and not await STORE.run((self._engine.directory / "CURRENT").exists):
            return None
        return await self._threads.read(self._look)

    async def enter(self, writer: str, *, mark: str) -> State:
        return await self._threads.read(self._enter, writer, mark)

    def _open(self, db: LevelDb) -> None:
        if not self._is_open:
            db.open()
            self._is_open = True
            self._ballast = Ballast(db.path, self._engine.reserve)
        elif self._is_suspect:
            if self._was_full and self._ballast is not None:
                self._ballast.drop()
            db.reopen(full=self._was_full)
            self._is_suspect = False

    def _look(self, db: LevelDb) -> State | None:
        self._open(db)
        mark = db.get(MARK)
        if mark is None:
            return None
        epoch, _, writer = (db.get(EPOCH) or b"0 ").decode().partition(" ")
        numbers = (db.get(POSITION) or b"0 0").split()
        return State(mark.decode(), int(epoch), writer, Position(*map(int, numbers)))

    def _enter(self, db: LevelDb, writer: str, mark: str) -> State:
        before = self._look(db) or State(mark, 0, "", NOTHING)
        state = State(before.mark, before.epoch + 1, writer, before.last)
        db.write([[(MARK, state.mark.encode()), (EPOCH, b"%d %b" % (state.epoch, writer.encode()))]])
        self._epoch = state.epoch
        if self._ballast is not None and not self._was_full:
            self._ballast.make()
        return state

    # --- writing

    async def apply(self, batch: Batch) -> None:
        if batch.position.epoch != self._epoch:
            raise FencedError(f"the spool has epoch {self._epoch}, the writer {batch.position.epoch}")
        write = batch.write
        is_small = not write.ranges and batch.size < LARGE_BATCH
        atomic = self.db.batch([_ops(batch)]) if is_small else None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing = _Job(atomic, batch, done)
        self._writer.put(self._writing)
        await done

    def _write(self, job: _Job) -> _Job:
        """In the writer thread."""
        db = self.db
        if job.batch is not None:
            db.commit(job.batch)
        else:
            gone: Iterator[Op] = (
                (key, None)
                for start, end in job.made_of.write.ranges
                for key, _ in db.rows(start, end, limit=2**62)
            )
            db.commit(db.batch([gone, _ops(job.made_of)]))  # type: ignore[list-item]  # iterables do as well
        return job

    def _written(self, result: _Job | Failed) -> None:
        job, self._writing = self._writing, None
        assert job is not None
        if not isinstance(result, Failed):
            if not job.done.done():
                job.done.set_result(None)
            return
        self._is_suspect = True
        self._was_full = isinstance(result.error, StoreFullError)
        refuse(job.done, result.error)

    async def renew(self) -> None:
        """The directory's lock does not end."""

    async def leave(self) -> None:
        """The lock ends with `close`."""

    async def room(self) -> int | None:
        free = await self._threads.read(LevelDb.free_space)
        return free + (self._ballast.held if self._ballast is not None else 0)

    async def compact(self, start: bytes, end: bytes) -> None:
        """Give back the space of what was removed between two keys."""
        await self._threads.read(LevelDb.compact, start, end)

    async def close(self) -> None:
        await STORE.run(self._writer.stop)
        await STORE.run(self._threads.stop)
        await STORE.run(self.db.close)


def _ops(batch: Batch) -> list[Op]:
    return [*batch.write.changes.items(), (POSITION, b"%d %d" % batch.position)]


def _page(db: LevelDb, wanted: KeyRange, rows: int, octets: int, values: bool) -> KeyPage:
    found: list[Row] = []
    for key, value in db.rows(*wanted, limit=rows + 1):
        if len(found) == rows or octets <= 0:
            return page_of(found, is_last=False)
        found.append((key, value if values else b""))
        octets -= len(key) + len(found[-1][1])
    return page_of(found, is_last=True)
