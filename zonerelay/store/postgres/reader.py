"""Reads messages, bodies and the queue from PostgreSQL; claims nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import (
    Kept,
    KeptKeys,
    MessageNotFoundError,
    StoreCorruptError,
    Wanted,
    everybody,
)
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import Columns, Fetch, Link
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.rows import column_of, delivery_of, identity, number, queue_in, row_key

PAGE_ROWS = 500
CHUNKS_AT_ONCE = 4
"""Chunks of a body that are in memory together: 256 KiB."""


class PostgresReader:
    """Reads with one way to carry out a statement."""

    def __init__(self, fetch: Callable[..., Awaitable[Sequence[Columns]]]) -> None:
        self._fetch = fetch

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        rows = await self._fetch(sql.KEPT_PAGE, cursor)
        page = [(name, Kept(identity(message), digest, until)) for name, message, digest, until in rows]
        return page, page[-1][0] if page else ""

    async def message(self, message_id: MessageId) -> tuple[Message, bytes | None]:
        """Reads a message, with its body when that is one chunk at most."""
        rows = await self._fetch(sql.MESSAGE, number(message_id))
        if not rows:
            raise MessageNotFoundError(f"no message {message_id}")
        ((metadata, body),) = rows
        message = records.decode_message(message_id, bytes(metadata))
        if body is None and message.chunks <= 1:
            raise StoreCorruptError(f"message {message_id}: its body is missing")
        if body is not None and len(body) != message.size:
            raise StoreCorruptError(f"message {message_id}: {len(body)} octets of {message.size}")
        return message, None if body is None else bytes(body)

    async def chunks(self, message_id: MessageId, count: int) -> AsyncIterator[bytes]:
        if count <= 1:
            _, body = await self.message(message_id)
            if body:
                yield body
            return
        for first in range(1, count + 1, CHUNKS_AT_ONCE):
            last = min(first + CHUNKS_AT_ONCE - 1, count)
            rows = await self._fetch(sql.CHUNKS, number(message_id), first, last)
            if [row[0] for row in rows] != list(range(first, last + 1)):
                await self._missing(message_id, first)
            for row in rows:
                yield bytes(row[1])

    async def _missing(self, message_id: MessageId, first: int) -> None:
        if not await self._fetch(sql.HAS_MESSAGE, number(message_id)):
            raise MessageNotFoundError(f"no message {message_id}")
        raise StoreCorruptError(f"message {message_id}: chunks are missing from number {first}")

    async def walk(
        self, fetch: Fetch, queue: QueueName | None, wanted: Wanted, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        """The queue, page by page, in a transaction that sees one moment."""
        place: tuple[object, ...] = ("" if queue is None else column_of(queue), -1, "")
        if after is not None:
            place = row_key(after)
        statement = sql.SCAN if queue is None else sql.SCAN_ZONE
        while rows := await fetch(statement, *place, PAGE_ROWS):
            for delivery in map(delivery_of, rows):
                if (queue or delivery.queue.is_mail) and wanted(delivery.recipient):
                    yield delivery
            place = tuple(rows[-1])[:3]

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        try:
            key = number(message_id)
        except MessageNotFoundError:
            return []
        rows = await self._fetch(sql.OF_MESSAGE, list(map(column_of, await self.queues())), key)
        return sorted(map(delivery_of, rows), key=lambda delivery: (delivery.recipient, delivery.queue))

    async def queues(self) -> set[QueueName]:
        return {queue_in(row[0]) for row in await self._fetch(sql.ZONES)}

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        rows = await self._fetch(sql.OLDEST, column_of(queue), now)
        return float(rows[0][0]) if rows else None


class QueueReader(PostgresReader):
    """Reads over the keeper's links; a scan of the whole queue has a connection of its own."""

    def __init__(self, keeper: PostgresKeeper) -> None:
        super().__init__(keeper.fetch)
        self._keeper = keeper

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        """Yields the queue as one snapshot shows it."""
        self._keeper.check_usable()
        link = await Link.open(self._keeper.access, reads=True)
        try:
            async with link.transaction(one_moment=True) as fetch:
                async for delivery in self.walk(fetch, queue, wanted, after):
                    yield delivery
        finally:
            await link.close()

    async def forget(self, messages: Mapping[int, set[QueueName]]) -> None:
        """Removes messages that may have been stored although their clients heard a refusal."""
        if messages:
            zones = sorted({column_of(queue) for some in messages.values() for queue in some})
            async with self._keeper.links.use() as link:
                await link.fetch(sql.FORGET_MESSAGES, list(messages), zones)
