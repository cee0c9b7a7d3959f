"""Opening the Redis spool: settings become a connection, a lease and a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zonerelay.config.models import LOSS_WORDS, RedisSettings, SpoolSettings
from zonerelay.config.secrets import SecretError, read_secret
from zonerelay.model.clock import Clock
from zonerelay.store.base import Lost, News, StoreError, StoreOpenError
from zonerelay.store.redis import RedisStore
from zonerelay.store.redis_link import RedisLink, Terms
from zonerelay.store.redis_wire import Server


async def open_redis(
    spool: SpoolSettings,
    settings: RedisSettings,
    *,
    environment: Mapping[str, str],
    clock: Clock,
    on_health: Callable[[str | None], None],
    observe_commit: Callable[[float], None],
    on_news: News,
    on_lost: Lost,
) -> RedisStore:
    """Raises StoreOpenError."""
    terms = Terms(
        prefix=settings.prefix.encode(),
        lease=settings.lease,
        replicas=settings.replicas,
        accept_loss=settings.accept_loss == LOSS_WORDS,
        min_free_memory=spool.min_free_space,
    )
    link = RedisLink(server_of(settings, environment), terms, clock=clock, on_health=on_health)
    await link.open()
    store = RedisStore(link, clock=clock, observe_commit=observe_commit, on_news=on_news, on_lost=on_lost)
    try:
        await store.start()
    except BaseException as error:
        await store.close()
        if isinstance(error, StoreError):
            raise StoreOpenError(f"[redis] url {settings.url}: {error}") from error
        raise
    return store


def server_of(settings: RedisSettings, environment: Mapping[str, str]) -> Server:
    password = ""
    if settings.password:
        try:
            password = read_secret(settings.password, environment)
        except SecretError as error:
            raise StoreOpenError(f"[redis] password: {error}") from error
    return Server(
        settings.url,
        user=settings.user,
        password=password,
        ca_file=str(settings.ca_file) if settings.ca_file else "",
        timeout=settings.timeout,
    )
