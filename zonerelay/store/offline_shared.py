"""Carries out operators' commands on a shared store while its relays may run. The commands do not join as a
node.

An engine is imported when the settings name it, because its driver is an optional dependency.
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
from zonerelay.store.shared import postgres_engine, redis_engine
from zonerelay.store.surroundings import driver


@contextlib.asynccontextmanager
async def shared_engine(
    settings: Settings, environment: Mapping[str, str], scratch: Path | None = None
) -> AsyncIterator[Engine]:
    """Open the engine that the settings name. `scratch` is a directory that does not exist and may be
    created. Raises StoreError.
    """
    engine: Engine
    with tempfile.TemporaryDirectory(dir=scratch and scratch.parent) as place:
        if settings.spool.backend is Backend.REDIS:
            engine = redis_engine(settings.redis, environment)
        elif settings.spool.backend is Backend.POSTGRES:
            engine = postgres_engine(settings.postgres, environment)
        else:
            with driver("s3", "aiobotocore", "botocore"):
                from zonerelay.store.objects.s3 import S3Engine

            engine = S3Engine(settings.s3, Path(place), SystemClock(), environment)
            engine.fresh_for = 1.0  # many pages are read in a row
        try:
            yield engine
        finally:
            await engine.close()


def _patience(settings: Settings) -> float:
    return 1.25 * settings.s3.lease if settings.spool.backend is Backend.S3 else 0.0


async def check_shared(settings: Settings, examination: Examination) -> Contents:
    """Check the shared queue. Raises StoreError."""
    async with shared_engine(settings, examination.environment, examination.scratch) as engine:
        return await check_engine(engine, examination.findings, examination.tell)


async def repair_shared(
    settings: Settings, salvage: Salvage, tell: Tell, *, carry_out: bool, environment: Mapping[str, str]
) -> Repaired:
    """Repair the shared queue. Raises StoreError with a message, also if relays use the store, and
    OSError.
    """
    async with shared_engine(settings, environment) as engine:
        return await repair_engine(
            engine,
            salvage,
            tell,
            kept=kept_beside(settings.spool.path),
            carry_out=carry_out,
            clock=SystemClock(),
            patience=_patience(settings),
        )


async def living(settings: Settings, environment: Mapping[str, str]) -> int:
    """Return how many relays on all machines use the queue, where each worker counts as one. A relay that was
    killed counts until its lease ends. Raises StoreError.
    """
    async with shared_engine(settings, environment) as engine:
        return len(await living_nodes(engine, _patience(settings)))


@contextlib.asynccontextmanager
async def view_shared(settings: Settings, environment: Mapping[str, str]) -> AsyncIterator[QueueView]:
    """Open the queue for reading. Each message is read in its current state. Raises StoreError."""
    async with shared_engine(settings, environment) as engine, view_engine(engine) as view:
        yield view
