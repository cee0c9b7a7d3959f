"""Opens the Redis spool: makes a connection, a lease and a store of the settings."""

from __future__ import annotations

from collections.abc import Mapping

from zonerelay.config.settings import RedisSettings, SpoolSettings
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.redis.connection import Server
from zonerelay.store.redis.foreign import tell_foreign_queue
from zonerelay.store.redis.keeper import RedisKeeper
from zonerelay.store.redis.store import RedisStore
from zonerelay.store.surroundings import Surroundings, secret_of


async def open_redis(
    spool: SpoolSettings,
    settings: RedisSettings,
    around: Surroundings,
    mark: QueueMark,
) -> RedisStore:
    """Raises StoreOpenError."""
    server = server_of(settings, around.environment)
    keeper = RedisKeeper(server, settings, around, mark, min_free_memory=spool.min_free_space)
    store = RedisStore(keeper, around)
    try:
        await store.start()
        await tell_foreign_queue(keeper, settings.url)
    except BaseException as error:
        await store.close()
        if isinstance(error, StoreError) and not isinstance(error, StoreOpenError):
            raise StoreOpenError(f"[redis] url {settings.url}: {error}") from error
        raise
    return store


def server_of(settings: RedisSettings, environment: Mapping[str, str]) -> Server:
    return Server(
        settings.url,
        user=settings.user,
        password=secret_of("redis.password", settings.password, environment),
        ca_file=str(settings.ca_file) if settings.ca_file else "",
        timeout=settings.timeout,
    )
