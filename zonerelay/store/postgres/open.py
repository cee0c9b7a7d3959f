"""Opens a PostgreSQL store: connects, brings the schema up to date, and frees what dead nodes have left."""

from __future__ import annotations

from collections.abc import Mapping

from zonerelay.config.settings import LOSS_WORDS, PostgresSettings
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.postgres.driver import Access, load_driver
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.store import PostgresStore
from zonerelay.store.surroundings import Surroundings, secret_of, start


async def open_postgres(
    settings: PostgresSettings,
    around: Surroundings,
    mark: QueueMark,
) -> PostgresStore:
    """Raises StoreOpenError. Delivering can begin at once; counting goes on behind it."""
    load_driver()
    access = access_of(settings, around.environment)
    store = PostgresStore(PostgresKeeper(access, node=settings.node, around=around, mark=mark), around)
    await start(store, "the database cannot be opened")
    return store


def access_of(settings: PostgresSettings, environment: Mapping[str, str]) -> Access:
    password = secret_of("postgres.password", settings.password, environment)
    name = f"zonerelay {settings.node}"
    unsafe = settings.accept_loss == LOSS_WORDS
    return Access(settings.url, password, settings.schema, name, settings.lease, accepts_loss=unsafe)
