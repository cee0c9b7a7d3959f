"""Checks the files of a LevelDB database before LevelDB opens them. The checks change nothing.

LevelDB creates a new database if `CURRENT` is missing, accepts a missing or truncated log as a shorter one,
and writes before it detects damage. So this module determines in advance what LevelDB would do: a database is
created only if there was none, missing files are an error, and logs with gaps are reported.

The spool's file `synced` records how far the newest log was durable: at most a second before a crash, and
exactly after an orderly stop. Without it, data missing at the end of a log would look like an incomplete last
write.
"""

import contextlib
import logging
import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay import durable
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.directories import lock_configured
from zonerelay.store.leveldb.damage import format as parser

_log = logging.getLogger("zonerelay.store")

MARK_NAME = "synced"
REPAIR_NAME = ".repair"
"""A subdirectory of the spool that exists while a repair runs."""
READY_NAME = "ready"
"""A file in that directory. Once it exists, the repaired database replaces the damaged one step by step."""
_MARK = re.compile(rb"zonerelay (\S+) (\d{10}) (\d{15}) ([0-9a-f]{8})\n")
_CURRENT = re.compile(rb"MANIFEST-\d+\n")
_LOG, _TABLE, _MANIFEST = (
    re.compile(pattern) for pattern in (r"(\d+)\.log", r"(\d+)\.ldb", r"MANIFEST-(\d+)")
)
_NEW_NAME = re.compile(r"\d+\.(?:log|ldb|dbtmp)|MANIFEST-\d+")
_DATABASE = re.compile(rf"CURRENT|{MARK_NAME}|{_NEW_NAME.pattern}")
MAX_MANIFEST = 64 * 1024 * 1024
"""The largest manifest, in bytes, that is checked here. A larger one would take a minute, so only LevelDB
checks it.
"""

RESCUE = (
    "`zonerelay spool repair` lists what can be restored, and restores it with --yes; it keeps a copy of "
    "the spool. Alternatively restore a backup. To accept new mail in the meantime, set another [spool] path"
)
_PUT_BACK = ". Look for the file in lost+found first"


class DamagedSpoolError(StoreOpenError):
    """The database directory is damaged, so LevelDB must not open it. `what` is a short description of the
    damage, and `finding` also names the directory.
    """

    def __init__(self, directory: Path, what: str, more: str = "") -> None:
        self.what = what
        self.finding = f"the spool {directory} is damaged: {what}"
        super().__init__(f"{self.finding}; nothing was changed. {RESCUE}{more}")


class SyncMark(msgspec.Struct, frozen=True):
    """The content of the file `synced`: the spool's format, and the number and the durable size of its newest
    log.
    """

    format: str
    log: int
    size: int

    def encode(self) -> bytes:
        text = b"zonerelay %b %010d %015d " % (self.format.encode("ascii"), self.log, self.size)
        return b"%b%08x\n" % (text, zlib.crc32(text))


class FoundLog(msgspec.Struct, frozen=True):
    """A log file that LevelDB will read, with its raw bytes and its parsed content."""

    path: Path
    raw: bytes
    contents: parser.LogContent


class DirectoryState(msgspec.Struct, frozen=True):
    """The result of checking a database directory. With `is_new` there is no database, or the beginning of
    one that never had data. `suspects` are logs that must be read with checksums.
    """

    is_new: bool
    mark: SyncMark | None = None
    suspects: tuple[FoundLog, ...] = ()
    files: tuple[str, ...] = ()
    """The files that LevelDB will read. Empty if the manifest was too large to be checked here."""


def read_mark(directory: Path) -> SyncMark | None:
    """Read the file `synced`, which records how much of the newest log is durable. Return None if it is
    missing or unreadable. Raises OSError.
    """
    try:
        found = _MARK.fullmatch((directory / MARK_NAME).read_bytes())
    except FileNotFoundError:
        return None
    if found is None or zlib.crc32(found.group()[:-9]) != int(found[4], 16):
        return None
    return SyncMark(found[1].decode("ascii", "replace"), int(found[2]), int(found[3]))


def judge(directory: Path, *, verify: bool = False) -> DirectoryState:
    """Check the files of a database directory before LevelDB opens it. With `verify` every log is read with
    checksums. Raises DamagedSpoolError, or OSError.
    """
    refuse_half_repaired(directory)
    names = {entry.name for entry in directory.iterdir()}
    mark = read_mark(directory)
    if "CURRENT" not in names:
        _check_never_used(directory, names, mark)
        return DirectoryState(is_new=True)
    name = _manifest_name(directory, names)
    if (directory / name).stat().st_size > MAX_MANIFEST:
        return DirectoryState(is_new=False, mark=mark)
    manifest = _read_manifest(directory, name)
    tables = [_table(directory, names, each) for each in manifest.tables.values()]
    logs = _logs(directory, names, manifest, mark)
    octets = [(path, path.read_bytes()) for path in logs]
    found = found_logs(octets, mark, manifest.last_sequence, verify=verify)
    return DirectoryState(
        is_new=False,
        mark=mark,
        suspects=tuple(log for log in found if not log.contents.is_clean),
        files=("CURRENT", name, *tables, *(path.name for path in logs)),
    )


def refuse_half_repaired(directory: Path) -> None:
    """Raise DamagedSpoolError if a repair was interrupted while it replaced the database's files."""
    if (directory / REPAIR_NAME / READY_NAME).exists():
        raise DamagedSpoolError(
            directory,
            "a repair of it was interrupted",
            ". Complete the repair with: zonerelay spool repair --yes",
        )


class RequiredFiles(NamedTuple):
    """The state of the files that LevelDB will need to open a database again, checked while it is open.
    `missing` describes missing files, and `in_memory` is whether the database still has their content.
    `manifest` is the size of the manifest.
    """

    manifest: int
    missing: str = ""
    in_memory: bool = False


def look_at(directory: Path, mark: SyncMark | None, manifest: int) -> RequiredFiles:
    """Check the files that LevelDB will need to reopen an open database. `manifest` is the last known size of
    its manifest. Raises OSError.
    """
    try:
        path = directory / _manifest_name(directory, set(os.listdir(directory)))  # noqa: PTH208 - names alone
    except DamagedSpoolError as error:
        return RequiredFiles(manifest, error.what)
    size = path.stat().st_size
    if size < max(manifest, 1):
        return RequiredFiles(manifest, f"the end of {path} is missing")
    newest = newest_log(directory)
    if mark is not None and newest < (mark.log, mark.size):
        log = directory / f"{mark.log:06d}.log"
        return RequiredFiles(size, f"{log} or its end is missing", in_memory=True)
    return RequiredFiles(size)


def drop_leftovers(directory: Path) -> bool:
    """Remove the unfinished table files that LevelDB was writing when it failed. All their data is stored
    elsewhere too.

    LevelDB does so itself after it has opened the database. On a full disk it cannot open it, because these
    tables use the space. Returns whether there were any. Raises StoreOpenError, or OSError.
    """
    files = judge(directory).files
    tables = _numbers(_TABLE, os.listdir(directory)).values() if files else ()  # noqa: PTH208 - names alone
    left = sorted(set(tables) - set(files))
    for name in left:
        (directory / name).unlink()
    return bool(left)


def is_database_file(name: str) -> bool:
    """Return whether a file contains mail, or is needed by LevelDB to find it."""
    return _DATABASE.fullmatch(name) is not None


def own_names(directory: Path) -> set[str]:
    """Return the names of the files that LevelDB creates when it opens a database."""
    return {entry.name for entry in directory.iterdir() if _NEW_NAME.fullmatch(entry.name)}


def newest_log(directory: Path) -> tuple[int, int]:
    """Return the number and the size of the current log, or zeros if there is none. Raises OSError."""
    for _ in range(3):  # a newer one may replace it at any time
        number = max(_numbers(_LOG, os.listdir(directory)), default=0)  # noqa: PTH208 - names alone
        with contextlib.suppress(FileNotFoundError):
            return number, (directory / f"{number:06d}.log").stat().st_size if number else 0
    return 0, 0


def last_written(directory: Path) -> float:
    """Return the time of the last write to any log (Unix time, rounded up), or 0 if there is no log. Raises
    OSError.
    """
    logs = [entry for entry in os.scandir(directory) if _LOG.fullmatch(entry.name)]
    return max((entry.stat().st_mtime + 1.0 for entry in logs), default=0.0)


def _numbers(pattern: re.Pattern[str], names: set[str] | list[str]) -> dict[int, str]:
    return {int(found[1]): name for name in names if (found := pattern.fullmatch(name))}


def _check_never_used(directory: Path, names: set[str], mark: SyncMark | None) -> None:
    """Raise DamagedSpoolError unless the files come from an interrupted first start, without tables and with
    empty logs.
    """
    tables, logs = _numbers(_TABLE, names), _numbers(_LOG, names)
    manifests = _numbers(_MANIFEST, names)
    used = [tables[number] for number in sorted(tables)]
    used += [name for name in logs.values() if (directory / name).stat().st_size]
    for number, name in sorted(manifests.items()):
        if number > 1 and not _is_unused(directory / name):
            used.append(name)
    if used or mark is not None:
        empty = f". If the spool was emptied on purpose, remove {directory / MARK_NAME} and start again"
        found = f"its database contains {', '.join(used[:3])}" if used else "its database is missing, too"
        raise DamagedSpoolError(directory, f"the file CURRENT is missing, and {found}", "" if used else empty)


def _is_unused(path: Path) -> bool:
    try:
        manifest = parser.read_manifest(path.read_bytes())
    except parser.FormatError:
        return False
    return not manifest.tables and not manifest.last_sequence


def _manifest_name(directory: Path, names: set[str]) -> str:
    current = directory / "CURRENT"
    raw = current.read_bytes() if "CURRENT" in names else b""
    if not _CURRENT.fullmatch(raw):
        raise DamagedSpoolError(directory, f"{current} does not name a manifest")
    name = raw.decode("ascii").strip()
    if name not in names:
        raise DamagedSpoolError(directory, f"{current} refers to {name}, which is missing")
    return name


def _read_manifest(directory: Path, name: str) -> parser.Manifest:
    try:
        return parser.read_manifest((directory / name).read_bytes())
    except parser.FormatError as error:
        raise DamagedSpoolError(directory, f"{directory / name}: {error}") from error


def _table(directory: Path, names: set[str], table: parser.TableFile) -> str:
    """Check that a table file exists and has the size that the manifest records, and return its name. Tables
    are never modified, so the size shows whether the end is missing.
    """
    name = f"{table.number:06d}.ldb"
    if name not in names:
        raise DamagedSpoolError(directory, f"{name} is missing", _PUT_BACK)
    size = (directory / name).stat().st_size
    if size != table.size:
        raise DamagedSpoolError(directory, f"{directory / name} has {size:,} bytes instead of {table.size:,}")
    return name


def _logs(directory: Path, names: set[str], manifest: parser.Manifest, mark: SyncMark | None) -> list[Path]:
    """Return the paths of the logs that LevelDB will read, in the order in which it reads them."""
    present = _numbers(_LOG, names)
    for number in missing_logs(present, manifest, mark):
        path = directory / f"{number:06d}.log"
        raise DamagedSpoolError(directory, f"{path}, which contains the newest mail, is missing", _PUT_BACK)
    return [directory / present[number] for number in sorted(present) if number >= manifest.log]


def missing_logs(present: Iterable[int], manifest: parser.Manifest, mark: SyncMark | None) -> list[int]:
    """Return the numbers of the missing logs that the manifest or the file `synced` requires."""
    needed = {manifest.log} if manifest.log else set[int]()
    if mark is not None and mark.log >= manifest.log and mark.size:
        needed.add(mark.log)
    return sorted(needed.difference(present))


def found_logs(
    logs: Iterable[tuple[Path, bytes]], mark: SyncMark | None, last_sequence: int, *, verify: bool
) -> list[FoundLog]:
    """Parse the contents of the logs. `last_sequence` is the highest number in the tables. If the sequence
    numbers of a log do not continue those of the previous log, the end of the previous log is missing.
    """
    found: list[FoundLog] = []
    for path, raw in logs:
        synced = mark.size if mark is not None and int(path.stem) == mark.log else 0
        contents = parser.read_log(raw, synced=synced, verify=verify)
        if not contents.is_clean and not verify:
            contents = parser.read_log(raw, synced=synced)
        if found and _missing(found[-1].contents, contents, last_sequence):
            contents = parser.read_log(raw, synced=synced)
            if missing := _missing(found[-1].contents, contents, last_sequence):
                _note_lost_end(found[-1], missing)
        found.append(FoundLog(path, raw, contents))
    return found


def _missing(log: parser.LogContent, following: parser.LogContent, last_sequence: int) -> int:
    """Return the number of writes that are missing between two consecutive logs. It is 0 if the second has
    lost its own beginning.
    """
    if following.sequences is None or (following.gaps and following.gaps[0].start == 0):
        return 0
    expected = last_sequence + 1 if log.sequences is None else log.sequences[1]
    return max(following.sequences[0] - expected, 0)


def _note_lost_end(log: FoundLog, missing: int) -> None:
    contents = log.contents
    contents.torn = None
    contents.writes_missing_behind = missing
    if not contents.gaps or contents.gaps[-1].end < len(log.raw):
        contents.gaps.append(parser.LogGap(contents.end, len(log.raw)))


# --- the files that the spool adds to LevelDB's


def write_mark(directory: Path, mark: SyncMark, *, syncs: bool = False) -> None:
    """Store the mark in the file `synced`, which is overwritten in place. After a power cut the previous mark
    may remain, which is valid too unless it was lowered; then the caller `syncs`. Raises OSError.
    """
    path, content = directory / MARK_NAME, mark.encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        durable.write(path, content)
        return
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        if syncs:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_directory(directory: Path) -> int:
    """Lock the directory until the returned descriptor is closed, or the process ends. LevelDB has its own
    lock, but acquires it after its first write, and releases it between two openings.

    Raises StoreOpenError if another process, or another store of this process, has the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock_configured(descriptor, directory, "path")
    except StoreOpenError:
        os.close(descriptor)
        raise
    except OSError as error:
        # Some network file systems cannot lock directories. There only LevelDB's lock on a file works.
        _log.info("the directory %s cannot be locked: %s", directory, error)
    return descriptor
