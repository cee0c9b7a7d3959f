"""Judges the files of a LevelDB database before LevelDB opens them. Reads, and changes nothing.

LevelDB makes a new database where `CURRENT` is missing, takes a log that is missing or cut short for one with
less in it, and has written before it finds damage. So what it would do is known before it may do anything: a
database is made only where none was, files that are missing are a refusal, and logs with holes are named.

The spool's file `synced` says how far the newest log was durable a second before the relay was left, and
exactly after an orderly stop: what is missing at the end of a log cannot be told from a torn end otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zonerelay import durable
from zonerelay.store.common.private_directories import lock_configured
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.leveldb.damage.format import (
    FormatError,
    Gap,
    Log,
    Manifest,
    Table,
    read_log,
    read_manifest,
)

_log = logging.getLogger("zonerelay.store")

MARK_NAME = "synced"
REPAIR_NAME = ".repair"
"""A directory in the spool's, as long as a repair works."""
READY_NAME = "ready"
"""In it: from here on the repaired database takes the place of the damaged one, step by step."""
_MARK = re.compile(rb"zonerelay (\S+) (\d{10}) (\d{15}) ([0-9a-f]{8})\n")
_CURRENT = re.compile(rb"MANIFEST-\d+\n")
_LOG, _TABLE, _MANIFEST = (
    re.compile(pattern) for pattern in (r"(\d+)\.log", r"(\d+)\.(?:ldb|sst)", r"MANIFEST-(\d+)")
)
_NEW_NAME = re.compile(r"\d+\.(?:log|ldb|sst|dbtmp)|MANIFEST-\d+")
_DATABASE = re.compile(rf"CURRENT|{MARK_NAME}|{_NEW_NAME.pattern}")
MAX_MANIFEST = 64 * 1024 * 1024
"""Octets; LevelDB alone judges one that is larger, for a minute would pass here."""

RESCUE = (
    "`zonerelay spool repair` says what it would save, and with --yes does it; it keeps the spool as it was."
    " Or restore a backup. To take new mail meanwhile, set another [spool] path"
)
_PUT_BACK = ". Look for the file in lost+found first"


class DamagedSpoolError(StoreOpenError):
    """LevelDB must not open the directory as it is. `what` is in short what is wrong with it; `finding` also
    names the directory.
    """

    def __init__(self, directory: Path, what: str, more: str = "") -> None:
        self.what = what
        self.finding = f"the spool {directory} is damaged: {what}"
        super().__init__(f"{self.finding}; nothing was changed. {RESCUE}{more}")


@dataclass(frozen=True, slots=True)
class Mark:
    """The spool's format, and how many bytes of which log are durable."""

    format: str
    log: int
    size: int

    def encode(self) -> bytes:
        text = b"zonerelay %b %010d %015d " % (self.format.encode("ascii"), self.log, self.size)
        return b"%b%08x\n" % (text, zlib.crc32(text))


@dataclass(frozen=True, slots=True)
class FoundLog:
    """A log that LevelDB will read, and bytes of it that must be there."""

    path: Path
    raw: bytes
    synced: int
    contents: Log


@dataclass(frozen=True, slots=True)
class Judgement:
    """The state of a directory. `is_new`: there is no database, or the beginnings of one that never held
    anything. `suspects` are logs that are to be read with checksums.
    """

    is_new: bool
    mark: Mark | None = None
    suspects: tuple[FoundLog, ...] = ()
    files: tuple[str, ...] = ()
    """What LevelDB will read; nothing when its manifest was too large to be judged here."""


def read_mark(directory: Path) -> Mark | None:
    """None when there is none, or none that can be read. Raises OSError."""
    try:
        found = _MARK.fullmatch((directory / MARK_NAME).read_bytes())
    except FileNotFoundError:
        return None
    if found is None or zlib.crc32(found.group()[:-9]) != int(found[4], 16):
        return None
    return Mark(found[1].decode("ascii", "replace"), int(found[2]), int(found[3]))


def judge(directory: Path, *, verify: bool = False) -> Judgement:
    """With `verify` every log is read with checksums. Raises DamagedSpoolError, or OSError."""
    refuse_half_repaired(directory)
    names = {entry.name for entry in directory.iterdir()}
    mark = read_mark(directory)
    if "CURRENT" not in names:
        _check_never_used(directory, names, mark)
        return Judgement(is_new=True)
    name = _manifest_name(directory, names)
    if (directory / name).stat().st_size > MAX_MANIFEST:
        return Judgement(is_new=False, mark=mark)
    manifest = _read_manifest(directory, name)
    tables = [_table(directory, names, each) for each in manifest.tables.values()]
    logs = _logs(directory, names, manifest, mark)
    octets = [(path, path.read_bytes()) for path in logs]
    found = found_logs(octets, mark, manifest.last_sequence, verify=verify)
    return Judgement(
        is_new=False,
        mark=mark,
        suspects=tuple(log for log in found if not log.contents.is_clean),
        files=("CURRENT", name, *tables, *(path.name for path in logs)),
    )


def refuse_half_repaired(directory: Path) -> None:
    """Raises DamagedSpoolError when a repair was cut short while it exchanged the database's files."""
    if (directory / REPAIR_NAME / READY_NAME).exists():
        raise DamagedSpoolError(
            directory,
            "a repair of it was cut short",
            ". This ends that repair: zonerelay spool repair --yes",
        )


class Needed(NamedTuple):
    """What the next opening of an open database needs. `missing` says in words what is not there,
    `in_memory` that the database has it all the same; `manifest` is the manifest's size.
    """

    manifest: int
    missing: str = ""
    in_memory: bool = False


def look_at(directory: Path, mark: Mark | None, manifest: int) -> Needed:
    """The manifest had `manifest` bytes before. Raises OSError."""
    try:
        path = directory / _manifest_name(directory, set(os.listdir(directory)))  # noqa: PTH208 - names alone
    except DamagedSpoolError as error:
        return Needed(manifest, error.what)
    size = path.stat().st_size
    if size < max(manifest, 1):
        return Needed(manifest, f"{path} has lost its end")
    newest = newest_log(directory)
    if mark is not None and newest < (mark.log, mark.size):
        log = directory / f"{mark.log:06d}.log"
        return Needed(size, f"{log} is missing or has lost its end", in_memory=True)
    return Needed(size)


def drop_leftovers(directory: Path) -> bool:
    """Remove the tables that LevelDB had begun to write when it failed: all that is in them is elsewhere too.

    LevelDB does so itself, once it has opened the database. On a full disk it cannot, for want of the room
    that they take. True when there were any. Raises StoreOpenError, or OSError.
    """
    files = judge(directory).files
    tables = _numbers(_TABLE, os.listdir(directory)).values() if files else ()  # noqa: PTH208 - names alone
    left = sorted(set(tables) - set(files))
    for name in left:
        (directory / name).unlink()
    return bool(left)


def is_database_file(name: str) -> bool:
    """A file that holds mail, or without which LevelDB does not find it."""
    return _DATABASE.fullmatch(name) is not None


def own_names(directory: Path) -> set[str]:
    """Return files that LevelDB makes when it opens a database."""
    return {entry.name for entry in directory.iterdir() if _NEW_NAME.fullmatch(entry.name)}


def newest_log(directory: Path) -> tuple[int, int]:
    """Return number and size of the log that is written to; zeros when there is none. Raises OSError."""
    for _ in range(3):  # a newer one may take its place at any time
        number = max(_numbers(_LOG, os.listdir(directory)), default=0)  # noqa: PTH208 - names alone
        with contextlib.suppress(FileNotFoundError):
            return number, (directory / f"{number:06d}.log").stat().st_size if number else 0
    return 0, 0


def last_written(directory: Path) -> float:
    """No log was written after it, in Unix seconds; 0 when there is none. Raises OSError."""
    logs = [entry for entry in os.scandir(directory) if _LOG.fullmatch(entry.name)]
    return max((entry.stat().st_mtime + 1.0 for entry in logs), default=0.0)


def _numbers(pattern: re.Pattern[str], names: set[str] | list[str]) -> dict[int, str]:
    return {int(found[1]): name for name in names if (found := pattern.fullmatch(name))}


def _check_never_used(directory: Path, names: set[str], mark: Mark | None) -> None:
    """Raises unless the files are those of a first start that was cut short: no table, and an empty log."""
    tables, logs = _numbers(_TABLE, names), _numbers(_LOG, names)
    manifests = _numbers(_MANIFEST, names)
    used = [tables[number] for number in sorted(tables)]
    used += [name for name in logs.values() if (directory / name).stat().st_size]
    for number, name in sorted(manifests.items()):
        if number > 1 and not _is_unused(directory / name):
            used.append(name)
    if used or mark is not None:
        empty = f". If the spool was emptied on purpose, remove {directory / MARK_NAME} and start again"
        found = f"of its database there is {', '.join(used[:3])}" if used else "so is its database"
        raise DamagedSpoolError(directory, f"the file CURRENT is missing, and {found}", "" if used else empty)


def _is_unused(path: Path) -> bool:
    try:
        manifest = read_manifest(path.read_bytes())
    except FormatError:
        return False
    return not manifest.tables and not manifest.last_sequence


def _manifest_name(directory: Path, names: set[str]) -> str:
    current = directory / "CURRENT"
    raw = current.read_bytes() if "CURRENT" in names else b""
    if not _CURRENT.fullmatch(raw):
        raise DamagedSpoolError(directory, f"{current} does not name a manifest")
    name = raw.decode("ascii").strip()
    if name not in names:
        raise DamagedSpoolError(directory, f"{current} names {name}, which is missing")
    return name


def _read_manifest(directory: Path, name: str) -> Manifest:
    try:
        return read_manifest((directory / name).read_bytes())
    except FormatError as error:
        raise DamagedSpoolError(directory, f"{directory / name}: {error}") from error


def _table(directory: Path, names: set[str], table: Table) -> str:
    """Return its name. A table is never written again, so its size tells whether its end is there."""
    name = f"{table.number:06d}.ldb"
    if name not in names and f"{table.number:06d}.sst" in names:
        name = f"{table.number:06d}.sst"
    if name not in names:
        raise DamagedSpoolError(directory, f"{name} is missing", _PUT_BACK)
    size = (directory / name).stat().st_size
    if size != table.size:
        raise DamagedSpoolError(
            directory, f"{directory / name} has {size:,} octets instead of {table.size:,}"
        )
    return name


def _logs(directory: Path, names: set[str], manifest: Manifest, mark: Mark | None) -> list[Path]:
    """Return those that LevelDB will read, in its order."""
    present = _numbers(_LOG, names)
    needed = {number for number in (manifest.log, manifest.previous_log) if number}
    if mark is not None and mark.log >= manifest.log and mark.size:
        needed.add(mark.log)
    for number in sorted(needed - present.keys()):
        path = directory / f"{number:06d}.log"
        raise DamagedSpoolError(
            directory,
            f"{path} is missing, which holds the newest mail",
            _PUT_BACK,
        )
    read = {number for number in present if number >= manifest.log or number == manifest.previous_log}
    return [directory / present[number] for number in sorted(read)]


def found_logs(
    logs: Iterable[tuple[Path, bytes]], mark: Mark | None, last_sequence: int, *, verify: bool
) -> list[FoundLog]:
    """`last_sequence`: of what is in tables. Where a log begins further behind than the one before it ends,
    that one has lost its end.
    """
    found: list[FoundLog] = []
    for path, raw in logs:
        synced = mark.size if mark is not None and int(path.stem) == mark.log else 0
        contents = read_log(raw, synced=synced, verify=verify)
        if not contents.is_clean and not verify:
            contents = read_log(raw, synced=synced)
        if found and _missing(found[-1].contents, contents, last_sequence):
            contents = read_log(raw, synced=synced)
            if missing := _missing(found[-1].contents, contents, last_sequence):
                _note_lost_end(found[-1], missing)
        found.append(FoundLog(path, raw, synced, contents))
    return found


def _missing(log: Log, following: Log, last_sequence: int) -> int:
    """Writes between two logs; none are known of when the second has lost its own beginning."""
    if following.sequences is None or (following.gaps and following.gaps[0].start == 0):
        return 0
    expected = last_sequence + 1 if log.sequences is None else log.sequences[1]
    return max(following.sequences[0] - expected, 0)


def _note_lost_end(log: FoundLog, missing: int) -> None:
    contents = log.contents
    contents.torn = None
    contents.writes_missing_behind = missing
    if not contents.gaps or contents.gaps[-1].end < len(log.raw):
        contents.gaps.append(Gap(contents.end, len(log.raw)))


# --- what the spool adds to LevelDB's files


def write_mark(directory: Path, mark: Mark) -> None:
    """Writes in place: after a power cut the mark before may stand, which is valid too. Raises OSError."""
    path, content = directory / MARK_NAME, mark.encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        durable.write(path, content)
        return
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def lock_directory(directory: Path) -> int:
    """Locks the directory until the returned descriptor is closed, or the process ends. LevelDB has a lock of
    its own, but takes it after it has written, and releases it between two openings.

    Raises StoreOpenError when another process, or another store of this one, has the lock.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock_configured(descriptor, directory, "path")
    except StoreOpenError:
        os.close(descriptor)
        raise
    except OSError as error:
        # Some network file systems lock no directories; LevelDB locks a file.
        _log.info("the directory %s cannot be locked: %s", directory, error)
    return descriptor
