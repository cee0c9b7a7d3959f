"""Reads data of the LevelDB spool that is not in memory: messages, deliveries, bodies, the whole queue.

Memory is ahead of the disk, so data that changes during a read is read again or discarded. Bodies are read in
groups of chunks, and the next group is read while one is consumed, so a reader holds at most two groups.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.common.body import BodyCache
from zonerelay.store.contract import Wanted, everybody
from zonerelay.store.leveldb.in_flight import Found, InFlight
from zonerelay.store.leveldb.keeper import SpoolKeeper
from zonerelay.store.leveldb.reads import READ_CHUNKS, Page


class ColdReads:
    """Reads data of a spool from disk."""

    def __init__(self, keeper: SpoolKeeper, in_flight: InFlight, bodies: BodyCache) -> None:
        self._keeper = keeper
        self._in_flight = in_flight
        self._bodies = bodies

    async def find(self, keys: Sequence[DeliveryKey]) -> Found:
        """Read the states of these deliveries that are not in memory. The caller must plan its write before
        it awaits anything else.
        """
        in_flight = self._in_flight
        found = Found()
        with in_flight.reading():
            while unknown := in_flight.unknown(keys, found):
                self._keeper.check_usable()
                since = in_flight.moment()
                read = await self._keeper.read(lambda reads: reads.states(unknown))
                # Data that changed during the read is read again.
                found.merge(read, unknown)
                found.drop(functools.partial(in_flight.is_stale, since=since))
        return found

    async def read_message(self, message_id: MessageId) -> Message:
        in_flight = self._in_flight
        with in_flight.reading():
            since = in_flight.moment()
            message, count, body = await self._keeper.read(lambda reads: reads.message_and_body(message_id))
            if not in_flight.is_stale(message_id, since):
                in_flight.remember(message_id, count)
                if body is not None:
                    self._bodies.put(message_id, body)
        return message

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        prefix = records.DELIVERY_PREFIX if queue is None else records.queue_prefix(queue)
        view = await self._keeper.read(lambda reads: reads.view())

        def page_at(start: bytes) -> Coroutine[None, None, Page]:
            return self._keeper.read(lambda _: view.scan_page(start, records.after(prefix), wanted))

        try:
            start: bytes | None = prefix if after is None else records.delivery_key(after) + b"\0"
            while start is not None:
                page = await page_at(start)
                for delivery in page.deliveries:
                    yield delivery
                start = page.low
        finally:
            view.close()


async def read_chunks(keeper: SpoolKeeper, message_id: MessageId, chunks: int) -> AsyncGenerator[bytes, None]:
    """Yield the chunks 1 to `chunks` in order."""

    def read(first: int) -> Coroutine[None, None, list[bytes]]:
        return keeper.read(lambda reads: reads.chunks(message_id, first, chunks))

    ahead: asyncio.Task[list[bytes]] | None = None
    try:
        for first in range(1, chunks + 1, READ_CHUNKS):
            if ahead is None:
                group = await read(first)
            else:
                group = await ahead
            following = first + READ_CHUNKS
            ahead = None
            if following <= chunks:
                ahead = asyncio.create_task(read(following))
            for chunk in group:
                yield chunk
    finally:
        if ahead is not None:
            # Nobody needs its result or error, because the reader has stopped.
            ahead.cancel()
            await asyncio.wait([ahead])
