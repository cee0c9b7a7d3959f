"""Which store can carry limits over all relays that share it, and the way there."""

from __future__ import annotations

from collections.abc import Mapping

from zonerelay.config.settings import Backend, Settings
from zonerelay.limits.shared import BookStore, SharedAuthority
from zonerelay.limits.values import LimitAuthority


def open_limits(settings: Settings, holder: str, environment: Mapping[str, str]) -> LimitAuthority | None:
    """`None` for stores of one relay, and those that cannot. Raises StoreOpenError."""
    shelf: BookStore
    if settings.spool.backend is Backend.REDIS:
        # The drivers are extras: without them every other backend works.
        from zonerelay.store.redis.limits import RedisShelf  # noqa: PLC0415
        from zonerelay.store.redis.open import server_of  # noqa: PLC0415

        shelf = RedisShelf(server_of(settings.redis, environment), settings.redis.prefix.encode())
    elif settings.spool.backend is Backend.POSTGRES:
        from zonerelay.store.postgres.limits import PostgresShelf  # noqa: PLC0415
        from zonerelay.store.postgres.open import access_of  # noqa: PLC0415

        shelf = PostgresShelf(access_of(settings.postgres, environment))
    else:
        return None
    return SharedAuthority(shelf, holder)
