"""Relays that share a Redis server, for tests."""

from __future__ import annotations

import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from tests.store.builders import NOW
from tests.store.spools import Spool, until
from tests.support.redis_server import RedisServer
from zonerelay.config.settings import Backend, RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Store
from zonerelay.store.redis.lease import RedisLease

LEASE = 1.0
LONG = 300.0
"""A lease that does not end, however busy the machine is, and is not renewed while a test runs."""


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

    def endlease_of(self, spool: Spool) -> None:
        """As if its time had passed without a renewal."""
        self.server.ask("ZADD", self.key("leases"), "1", lease_of(spool).token.decode())

    def forgetlease_of(self, spool: Spool) -> None:
        """It has ended, and others have seen to what was claimed under it."""
        self.server.ask("ZREM", self.key("leases"), lease_of(spool).token.decode())


async def until_healthy(spool: Spool) -> None:
    await until(lambda: spool.store.unhealthy() is None)


async def claim_ids(store: Store, *, now: float = NOW, limit: int = 100) -> list[int]:
    return [int(d.message_id, 16) for d in await store.claim(queue_of("default"), limit, now=now)]


def lease_of(spool: Spool) -> RedisLease:
    lease: RedisLease = spool.store._keeper.lease  # type: ignore[attr-defined]
    return lease


def beat_now(spool: Spool) -> None:
    """Renew, and look after the others, as one that has been here for longer than a lease."""
    lease = lease_of(spool)
    lease._connected_at = float("-inf")
    lease._beat_now.set()


def stop_renewing(spool: Spool) -> None:
    """What a relay looks like from outside that hangs, or cannot be reached: its lease will end."""
    link = spool.store._keeper  # type: ignore[attr-defined]
    link._task.cancel()
