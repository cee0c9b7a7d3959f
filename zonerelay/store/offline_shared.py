"""Does what operators' commands do to a shared store, beside its relays: none of this joins them.

An engine is imported when the settings name it, for its driver is an extra.
"""

# ruff: noqa: PLC0415  (see above)

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from zonerelay.config.settings import Backend, Settings
from zonerelay.model.clock import SystemClock
from zonerelay.store.check import Contents, Examination, Repaired, Salvage, Tell
from zonerelay.store.contract import QueueView
from zonerelay.store.keys.offline import check_engine, repair_engine
from zonerelay.store.keys.offline import living as living_nodes
from zonerelay.store.keys.port import Engine
from zonerelay.store.keys.repair import kept_beside
from zonerelay.store.queue.view import view_engine
from zonerelay.store.shared import postgres_engine
from zonerelay.store.surroundings import driver

OVER_KEYS = frozenset((Backend.POSTGRES, Backend.REDIS, Backend.S3))
"""Those whose queue stands on ordered keys."""


@contextlib.asynccontextmanager
async def shared_engine(
    settings: Settings, environment: Mapping[str, str], scratch: Path | None = None
) -> AsyncIterator[Engine]:
    """`scratch` is a directory that does not exist and may be made. Raises StoreError."""
    engine: Engine
    with tempfile.TemporaryDirectory(dir=scratch and scratch.parent) as place:
        if settings.spool.backend is Backend.REDIS:
            with driver("redis", "redis"):
                from zonerelay.store.keys.redis import RedisEngine
                from zonerelay.store.redis.open import server_of

            engine = RedisEngine(server_of(settings.redis, environment))
        elif settings.spool.backend is Backend.POSTGRES:
            engine = postgres_engine(settings.postgres, environment)
        else:
            with driver("s3", "aiobotocore", "botocore"):
                from zonerelay.store.objects.s3 import S3Engine

            engine = S3Engine(settings.s3, Path(place), SystemClock(), environment)
        try:
            yield engine
        finally:
            await engine.close()


def _patience(settings: Settings) -> float:
    return 1.25 * settings.s3.lease if settings.spool.backend is Backend.S3 else 0.0


async def check_shared(settings: Settings, examination: Examination) -> Contents:
    """Raises StoreError."""
    if settings.spool.backend in OVER_KEYS:
        async with shared_engine(settings, examination.environment, examination.scratch) as engine:
            return await check_engine(engine, examination.findings, examination.tell)
    with driver("redis", "redis"):
        from zonerelay.store.redis.check import check as check_redis

    return await check_redis(settings.redis, examination)


async def repair_shared(
    settings: Settings, salvage: Salvage, tell: Tell, *, carry_out: bool, environment: Mapping[str, str]
) -> Repaired:
    """Raises StoreError in words, also when relays use the store, and OSError."""
    kept = kept_beside(settings.spool.path)
    if settings.spool.backend in OVER_KEYS:
        async with shared_engine(settings, environment) as engine:
            return await repair_engine(
                engine,
                salvage,
                tell,
                kept=kept,
                carry_out=carry_out,
                clock=SystemClock(),
                patience=_patience(settings),
            )
    with driver("redis", "redis"):
        from zonerelay.store.redis.repair import repair as repair_redis

    return await repair_redis(
        settings.redis, salvage, tell, kept=kept, carry_out=carry_out, environment=environment
    )


async def living(settings: Settings, environment: Mapping[str, str]) -> int:
    """Returns how many relays use the queue, as workers and on any machine; one that was killed counts until
    its lease ends, and the node of these settings does not. Raises StoreError.
    """
    if settings.spool.backend in OVER_KEYS:
        async with shared_engine(settings, environment) as engine:
            return len(await living_nodes(engine, _patience(settings)))
    with driver("redis", "redis"):
        from zonerelay.store.redis.repair import living as living_redis

    return await living_redis(settings.redis, environment)


@contextlib.asynccontextmanager
async def view_shared(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[QueueView]:
    """The queue, to be read: message by message as each is then. Raises StoreError."""
    if settings.spool.backend in OVER_KEYS:
        async with shared_engine(settings, environment) as engine, view_engine(engine) as view:
            yield view
        return
    with driver("redis", "redis"):
        from zonerelay.store.redis.view import view as view_redis

    async with view_redis(settings.redis, environment) as redis:
        yield redis
