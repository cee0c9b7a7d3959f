"""Reads from the LevelDB spool what memory does not hold: cold messages and deliveries, and the whole queue.

Memory runs ahead of the disk, so what was changed while it was being read is not believed: it is read again,
or not kept.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.common.body_cache import BodyCache
from zonerelay.store.common.in_flight import Found, InFlight
from zonerelay.store.contract import Wanted, everybody
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.keeper import SpoolKeeper


class ColdReads:
    """Of one spool."""

    def __init__(self, keeper: SpoolKeeper, in_flight: InFlight, bodies: BodyCache) -> None:
        self._keeper = keeper
        self._reader = keeper.reader
        self._in_flight = in_flight
        self._bodies = bodies

    async def find(self, keys: Sequence[DeliveryKey]) -> Found:
        """Read what memory does not know of these deliveries. The caller plans before it waits again."""
        found = Found()
        in_flight = self._in_flight
        if not in_flight.unknown(keys, found):
            return found
        with in_flight.reading():
            while unknown := in_flight.unknown(keys, found):
                self._keeper.check_usable()
                since = in_flight.moment()
                read = await self._reader.read(scan.read_states, unknown)
                # What was changed while it was being read is read again.
                found.merge(read, unknown)
                found.drop(functools.partial(in_flight.is_stale, since=since))
        return found

    async def read_message(self, message_id: MessageId) -> Message:
        in_flight = self._in_flight
        with in_flight.reading():
            since = in_flight.moment()
            message, count, body = await self._reader.read(scan.read_message_and_body, message_id)
            if not in_flight.is_stale(message_id, since):
                in_flight.remember(message_id, count)
                if body is not None:
                    self._bodies.put(message_id, body)
        return message

    async def scan(self, zone: str | None = None, *, wanted: Wanted = everybody) -> AsyncIterator[Delivery]:
        read = self._reader.read
        prefix = records.DELIVERY_PREFIX if zone is None else records.zone_prefix(zone)
        view = await read(type(self._reader.db).snapshot)
        try:
            start: bytes | None = prefix
            while start is not None:
                page = await read(scan.scan_page, start, records.after(prefix), view, wanted)
                for delivery in page.deliveries:
                    yield delivery
                start = page.low
        finally:
            view.close()
