"""Reads and writes a LevelDB database. This is the only module that uses plyvel. Every call blocks.

Promises: a batch is written with `sync=True` or not at all (DESIGN rule 1), and a `Database` raises only
StoreError. The checksum of every block is verified. Unreadable data is reported to `on_damage` and skipped by
scans, so it does not hide the data after it.

After a failed write the log may end with half a record. LevelDB would append after it, where recovery never
reads, and acknowledged mail would be lost. So after any failed write `commit` refuses until the database was
closed and opened again. A batch whose sync failed may be found complete then and counts as written (at least
once). A power cut does not remove a new log, because ext4, xfs and btrfs make a new file's name durable with
its first fdatasync.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

try:
    import plyvel as plyvel  # noqa: PLC0414  # tests take it from here
except ImportError:  # Python 3.12 and later have another fork of plyvel, with the same interface
    import plyvel_next as plyvel  # type: ignore[no-redef]

from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError
from zonerelay.store.keys.port import Op, Row

Batches = Sequence[Sequence[Op]]

_BLOCK_CACHE = 4 * 1024 * 1024
_MB = 1024 * 1024
_FILE_SIZE = 3 * _MB
"""With LevelDB's own 2 MB every byte is written 3.0 times, with 3 to 8 MB 2.6, with 32 MB 4.4 times."""
_TIGHT_FILE_SIZE = _MB
"""LevelDB's minimum. A compaction below level 0 needs up to 25 times the file size."""
_MOST_OVERLAP = 12 * _FILE_SIZE
"""The tables of the next level that usually overlap with one table: the tenfold size, and both edges."""
_OPEN_FILES = 74
"""LevelDB's minimum. All but ten are for tables, which are mapped. So this limit and the file size bound the
spool's part of the relay's memory: 192 MB, however large the queue is.
"""
_BLOOM_BITS = 10

AtomicBatch: TypeAlias = "plyvel.WriteBatch"
"""The puts and deletes of one atomic write."""
View: TypeAlias = "plyvel.Snapshot"
"""A snapshot of the spool."""
Handle: TypeAlias = "plyvel.DB"
"""An open LevelDB database."""
LevelDbError = plyvel.Error
LevelDbCorruptionError = plyvel.CorruptionError


def connect(path: Path, *, write_buffer: int, create: bool = False, is_tight: bool = False) -> Handle:
    """Open a database, or create one. `write_buffer` is in bytes, and `is_tight` means that the disk is
    nearly full. Raises LevelDbError.
    """
    # Snappy takes 20 % less CPU than no compression, even for incompressible bodies, because other data has
    # fewer bytes to checksum and write. Without paranoid_checks LevelDB drops damaged parts of a log, a
    # compaction gives damaged bytes a new checksum, and a damaged index or filter is not detected.
    return plyvel.DB(
        str(path),
        create_if_missing=create,
        paranoid_checks=True,
        write_buffer_size=write_buffer,
        max_file_size=_TIGHT_FILE_SIZE if is_tight else _FILE_SIZE,
        max_open_files=_OPEN_FILES,
        lru_cache_size=_BLOCK_CACHE,
        compression="snappy",
        bloom_filter_bits=_BLOOM_BITS,
    )


_REPAIR = f"""
import sys
try:
    import plyvel
except ImportError:
    import plyvel_next as plyvel
plyvel.repair_db(sys.argv[1], paranoid_checks=True, bloom_filter_bits={_BLOOM_BITS})
"""


def repair_database(path: Path) -> str:
    """Run LevelDB's repair on the tables and logs in a directory, in a separate process because it may abort.
    Return "", or a description of the failure.
    """
    # Without paranoid_checks it keeps damaged bytes, some of them with new checksums.
    ran = subprocess.run([sys.executable, "-c", _REPAIR, path], capture_output=True, check=False)  # noqa: S603 - our own program
    said = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"failed with status {ran.returncode}: {said}" if ran.returncode else ""


def damaged_tables(path: Path) -> list[int]:
    """Return the numbers of the tables in which `repair_database` has found damage, according to its log."""
    log = (path / "LOG").read_bytes()
    return sorted(set(map(int, re.findall(rb"Table #(\d+): \d+ entries (?!OK)", log))))


def peek(path: Path, key: bytes, *, write_buffer: int) -> tuple[bytes | None, bool]:
    """Open a database only to return the value of a key, and whether the database is empty. Raises
    LevelDbError.
    """
    db = connect(path, write_buffer=write_buffer)
    try:
        with db.raw_iterator() as cursor:
            cursor.seek(b"")
            return db.get(key), not cursor.valid()
    finally:
        db.close()


class Database:
    """A LevelDB database in one directory, while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        """The first damage that was found."""
        self.on_damage: Callable[[str], None] = lambda text: None
        self.on_unreadable: Callable[[str], None] = lambda text: None
        """The callback is called in the thread that finds a block that LevelDB cannot read, or an invalid
        record.
        """
        self._db: Handle | None = None
        self._suspect = False
        # A compaction runs in its own thread. The database must not be closed during it.
        self._compacting = threading.Lock()

    def _close(self) -> None:
        with self._compacting:
            if self._db is not None:
                self._db.close()
                self._db = None

    # --- writing

    def batch(self, batches: Batches) -> AtomicBatch:
        """Create one atomic batch of all these operations, for `commit`. Nothing is written yet."""
        try:
            batch = self._handle().write_batch(sync=True)
            put, delete = batch.put, batch.delete
            for ops in batches:
                for key, value in ops:
                    if value is None:
                        delete(key)
                    else:
                        put(key, value)
        except FAILURES as error:
            raise self._failure(error) from error
        return batch

    def commit(self, batch: AtomicBatch) -> None:
        """Write the batch atomically and sync it."""
        if self._suspect:
            raise StoreError("the spool failed and is being reopened")
        try:
            batch.write()
        except FAILURES as error:
            self._suspect = True
            raise self._failure(error) from error

    def write(self, batches: Batches) -> None:
        """Write all operations as one atomic batch and sync it."""
        self.commit(self.batch(batches))

    def compact(self, start: bytes, stop: bytes) -> None:
        """Reclaim the space of removed data between two keys. LevelDB itself only does so during other
        writes.
        """
        with self._compacting, self._translated():
            self._handle().compact_range(start=start, stop=stop)

    def size(self, start: bytes, stop: bytes) -> int:
        """Return the approximate size on disk of the data between two keys, in bytes."""
        with self._translated():
            return self._handle().approximate_size(start, stop)

    # --- reading

    def snapshot(self) -> View:
        """Return a snapshot of the database, which later writes do not change. The caller must close it."""
        with self._translated():
            return self._handle().snapshot()

    def get(self, key: bytes, view: View | None = None) -> bytes | None:
        with self._translated():
            return (view or self._handle()).get(key, verify_checksums=True)

    def get_many(self, keys: Sequence[bytes], view: View | None = None) -> list[bytes | None]:
        """Return the values of keys that are expected to exist, using one cursor. Raises StoreCorruptError if
        one is damaged.

        If a Get reads two files, LevelDB counts it against the first one, and rewrites up to 33 MB after one
        or two hundred of these (seek compaction). Cursors are not counted. But a cursor steps over all
        removed rows after a missing key, and stops being reliable at a damaged row. So from the first missing
        or damaged key on, each key is read with a Get.
        """
        with self._translated():
            found = _by_cursor(view or self._handle(), keys)
        found += [self.get(key, view) for key in keys[len(found) :]]
        if None in found:
            # LevelDB treats a missing table as empty.
            with self._translated():
                missing = self._missing_tables()
            if missing:
                raise self._damaged(f"{missing[0]} is missing")
        return found

    def _missing_tables(self) -> list[str]:
        gone = self._tables() - {path.name for path in self.path.iterdir()}
        # Tables that a compaction has replaced in the meantime are no longer needed.
        return sorted(gone & self._tables()) if gone else []

    def _tables(self) -> set[str]:
        lines = (self._handle().get_property(b"leveldb.sstables") or b"").splitlines()
        return {f"{int(line.partition(b':')[0]):06d}.ldb" for line in lines if line.startswith(b" ")}

    def moved_at_once(self) -> int:
        """Return the number of bytes that a compaction may write before it removes any table. Raises
        StoreError.

        Every table of level 0 has keys from the whole spool, so a compaction reads all of them and all of
        level 1. Half of that is added for data that arrives during the compaction. Below, a compaction
        rewrites one table and those that overlap with it in the next level, which is ten times as large.
        LevelDB begins the same compaction again after each reopening. Without space for it the spool would
        fail for ever.
        """
        with self._translated():
            lines = (self._handle().get_property(b"leveldb.stats") or b"").splitlines()[3:]
        levels = {int(level): int(size) * _MB for level, _, size, *_ in map(bytes.split, lines)}
        upper = (levels.pop(0, 0) + levels.get(1, 0)) * 3 // 2
        overlap = max((levels.get(level + 1, 0) for level in levels), default=0)
        return max(upper, min(overlap, _MOST_OVERLAP) + _FILE_SIZE if overlap else 0)

    def rows(
        self,
        start: bytes,
        stop: bytes | None = None,
        *,
        limit: int,
        values: bool = True,
        view: View | None = None,
    ) -> Iterator[Row]:
        """Yield at most `limit` rows with keys from `start` to before `stop`, in key order, and skip damaged
        rows. Without `values` the values are empty and not copied.
        """
        with self._walk(view) as walk:
            cursor, move = walk.cursor, walk.move
            move(cursor.seek, start)
            while limit > 0 and cursor.valid():
                row = cursor.item() if values else (cursor.key(), b"")
                if stop is not None and row[0] >= stop:
                    return
                if walk.damage is None or (not walk.is_short and self._is_current(cursor.item(), view)):
                    yield row
                    limit -= 1
                move(cursor.next)

    def first_keys(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        """Yield the first key of each group of keys that are equal up to their last space. Raise
        StoreCorruptError if keys may be missing, because callers rely on their absence.
        """
        with self._walk(strict=True) as walk:
            cursor, move = walk.cursor, walk.move
            move(cursor.seek, start)
            while cursor.valid() and (key := cursor.key()) < stop:
                yield key
                move(cursor.seek, key.rpartition(b" ")[0] + b"!")

    def last_key(self, start: bytes, stop: bytes) -> bytes | None:
        """Return the highest readable key from `start` to before `stop`, or None."""
        with self._walk() as walk:
            cursor, move = walk.cursor, walk.move
            move(cursor.seek, stop)
            if cursor.valid():
                move(cursor.prev)
            else:
                move(cursor.seek_to_last)
            key = cursor.key() if cursor.valid() else b""
            return key if key >= start else None

    @contextlib.contextmanager
    def _walk(self, view: View | None = None, *, strict: bool = False) -> Iterator[_SkippingCursor]:
        source = view or self._handle()
        with self._translated(), source.raw_iterator(verify_checksums=True, fill_cache=False) as cursor:
            walk = _SkippingCursor(cursor, strict=strict)
            try:
                yield walk
            finally:
                if walk.damage is not None:
                    self._failure(walk.damage)

    def _is_current(self, row: Row, view: View | None) -> bool:
        """Return whether a row that a scan returned is the current version of its key. After damage a scan
        may return rows that were removed or replaced in the damaged part.
        """
        try:
            return self.get(row[0], view) == row[1]
        except StoreCorruptError:
            return False

    def _handle(self) -> plyvel.DB:
        if self._db is None:
            raise StoreError("the spool is closed")
        return self._db

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Convert the errors of plyvel to StoreError."""
        try:
            yield
        except FAILURES as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        """Return the StoreError for an error of plyvel. Damage is reported to `on_damage`."""
        text = f"LevelDB: {words(error)}"
        if _is_damage(error):
            return self._damaged(text)
        if isinstance(error, RuntimeError):
            return StoreError(f"the spool was closed: {error}")
        return StoreFullError(text) if is_full(error) else StoreError(text)

    def _damaged(self, text: str) -> StoreCorruptError:
        self.damage = self.damage or text
        self.on_damage(text)
        return StoreCorruptError(text)


class _SkippingCursor:
    """A cursor that skips damaged data. LevelDB omits the block or the table and continues after it, but
    reports that only once.
    """

    def __init__(self, cursor: plyvel.RawIterator, *, strict: bool) -> None:
        self.cursor = cursor
        self.damage: Exception | None = None
        self.is_short = False
        """Whether a table is missing. A Get does not notice that either."""
        self._strict = strict

    def move(self, step: Callable[..., None], *to: bytes) -> None:
        try:
            step(*to)
        except FAILURES as error:
            if self._strict or not _is_damage(error):
                raise
            self.damage = error
            self.is_short = self.is_short or not isinstance(error, plyvel.CorruptionError)


FAILURES = (LevelDbError, OSError, RuntimeError)
"""The exceptions of plyvel. RuntimeError means that the database was closed."""


def _by_cursor(source: View | plyvel.DB, keys: Sequence[bytes]) -> list[bytes | None]:
    """Return the values of the keys, up to the first key that is missing or unreadable."""
    found: list[bytes | None] = []
    try:
        with source.raw_iterator(verify_checksums=True) as cursor:
            for key in keys:
                cursor.seek(key)
                if not cursor.valid() or cursor.key() != key:
                    break
                found.append(cursor.value())
    except plyvel.Error as error:
        if not _is_damage(error):
            raise
    return found


def is_there(db: plyvel.DB, key: bytes) -> bool:
    try:
        return db.get(key) is not None
    except plyvel.Error:
        return False


def _is_damage(error: Exception) -> bool:
    """Return whether an error is permanent damage: a wrong checksum, a read error of the disk, or a missing
    table.
    """
    return isinstance(error, plyvel.CorruptionError) or (
        isinstance(error, plyvel.Error)
        and has_words(error, errno.EIO, errno.ENOENT)
        and ".ldb" in words(error)
    )


def is_full(error: Exception) -> bool:
    return has_words(error, errno.ENOSPC, errno.EDQUOT)


def lacks_resources(error: Exception) -> bool:
    """Return whether an error means that file descriptors or memory are used up; the files may be whole."""
    return has_words(error, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_locked(error: Exception) -> bool:
    """Return whether an error means that this or another process has the database open."""
    return has_words(error, errno.EAGAIN) or words(error).endswith("already held by process")


def has_words(error: Exception, *numbers: int) -> bool:
    """Return whether the error text of LevelDB contains the text of one of these system errors. It only
    provides their texts.
    """
    return any(os.strerror(number) in words(error) for number in numbers)


def words(error: Exception) -> str:
    """Return LevelDB's error text, which plyvel provides as bytes."""
    said = error.args[0] if error.args else ""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(error)
