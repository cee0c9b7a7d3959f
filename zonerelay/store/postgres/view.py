"""Reads a PostgreSQL queue as it is at one moment, beside the relays that work on it: no session, no claim.

One transaction sees the same state to its end, however long that takes. Until then the database keeps the
rows that relays remove.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence

from zonerelay.config.settings import PostgresSettings
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import StoreCorruptError, StoreOpenError, Wanted, everybody
from zonerelay.store.postgres.check import HAS_TABLES, STEP_TIMEOUT
from zonerelay.store.postgres.driver import Columns, Fetch, Link
from zonerelay.store.postgres.open import access_of
from zonerelay.store.postgres.reader import PostgresReader
from zonerelay.store.postgres.rows import identity, number
from zonerelay.store.postgres.schema import check_schema

_METADATA = "SELECT id, metadata FROM message WHERE id = ANY($1::bigint[])"


class PostgresView(PostgresReader):
    """`QueueView` over one transaction."""

    def __init__(self, fetch: Fetch) -> None:
        super().__init__(self._one_by_one)
        self._inner = fetch
        self._lock = asyncio.Lock()
        self._queues: set[QueueName] | None = None

    async def _one_by_one(
        self, statement: str, *values: object, timeout: float | None = STEP_TIMEOUT
    ) -> Sequence[Columns]:
        async with self._lock:
            return await self._inner(statement, *values, timeout=timeout)

    async def queues(self) -> set[QueueName]:
        if self._queues is None:
            self._queues = await super().queues()
        return self._queues

    def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        return self.walk(self._one_by_one, queue, wanted, after)

    async def read_message(self, message_id: MessageId) -> Message:
        return (await self.message(message_id))[0]

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found: dict[MessageId, Message] = {}
        for key, metadata in await self._fetch(_METADATA, [number(each) for each in ids]):
            with contextlib.suppress(StoreCorruptError):
                found[identity(key)] = records.decode_message(identity(key), bytes(metadata))
        return found

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        message, body = await self.message(message_id)
        if body is not None:
            yield body
            return
        async for chunk in self.chunks(message_id, message.chunks):
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
