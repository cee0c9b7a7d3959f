"""Opens the store that the settings name, and the limits that relays share in it. No engine imports this.

An engine is imported when the settings name it: the others would be memory and time of every start, and the
drivers of three are extras that a machine may lack.
"""

# ruff: noqa: PLC0415  (see above)

from __future__ import annotations

from collections.abc import Mapping

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
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import Store
from zonerelay.store.shared import open_shared, place_of, postgres_access, postgres_engine
from zonerelay.store.surroundings import Surroundings, driver


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
    place = place_of(settings.backend, redis=redis, postgres=postgres, s3=s3)
    mark = QueueMark(settings.path, place)
    match settings.backend:
        case Backend.MEMORY:
            from zonerelay.store.queue.shelf import open_memory

            return await open_memory(settings.shelve, around)
        case Backend.DISK:
            from zonerelay.store.queue.disk import open_disk

            return await open_disk(settings, around)
        case Backend.LEVELDB:
            from zonerelay.store.leveldb.store import open_leveldb

            return await open_leveldb(settings, around)
        case Backend.POSTGRES:
            return await open_shared(
                postgres_engine(postgres, around.environment),
                settings.path,
                place,
                around,
                preferred=postgres.node,
            )
        case Backend.S3:
            with driver("s3", "aiobotocore", "botocore"):
                from zonerelay.store.s3.open import open_s3

            return await open_s3(s3, around, mark)
        case Backend.REDIS:
            with driver("redis", "redis"):
                from zonerelay.store.redis.open import open_redis

            return await open_redis(settings, redis, around, mark)


async def acknowledge_loss(store: Store, loss: str) -> bool:
    """Ends the warning about a loss of mail. False when the store has no such loss. Raises StoreError."""
    from zonerelay.store.leveldb.store import LevelDbStore

    return isinstance(store, LevelDbStore) and await store.acknowledge(loss)


def open_limits(settings: Settings, holder: str, environment: Mapping[str, str]) -> LimitAuthority | None:
    """The limits that all relays on a shared store keep together. Raises StoreOpenError.

    `None` for the stores of one relay, and for S3, which cannot carry them.
    """
    shelf = open_books(settings, environment)
    return None if shelf is None else shared_limits.SharedAuthority(shelf, holder)


def open_books(settings: Settings, environment: Mapping[str, str]) -> shared_limits.BookStore | None:
    """The store of what all relays on a shared store count together, or `None`. Raises StoreOpenError."""
    if settings.spool.backend is Backend.REDIS:
        from zonerelay.store.redis.limits import RedisShelf
        from zonerelay.store.redis.open import server_of

        return RedisShelf(server_of(settings.redis, environment))
    if settings.spool.backend is Backend.POSTGRES:
        from zonerelay.store.postgres.limits import PostgresShelf

        return PostgresShelf(postgres_access(settings.postgres, environment))
    return None
