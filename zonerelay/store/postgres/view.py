"""Reads a PostgreSQL queue as it is at one moment, beside the relays that work on it: no session, no claim.

One transaction sees the same state to its end, however long that takes. Until then the database keeps the
rows that relays remove.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from zonerelay.config.settings import PostgresSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common.reading import read_each
from zonerelay.store.contract import StoreOpenError, Wanted, everybody
from zonerelay.store.postgres.check import HAS_TABLES, STEP_TIMEOUT
from zonerelay.store.postgres.driver import Columns, Fetch, Link
from zonerelay.store.postgres.open import access_of
from zonerelay.store.postgres.reader import PostgresReader
from zonerelay.store.postgres.schema import check_schema


class PostgresView(PostgresReader):
    """`QueueView` over one transaction."""

    def __init__(self, fetch: Fetch) -> None:
        super().__init__(self._one_by_one)
        self._inner = fetch
        self._lock = asyncio.Lock()
        self._zones: set[str] | None = None

    async def _one_by_one(
        self, statement: str, *values: object, timeout: float | None = STEP_TIMEOUT
    ) -> Sequence[Columns]:
        async with self._lock:
            return await self._inner(statement, *values, timeout=timeout)

    async def zones(self) -> set[str]:
        if self._zones is None:
            self._zones = await super().zones()
        return self._zones

    def scan(self, zone: str | None = None, *, wanted: Wanted = everybody) -> AsyncIterator[Delivery]:
        return self.walk(self._one_by_one, zone, wanted)

    async def read_message(self, message_id: MessageId) -> Message:
        return (await self.message(message_id))[0]

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        return await read_each(self.read_message, ids)

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        async for chunk in self.chunks(message_id, (await self.read_message(message_id)).chunks):
            yield chunk


@contextlib.asynccontextmanager
async def view(settings: PostgresSettings, environment: Mapping[str, str]) -> AsyncIterator[PostgresView]:
    """Raises StoreError."""
    link = await Link.open(access_of(settings, environment), reads=True)
    try:
        async with link.transaction(one_moment=True) as fetch:
            if not (await fetch(HAS_TABLES))[0][0]:
                raise StoreOpenError(f"schema {settings.schema} of the database has no queue in it")
            await check_schema(fetch, settings.schema)
            yield PostgresView(fetch)
    finally:
        await link.close()
