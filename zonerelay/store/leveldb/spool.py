"""Opens, checks and closes the directory of a LevelDB spool, and reads the queue in it (`SpoolReads`).

An opening that fails changes nothing. `damage.directory` checks the files before LevelDB uses them,
`DatabaseRepair` repairs logs with gaps, and the mark `synced` records how far the newest log was durable.
Every method blocks. Raises only StoreError.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from zonerelay import durable
from zonerelay.config.units import rough_size
from zonerelay.model.envelope import MessageId, first_at, is_message_id
from zonerelay.store import contract, records
from zonerelay.store.contract import StoreCorruptError, StoreOpenError
from zonerelay.store.directories import FILE_NAME, lacks_inodes, make_configured, take_from_others
from zonerelay.store.keys import port
from zonerelay.store.keys.port import KeyPage, Row, get_each, page_of
from zonerelay.store.leveldb import engine
from zonerelay.store.leveldb.damage import directory as files
from zonerelay.store.leveldb.damage.format import identities_in, write_log
from zonerelay.store.leveldb.damage.losses import DIRECTORY, MAX_NAMED, Loss, Losses, identity_of
from zonerelay.store.queue.reads import QueueReads

T = TypeVar("T")

_OTHER_FILES = frozenset({"LOCK", "LOG", "LOG.old", FILE_NAME, DIRECTORY})
"""Files of a spool that contain no mail."""
_TRIAL = "trial"

_log = logging.getLogger("zonerelay.store")


class OutOfSpaceError(StoreOpenError, contract.StoreFullError):
    """The disk is full, but LevelDB must write before it can open the spool."""


class LevelDb(engine.Database):
    """A LevelDB database in a spool directory, with its lock and its loss reports."""

    def __init__(self, path: Path, *, write_buffer: int) -> None:
        super().__init__(path)
        self.losses = Losses(path)
        self._write_buffer = write_buffer
        self._is_tight = False
        self._lock = -1
        self._mark: files.SyncMark | None = None
        self._missing = set[str]()
        self._manifest_size = 0
        self.last_used = 0.0
        """The Unix time of the previous run's last write. It is not earlier than that run's message ids."""

    # --- opening and closing

    def open(self) -> None:
        """Open or create the spool. Raises StoreOpenError with a message, in which case every file is
        unchanged.
        """
        _make_directory(self.path)
        try:
            if self._lock < 0:
                self._lock = files.lock_directory(self.path)
            self.last_used = self.last_used or files.last_written(self.path)
            self._db = self._connect()
            self._check_format()
            take_from_others(self.path)
        except BaseException as error:
            self._release()  # a mark would make a foreign database a spool
            if isinstance(error, StoreOpenError) or not isinstance(
                error, (*engine.FAILURES, contract.StoreError)
            ):
                raise
            raise self.open_error(error) from error
        self.note_synced()

    def open_error(self, error: Exception) -> StoreOpenError:
        """Return an error whose text describes what failed at opening and advises the operator."""
        path, text = self.path, engine.words(error)
        if engine.is_locked(error):
            return StoreOpenError(
                f"another zonerelay has opened {path}; stop it or choose another [spool] path"
            )
        if engine.is_full(error) and lacks_inodes(path):
            return OutOfSpaceError(
                f"the file system of the spool {path} has no free inodes (df -i); remove files there and "
                f"restart ({text})"
            )
        if engine.is_full(error):
            # An opening writes no more, because the logs become tables.
            needed = sum(log.stat().st_size for log in path.glob("*.log")) + 2 * self._write_buffer
            return OutOfSpaceError(
                f"the file system of the spool {path} is full; free {rough_size(needed)} and restart ({text})"
            )
        if engine.lacks_resources(error) or engine.has_words(error, errno.EACCES, errno.EPERM, errno.EROFS):
            advice = (
                "raise this limit and restart"
                if engine.lacks_resources(error)
                else "check its owner, its mode and the mount options of its disk"
            )
            return StoreOpenError(f"the spool {path} cannot be opened: {text}; {advice}")
        if engine.has_words(error, errno.EIO):
            return StoreOpenError(
                f"the disk of the spool {path} has an error: {text}; nothing was changed. Check the kernel "
                "log, and copy the directory to another disk while it can be read (GNU ddrescue for single "
                "files); to accept new mail in the meantime, set another [spool] path"
            )
        return files.DamagedSpoolError(path, text)

    def reopen(self, *, full: bool = False) -> None:
        """Recover the log up to the last complete batch after a failed write, and start a new log.

        After the disk was `full`, tables are small until the next start, because a compaction needs less
        space then.
        """
        self._is_tight = self._is_tight or full
        self._close()
        with self._translated():
            self._db = self._connect()
        self._suspect = False

    def close(self) -> None:
        """Close the database and the directory, and record how far the log is durable."""
        if self._db is not None:
            self._close()
            self.note_synced()
        self._release()

    def _release(self) -> None:
        self._close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _connect(self) -> engine.Handle:
        try:
            return self._open_judged()
        except engine.LevelDbError as error:
            if not engine.is_full(error) or not files.drop_leftovers(self.path):
                raise
        return self._open_judged()

    def _open_judged(self) -> engine.Handle:
        """Check the files, repair damaged logs before LevelDB drops parts of them, and open the database."""
        self.losses.refresh()
        found = files.judge(self.path)
        if found.mark is not None:
            judge_format(self.path, found.mark.format.encode(), is_empty=False)
        elif not found.is_new:
            self._look_at(found)
        self._mark = found.mark
        self._manifest_size = 0
        mending = DatabaseRepair(self.path, self.losses, found.mark)
        try:
            for log in found.suspects:
                if log.contents.gaps:
                    mending.mend(log)
            db = self._open_mended(mending, is_new=found.is_new)
        except BaseException:
            try:
                mending.undo()
            except OSError as error:
                _log.error("the previous state of the spool %s could not be restored: %s", self.path, error)
            raise
        mending.settle(lambda identity: engine.is_there(db, records.metadata_key(MessageId(identity))))
        return db

    def _open_mended(self, mending: DatabaseRepair, *, is_new: bool) -> engine.Handle:
        try:
            return engine.connect(
                self.path, write_buffer=self._write_buffer, create=is_new, is_tight=self._is_tight
            )
        except engine.LevelDbCorruptionError:
            suspects = files.judge(self.path, verify=True).suspects
            if not suspects:
                raise
            for log in suspects:
                mending.mend(log)
        return engine.connect(self.path, write_buffer=self._write_buffer, is_tight=self._is_tight)

    def _look_at(self, found: files.DirectoryState) -> None:
        """Check the format of a database without the file `synced`, written by an older release or by another
        program. Opening it would change it, so links to its files are opened. Raises StoreOpenError; other
        errors are left to the opening itself.
        """
        trial = self.path / _TRIAL
        shutil.rmtree(trial, ignore_errors=True)
        try:
            trial.mkdir(mode=0o700)
            for name in found.files:
                os.link(self.path / name, trial / name)
            version, is_empty = engine.peek(trial, records.META_FORMAT, write_buffer=self._write_buffer)
        except (engine.LevelDbError, OSError):
            return
        finally:
            shutil.rmtree(trial, ignore_errors=True)
        judge_format(self.path, version, is_empty=is_empty)

    def _check_format(self) -> None:
        mark = self._mark
        try:
            found = self.get(records.META_FORMAT)
        except StoreCorruptError:
            if mark is None:
                raise
            return  # reported already; the mark has the same information as the record
        if mark is not None and (found is None or not found.isdigit()):
            said = "missing" if found is None else f"unreadable ({found[:20]!r})"
            self.losses.tell(
                Loss(
                    id=identity_of(b"format %b" % (found or b"")),
                    what=f"the record of the spool's format version was {said} and was restored; it"
                    " contains no mail, but the same fault may have damaged more",
                )
            )
            found = None
        else:
            judge_format(self.path, found, is_empty=next(self.rows(b"", limit=1), None) is None)
        if found is None:
            self.write([[(records.META_FORMAT, records.FORMAT_VERSION)]])

    # --- while it is open

    def look(self) -> None:
        """Check the files that LevelDB does not read again until the next opening. If a log has disappeared,
        its content is still in memory and is moved into a table.
        """
        if self._suspect or self._db is None:
            return
        try:
            found = files.look_at(self.path, self._mark, self._manifest_size)
        except OSError as error:
            if engine.lacks_resources(error):
                return
            found = files.RequiredFiles(self._manifest_size, str(error))
        self._manifest_size = found.manifest
        if found.missing and found.missing not in self._missing:
            self._missing.add(found.missing)
            self.damage = self.damage or found.missing
            self.on_damage(found.missing)
            if found.in_memory:
                self.compact(b"", b"\0")

    def note_synced(self) -> None:
        """Record in the file `synced` how much of the newest log is durable. Call this while nothing is being
        written.
        """
        if self._suspect:
            return
        try:
            mark = files.SyncMark(records.FORMAT_VERSION.decode(), *files.newest_log(self.path))
            if self._mark is not None and (mark.log, mark.size) < (self._mark.log, self._mark.size):
                return  # `look` reports it
            if mark != self._mark:
                files.write_mark(self.path, mark)
                self._mark = mark
        except OSError as error:
            _log.warning("the mark of the spool cannot be written; the previous mark stays valid: %s", error)

    def free_space(self) -> int:
        """Return the bytes that this process may still write to the spool's file system."""
        with self._translated():
            usage = os.statvfs(self.path)
        return usage.f_bavail * usage.f_frsize

    def foreign_files(self) -> list[str]:
        """Return the names of the files in the spool directory that neither LevelDB nor the relay uses.
        Raises StoreError.
        """
        with self._translated():
            names = {each.name for each in self.path.iterdir()} - _OTHER_FILES
        return sorted(itertools.filterfalse(files.is_database_file, names))


def judge_format(path: Path, found: bytes | None, *, is_empty: bool) -> None:
    """Raise StoreOpenError if a database is not a spool, or has the format of another release."""
    if found is None and not is_empty:
        raise StoreOpenError(
            f"{path} contains a LevelDB database that is not a zonerelay spool; choose another [spool] path"
        )
    if found not in (None, records.FORMAT_VERSION):
        raise StoreOpenError(
            f"the spool in {path} has format version {found.decode('ascii', 'replace')}, but this "
            f"zonerelay supports version {records.FORMAT_VERSION.decode()}; run the release that wrote it, "
            "or drain it there first"
        )


def _make_directory(path: Path) -> None:
    make_configured(path, "path")
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise StoreOpenError(
            f"the file system of the spool directory {path} is read-only, perhaps because of a disk error; "
            "check the kernel log. Nothing was changed"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreOpenError(
            f"the spool directory {path} is not writable by this user; give it to the user that zonerelay "
            "runs as, or choose another [spool] path"
        )


class DatabaseRepair:
    """Repairs logs with gaps before LevelDB opens them. Only damaged records are lost, and the loss is
    reported.

    LevelDB would drop the whole rest of a block. So a log with a gap is kept as a copy and replaced by one
    with all intact records. Until LevelDB has opened the database, `undo` restores the original files.
    """

    def __init__(self, directory: Path, losses: Losses, mark: files.SyncMark | None) -> None:
        self._directory = directory
        self._losses = losses
        self._mark = mark
        self._mended: list[tuple[files.FoundLog, Loss | None]] = []
        """The logs that were replaced, and what each has lost."""
        self._names = files.own_names(directory)
        self._current = _current(directory / "CURRENT")

    def mend(self, log: files.FoundLog) -> None:
        """Replace a damaged log by one with its intact records. Raises OSError, in which case the log is
        unchanged.
        """
        loss = self._account_for(log) if log.contents.gaps else None
        whole = write_log(log.contents.records)
        try:
            if self._mark is not None and self._mark.log == int(log.path.stem):
                self._write_mark(structs.replace(self._mark, size=min(self._mark.size, len(whole))))
            durable.write(log.path, whole)
        except OSError:
            self._restore_mark()
            if loss is not None:
                self._losses.forget(loss)
            raise
        self._mended.append((log, loss))

    def settle(self, is_there: Callable[[str], bool]) -> None:
        """Report the losses in the repaired logs, after LevelDB has opened the database. `is_there` returns
        whether a message exists.
        """
        for _, loss in self._mended:
            if loss is not None:
                missing = tuple(each for each in loss.messages if not is_there(each))
                self._losses.tell(msgspec.structs.replace(loss, missing=missing))
        self._mended.clear()

    def undo(self) -> None:
        """Restore the files as they were before the repair, because LevelDB could not open the database.
        Raises OSError.
        """
        if _current(self._directory / "CURRENT") == self._current:
            for name in files.own_names(self._directory) - self._names:
                (self._directory / name).unlink()
        if self._mended:
            self._restore_mark()
        for log, loss in self._mended:
            if loss is None or not loss.kept:
                durable.write(log.path, log.raw)
            else:
                durable.rename(self._losses.directory / loss.kept, log.path)
            if loss is not None:
                self._losses.forget(loss)
        self._mended.clear()

    def _restore_mark(self) -> None:
        """Restore the file `synced`, before the report of a loss is removed. Only the mark distinguishes a
        missing end from an incomplete last write. Raises OSError.
        """
        if self._mark is not None:
            try:
                self._write_mark(self._mark)
            except OSError:  # a full disk has no space for a new file
                files.write_mark(self._directory, self._mark, syncs=True)

    def _account_for(self, log: files.FoundLog) -> Loss:
        identity, kept = self._losses.keep(log.path, log.raw)
        named: list[str] = []
        for gap in log.contents.gaps:
            named += identities_in(log.raw[gap.start : gap.end])
        loss = Loss(
            id=identity,
            what=_description(log),
            octets=sum(gap.end - gap.start for gap in log.contents.gaps),
            messages=tuple(dict.fromkeys(named))[:MAX_NAMED],
            kept=kept,
        )
        self._losses.note(loss)
        return loss

    def _write_mark(self, mark: files.SyncMark) -> None:
        durable.write(self._directory / files.MARK_NAME, mark.encode())


def _description(log: files.FoundLog) -> str:
    gaps = log.contents.gaps
    shown = ", ".join(f"{gap.start:,} to {gap.end:,}" for gap in gaps[:3])
    if gaps[-1].end >= len(log.raw) and len(gaps) <= 3:
        shown = f"{shown.rpartition(' to ')[0]} to the end"
    more = f" and {len(gaps) - 3} more ranges" if len(gaps) > 3 else ""
    text = f"bytes {shown}{more} of {log.path.name} were damaged or missing when the spool was opened"
    if writes := log.contents.writes_missing:
        text += f", with at least {writes:,} record{'' if writes == 1 else 's'}"
    return text


def _current(path: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return None


# --- reading the queue


def run_through(work: Coroutine[Any, Any, T]) -> T:  # Any: nothing is sent
    """Run a coroutine that never waits, such as one that uses `SpoolKeys`, and return its result."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


class SpoolKeys:
    """Reads and writes the keys of an open spool through the partition interface. Every method blocks.
    Damaged records are omitted from pages.
    """

    def __init__(self, db: LevelDb, view: engine.View | None = None) -> None:
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

    async def write(self, write: port.Write) -> None:
        self._db.write([list(write.changes.items())])


class SpoolReads(QueueReads):
    """Reads the queue of a LevelDB spool with as few LevelDB operations as possible. Every method blocks."""

    def __init__(self, db: LevelDb, view: engine.View | None = None) -> None:
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
        found = await get_each(self.keys, keys)
        return [None if isinstance(value, StoreCorruptError) else value for value in found]

    async def _look_up(self, key: bytes) -> bytes | None:
        return self._db.get(key, self._view)

    async def _rows(self, start: bytes, end: bytes, limit: int, *, values: bool = True) -> Iterable[Row]:
        return self._db.rows(start, end, limit=limit, values=values, view=self._view)

    async def _chunks(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self.keys.get(keys)  # LevelDb has reported the damage

    async def _noted_last_id(self) -> str:
        """Return the last message id as stored in the spool's metadata. If it is unreadable, derive one from
        the time of the last run, so that no id is used twice.
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
                what=f"the record of the last message id was unreadable ({noted[:20]!r}) and was replaced by"
                f" {instead}; it contains no mail, but the same fault may have damaged more",
            )
        )
        db.write([[(records.META_LAST_ID, instead.encode("ascii"))]])
        return instead

    async def _first_keys(self, start: bytes, end: bytes, most: int) -> list[bytes]:
        """Return the first key of each message in a range, at most `most` keys. Raise StoreCorruptError if a
        key that ends in `#` may be in damaged data.
        """
        return list(itertools.islice(self._db.first_keys(start, end), most))

    async def left_over(self) -> str:
        if found := await super().left_over():
            return found
        foreign = self._db.foreign_files()
        if not foreign:
            return ""
        return f"files in {self.name} that do not belong to the database: {', '.join(foreign[:3])}"
