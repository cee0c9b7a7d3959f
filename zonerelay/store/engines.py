"""Creates the engine of a queue that several nodes share, for a relay and for operators' commands.

An engine is imported when the settings name it, because its driver is an optional dependency. Every function
raises StoreOpenError if the driver is missing.
"""

# ruff: noqa: PLC0415  (see above)

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings, Settings
from zonerelay.model.clock import Clock
from zonerelay.store.context import driver, secret_of

if TYPE_CHECKING:
    from zonerelay.store.keys.port import SharedEngine
    from zonerelay.store.objects.s3 import S3Engine
    from zonerelay.store.postgres.driver import DatabaseAccess
    from zonerelay.store.redis.connection import RedisEndpoint


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
    """Return the engine that the settings name. `indexes` is the directory for an index of S3."""
    match settings.spool.backend:
        case Backend.REDIS:
            server = redis_server(settings.redis, environment)
            from zonerelay.store.keys.redis import RedisEngine

            return RedisEngine(server)
        case Backend.POSTGRES:
            from zonerelay.store.keys.postgres import PostgresEngine

            return PostgresEngine(postgres_access(settings.postgres, environment))
        case Backend.S3:
            return s3_engine(settings, environment, indexes, clock)
    raise AssertionError("this queue is not shared")


def s3_engine(settings: Settings, environment: Mapping[str, str], indexes: Path, clock: Clock) -> S3Engine:
    with driver("s3", "aiobotocore", "botocore"):
        from zonerelay.store.objects.s3 import S3Engine

    return S3Engine(settings.s3, indexes, clock, environment)


def postgres_access(settings: PostgresSettings, environment: Mapping[str, str]) -> DatabaseAccess:
    """Return the access to the PostgreSQL server."""
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
    """Return the access to the Redis server."""
    with driver("redis", "redis"):
        from zonerelay.store.redis.connection import RedisEndpoint

    return RedisEndpoint(settings, secret_of("redis.password", settings.password, environment))
