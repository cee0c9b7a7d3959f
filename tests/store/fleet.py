"""Relays that share a Redis server, for tests."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from tests.store.builders import NOW
from tests.store.spools import Spool, until
from tests.support.redis_server import RedisServer
from zonerelay.config.models import Backend, RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.store.base import Store

LEASE = 1.0


class Fleet:
    """Relays that share a server and a prefix."""

    def __init__(self, server: RedisServer, directory: Path, stack: AsyncExitStack) -> None:
        self.server = server
        self.settings = RedisSettings(url=server.url, prefix=f"{uuid.uuid4().hex}:", lease=LEASE, timeout=5.0)
        self._directory = directory
        self._stack = stack
        self.spools: list[Spool] = []

    async def relay(self, **other: object) -> Spool:
        settings = replace(self.settings, **other)  # type: ignore[arg-type]  # whatever the test wants
        spool = Spool(self._directory / "none", backend=Backend.REDIS, redis=settings, clock=SystemClock())
        self.spools.append(spool)
        return await self._stack.enter_async_context(spool)

    def key(self, name: str) -> str:
        return self.settings.prefix + name


async def until_healthy(spool: Spool) -> None:
    await until(lambda: spool.store.unhealthy() is None)


async def claim_ids(store: Store, *, now: float = NOW, limit: int = 100) -> list[int]:
    return [int(d.message_id, 16) for d in await store.claim("default", limit, now=now)]


def stop_renewing(spool: Spool) -> None:
    """What a relay looks like from outside that hangs, or cannot be reached: its lease will end."""
    link = spool.store._link  # type: ignore[attr-defined]
    link._task.cancel()
