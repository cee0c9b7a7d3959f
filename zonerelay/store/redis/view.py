"""Reads a Redis queue without joining it: no lease, no claim, no number.

Each message is as one moment shows it, and different messages as different moments do: what comes in behind
the last delivery that was there at the start is not seen, and what leaves meanwhile is not found.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from zonerelay.config.settings import RedisSettings
from zonerelay.store.redis.check import looking
from zonerelay.store.redis.claim_book import ClaimBook
from zonerelay.store.redis.reader import RedisReader


@contextlib.asynccontextmanager
async def view(settings: RedisSettings, environment: Mapping[str, str]) -> AsyncIterator[RedisReader]:
    """Raises StoreError."""
    async with looking(settings, environment) as look:
        yield RedisReader(look, ClaimBook())
