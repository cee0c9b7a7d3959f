"""Opens the store that the settings name, and the limits that relays share in it. No engine imports this
module.

An engine is imported when the settings name it. Importing the others would cost memory and time at every
start, and three drivers are optional dependencies that may be missing.
"""

# ruff: noqa: PLC0415  (see above)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

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
from zonerelay.process.threads import STORE
from zonerelay.store.contract import Store, StoreError, StoreOpenError
from zonerelay.store.shared import (
    open_shared,
    place_of,
    postgres_access,
    postgres_engine,
    redis_engine,
    redis_server,
    seen_directory,
)
from zonerelay.store.surroundings import Surroundings, driver

if TYPE_CHECKING:
    from zonerelay.store.keys.partition import Hooks, Partition
    from zonerelay.store.keys.port import Engine


async def open_store(
    settings: SpoolSettings,
    around: Surroundings,
    *,
    redis: RedisSettings | None = None,
    postgres: PostgresSettings | None = None,
    s3: S3Settings | None = None,
) -> Store:
    """Open the store. Raises StoreOpenError whose text advises the operator."""
    redis, postgres, s3 = redis or RedisSettings(), postgres or PostgresSettings(), s3 or S3Settings()
    place = place_of(settings.backend, redis=redis, postgres=postgres, s3=s3)
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
                settings,
                place,
                around,
                preferred=postgres.node,
            )
        case Backend.S3:
            return await _open_s3(settings, s3, around, place)
        case Backend.REDIS:
            store = await open_shared(redis_engine(redis, around.environment), settings, place, around)
            from zonerelay.store.redis.foreign import tell_foreign_queue

            await tell_foreign_queue(redis_server(redis, around.environment))
            return store


async def _open_s3(settings: SpoolSettings, s3: S3Settings, around: Surroundings, place: str) -> Store:
    """Open a queue on S3. Raises StoreOpenError."""
    with driver("s3", "aiobotocore", "botocore"):
        from zonerelay.store.objects.s3 import S3Engine
    from zonerelay.store.nodes.store import NodeStore

    seen = seen_directory(settings.path, place)
    engine = S3Engine(s3, settings.path / "index" / seen.name, around.clock, around.environment)
    try:
        await engine.check()
        if not s3.shared:
            return await _open_alone(engine, around, seen)
        every = s3.lease / 4
        return await NodeStore(engine, around, directory=seen, every=every, wait=engine.wait).opened()
    except BaseException as error:
        await engine.close()
        if isinstance(error, StoreError):
            raise StoreOpenError(f"[s3] bucket {s3.bucket}: {error}") from error
        raise


async def _open_alone(engine: Engine, around: Surroundings, seen: Path) -> Store:
    """Open the queue of a service that only one relay at a time can use. Raises StoreError."""
    from zonerelay.store.keys.partition import open_partition
    from zonerelay.store.keys.port import NodeTakenError
    from zonerelay.store.keys.seen_file import SeenFile
    from zonerelay.store.queue.queue import open_queue

    async def opened(hooks: Hooks) -> Partition:
        file = await STORE.open(SeenFile, seen / "0.seen", uuid4().hex)
        try:
            return await open_partition(
                engine,
                0,
                token="",
                clock=around.clock,
                seen_file=file,
                hooks=hooks,
                wait=1.5 * engine.lease,
            )
        except NodeTakenError as error:
            raise StoreOpenError(f"{error}: with shared = false only one relay may run at a time") from error

    return await open_queue(opened, around, release=engine.close)


async def acknowledge_loss(store: Store, loss: str) -> bool:
    """Dismiss a loss of mail. Return false if the store has no such loss. Raises StoreError."""
    from zonerelay.store.leveldb.store import LevelDbStore

    return isinstance(store, LevelDbStore) and await store.acknowledge(loss)


def open_limits(settings: Settings, owner: str, environment: Mapping[str, str]) -> LimitAuthority | None:
    """Return the limits that all relays on a shared store have together. Raises StoreOpenError.

    Returns `None` for private stores, and for S3, which cannot store limits.
    """
    store = open_record_store(settings, environment)
    return None if store is None else shared_limits.SharedAuthority(store, owner)


def open_record_store(settings: Settings, environment: Mapping[str, str]) -> shared_limits.RecordStore | None:
    """Return the store of the shared counts of all relays on a shared store, or `None`. Raises
    StoreOpenError.
    """
    if settings.spool.backend is Backend.REDIS:
        server = redis_server(settings.redis, environment)
        from zonerelay.store.redis.limits import RedisRecordStore

        return RedisRecordStore(server)
    if settings.spool.backend is Backend.POSTGRES:
        from zonerelay.store.postgres.limits import PostgresRecordStore

        return PostgresRecordStore(postgres_access(settings.postgres, environment))
    return None
