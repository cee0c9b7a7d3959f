"""Opens the engine of a queue that several nodes share, for a relay and for operators' commands.

An engine is imported when the settings name it, because its driver is an optional dependency.
"""

# ruff: noqa: PLC0415  (see above)

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.config.settings import (
    Backend,
    PostgresSettings,
    RedisSettings,
    S3Settings,
    SpoolSettings,
)
from zonerelay.store.contract import Store, StoreError, StoreOpenError
from zonerelay.store.surroundings import Surroundings, driver, secret_of

if TYPE_CHECKING:
    from zonerelay.store.keys.port import SharedEngine
    from zonerelay.store.postgres.driver import Access
    from zonerelay.store.redis.connection import Server

LOOK_EVERY = 2.0
"""Seconds between two checks of the other nodes and their requests. A quarter of the lease is used if it is
shorter.
"""


def place_of(backend: Backend, *, redis: RedisSettings, postgres: PostgresSettings, s3: S3Settings) -> str:
    """Return the location of the shared queue without secrets, or "" for a spool that is not shared."""
    match backend:
        case Backend.REDIS:
            return f"[redis] url {redis.url} prefix {redis.prefix}"
        case Backend.POSTGRES:
            return f"[postgres] url {postgres.url} schema {postgres.schema}"
        case Backend.S3:
            return f"[s3] {s3.endpoint_url} bucket {s3.bucket} prefix {s3.prefix}"
    return ""


def seen_directory(spool: Path, place: str) -> Path:
    """Return the directory in which this machine records the partitions that it has seen at one location."""
    return spool / "nodes" / hashlib.sha256(place.encode()).hexdigest()[:16]


def postgres_access(settings: PostgresSettings, environment: Mapping[str, str]) -> Access:
    """Return the access to the PostgreSQL server. Raises StoreOpenError if the driver is missing."""
    from zonerelay.store.postgres.driver import Access, load_driver

    load_driver()
    return Access(
        settings.url,
        secret_of("postgres.password", settings.password, environment),
        settings.schema,
        f"zonerelay {settings.node}",
        settings.lease,
        accepts_loss=bool(settings.unsafe),
    )


def postgres_engine(settings: PostgresSettings, environment: Mapping[str, str]) -> SharedEngine:
    """Create the PostgreSQL engine. Raises StoreOpenError if the driver is missing."""
    from zonerelay.store.keys.postgres import PostgresEngine

    return PostgresEngine(postgres_access(settings, environment))


def redis_server(settings: RedisSettings, environment: Mapping[str, str]) -> Server:
    """Create the access to the Redis server. Raises StoreOpenError if the driver is missing."""
    with driver("redis", "redis"):
        from zonerelay.store.redis.connection import Server

    return Server(settings, secret_of("redis.password", settings.password, environment))


def redis_engine(settings: RedisSettings, environment: Mapping[str, str]) -> SharedEngine:
    """Create the Redis engine. Raises StoreOpenError if the driver is missing."""
    server = redis_server(settings, environment)
    from zonerelay.store.keys.redis import RedisEngine

    return RedisEngine(server)


async def open_shared(
    engine: SharedEngine,
    spool: SpoolSettings,
    place: str,
    around: Surroundings,
    *,
    preferred: int | None = None,
) -> Store:
    """Open the queue of one node. Raises StoreOpenError."""
    from zonerelay.store.nodes.store import NodeStore

    try:
        return await NodeStore(
            engine,
            around,
            directory=seen_directory(spool.path, place),
            preferred=preferred,
            every=min(LOOK_EVERY, engine.lease / 4),
            min_free_space=spool.min_free_space,
        ).opened()
    except StoreOpenError:
        raise
    except StoreError as error:
        raise StoreOpenError(f"{place} cannot be used: {error}") from error
