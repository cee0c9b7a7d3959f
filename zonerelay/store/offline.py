"""Carries out operators' commands on a store without a relay.

A check and a snapshot change nothing and work while a relay is running. A repair requires a stopped relay.
Functions that are not `async` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from zonerelay.config.settings import Backend, Settings, SpoolSettings
from zonerelay.process.threads import STORE
from zonerelay.store.check import Contents, Examination, Repaired, Salvage, Tell
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.keys.seen_file import SeenFile
from zonerelay.store.leveldb.damage.directory import lock_directory
from zonerelay.store.leveldb.damage.losses import Losses
from zonerelay.store.leveldb.snapshot import take_snapshot
from zonerelay.store.leveldb_check import check as check_leveldb
from zonerelay.store.leveldb_repair import repair as repair_leveldb
from zonerelay.store.offline_shared import check_shared, repair_shared
from zonerelay.store.queue.disk_offline import check_disk, repair_disk, snapshot_disk
from zonerelay.store.shared import place_of, seen_directory
from zonerelay.store.spool_paths import is_shared, spool_of, spools_beyond

T = TypeVar("T")

_SHELF = (
    '[spool] backend = "memory" is for tests: its shelf is one file, which a start reads whole or refuses;'
    " copy that file while the relay is stopped, or export its mail: zonerelay spool export"
)


def acknowledge_loss(spool: SpoolSettings, loss: str) -> bool:
    """Dismiss a loss of mail in the spool of any worker. Return false if no spool has this loss.

    Raises StoreError if a relay has the spool open or the dismissal cannot be stored, and OSError.
    """
    for worker in (0, *(() if is_shared(spool) else spools_beyond(spool, 1))):
        path = spool_of(spool, worker).path
        if not path.is_dir():
            continue
        lock = lock_directory(path)
        try:
            losses = Losses(path)
            losses.refresh()
            if losses.acknowledge(loss):
                return True
        finally:
            os.close(lock)
    return False


def place_of_queue(settings: Settings) -> str:
    """Return the location of a shared queue without secrets, or "" for a spool of this machine."""
    return place_of(settings.spool.backend, redis=settings.redis, postgres=settings.postgres, s3=settings.s3)


def forget_queue(settings: Settings) -> str:
    """Forget the known state of the shared store, so that this machine accepts it as it is. A relay that has
    refused it checks again within seconds.

    Returns the mark of the known queue, or "" if none was known. Raises StoreError, OSError.
    """
    place = place_of_queue(settings)
    known = ""
    for path in sorted(seen_directory(settings.spool.path, place).glob("*.seen")):
        seen = SeenFile(path, "")
        known = seen.seen.mark or known
        seen.forget()
        seen.close()
    return known


async def check_spool(settings: Settings, worker: int, examination: Examination) -> Contents:
    """Check the spool of one worker. A shared queue belongs to the first worker.

    Raises StoreError, or OSError, if the spool cannot be checked at all.
    """
    spool = spool_of(settings.spool, worker)
    if is_shared(spool):
        return await check_shared(settings, examination)
    match spool.backend:
        case Backend.LEVELDB:
            return await _in_thread(
                lambda tell: check_leveldb(spool.path, replace(examination, tell=tell)), examination.tell
            )
        case Backend.DISK:
            return await check_disk(spool, examination)
        case Backend.MEMORY:
            raise StoreOpenError(_SHELF)
    raise StoreOpenError(f"[spool] backend: there is no check for {spool.backend.value}")


async def snapshot_spool(settings: Settings, worker: int, scratch: Path) -> SpoolSettings:
    """Copy a snapshot of one worker's spool to a directory that does not exist yet. A relay may be running.
    Raises StoreError, or OSError.
    """
    spool = spool_of(settings.spool, worker)
    match spool.backend:
        case Backend.LEVELDB:
            await STORE.run(take_snapshot, spool.path, scratch)
            return replace(spool, path=scratch)
        case Backend.DISK:
            return await snapshot_disk(spool, scratch)
        case Backend.MEMORY:
            raise StoreOpenError(_SHELF)
    raise StoreOpenError(f"[spool] backend: snapshots are not supported by {spool.backend.value}")


async def repair_spool(
    settings: Settings,
    worker: int,
    salvage: Salvage,
    tell: Tell,
    *,
    carry_out: bool,
    environment: Mapping[str, str],
) -> Repaired:
    """Repair the spool of one worker of a stopped relay. Without `carry_out`, return what a repair would do.

    Raises StoreError with a message, or OSError, in which case nothing was changed.
    """
    spool = spool_of(settings.spool, worker)
    if is_shared(spool):
        return await repair_shared(settings, salvage, tell, carry_out=carry_out, environment=environment)
    match spool.backend:
        case Backend.LEVELDB:
            home = settings.spool.path.parent
            return await _in_thread(
                lambda told: repair_leveldb(spool.path, home, salvage, told, carry_out=carry_out), tell
            )
        case Backend.DISK:
            return await repair_disk(spool, salvage, tell, carry_out=carry_out)
        case Backend.MEMORY:
            raise StoreOpenError(_SHELF)
    raise StoreOpenError(f"[spool] backend: there is no repair for {spool.backend.value}")


async def _in_thread(work: Callable[[Tell], T], tell: Tell) -> T:
    """Run `work` in a thread. A cancellation ends the work at its next progress report and waits for that, so
    the work leaves nothing half done.
    """
    given_up = threading.Event()

    def told(done: int, total: int) -> None:
        if given_up.is_set():
            raise _GivenUpError
        tell(done, total)

    working = asyncio.ensure_future(STORE.run(work, told))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        given_up.set()
        with contextlib.suppress(_GivenUpError):
            await working
        raise


class _GivenUpError(Exception):
    """The caller was cancelled."""
