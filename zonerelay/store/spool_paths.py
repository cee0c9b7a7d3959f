"""Says where each worker's spool lies, and finds the spools that belong to no worker any more.

The first worker's spool is `[spool] path` itself, that of worker 3 is `03` in it; the other directories of
the disk queue and the shelf go the same way. So a relay with one worker is the first worker of any other
number, and more workers need no migration. Shared spools are where the configuration says, for every worker.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import AUTO, Backend, PostgresSettings, Settings, SpoolSettings

SHARED = frozenset({Backend.REDIS, Backend.POSTGRES, Backend.S3})
KEYS = "idempotency-register"
"""The directory beside the spool in which workers share what they know of idempotency keys."""
_NUMBER = re.compile(r"\d{2,3}", re.ASCII)
_REMOVED = ".removed"


def count_of(settings: Settings) -> int:
    """Returns `workers`, with "auto" counted on this machine."""
    return settings.workers if settings.workers != AUTO else len(os.sched_getaffinity(0))


def is_shared(spool: SpoolSettings) -> bool:
    """One queue for all workers."""
    return spool.backend in SHARED


def spool_of(spool: SpoolSettings, worker: int) -> SpoolSettings:
    """Return the spool of one worker, which counts from 0."""
    if worker == 0 or is_shared(spool):
        return spool

    def own(path: Path | None) -> Path | None:
        return None if path is None else path / name_of(worker)

    return replace(
        spool,
        path=spool.path / name_of(worker),
        env_directory=own(spool.env_directory),
        meta_directory=own(spool.meta_directory),
        scratch_directory=own(spool.scratch_directory),
        shelve=None
        if spool.shelve is None
        else spool.shelve.with_name(f"{spool.shelve.name}.{name_of(worker)}"),
    )


def disk_directories(spool: SpoolSettings) -> tuple[Path, Path, Path]:
    """Return the directories of bodies, of the log and of the index of a disk queue."""
    return (
        spool.env_directory or spool.path / "messages",
        spool.meta_directory or spool.path,
        spool.scratch_directory or spool.path / "scratch",
    )


def name_of(worker: int) -> str:
    return f"{worker:02d}"


def node_of(postgres: PostgresSettings, worker: int) -> PostgresSettings:
    """Each worker is a relay of its own to the database."""
    return replace(postgres, node=postgres.node + worker)


def spools_beyond(spool: SpoolSettings, workers: int) -> list[int]:
    """Return workers that there are no more but whose spools are still there. Reads directories.

    What was being removed when a crash came is removed now. A directory that cannot be read has none: the
    store that opens it says so in words. Raises OSError.
    """
    found = set[int]()
    for place in directories_of(spool):
        for entry in place.iterdir() if place.is_dir() and os.access(place, os.R_OK | os.X_OK) else ():
            if entry.name.endswith(_REMOVED) and _NUMBER.fullmatch(entry.name.removesuffix(_REMOVED)):
                shutil.rmtree(entry)
            elif _NUMBER.fullmatch(entry.name) and entry.is_dir() and int(entry.name) >= workers:
                found.add(int(entry.name))
    return sorted(found | _shelves_beyond(spool, workers))


def _shelves_beyond(spool: SpoolSettings, workers: int) -> set[int]:
    """A shelf is a file, or several with endings, as the platform's database has them."""
    shelf = spool.shelve
    if shelf is None or spool.backend is not Backend.MEMORY or not shelf.parent.is_dir():
        return set()
    names = (entry.name.removeprefix(f"{shelf.name}.") for entry in shelf.parent.glob(f"{shelf.name}.*"))
    numbers = (name.partition(".")[0] for name in names)
    return {int(number) for number in numbers if _NUMBER.fullmatch(number) and int(number) >= workers}


def remove_spool(spool: SpoolSettings, worker: int) -> None:
    """Remove the spool of a worker that is no more. It must be closed and empty of mail. Raises OSError.

    A directory gets another name first: half of a spool would be a broken one.
    """
    assert worker > 0, "the first worker's spool holds the others"
    for place in directories_of(spool):
        directory = place / name_of(worker)
        if directory.is_dir():
            gone = directory.with_name(directory.name + _REMOVED)
            durable.rename(directory, gone)
            shutil.rmtree(gone)
    shelf = spool_of(spool, worker).shelve
    if shelf is not None:
        for path in (shelf, *shelf.parent.glob(f"{shelf.name}.*")):
            path.unlink(missing_ok=True)


def directories_of(spool: SpoolSettings) -> list[Path]:
    """Directories of the first worker's spool, which hold the numbered ones of the others."""
    if is_shared(spool) or spool.backend is Backend.MEMORY:
        return []
    wanted = (spool.path, spool.env_directory, spool.meta_directory, spool.scratch_directory)
    return list(dict.fromkeys(path for path in wanted if path is not None))
