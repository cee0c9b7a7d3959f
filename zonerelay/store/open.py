"""Opens the store that the settings name, and the limits that relays share in it. No engine imports this."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping

from zonerelay.config.settings import (
    Backend,
    PostgresSettings,
    RedisSettings,
    S3Settings,
    Settings,
    SpoolSettings,
)
from zonerelay.limits import shared as shared_limits
from zonerelay.limits.values import LimitAuthority
from zonerelay.store.check import Contents, Examination, Repaired, Salvage, Tell
from zonerelay.store.common.queue_mark import QueueMark, place_of
from zonerelay.store.contract import Store, StoreOpenError
from zonerelay.store.disk.open import open_disk
from zonerelay.store.leveldb.check import check as check_leveldb
from zonerelay.store.leveldb.open import open_leveldb
from zonerelay.store.leveldb.repair import repair as repair_leveldb
from zonerelay.store.leveldb.store import LevelDbStore
from zonerelay.store.memory.shelf import Shelf
from zonerelay.store.memory.store import MemoryStore
from zonerelay.store.spool_paths import spool_of
from zonerelay.store.surroundings import Surroundings

_PACKAGES = {"redis": "redis-py", "s3": "aiobotocore"}

_log = logging.getLogger("zonerelay.store")


async def open_store(
    settings: SpoolSettings,
    around: Surroundings,
    *,
    redis: RedisSettings | None = None,
    postgres: PostgresSettings | None = None,
    s3: S3Settings | None = None,
) -> Store:
    """Raises StoreOpenError, whose text says what the operator should do."""
    redis, postgres, s3 = redis or RedisSettings(), postgres or PostgresSettings(), s3 or S3Settings()
    mark = QueueMark(settings.path, place_of(settings.backend, redis=redis, postgres=postgres, s3=s3))
    match settings.backend:
        case Backend.MEMORY:
            return await _open_memory(settings)
        case Backend.DISK:
            return await open_disk(settings, around)
        case Backend.LEVELDB:
            return await open_leveldb(settings, around)
        case Backend.POSTGRES:
            from zonerelay.store.postgres.open import open_postgres  # noqa: PLC0415 - its driver is an extra

            return await open_postgres(postgres, around, mark)
        case Backend.S3:
            with _driver("s3", "aiobotocore", "botocore"):
                from zonerelay.store.s3.open import open_s3  # noqa: PLC0415 - its client is an extra

            return await open_s3(s3, around, mark)
        case Backend.REDIS:
            with _driver("redis", "redis"):
                from zonerelay.store.redis.open import open_redis  # noqa: PLC0415 - its driver is an extra

            return await open_redis(settings, redis, around, mark)


async def acknowledge_loss(store: Store, loss: str) -> bool:
    """Ends the warning about a loss of mail. False when the store has no such loss. Raises StoreError."""
    return isinstance(store, LevelDbStore) and await store.acknowledge(loss)


@contextlib.contextmanager
def _driver(extra: str, *modules: str) -> Iterator[None]:
    """Says in words which package is missing: without it every other backend works."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in modules:
            raise
        package = _PACKAGES[extra]
        raise StoreOpenError(
            f"[spool] backend: {extra} needs the Python package {package}; in zonerelay's source,"
            f" with the relay's own pip: pip install -r locks/{extra}.lock"
        ) from error


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


async def check_spool(settings: Settings, worker: int, examination: Examination) -> Contents:
    """Check the spool of one worker; the queue of a shared store is the first worker's.

    Raises StoreError, or OSError, when the spool cannot be checked at all.
    """
    spool = spool_of(settings.spool, worker)
    match spool.backend:
        case Backend.LEVELDB:
            return await asyncio.to_thread(check_leveldb, spool.path, examination)
    raise StoreOpenError(f"[spool] backend: there is no check for {spool.backend.value}")


async def repair_spool(
    settings: Settings,
    worker: int,
    salvage: Salvage,
    tell: Tell,
    *,
    carry_out: bool,
    environment: Mapping[str, str],
) -> Repaired:
    """Repair the spool of one worker of a stopped relay; without `carry_out` say what that would do.

    Raises StoreError in words, or OSError, and has changed nothing then.
    """
    spool = spool_of(settings.spool, worker)
    match spool.backend:
        case Backend.LEVELDB:
            return await asyncio.to_thread(repair_leveldb, spool.path, salvage, tell, carry_out=carry_out)
    raise StoreOpenError(f"[spool] backend: there is no repair for {spool.backend.value}")


def open_limits(settings: Settings, holder: str, environment: Mapping[str, str]) -> LimitAuthority | None:
    """The limits that all relays on a shared store keep together. Raises StoreOpenError.

    `None` for the stores of one relay, and for S3, which cannot carry them.
    """
    shelf: shared_limits.BookStore
    if settings.spool.backend is Backend.REDIS:
        # The drivers are extras: without them every other backend works.
        from zonerelay.store.redis.limits import RedisShelf  # noqa: PLC0415
        from zonerelay.store.redis.open import server_of  # noqa: PLC0415

        shelf = RedisShelf(server_of(settings.redis, environment), settings.redis.prefix.encode())
    elif settings.spool.backend is Backend.POSTGRES:
        from zonerelay.store.postgres.limits import PostgresShelf  # noqa: PLC0415
        from zonerelay.store.postgres.open import access_of  # noqa: PLC0415

        shelf = PostgresShelf(access_of(settings.postgres, environment))
    else:
        return None
    return shared_limits.SharedAuthority(shelf, holder)
