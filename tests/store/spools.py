"""A spool that a test opens, closes and opens again, and what it reported meanwhile."""

import uuid
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.s3_server import BUCKET, KEY, SECRET, shared_moto
from zonerelay.config import settings as options
from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings, S3Settings, Settings
from zonerelay.model.clock import Clock, ManualClock
from zonerelay.model.delivery import DeliveryKey, QueueName
from zonerelay.store.context import SiblingWorkers, StoreContext
from zonerelay.store.contract import Store
from zonerelay.store.open import open_store


class Spool:
    """`store` is the open one."""

    store: Store

    def __init__(
        self,
        path: Path,
        *,
        backend: Backend = Backend.LEVELDB,
        clock: Clock | None = None,
        min_free_space: int = 0,
        write_buffer: int = 256 * 1024,
        redis: RedisSettings | None = None,
        places: Mapping[str, Any] | None = None,  # Any: `replace` takes them by name
        postgres: PostgresSettings | None = None,
        s3: S3Settings | None = None,
        siblings: SiblingWorkers | None = None,
    ) -> None:
        """`places` are other paths of [spool] by their names."""
        settings = options.SpoolSettings(
            backend=backend, path=path, min_free_space=min_free_space, write_buffer=write_buffer
        )
        self.settings = replace(settings, **(places or {}))
        self.redis = redis or RedisSettings()
        if backend is Backend.REDIS and redis is None:
            self.redis = RedisSettings(url=shared_server().url, prefix=f"{uuid.uuid4().hex}:")
        self.postgres = postgres or PostgresSettings()
        if backend is Backend.POSTGRES and postgres is None:
            self.postgres = PostgresSettings(
                url=shared_postgres().url, schema=f"spool_{uuid.uuid4().hex[:16]}", lease=60.0
            )
        self.s3 = s3 or S3Settings()
        if backend is Backend.S3 and s3 is None:
            self.s3 = s3_settings(shared_moto().url, lease=60.0)
        self.environment = {"SECRET": SECRET}
        self.siblings = siblings
        self.clock = clock or ManualClock()
        self.health: list[str | None] = []
        self.damage: list[str] = []
        self.news: list[QueueName] = []
        self.lost: list[Collection[DeliveryKey]] = []
        self.syncs: list[float] = []

    @property
    def all_settings(self) -> Settings:
        """With those of its server."""
        return Settings(spool=self.settings, redis=self.redis, postgres=self.postgres, s3=self.s3)

    async def open(self, *, min_free_space: int | None = None) -> Store:
        settings = self.all_settings
        if min_free_space is not None:
            settings = replace(settings, spool=replace(self.settings, min_free_space=min_free_space))
        self.store = await open_store(
            settings,
            StoreContext(
                clock=self.clock,
                on_health=self.health.append,
                on_damage=self.damage.append,
                observe_commit=self.syncs.append,
                on_news=self.news.append,
                on_lost=self.lost.append,
                environment=self.environment,
                siblings=self.siblings,
            ),
        )
        return self.store

    async def reopen(self) -> Store:
        await self.store.close()
        return await self.open()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.store.close()


def s3_settings(url: str, **other: Any) -> S3Settings:  # Any: `replace` takes them by name
    """A queue of one's own in the bucket of a server."""
    settings = S3Settings(
        bucket=BUCKET,
        prefix=f"{uuid.uuid4().hex}/",
        endpoint_url=url,
        access_key=KEY,
        secret_key="env:SECRET",
    )
    return replace(settings, **other)
