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
from zonerelay.store.common.in_flight import Found, Ledger
from zonerelay.store.contract import Wanted, everybody
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.keeper import SpoolKeeper


class ColdReads:
    """Of one spool."""

    def __init__(self, keeper: SpoolKeeper, ledger: Ledger, bodies: BodyCache) -> None:
        self._keeper = keeper
        self._reader = keeper.reader
        self._ledger = ledger
        self._bodies = bodies

    async def find(self, keys: Sequence[DeliveryKey]) -> Found:
        """Read what the ledger does not know of these deliveries; returns without a gap before planning."""
        found = Found()
        ledger = self._ledger
        if not ledger.unknown(keys, found):
            return found
        with ledger.reading():
            while unknown := ledger.unknown(keys, found):
                self._keeper.check_usable()
                since = ledger.moment()
                read = await self._reader.read(scan.read_states, unknown)
                # What was changed while it was being read is read again.
                found.merge(read, unknown)
                found.drop(functools.partial(ledger.is_stale, since=since))
        return found

    async def read_message(self, message_id: MessageId) -> Message:
        ledger = self._ledger
        with ledger.reading():
            since = ledger.moment()
            message, count, body = await self._reader.read(scan.read_message_and_body, message_id)
            if not ledger.is_stale(message_id, since):
                ledger.remember(message_id, count)
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
