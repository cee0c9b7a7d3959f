"""Opening the store that the settings name. Above the backends: no backend imports this."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from zonerelay.config.models import Backend, PostgresSettings, RedisSettings, S3Settings, SpoolSettings
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.store.base import Lost, News, Store, StoreOpenError
from zonerelay.store.disk_open import open_disk
from zonerelay.store.leveldb_open import open_leveldb
from zonerelay.store.memory import MemoryStore
from zonerelay.store.shelf import Shelf

_log = logging.getLogger("zonerelay.store")


def _no_news(zone: str) -> None:
    """Nobody else's mail comes in."""


def _none_lost(keys: Collection[DeliveryKey]) -> None:
    """Claims do not end by themselves."""


async def open_store(
    settings: SpoolSettings,
    *,
    clock: Clock,
    on_health: Callable[[str | None], None],
    observe_commit: Callable[[float], None],
    on_news: News = _no_news,
    on_lost: Lost = _none_lost,
    redis: RedisSettings | None = None,
    postgres: PostgresSettings | None = None,
    s3: S3Settings | None = None,
    environment: Mapping[str, str] | None = None,
) -> Store:
    """Raises StoreOpenError, whose text says what the operator should do.

    `on_health` hears of every change of `unhealthy()`; `observe_commit` of the seconds of each durable
    write; `on_news` and `on_lost` of what other relays do to a shared store. All are called on the event
    loop that is running now and must not raise. `environment` is where secrets may be.
    """
    if settings.backend is Backend.MEMORY:
        return await _open_memory(settings)
    if settings.backend is Backend.DISK:
        return await open_disk(settings, clock=clock, on_health=on_health, observe_commit=observe_commit)
    if settings.backend is Backend.LEVELDB:
        return await open_leveldb(settings, clock=clock, on_health=on_health, observe_commit=observe_commit)
    if settings.backend is Backend.POSTGRES:
        from zonerelay.store.postgres_open import open_postgres  # noqa: PLC0415 - its driver is an extra

        return await open_postgres(
            postgres or PostgresSettings(),
            environment=environment or {},
            clock=clock,
            on_health=on_health,
            observe_commit=observe_commit,
            on_news=on_news,
            on_lost=on_lost,
        )
    if settings.backend is Backend.S3:
        return await _open_s3(
            s3 or S3Settings(),
            environment=environment or {},
            clock=clock,
            on_health=on_health,
            observe_commit=observe_commit,
            on_news=on_news,
            on_lost=on_lost,
        )
    try:
        # The driver is an extra: without it every other backend works.
        from zonerelay.store.redis_open import open_redis  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise StoreOpenError(
            "[spool] backend: redis needs the Python package redis-py: pip install 'zonerelay[redis]'"
        ) from error
    return await open_redis(
        settings,
        redis or RedisSettings(),
        environment=environment or {},
        clock=clock,
        on_health=on_health,
        observe_commit=observe_commit,
        on_news=on_news,
        on_lost=on_lost,
    )


async def _open_s3(
    settings: S3Settings,
    *,
    environment: Mapping[str, str],
    clock: Clock,
    on_health: Callable[[str | None], None],
    observe_commit: Callable[[float], None],
    on_news: News,
    on_lost: Lost,
) -> Store:
    try:
        # The client is an extra: without it every other backend works.
        from zonerelay.store.s3_open import open_s3  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"aiobotocore", "botocore"}:
            raise
        raise StoreOpenError(
            "[spool] backend: s3 needs the Python package aiobotocore: pip install 'zonerelay[s3]'"
        ) from error
    return await open_s3(
        settings,
        environment=environment,
        clock=clock,
        on_health=on_health,
        observe_commit=observe_commit,
        on_news=on_news,
        on_lost=on_lost,
    )


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
