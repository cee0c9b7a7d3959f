"""Reads and writes a LevelDB database. This is the only module that knows plyvel. Every call blocks.

Promises: a batch is written with `sync=True` or not at all (DESIGN rule 1), and nothing but
StoreError leaves a `Database`. Every block that is read is checked. What cannot be read back is reported to
`on_damage`, and walks step over it, so that it hides nothing behind it.

After a failed write the log may end in half a record, and LevelDB would append behind it, where recovery
never looks: acknowledged mail would be lost. So after any failed write `commit` refuses until the database
was closed and opened again. A batch whose sync failed may yet be found complete then: it counts as written
(at least once). A power cut keeps a freshly switched log because ext4, xfs and btrfs make a new file's name
durable with its first fdatasync.
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
except ImportError:  # Python 3.13 and later have its fork, with the same interface
    import plyvel_next as plyvel  # type: ignore[no-redef]

from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError

Op = tuple[bytes, bytes | None]
"""A key and its new value; `None` deletes it."""
Batches = Sequence[Sequence[Op]]
Row = tuple[bytes, bytes]
Jump = Callable[[bytes], bytes]

_BLOCK_CACHE = 4 * 1024 * 1024
_FILE_SIZE = 3 * 1024 * 1024
"""With LevelDB's own 2 MB every octet is written 3.0 times, with 3 to 8 MB 2.6, with 32 MB 4.4 times."""
_TIGHT_FILE_SIZE = 1024 * 1024
"""LevelDB's least. A compaction below level 0 takes up to 25 times the file size."""
_OPEN_FILES = 74
"""LevelDB's least. Ten are not for tables; the others are mapped, so this and the file size bound what of the
spool is counted as memory of the relay: 192 MB, however large the queue is.
"""
_BLOOM_BITS = 10

AtomicBatch: TypeAlias = "plyvel.WriteBatch"
"""The puts and deletes of one atomic write."""
View: TypeAlias = "plyvel.Snapshot"
"""The spool as it was at one moment."""
Handle: TypeAlias = "plyvel.DB"
"""An open database of LevelDB."""
LevelDbError = plyvel.Error
LevelDbCorruptionError = plyvel.CorruptionError


def connect(path: Path, *, write_buffer: int, create: bool = False, is_tight: bool = False) -> Handle:
    """Opens a database, or makes one. `write_buffer` is in bytes; `is_tight`: the disk is nearly full.
    Raises LevelDbError.
    """
    # Snappy: 20 % less CPU than none even for bodies that do not shrink (fewer octets to
    # checksum and write when they do). Without paranoid_checks LevelDB drops what is damaged in a log,
    # a compaction gives damaged octets a new checksum, and a damaged index or filter is believed.
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
    """Let LevelDB make a database of the tables and logs in a directory, in a process of its own, for it may
    abort. Returns "", or in words how it failed.
    """
    # Without paranoid_checks it keeps damaged octets, in part under new checksums.
    ran = subprocess.run([sys.executable, "-c", _REPAIR, path], capture_output=True, check=False)  # noqa: S603 - our own program
    said = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"ended with {ran.returncode}: {said}" if ran.returncode else ""


def damaged_tables(path: Path) -> list[int]:
    """Return the numbers of the tables in which `repair_database` has just met damage, as its log says."""
    log = (path / "LOG").read_bytes()
    return sorted(set(map(int, re.findall(rb"Table #(\d+): \d+ entries (?!OK)", log))))


def peek(path: Path, key: bytes, *, write_buffer: int) -> tuple[bytes | None, bool]:
    """Opens a database for a moment. Returns the value of a key, and whether there is nothing at all in the
    database. Raises LevelDbError.
    """
    db = connect(path, write_buffer=write_buffer)
    try:
        with db.raw_iterator() as cursor:
            cursor.seek(b"")
            return db.get(key), not cursor.valid()
    finally:
        db.close()


class Database:
    """Reads and writes of one directory's database, while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage = ""
        """The first that was met."""
        self.on_damage: Callable[[str], None] = lambda text: None
        self.on_unreadable: Callable[[str], None] = lambda text: None
        """Called in the thread that meets a block that LevelDB cannot read, or a record without sense."""
        self._db: Handle | None = None
        self._suspect = False
        # A compaction has a thread of its own: the database must not be closed under it.
        self._compacting = threading.Lock()

    def _close(self) -> None:
        with self._compacting:
            if self._db is not None:
                self._db.close()
                self._db = None

    # --- writing

    def batch(self, batches: Batches) -> AtomicBatch:
        """Return everything as one batch to be committed; nothing is written yet."""
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
        """Write everything as one atomic batch and sync it."""
        self.commit(self.batch(batches))

    def compact(self, start: bytes, stop: bytes) -> None:
        """Give back the space of what was removed between two keys; LevelDB does so only as others write."""
        with self._compacting, self._translated():
            self._handle().compact_range(start=start, stop=stop)

    def size(self, start: bytes, stop: bytes) -> int:
        """Return bytes on disk between two keys, about."""
        with self._translated():
            return self._handle().approximate_size(start, stop)

    # --- reading

    def snapshot(self) -> View:
        """Return a view that later writes do not change. Close it."""
        with self._translated():
            return self._handle().snapshot()

    def get(self, key: bytes, view: View | None = None) -> bytes | None:
        with self._translated():
            return (view or self._handle()).get(key, verify_checksums=True)

    def get_many(self, keys: Sequence[bytes], view: View | None = None) -> list[bytes | None]:
        """Return the values of keys that are expected to be there. Raises StoreCorruptError if one is
        damaged.
        """
        found: list[bytes | None] = []
        for value in self.get_each(keys, view):
            if isinstance(value, StoreCorruptError):
                raise value
            found.append(value)
        return found

    def get_each(
        self, keys: Sequence[bytes], view: View | None = None
    ) -> list[bytes | StoreCorruptError | None]:
        """Return the values of keys that are expected to be there, by one cursor.

        LevelDB counts each Get that looks into two files against the first of them, and rewrites up to 33 MB
        for a hundred or two of those (seek compaction). A cursor is not counted. But it walks over all
        that was removed behind a missing key, and what is damaged beside a key spoils it: from the first
        such key on, each is asked for alone.
        """
        with self._translated():
            found = _by_cursor(view or self._handle(), keys)
        for key in keys[len(found) :]:
            try:
                found.append(self.get(key, view))
            except StoreCorruptError as error:
                found.append(error)
        if None in found:
            # To LevelDB a table that is not there held nothing.
            with self._translated():
                missing = self._missing_tables()
            if missing:
                lost = self._damaged(f"{missing[0]} is missing")
                found = [lost if value is None else value for value in found]
        return found

    def _missing_tables(self) -> list[str]:
        gone = self._tables() - {path.name for path in self.path.iterdir()}
        # Those that a compaction has replaced meanwhile are no longer asked for.
        return sorted(gone & self._tables()) if gone else []

    def _tables(self) -> set[str]:
        lines = (self._handle().get_property(b"leveldb.sstables") or b"").splitlines()
        return {f"{int(line.partition(b':')[0]):06d}.ldb" for line in lines if line.startswith(b" ")}

    def moved_at_once(self) -> int:
        """Return bytes that a compaction may write before it removes any table. Raises StoreError.

        Every table of level 0 has keys from all over the spool, so a compaction takes all of them, and all of
        level 1. Half as much again is for what comes meanwhile.
        """
        with self._translated():
            lines = (self._handle().get_property(b"leveldb.stats") or b"").splitlines()[3:5]
        megabytes = {int(level): int(size) for level, _, size, *_ in map(bytes.split, lines)}
        return (megabytes.get(0, 0) + megabytes.get(1, 0)) * 3 * 1024 * 1024 // 2

    def rows(
        self, start: bytes, stop: bytes | None = None, *, limit: int, view: View | None = None
    ) -> Iterator[Row]:
        """At most `limit` rows from `start` up to and without `stop`, in key order; none that is damaged."""
        with self._walk(view) as walk:
            cursor, move = walk.cursor, walk.move
            move(cursor.seek, start)
            while limit > 0 and cursor.valid():
                row = cursor.item()
                if stop is not None and row[0] >= stop:
                    return
                if walk.damage is None or (not walk.is_short and self._is_current(row, view)):
                    yield row
                    limit -= 1
                move(cursor.next)

    def sampled(
        self, start: bytes, stop: bytes, gap: Callable[[], int], *, limit: int, view: View
    ) -> Iterator[Row]:
        """Yield the first row from `start` on, and each time the one `gap()` rows behind it, at
        most `limit`.
        """
        with self._walk(view) as walk:
            cursor, move = walk.cursor, walk.move
            valid, following = cursor.valid, cursor.next
            move(cursor.seek, start)
            for _ in range(limit):
                if not valid() or (row := cursor.item())[0] >= stop:
                    return
                yield row
                for _ in range(gap()):
                    if not valid():
                        return
                    move(following)

    def first_keys(self, start: bytes, stop: bytes, jump: Jump, *, strict: bool = False) -> Iterator[bytes]:
        """Yield keys from `start` to `stop`; after each, seek to `jump(key)`: walks prefixes, not rows.

        `strict` raises StoreCorruptError where keys may be missing, for conclusions from what is not there.
        """
        with self._walk(strict=strict) as walk:
            cursor, move = walk.cursor, walk.move
            move(cursor.seek, start)
            while cursor.valid():
                key = cursor.key()
                if key >= stop:
                    return
                yield key
                move(cursor.seek, jump(key))

    def last_key(self, start: bytes, stop: bytes) -> bytes | None:
        """Return the highest key in the range that can be read."""
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
    def _walk(self, view: View | None = None, *, strict: bool = False) -> Iterator[_Walk]:
        source = view or self._handle()
        with self._translated(), source.raw_iterator(verify_checksums=True, fill_cache=False) as cursor:
            walk = _Walk(cursor, strict=strict)
            try:
                yield walk
            finally:
                if walk.damage is not None:
                    self._failure(walk.damage)

    def _is_current(self, row: Row, view: View | None) -> bool:
        """Behind damage a walk may show what was removed, or replaced, by what is damaged."""
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
        """Plyvel's errors as ours."""
        try:
            yield
        except FAILURES as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        """Return the StoreError for an error of plyvel; damage is reported to `on_damage`."""
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


class _Walk:
    """A cursor that steps over what is damaged: LevelDB leaves out the block, or the table, and goes on
    behind it, but never says again that it did.
    """

    def __init__(self, cursor: plyvel.RawIterator, *, strict: bool) -> None:
        self.cursor = cursor
        self.damage: Exception | None = None
        self.is_short = False
        """A table is missing, of which a Get knows nothing either."""
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
"""What plyvel raises; RuntimeError means that the database was closed."""


def _by_cursor(source: View | plyvel.DB, keys: Sequence[bytes]) -> list[bytes | StoreCorruptError | None]:
    """Return the values up to the first key that is missing or cannot be read."""
    found: list[bytes | StoreCorruptError | None] = []
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
    """Not for a while, and not for want of anything: a checksum, a disk that cannot read, a missing table."""
    return isinstance(error, plyvel.CorruptionError) or (
        isinstance(error, plyvel.Error)
        and has_words(error, errno.EIO, errno.ENOENT)
        and ".ldb" in words(error)
    )


def is_full(error: Exception) -> bool:
    return has_words(error, errno.ENOSPC, errno.EDQUOT)


def is_locked(error: Exception) -> bool:
    """Return whether another process, or this one, has the database open."""
    return has_words(error, errno.EAGAIN) or words(error).endswith("already held by process")


def has_words(error: Exception, *numbers: int) -> bool:
    """Return whether LevelDB failed with one of these errors of the system: it hands on their words alone."""
    return any(os.strerror(number) in words(error) for number in numbers)


def words(error: Exception) -> str:
    """LevelDB's own: plyvel hands on bytes."""
    said = error.args[0] if error.args else ""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(error)
