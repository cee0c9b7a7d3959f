"""Opening a disk queue: directories, what the last run left, threads."""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from zonerelay.config.settings import SpoolSettings
from zonerelay.store.common.keeper.ballast import Ballast
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError
from zonerelay.store.disk.directories import Directories, check_marks, open_directories
from zonerelay.store.disk.keeper import DiskKeeper
from zonerelay.store.disk.stock import Stock, list_names, take_stock
from zonerelay.store.disk.store import DiskStore
from zonerelay.store.surroundings import Surroundings

_log = logging.getLogger("zonerelay.store")


class _Opened(NamedTuple):
    directories: Directories
    ballast: Ballast
    stock: Stock


async def open_disk(
    settings: SpoolSettings,
    around: Surroundings,
) -> DiskStore:
    """Raises StoreOpenError. Returns when every state has been read."""
    opened = await asyncio.get_running_loop().run_in_executor(None, _open, settings, around.clock.now())
    keeper = DiskKeeper(
        opened.directories,
        noted_id=opened.stock.noted_id,
        number=opened.stock.number,
        ballast=opened.ballast,
        min_free_space=settings.min_free_space,
        around=around,
    )
    store = DiskStore(keeper, opened.stock)
    keeper.start()
    return store


def _open(settings: SpoolSettings, now: float) -> _Opened:
    directories = open_directories(settings)
    try:
        ballast = Ballast(directories.meta.path, settings.min_free_space // 2)
        try:
            stock = _take_stock(directories, now)
        except StoreFullError:
            if not ballast.drop():
                raise
            stock = _take_stock(directories, now)
    except StoreOpenError:
        directories.close()
        raise
    except (StoreError, OSError) as error:
        directories.close()
        raise StoreOpenError(
            f"the queue in {directories.meta.path} cannot be read: {error}; nothing of it was given up"
        ) from error
    if stock.unreadable or stock.foreign:
        _log.error(
            "the queue in %s has %d unreadable and %d foreign files: docs/disk-queue.md says what to do",
            directories.meta.path,
            stock.unreadable,
            stock.foreign,
        )
    return _Opened(directories, ballast, stock)


def _take_stock(directories: Directories, now: float) -> Stock:
    listing = list_names(directories)
    identity = f"{now:.6f} {directories.meta.path.stat().st_ino:x}"
    check_marks(directories, identity=identity, pending=bool(listing.intents), used=listing.is_used)
    return take_stock(directories)
