"""Returns the location of each worker's spool, and finds the spools of workers that no longer exist.

The first worker's spool is `[spool] path` itself, and that of worker 3 is `03` in it. The other directories
of the disk queue and the shelf follow the same rule. So a relay with one worker can be given more workers, or
fewer, without a migration. A shared spool has the same location for every worker.
"""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import AUTO, Backend, Settings, SpoolSettings

SHARED = frozenset({Backend.REDIS, Backend.POSTGRES, Backend.S3})
KEYS = "idempotency-register"
"""The directory next to the spool in which workers share their idempotency keys."""
_NUMBER = re.compile(r"\d{2,3}", re.ASCII)
_REMOVED = ".removed"


def count_of(settings: Settings) -> int:
    """Return the configured number of workers, where "auto" is the number of CPUs."""
    return settings.workers if settings.workers != AUTO else len(os.sched_getaffinity(0))


def is_shared(spool: SpoolSettings) -> bool:
    """Return whether all workers share one queue."""
    return spool.backend in SHARED


def spool_of(spool: SpoolSettings, worker: int) -> SpoolSettings:
    """Return the spool settings of one worker. The first worker is number 0."""
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


def spools_beyond(spool: SpoolSettings, workers: int) -> list[int]:
    """Return the workers that are no longer configured but still have a spool. Reads directories.

    A removal that a crash interrupted is finished first. An unreadable directory counts as empty, because the
    store that opens it reports the error. Raises OSError.
    """
    found = set[int]()
    for place in directories_of(spool):
        for entry in place.iterdir() if place.is_dir() and os.access(place, os.R_OK | os.X_OK) else ():
            if entry.name.endswith(_REMOVED) and _NUMBER.fullmatch(entry.name.removesuffix(_REMOVED)):
                shutil.rmtree(entry)
            elif _NUMBER.fullmatch(entry.name) and entry.is_dir() and int(entry.name) >= workers:
                found.add(int(entry.name))
    return sorted(found | _shelves_beyond(spool, workers))


def spools_of(spool: SpoolSettings) -> list[int]:
    """Return the workers that have or may have a spool. A shared queue is listed as worker 0."""
    return [0] if is_shared(spool) else [0, *spools_beyond(spool, 1)]


def _shelves_beyond(spool: SpoolSettings, workers: int) -> set[int]:
    """Return the workers from number `workers` on that have saved their queue in memory to a file, the shelf.
    A shelf is a file, or several with suffixes, as the platform's database module creates them.
    """
    shelf = spool.shelve
    if shelf is None or spool.backend is not Backend.MEMORY or not shelf.parent.is_dir():
        return set()
    names = (entry.name.removeprefix(f"{shelf.name}.") for entry in shelf.parent.glob(f"{shelf.name}.*"))
    numbers = (name.partition(".")[0] for name in names)
    return {int(number) for number in numbers if _NUMBER.fullmatch(number) and int(number) >= workers}


def remove_spool(spool: SpoolSettings, worker: int) -> None:
    """Remove the spool of a worker that no longer exists. It must be closed and contain no mail. Raises
    OSError.

    A directory is renamed first, because a partly removed spool would count as damaged.
    """
    assert worker > 0, "the spool of the first worker contains the others"
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
    """Return the directories of the first worker's spool, which contain the numbered ones of the others."""
    if is_shared(spool) or spool.backend is Backend.MEMORY:
        return []
    wanted = (spool.path, spool.env_directory, spool.meta_directory, spool.scratch_directory)
    return list(dict.fromkeys(path for path in wanted if path is not None))
