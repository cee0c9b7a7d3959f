"""Opens the configured store and the limits that relays share in it, and creates the engine of a shared
queue. No engine imports this module.

An engine is imported when the settings name it. Importing the others would cost memory and time at every
start, and three drivers are optional dependencies that may be missing.
"""

# ruff: noqa: PLC0415  (see above)

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings, Settings
from zonerelay.limits import shared as shared_limits
from zonerelay.limits.authority import LimitAuthority
from zonerelay.model.clock import Clock
from zonerelay.process.threads import STORE
from zonerelay.store.context import StoreContext, driver, secret_of
from zonerelay.store.contract import Store, StoreError, StoreOpenError
from zonerelay.store.spool_paths import spool_of

if TYPE_CHECKING:
    from zonerelay.store.keys.port import Engine, SharedEngine
    from zonerelay.store.objects.s3 import S3Engine
    from zonerelay.store.postgres.driver import DatabaseAccess
    from zonerelay.store.redis.connection import RedisEndpoint

LOOK_EVERY = 2.0
"""Seconds between two checks of the other nodes and their requests. A quarter of the lease is used if it is
shorter.
"""


async def open_store(settings: Settings, around: StoreContext, worker: int = 0) -> Store:
    """Open the store of a worker. Raises StoreOpenError whose text advises the operator."""
    spool = spool_of(settings.spool, worker)
    match spool.backend:
        case Backend.MEMORY:
            from zonerelay.store.memory import open_memory

            return await open_memory(spool.shelve, around)
        case Backend.DISK:
            from zonerelay.store.objects.disk import open_disk

            return await open_disk(spool, around)
        case Backend.LEVELDB:
            from zonerelay.store.leveldb.keeper import open_leveldb

            return await open_leveldb(spool, around)
        case Backend.S3:
            return await _open_s3(settings, around)
    # Each worker is a separate relay to the database.
    postgres = replace(settings.postgres, node=settings.postgres.node + worker)
    store = await _open_shared(replace(settings, postgres=postgres), around)
    if spool.backend is Backend.REDIS:
        from zonerelay.store.redis.engine import tell_foreign_queue

        await tell_foreign_queue(redis_server(settings.redis, around.environment))
    return store


async def _open_shared(settings: Settings, around: StoreContext) -> Store:
    """Open a shared queue on a database server as one of its nodes. Raises StoreOpenError."""
    spool = settings.spool
    engine = shared_engine(settings, around.environment, spool.path, around.clock)
    from zonerelay.store.nodes import NodeStore

    try:
        return await NodeStore(
            engine,
            around,
            directory=seen_directory(settings),
            preferred=settings.postgres.node if spool.backend is Backend.POSTGRES else None,
            every=min(LOOK_EVERY, engine.lease / 4),
            min_free_space=spool.min_free_space,
        ).opened()
    except StoreOpenError:
        raise
    except StoreError as error:
        raise StoreOpenError(f"{place_of_queue(settings)} cannot be used: {error}") from error


async def _open_s3(settings: Settings, around: StoreContext) -> Store:
    """Open a queue on S3. Raises StoreOpenError."""
    s3, seen = settings.s3, seen_directory(settings)
    engine = s3_engine(settings, around.environment, settings.spool.path / "index" / seen.name, around.clock)
    from zonerelay.store.nodes import NodeStore

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


async def _open_alone(engine: Engine, around: StoreContext, seen: Path) -> Store:
    """Open a queue in an engine that only one relay at a time can use. Raises StoreError."""
    from zonerelay.store.keys.partition import SeenFile, open_partition
    from zonerelay.store.keys.port import NodeTakenError
    from zonerelay.store.queue.partition_keeper import open_queue

    file = await STORE.open(SeenFile, seen / "0.seen", uuid4().hex)
    try:
        partition = await open_partition(
            engine, 0, clock=around.clock, seen_file=file, wait=1.5 * engine.lease
        )
    except NodeTakenError as error:
        raise StoreOpenError(f"{error}: with shared = false only one relay may run at a time") from error
    return await open_queue(partition, around, release=engine.close)


async def acknowledge_loss(store: Store, loss: str) -> bool:
    """Dismiss a loss of mail. Return false if the store has no such loss. Raises StoreError."""
    from zonerelay.store.queue.store import PartitionStore

    return isinstance(store, PartitionStore) and await store.acknowledge(loss)


def open_limits(settings: Settings, owner: str, environment: Mapping[str, str]) -> LimitAuthority | None:
    """Return the object that grants connections and rates for all relays on a shared store together. Raises
    StoreOpenError.

    Returns `None` for private stores, and for S3, which cannot store limits.
    """
    store = open_record_store(settings, environment)
    return None if store is None else shared_limits.SharedAuthority(store, owner)


def open_record_store(
    settings: Settings, environment: Mapping[str, str]
) -> shared_limits.SharedRecordStore | None:
    """Return the store in which all relays on a shared queue count connections and rates, or `None` if there
    is none. Raises StoreOpenError.
    """
    if settings.spool.backend is Backend.REDIS:
        server = redis_server(settings.redis, environment)
        from zonerelay.store.redis.engine import RedisRecordStore

        return RedisRecordStore(server)
    if settings.spool.backend is Backend.POSTGRES:
        from zonerelay.store.postgres.engine import PostgresRecordStore

        return PostgresRecordStore(postgres_access(settings.postgres, environment))
    return None


# --- engines


def place_of_queue(settings: Settings) -> str:
    """Return the location of a shared queue without secrets, or "" for a spool of this machine."""
    redis, postgres, s3 = settings.redis, settings.postgres, settings.s3
    return {
        Backend.REDIS: f"[redis] url {redis.url} prefix {redis.prefix}",
        Backend.POSTGRES: f"[postgres] url {postgres.url} schema {postgres.schema}",
        Backend.S3: f"[s3] {s3.endpoint_url} bucket {s3.bucket} prefix {s3.prefix}",
    }.get(settings.spool.backend, "")


def seen_directory(settings: Settings) -> Path:
    """Return the directory in which this machine records the partitions of the shared queue that it has
    seen.
    """
    name = hashlib.sha256(place_of_queue(settings).encode()).hexdigest()[:16]
    return settings.spool.path / "nodes" / name


def shared_engine(
    settings: Settings, environment: Mapping[str, str], indexes: Path, clock: Clock
) -> SharedEngine:
    """Return the engine of the shared queue that the settings name. `indexes` is the directory for an index
    of S3.
    """
    match settings.spool.backend:
        case Backend.REDIS:
            server = redis_server(settings.redis, environment)
            from zonerelay.store.redis.engine import RedisEngine

            return RedisEngine(server)
        case Backend.POSTGRES:
            from zonerelay.store.postgres.engine import PostgresEngine

            return PostgresEngine(postgres_access(settings.postgres, environment))
        case Backend.S3:
            return s3_engine(settings, environment, indexes, clock)
    raise AssertionError("this queue is not shared")


def s3_engine(settings: Settings, environment: Mapping[str, str], indexes: Path, clock: Clock) -> S3Engine:
    with driver("s3", "aiobotocore", "botocore"):
        from zonerelay.store.objects.s3 import S3Engine

    return S3Engine(settings.s3, indexes, clock, environment)


def postgres_access(settings: PostgresSettings, environment: Mapping[str, str]) -> DatabaseAccess:
    """Return the address, login and lease time for the PostgreSQL server."""
    from zonerelay.store.postgres.driver import DatabaseAccess, load_driver

    load_driver()
    return DatabaseAccess(
        settings.url,
        secret_of("postgres.password", settings.password, environment),
        settings.schema,
        f"zonerelay {settings.node}",
        settings.lease,
        accepts_loss=bool(settings.unsafe),
    )


def redis_server(settings: RedisSettings, environment: Mapping[str, str]) -> RedisEndpoint:
    """Return the configured Redis server, with a function that reads its password."""
    with driver("redis", "redis"):
        from zonerelay.store.redis.connection import RedisEndpoint

    return RedisEndpoint(settings, secret_of("redis.password", settings.password, environment))
