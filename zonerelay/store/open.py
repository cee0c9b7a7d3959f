"""Opening the store that the settings name. Above the backends: no backend imports this."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from zonerelay.config.models import Backend, SpoolSettings
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.store.base import Lost, News, Store
from zonerelay.store.leveldb_open import open_leveldb
from zonerelay.store.memory import MemoryStore
from zonerelay.store.postgres_open import open_postgres

_log = logging.getLogger("zonerelay.store")


async def open_store(
    settings: SpoolSettings,
    *,
    clock: Clock,
    on_health: Callable[[str | None], None],
    observe_commit: Callable[[float], None],
    environment: Mapping[str, str] | None = None,
    on_news: News | None = None,
    on_lost: Lost | None = None,
) -> Store:
    """Raises StoreOpenError, whose text says what the operator should do.

    `on_health` hears of every change of `unhealthy()`; `observe_commit` of the seconds of each durable
    write; `on_news` and `on_lost` of what other relays do to a shared store. All are called on the event loop
    that is running now and must not raise. `environment` is where secrets may be (`config/secrets.py`).
    """
    if settings.backend is Backend.MEMORY:
        _log.warning("%s", MemoryStore.WARNING)
        return MemoryStore()
    if settings.backend is Backend.POSTGRES:
        return await open_postgres(
            settings,
            environment=environment or {},
            clock=clock,
            on_health=on_health,
            observe_commit=observe_commit,
            on_news=on_news or _no_news,
            on_lost=on_lost or _nothing_lost,
        )
    return await open_leveldb(settings, clock=clock, on_health=on_health, observe_commit=observe_commit)


def _no_news(_zone: str) -> None:
    """When nobody listens."""


def _nothing_lost(_keys: Collection[DeliveryKey]) -> None:
    """When nobody listens."""
