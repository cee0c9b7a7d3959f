"""Reads the queue of any engine without joining it, for a backup while relays may be running.

Each page shows one moment. Mail that is added during the scan may be missed, and mail that leaves is not
found.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import KeptKeys, MessageNotFoundError, Wanted, everybody
from zonerelay.store.keys.offline import nodes_of
from zonerelay.store.keys.port import Engine, KeyReader
from zonerelay.store.leveldb.reads import QueueReads


class EngineView:
    """Reads all partitions of an engine (implements `QueueView`)."""

    def __init__(self, keepers: Sequence[KeyReader]) -> None:
        self._readers = [QueueReads(each) for each in keepers]

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        for reads in self._readers:
            async for delivery in reads.scan(queue, wanted=wanted, after=after):
                yield delivery

    async def queues(self) -> set[QueueName]:
        return set[QueueName]().union(*[await reads.queues() for reads in self._readers])

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        return [each for reads in self._readers for each in await reads.deliveries_of(message_id)]

    async def read_message(self, message_id: MessageId) -> Message:
        return (await (await self._holder(message_id)).message(message_id))[0]

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found: dict[MessageId, Message] = {}
        for reads in self._readers:
            found |= await reads.messages([each for each in ids if each not in found])
        return found

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        reads = await self._holder(message_id)
        async for chunk in reads.body((await reads.message(message_id))[0]):
            yield chunk

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        number, _, identity = (cursor or "0 ").partition(" ")
        if int(number) >= len(self._readers):
            return [], ""
        page = await self._readers[int(number)].kept_page(identity)
        return page, f"{number} {page[-1][0]}" if page else f"{int(number) + 1} "

    async def _holder(self, message_id: MessageId) -> QueueReads:
        for reads in self._readers:
            if await reads.keys.get([records.exists_key(message_id)]) != [None]:
                return reads
        raise MessageNotFoundError(f"message {message_id} does not exist")


@contextlib.asynccontextmanager
async def view_engine(engine: Engine) -> AsyncIterator[EngineView]:
    """Open a view of the queue without joining it. Raises StoreError."""
    keepers = [engine.keeper(node) for node in await nodes_of(engine)]
    try:
        yield EngineView([each for each in keepers if await each.look() is not None])
    finally:
        for each in keepers:
            await each.close()
