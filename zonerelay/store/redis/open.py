"""Opens the Redis spool: makes a connection, a lease and a store of the settings."""

from __future__ import annotations

from collections.abc import Mapping

from zonerelay.config.settings import RedisSettings, SpoolSettings
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.redis.connection import Server
from zonerelay.store.redis.foreign import tell_foreign_queue
from zonerelay.store.redis.keeper import RedisKeeper
from zonerelay.store.redis.store import RedisStore
from zonerelay.store.surroundings import Surroundings, secret_of, start


async def open_redis(
    spool: SpoolSettings,
    settings: RedisSettings,
    around: Surroundings,
    mark: QueueMark,
) -> RedisStore:
    """Raises StoreOpenError."""
    server = server_of(settings, around.environment)
    keeper = RedisKeeper(server, around, mark, min_free_memory=spool.min_free_space)
    store = RedisStore(keeper, around)
    await start(store, f"[redis] url {settings.url}")
    await tell_foreign_queue(keeper, settings.url)
    return store


def server_of(settings: RedisSettings, environment: Mapping[str, str]) -> Server:
    return Server(settings, secret_of("redis.password", settings.password, environment))
