"""Copies the state of a LevelDB spool at one moment into a second directory, while a relay may write to the
spool.

Tables never change, so they become hard links. Logs and the manifest grow, so they are copied. The snapshot
has a prefix of all writes: every write that was acknowledged before `take_snapshot` was called, and later
ones up to some moment. The spool's directory is not written to, and the relay does not wait.

A compaction may remove a file after the manifest was copied and before the file is. Then the snapshot starts
again.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.leveldb.damage.directory import MARK_NAME, refuse_half_repaired
from zonerelay.store.leveldb.damage.format import read_manifest

TRIES = 50
_LOG = re.compile(r"\d+\.log")


def take_snapshot(spool: Path, into: Path) -> None:
    """Take a snapshot in `into`, which does not exist yet. Raises StoreError, StoreFullError, or OSError, in
    which case nothing is left there.

    If `into` is on another file system, the tables are copied after a check of the free space.
    """
    refuse_half_repaired(spool)
    for _ in range(TRIES):
        try:
            before = _manifest_state(spool)
            _take(spool, into)
            if _manifest_state(spool) == before:
                return
        except FileNotFoundError:
            # Before LevelDB removes a file, it writes to the manifest that the file is no longer needed.
            if not spool.is_dir():
                shutil.rmtree(into, ignore_errors=True)
                raise
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        shutil.rmtree(into, ignore_errors=True)
    raise StoreError(f"{spool} was modified while it was being read, {TRIES} times in a row; try again later")


def _manifest_state(spool: Path) -> tuple[bytes, int]:
    """Return a value that changes when LevelDB adds or removes a file, because its manifest has grown or was
    replaced.
    """
    try:
        current = (spool / "CURRENT").read_bytes()
        return current, (spool / os.fsdecode(current.strip())).stat().st_size
    except (OSError, ValueError):  # checked with the snapshot
        return b"", 0


def _take(spool: Path, into: Path) -> None:
    into.mkdir(mode=0o700)
    # The mark defines what a log must contain, so it is copied first. If a newer log exists, the older one is
    # complete, so the logs together are a prefix of all writes.
    names = sorted(os.listdir(spool))  # noqa: PTH208 - names alone
    first = [name for name in (MARK_NAME, "CURRENT") if name in names]
    manifests = [name for name in names if name.startswith("MANIFEST-")]
    for name in (*first, *manifests, *filter(_LOG.fullmatch, names)):
        shutil.copyfile(spool / name, into / name)
    _link(spool, into, _tables(into, set(names)))


def _tables(into: Path, names: set[str]) -> list[str]:
    """Return the tables that the manifest names. A table that is still being written must not be linked,
    because LevelDB would reuse its number for a table of the snapshot and overwrite the spool's file.
    """
    try:
        current = into / os.fsdecode((into / "CURRENT").read_bytes().strip())
        tables = read_manifest(current.read_bytes()).tables.values()
    except (OSError, ValueError):  # the error is reported when the snapshot is opened
        return []
    either = (f"{table.number:06d}.{ending}" for table in tables for ending in ("ldb", "sst"))
    return [name for name in either if name in names]


def _link(spool: Path, into: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        try:
            os.link(spool / name, into / name)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            _copy(spool, into, names[number:])
            return


def _copy(spool: Path, into: Path, names: list[str]) -> None:
    needed = sum((spool / name).stat().st_size for name in names)
    free = shutil.disk_usage(into).free
    if needed > free:
        raise StoreFullError(
            f"{into.parent} requires {needed / 1e9:.2f} GB for a copy of {spool}, but "
            f"only {free / 1e9:.2f} GB are free; use a directory on the same file system as the spool, "
            "where hard links suffice"
        )
    for name in names:
        shutil.copyfile(spool / name, into / name)
