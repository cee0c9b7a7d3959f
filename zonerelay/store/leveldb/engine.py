"""LevelDB itself: the only module that knows plyvel. Every call blocks; the store's threads make them.

Promises: a batch is written with `sync=True` or not at all (DESIGN rule 1), and nothing but
StoreError leaves. Every block that is read is checked. What cannot be read back is told to `on_damage`, and
walks step over it, so that it hides nothing behind it. After a failed write the log may end in half a record,
and LevelDB would append behind it, where recovery never looks: acknowledged mail would be lost. So after any
failed write `write` refuses until `reopen` has succeeded. A batch whose sync failed may yet be found complete
by the reopening: it then counts as written (at least once).

A power cut keeps a freshly switched log because ext4, xfs and btrfs make a new file's name
durable with its first fdatasync.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

try:
    import plyvel as plyvel  # noqa: PLC0414  # tests take it from here
except ImportError:  # Python 3.13 and later have its fork, with the same interface
    import plyvel_next as plyvel  # type: ignore[no-redef]

from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.keeper.ballast import FILE_NAME
from zonerelay.store.common.private_directories import make_private, take_from_others
from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, StoreOpenError
from zonerelay.store.leveldb.damage.directory import (
    MARK_NAME,
    REBUILD,
    Judgement,
    Mark,
    Needed,
    drop_leftovers,
    judge,
    last_written,
    lock_directory,
    look_at,
    newest_log,
    write_mark,
)
from zonerelay.store.leveldb.damage.losses import DIRECTORY, Loss, Losses, identity_of
from zonerelay.store.leveldb.damage.mending import Mending

Op = tuple[bytes, bytes | None]
"""A key and its new value; `None` deletes it."""
Batches = Sequence[Sequence[Op]]
Row = tuple[bytes, bytes]
Jump = Callable[[bytes], bytes]

_BLOCK_CACHE = 4 * 1024 * 1024
_FILE_SIZE = 3 * 1024 * 1024
"""With LevelDB's own 2 MB every octet is written 3.0 times, with 3 to 8 MB 2.6, with 32 MB 4.4 times."""
_OPEN_FILES = 74
"""LevelDB's least. Ten are not for tables; the others are mapped, so this and the file size bound what of the
spool is counted as memory of the relay: 192 MB, however large the queue is.
"""
_BLOOM_BITS = 10
_OWN_FILE = re.compile(
    rf"CURRENT|LOCK|LOG(\.old)?|MANIFEST-\d+|\d+\.(log|ldb|sst|dbtmp)|{FILE_NAME}|{MARK_NAME}(\.part)?|{DIRECTORY}"
)
_TRIAL = "trial"

_log = logging.getLogger("zonerelay.store")


class NoRoomToOpenError(StoreOpenError):
    """The disk is full, and LevelDB has to write before it can open the spool."""


class AtomicBatch(Protocol):
    """The puts and deletes of one atomic write (plyvel's WriteBatch, which it does not export)."""

    def write(self) -> None: ...


class View(Protocol):
    """The spool as it was at one moment (plyvel's Snapshot, which it does not export)."""

    def get(self, key: bytes, *, verify_checksums: bool = False) -> bytes | None: ...

    def raw_iterator(
        self, *, verify_checksums: bool = False, fill_cache: bool = True
    ) -> plyvel.RawIterator: ...

    def close(self) -> None: ...


class LevelDb:
    """One open spool directory."""

    def __init__(self, path: Path, *, write_buffer: int) -> None:
        self.path = path
        self.damage = ""
        """The first that was met."""
        self.on_damage: Callable[[str], None] = lambda text: None
        self.on_unreadable: Callable[[str], None] = lambda text: None
        """Called in the thread that meets a block that LevelDB cannot read, or a record without sense."""
        self.losses = Losses(path)
        self._write_buffer = write_buffer
        self._db: plyvel.DB | None = None
        self._lock = -1
        self._mark: Mark | None = None
        self._missing = set[str]()
        self._manifest_size = 0
        self.last_used = 0.0
        """When the run before this one wrote, in Unix seconds: not before the ids that it gave."""
        self._suspect = False
        # A compaction has a thread of its own: the database must not be closed under it.
        self._compacting = threading.Lock()

    # --- opening and closing

    def open(self) -> None:
        """Open or create the spool. Raises StoreOpenError in words, with every file as it was."""
        _make_directory(self.path)
        try:
            if self._lock < 0:
                self._lock = lock_directory(self.path)
            self.last_used = self.last_used or last_written(self.path)
            self._db = self._connect()
        except (plyvel.Error, OSError) as error:
            self.close()
            raise self.open_error(error) from error
        except BaseException:
            self.close()
            raise
        try:
            self._check_format()
            take_from_others(self.path)
        except StoreOpenError:
            self.close()
            raise
        except (StoreError, OSError) as error:
            self.close()
            raise self.open_error(error) from error
        self.note_synced()

    def open_error(self, error: Exception) -> StoreOpenError:
        """The error whose text says what failed at opening and what the operator should do."""
        kind = NoRoomToOpenError if _is_full(error) else StoreOpenError
        return kind(_explain(self.path, error))

    def reopen(self) -> None:
        """Reads the log back up to the last whole batch after a failed write, and starts a new log."""
        self._close()
        with self._translated():
            self._db = self._connect()
        self._suspect = False

    def close(self) -> None:
        """Release everything."""
        was_open = self._db is not None
        self._close()
        if was_open:
            self.note_synced()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _close(self) -> None:
        with self._compacting:
            if self._db is not None:
                self._db.close()
                self._db = None

    def look(self) -> None:
        """Looks at the files that LevelDB reads only at the next opening. The content of a log that has
        vanished is in memory too, and is moved into a table.
        """
        if self._suspect or self._db is None:
            return
        try:
            found = look_at(self.path, self._mark, self._manifest_size)
        except OSError as error:
            found = Needed(self._manifest_size, str(error))
        self._manifest_size = found.manifest
        if found.missing and found.missing not in self._missing:
            self._missing.add(found.missing)
            self.damage = self.damage or found.missing
            self.on_damage(found.missing)
            if found.in_memory:
                self.compact(b"", b"\0")

    def note_synced(self) -> None:
        """Keep what is durable in the mark. Call it while nothing is being written."""
        if self._suspect:
            return
        try:
            mark = Mark(records.FORMAT_VERSION.decode(), *newest_log(self.path))
            if self._mark is not None and (mark.log, mark.size) < (self._mark.log, self._mark.size):
                return  # `look` tells of it
            if mark != self._mark:
                write_mark(self.path, mark)
                self._mark = mark
        except OSError as error:
            _log.warning("the mark of the spool cannot be written, the one before stays good: %s", error)

    def free_space(self) -> int:
        """Octets that this process may still write to the spool's file system."""
        with self._translated():
            usage = os.statvfs(self.path)
        return usage.f_bavail * usage.f_frsize

    def foreign_files(self) -> list[str]:
        """The names in the directory that belong to no file of a database in use. Raises StoreError."""
        with self._translated():
            return sorted(each.name for each in self.path.iterdir() if not _OWN_FILE.fullmatch(each.name))

    def _connect(self) -> plyvel.DB:
        try:
            return self._open_judged()
        except plyvel.Error as error:
            if not _is_full(error) or not drop_leftovers(self.path):
                raise
        return self._open_judged()

    def _open_judged(self) -> plyvel.DB:
        """Opens the database once `judge` has said what LevelDB would change, or drop without a word."""
        self.losses.refresh()
        found = judge(self.path)
        if found.mark is not None:
            _judge_format(self.path, found.mark.format.encode(), is_empty=False)
        elif not found.is_new:
            self._look_at(found)
        self._mark = found.mark
        self._manifest_size = 0
        mending = Mending(self.path, self.losses, found.mark)
        try:
            for log in found.suspects:
                if log.contents.gaps:
                    mending.mend(log)
            db = self._open_mended(mending, is_new=found.is_new)
        except BaseException:
            try:
                mending.undo()
            except OSError as error:
                _log.error("the spool %s could not be left as it was: %s", self.path, error)
            raise
        mending.settle(lambda identity: _is_there(db, records.metadata_key(MessageId(identity))))
        return db

    def _open_mended(self, mending: Mending, *, is_new: bool) -> plyvel.DB:
        try:
            return self._database(self.path, is_new=is_new)
        except plyvel.CorruptionError:
            suspects = judge(self.path, verify=True).suspects
            if not suspects:
                raise
            for log in suspects:
                mending.mend(log)
        return self._database(self.path)

    def _database(self, path: Path, *, is_new: bool = False) -> plyvel.DB:
        # Snappy: 20 % less CPU than none even for bodies that do not shrink (fewer octets to
        # checksum and write when they do). Without paranoid_checks LevelDB drops what is damaged in a log,
        # a compaction gives damaged octets a new checksum, and a damaged index or filter is believed.
        return plyvel.DB(
            str(path),
            create_if_missing=is_new,
            paranoid_checks=True,
            write_buffer_size=self._write_buffer,
            max_file_size=_FILE_SIZE,
            max_open_files=_OPEN_FILES,
            lru_cache_size=_BLOCK_CACHE,
            compression="snappy",
            bloom_filter_bits=_BLOOM_BITS,
        )

    def _look_at(self, found: Judgement) -> None:
        """A database without our mark is that of an older release, or not ours, and opening it would change
        it: it is opened through links. Raises StoreOpenError; other trouble is left to the opening itself.
        """
        trial = self.path / _TRIAL
        shutil.rmtree(trial, ignore_errors=True)
        with contextlib.suppress(plyvel.Error, OSError):
            trial.mkdir(mode=0o700)
            for name in found.files:
                os.link(self.path / name, trial / name)
            db = self._database(trial)
            try:
                with db.raw_iterator() as cursor:
                    cursor.seek(b"")
                    _judge_format(self.path, db.get(records.META_FORMAT), is_empty=not cursor.valid())
            finally:
                db.close()
                shutil.rmtree(trial, ignore_errors=True)
        shutil.rmtree(trial, ignore_errors=True)

    def _check_format(self) -> None:
        mark = self._mark
        try:
            found = self.get(records.META_FORMAT)
        except StoreCorruptError:
            if mark is None:
                raise
            return  # told by now; the mark says what the record would
        if mark is not None and (found is None or not found.isdigit()):
            said = "missing" if found is None else f"unreadable ({_printable(found[:20])})"
            self.losses.tell(
                Loss(
                    id=identity_of(b"format %b" % (found or b"")),
                    what=f"the record of the spool's format version was {said} and was written again; no mail"
                    " is in it, but what took it may have taken more",
                )
            )
            found = None
        else:
            _judge_format(self.path, found, is_empty=next(self.rows(b"", limit=1), None) is None)
        if found is None:
            self.write([[(records.META_FORMAT, records.FORMAT_VERSION)]])

    # --- writing

    def batch(self, batches: Batches) -> AtomicBatch:
        """Everything as one batch to be committed; nothing is written yet."""
        try:
            batch = self._handle().write_batch(sync=True)
            put, delete = batch.put, batch.delete
            for ops in batches:
                for key, value in ops:
                    if value is None:
                        delete(key)
                    else:
                        put(key, value)
        except _FAILURES as error:
            raise self._failure(error) from error
        return batch

    def commit(self, batch: AtomicBatch) -> None:
        """Write the batch atomically and sync it."""
        if self._suspect:
            raise StoreError("the spool failed and is being reopened")
        try:
            batch.write()
        except _FAILURES as error:
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
        """Octets on disk between two keys, about."""
        with self._translated():
            return self._handle().approximate_size(start, stop)

    # --- reading

    def snapshot(self) -> View:
        """A view that later writes do not change. Close it."""
        with self._translated():
            return self._handle().snapshot()

    def get(self, key: bytes, view: View | None = None) -> bytes | None:
        with self._translated():
            return (view or self._handle()).get(key, verify_checksums=True)

    def get_many(self, keys: Sequence[bytes], view: View | None = None) -> list[bytes | None]:
        """The values of keys that are expected to be there. Raises StoreCorruptError if one is damaged."""
        found: list[bytes | None] = []
        for value in self.get_each(keys, view):
            if isinstance(value, StoreCorruptError):
                raise value
            found.append(value)
        return found

    def get_each(
        self, keys: Sequence[bytes], view: View | None = None
    ) -> list[bytes | StoreCorruptError | None]:
        """The values of keys that are expected to be there, by one cursor.

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

    def first_keys(self, start: bytes, stop: bytes, jump: Jump, *, strict: bool = False) -> Iterator[bytes]:
        """Keys from `start` to `stop`; after each, seek to `jump(key)`: walks prefixes, not rows.

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
        """The highest key in the range that can be read."""
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
        except _FAILURES as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> StoreError:
        """The StoreError for an error of plyvel; damage is reported to `on_damage`."""
        text = f"LevelDB: {_words(error)}"
        if _is_damage(error):
            return self._damaged(text)
        if isinstance(error, RuntimeError):
            return StoreError(f"the spool was closed: {error}")
        return StoreFullError(text) if _is_full(error) else StoreError(text)

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
        except _FAILURES as error:
            if self._strict or not _is_damage(error):
                raise
            self.damage = error
            self.is_short = self.is_short or not isinstance(error, plyvel.CorruptionError)


_FAILURES = (plyvel.Error, OSError, RuntimeError)
"""What plyvel raises; RuntimeError means that the database was closed."""


def _by_cursor(source: View | plyvel.DB, keys: Sequence[bytes]) -> list[bytes | StoreCorruptError | None]:
    """The values up to the first key that is missing or cannot be read."""
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


def _is_there(db: plyvel.DB, key: bytes) -> bool:
    try:
        return db.get(key) is not None
    except plyvel.Error:
        return False


def _judge_format(path: Path, found: bytes | None, *, is_empty: bool) -> None:
    if found is None and not is_empty:
        raise StoreOpenError(
            f"{path} holds a LevelDB database that is not a zonerelay spool; choose another [spool] path"
        )
    if found not in (None, records.FORMAT_VERSION):
        raise StoreOpenError(
            f"the spool in {path} has format version {found.decode('ascii', 'replace')};"
            f" this zonerelay reads version {records.FORMAT_VERSION.decode()}:"
            " run the release that wrote it, or drain it there first"
        )


def _is_damage(error: Exception) -> bool:
    """Not for a while, and not for want of anything: a checksum, a disk that cannot read, a missing table."""
    text = _words(error)
    return isinstance(error, plyvel.CorruptionError) or (
        isinstance(error, plyvel.Error)
        and text.endswith((os.strerror(errno.EIO), os.strerror(errno.ENOENT)))
        and ".ldb" in text
    )


def _is_full(error: Exception) -> bool:
    # LevelDB hands the system's words on, nothing else.
    text = _words(error)
    return "No space left" in text or "quota exceeded" in text


def _printable(raw: bytes) -> str:
    return raw.decode("ascii", "backslashreplace")


def _words(error: Exception) -> str:
    """LevelDB's own: plyvel hands on octets."""
    said = error.args[0] if error.args else ""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(error)


def _make_directory(path: Path) -> None:
    try:
        make_private(path)
    except OSError as error:
        raise StoreOpenError(
            f"cannot create the spool directory {path}: {error.strerror}; create it and give it to"
            " the user that zonerelay runs as, or choose another [spool] path"
        ) from error
    if not path.is_dir():
        raise StoreOpenError(f"{path} is not a directory; choose another [spool] path")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise StoreOpenError(
            f"the file system of the spool directory {path} is read-only, perhaps because its disk fails:"
            " look at the kernel's messages; nothing was changed"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreOpenError(
            f"the spool directory {path} cannot be written by this user; give it to the user that"
            " zonerelay runs as, or choose another [spool] path"
        )


def _explain(path: Path, error: Exception) -> str:
    """Says what happened at opening and what the operator should do."""
    text = _words(error)
    if "lock" in text.lower() and ("temporarily unavailable" in text or "already held" in text):
        return f"another zonerelay has this spool open: {path}; stop it or choose another [spool] path"
    if _is_full(error):
        return f"the file system of the spool {path} is full: free some space and start again ({text})"
    if "Permission denied" in text or "Read-only" in text:
        return (
            f"the spool {path} cannot be written: {text}; check its owner, its mode and the mount of its disk"
        )
    if os.strerror(errno.EIO) in text:
        return (
            f"the disk of the spool {path} fails: {text}; nothing was changed. Look at the kernel's messages,"
            " and copy the directory to another disk while it can be read (GNU ddrescue for single files); to"
            " take new mail meanwhile, set another [spool] path"
        )
    return f"the spool {path} is damaged: {text}{REBUILD}"
