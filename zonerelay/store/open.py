"""Opening the store that the settings name. Above the backends: no backend imports this."""

from __future__ import annotations

import logging
from collections.abc import Callable

from zonerelay.config.models import Backend, SpoolSettings
from zonerelay.model.clock import Clock
from zonerelay.store.base import Store
from zonerelay.store.disk_open import open_disk
from zonerelay.store.leveldb_open import open_leveldb
from zonerelay.store.memory import MemoryStore
from zonerelay.store.shelf import Shelf

_log = logging.getLogger("zonerelay.store")


async def open_store(
    settings: SpoolSettings,
    *,
    clock: Clock,
    on_health: Callable[[str | None], None],
    observe_commit: Callable[[float], None],
) -> Store:
    """Raises StoreOpenError, whose text says what the operator should do.

    `on_health` hears of every change of `unhealthy()`; `observe_commit` of the seconds of each durable
    write. Both are called on the event loop that is running now and must not raise.
    """
    if settings.backend is Backend.MEMORY:
        return await _open_memory(settings)
    if settings.backend is Backend.DISK:
        return await open_disk(settings, clock=clock, on_health=on_health, observe_commit=observe_commit)
    return await open_leveldb(settings, clock=clock, on_health=on_health, observe_commit=observe_commit)


async def _open_memory(settings: SpoolSettings) -> MemoryStore:
    if settings.shelve is None:
        _log.warning("%s", MemoryStore.WARNING)
        return MemoryStore()
    _log.warning(MemoryStore.SHELF_WARNING, settings.shelve)
    shelf = Shelf(settings.shelve)
    shelved = await shelf.open()
    if not shelved.was_closed:
        _log.error("the shelf %s was not closed in order: mail may be missing in it", settings.shelve)
    return MemoryStore(shelf, shelved)
