"""A second directory that holds a LevelDB spool as it was at one moment, made while a relay may write to it.

Tables never change, so they are hard links; logs and the manifest grow, so they are copied. The snapshot
holds a prefix of what was written: every write that was acknowledged before `take_snapshot` was called is in
it, and of the later ones those up to some moment. Nothing in the spool's directory is written, and the relay
waits for nothing.

A compaction may remove a file between the manifest and the file's turn; the snapshot is then begun anew.
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
    """`into` does not exist yet. Raises StoreError, StoreFullError, or OSError, and leaves nothing then.

    Where `into` is on another file system the tables are copied, once it is known that there is room.
    """
    refuse_half_repaired(spool)
    for _ in range(TRIES):
        try:
            before = _manifest_state(spool)
            _take(spool, into)
            if _manifest_state(spool) == before:
                return
        except FileNotFoundError:
            # Of a file that it no longer needs LevelDB says so in the manifest first, and removes it then.
            if not spool.is_dir():
                shutil.rmtree(into, ignore_errors=True)
                raise
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        shutil.rmtree(into, ignore_errors=True)
    raise StoreError(f"{spool} changes faster than it can be read, {TRIES} times in a row; try again later")


def _manifest_state(spool: Path) -> tuple[bytes, int]:
    """Differs once LevelDB has begun or given up a file: its manifest has grown, or is another one."""
    try:
        current = (spool / "CURRENT").read_bytes()
        return current, (spool / os.fsdecode(current.strip())).stat().st_size
    except (OSError, ValueError):  # judged with the snapshot
        return b"", 0


def _take(spool: Path, into: Path) -> None:
    into.mkdir(mode=0o700)
    # The mark says what must be in a log, so it comes first. A log that is listed beside a newer one is
    # complete, so the logs together are a prefix of what is written.
    names = sorted(os.listdir(spool))  # noqa: PTH208 - names alone
    first = [name for name in (MARK_NAME, "CURRENT") if name in names]
    manifests = [name for name in names if name.startswith("MANIFEST-")]
    for name in (*first, *manifests, *filter(_LOG.fullmatch, names)):
        shutil.copyfile(spool / name, into / name)
    _link(spool, into, _tables(into, set(names)))


def _tables(into: Path, names: set[str]) -> list[str]:
    """Return those that the manifest names. A table that is still being written must not be linked: LevelDB
    would give its number to a table of the snapshot, and write that into the spool's file.
    """
    try:
        current = into / os.fsdecode((into / "CURRENT").read_bytes().strip())
        tables = read_manifest(current.read_bytes()).tables.values()
    except (OSError, ValueError):  # the opening says what is wrong
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
            f"{into.parent} needs {needed / 1e9:.2f} GB for a copy of {spool}, {free / 1e9:.2f} GB are free;"
            " name a directory on the spool's own file system, where links are enough"
        )
    for name in names:
        shutil.copyfile(spool / name, into / name)
