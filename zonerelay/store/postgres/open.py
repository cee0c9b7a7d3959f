"""Opens a PostgreSQL store: connects, brings the schema up to date, and frees what dead nodes have left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from zonerelay.config.settings import LOSS_WORDS, PostgresSettings
from zonerelay.store.common.claims.pool import Claims
from zonerelay.store.common.queue_mark import QueueMark
from zonerelay.store.contract import News, StoreError, StoreOpenError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.claims import PostgresClaims
from zonerelay.store.postgres.counts import QueueCounter
from zonerelay.store.postgres.driver import Access, load_driver
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.reader import PostgresReader
from zonerelay.store.postgres.rows import unword
from zonerelay.store.postgres.store import PostgresStore
from zonerelay.store.surroundings import Surroundings, secret_of


async def open_postgres(
    settings: PostgresSettings,
    around: Surroundings,
    mark: QueueMark,
) -> PostgresStore:
    """Raises StoreOpenError. Delivering can begin at once; counting goes on behind it."""
    load_driver()
    access = access_of(settings, around.environment)
    keeper = PostgresKeeper(access, node=settings.node, around=around, mark=mark)
    counter = QueueCounter(access, lambda: keeper.has_company)
    claims = PostgresClaims(keeper, Claims(), around.on_lost)
    store = PostgresStore(keeper, claims, PostgresReader(keeper, access), counter)
    news = _News(store, claims, around.on_news)
    keeper.on_news, keeper.all_zones = news.of_zone, news.of_all

    async def reconcile() -> None:
        await store.reconcile()
        for (zone,) in await keeper.ask(sql.BUSY, around.clock.now()):
            news.of_zone(unword(zone))

    keeper.reconcile = reconcile
    try:
        await keeper.start()
        await keeper.reap()
        ((last,),) = await keeper.ask(sql.LAST_ID)
        keeper.last_id = last or 0
        await counter.start()
    except BaseException as error:
        await store.close()
        if isinstance(error, StoreError) and not isinstance(error, StoreOpenError):
            raise StoreOpenError(f"the database cannot be opened: {error}") from error
        raise
    return store


def access_of(settings: PostgresSettings, environment: Mapping[str, str]) -> Access:
    password = secret_of("postgres.password", settings.password, environment)
    name = f"zonerelay {settings.node}"
    unsafe = settings.accept_loss == LOSS_WORDS
    return Access(settings.url, password, settings.schema, name, settings.lease, accepts_loss=unsafe)


class _News:
    """Passes news of other relays to the claims first, then to the scheduler."""

    def __init__(self, store: PostgresStore, claims: PostgresClaims, on_news: News) -> None:
        self._store = store
        self._claims = claims
        self._on_news = on_news
        self._asking: asyncio.Task[None] | None = None

    def of_zone(self, zone: str) -> None:
        self._claims.doubt(zone)
        self._on_news(zone)

    def of_all(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._tell_all())

    async def _tell_all(self) -> None:
        try:
            zones = await self._store.zones()
        except StoreError:
            return  # once the database is back, all zones hear of it
        for zone in zones:
            self.of_zone(zone)
