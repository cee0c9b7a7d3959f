"""The ordered map with atomic batches that a simulated spool lies on, and what faults do to it.

Policy, as DESIGN 2.1 has it: a synced batch survives everything once its sync has returned. A batch that is
being synced when the power fails is there whole or not at all. A batch that was written without a sync may be
missing afterwards even when later ones are there (LevelDB closes a full log without syncing it). A write may
fail before or after it took effect. `Handle` is what `store/leveldb/engine` needs of plyvel, over the map.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sortedcontainers import SortedDict

from tests.simulation.loop import PROCESS
from zonerelay.store import records
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.keys.group_commit import JobFailure
from zonerelay.store.leveldb import engine
from zonerelay.store.leveldb.damage.losses import Losses
from zonerelay.store.leveldb.engine import Database

Ops = list[tuple[bytes, bytes | None]]
Rows = SortedDict[bytes, bytes]


@dataclass
class Disk:
    """What one spool directory holds. `error` is asked at every write and read: it returns an error or
    `None`; `delay` is asked how long a sync takes.
    """

    random: Random
    live: Rows = field(default_factory=SortedDict)
    durable: Rows = field(default_factory=SortedDict)
    owner: object | None = None
    error: Callable[[str], Exception | None] = lambda what: None
    delay: Callable[[], float] = lambda: 0.002
    _tail: list[tuple[Ops, bool]] = field(default_factory=list)

    def write(self, ops: Ops, *, sync: bool) -> None:
        error = self.error("write")
        if error is None or self.random.random() < 0.5:
            _apply(self.live, ops)
            self._tail.append((ops, sync))
        if error is not None:
            raise error

    def synced(self) -> None:
        """The sync that was under way has returned."""
        for ops, sync in self._tail:
            if sync:
                _apply(self.durable, ops)
        self._tail = [(ops, sync) for ops, sync in self._tail if not sync]

    def recover(self) -> None:
        """Opening: LevelDB reads its log and writes what it found to a synced table, or fails."""
        if (error := self.error("write")) is not None:
            raise error
        self.durable = self.live.copy()
        self._tail = []

    def fall_back(self) -> None:
        """A power cut: what was not synced may be gone. It stays in order, for a log is read to its end."""
        cut = self.random.randint(0, len(self._tail))
        for number, (ops, sync) in enumerate(self._tail):
            if number < cut and (sync or self.random.random() < 0.5):
                _apply(self.durable, ops)
        self._tail = []
        self.live = self.durable.copy()
        self.owner = None


def _apply(where: Rows, ops: Ops) -> None:
    for key, value in ops:
        if value is None:
            where.pop(key, None)
        else:
            where[key] = value


@dataclass
class _Batch:
    disk: Disk
    sync: bool
    ops: Ops = field(default_factory=list)

    def put(self, key: bytes, value: bytes) -> None:
        self.ops.append((bytes(key), bytes(value)))

    def delete(self, key: bytes) -> None:
        self.ops.append((bytes(key), None))

    def write(self) -> None:
        self.disk.write(self.ops, sync=self.sync)


@dataclass
class Handle:
    """Stands where plyvel's DB is, and its snapshot, which is the map as it was."""

    disk: Disk
    old: Rows | None = None

    def rows(self) -> Rows:
        if (error := self.disk.error("read")) is not None:
            raise error
        return self.disk.live if self.old is None else self.old

    def get(self, key: bytes, verify_checksums: bool = False) -> bytes | None:
        return self.rows().get(key)

    @contextlib.contextmanager
    def raw_iterator(self, **kwargs: Any) -> "Iterator[_Cursor]":
        yield _Cursor(self.rows())

    def write_batch(self, sync: bool = False) -> _Batch:
        return _Batch(self.disk, sync)

    def snapshot(self) -> "Handle":
        return Handle(self.disk, self.disk.live.copy())

    def get_property(self, name: bytes) -> bytes:
        return b""

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class _Cursor:
    rows: Rows
    at: int = 0

    def seek(self, key: bytes) -> None:
        self.at = self.rows.bisect_left(key)

    def seek_to_last(self) -> None:
        self.at = len(self.rows) - 1

    def valid(self) -> bool:
        return 0 <= self.at < len(self.rows)

    def key(self) -> bytes:
        return self.rows.peekitem(self.at)[0]

    def value(self) -> bytes:
        return self.rows.peekitem(self.at)[1]

    def item(self) -> tuple[bytes, bytes]:
        return self.rows.peekitem(self.at)

    def next(self) -> None:
        self.at += 1

    def prev(self) -> None:
        self.at -= 1


class SimLevelDb(Database):
    """Stands where `store.leveldb.spool.LevelDb` is: opening a directory of files is not simulated."""

    last_used = 0.0

    def __init__(self, path: Any, *, write_buffer: int) -> None:
        super().__init__(path)
        self.losses = Losses(path)
        process = PROCESS.get()
        assert process is not None
        self.disk = process.disk

    def open(self) -> None:
        if self.disk.owner is not None:
            raise StoreOpenError("another process has the spool open")
        self.disk.owner = self
        self.reopen()
        if self.get(records.META_FORMAT) is None:
            self.write([[(records.META_FORMAT, records.FORMAT_VERSION)]])
            self.disk.synced()

    def open_error(self, error: Exception) -> StoreOpenError:
        return StoreOpenError(str(error))

    def reopen(self, *, full: bool = False) -> None:
        self._close()
        with self._translated():
            self.disk.recover()
        self._db = Handle(self.disk)  # type: ignore[assignment]
        self._suspect = False

    def close(self) -> None:
        self._close()
        self.disk.owner = None

    def look(self) -> None:
        """There are no files to look at."""

    note_synced = look

    def free_space(self) -> int:
        return 1 << 40

    def foreign_files(self) -> list[str]:
        return []

    def _missing_tables(self) -> list[str]:
        return []


class SimWriter:
    """Stands where `WriterThread` is: between a write and the news of it lies the time of a sync."""

    def __init__(self, name: str, work: Callable[[Any], Any], report: Callable[[Any], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._report = report
        self._keeper: Any = work.__self__  # type: ignore[attr-defined]

    def put(self, job: Any) -> None:
        self._loop.call_later(0.0001, self._do, job)

    def _do(self, job: Any) -> None:
        try:
            result = self._work(job)
        except BaseException as error:
            result = JobFailure(error)
        self._loop.call_later(self._keeper._db.disk.delay(), self._ended, result)

    def _ended(self, result: Any) -> None:
        if not isinstance(result, JobFailure):
            self._keeper._db.disk.synced()
        self._report(result)

    def stop(self) -> None:
        """No thread runs."""


def failure(text: bytes) -> Exception:
    return engine.plyvel.IOError(b"IO error: 000005.log: " + text)
