"""Everything in the bucket, for operators: whoever's it is.

The keys are taken at once, from the index for this relay's mail and by listing for the others'; states are
read in groups, each as it is then. So memory holds a key for each delivery, but only few states.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import StoreCorruptError, Wanted, everybody
from zonerelay.store.s3 import records as spelled
from zonerelay.store.s3.adopt import READS_AT_ONCE
from zonerelay.store.s3.objects import Objects
from zonerelay.store.s3.states import OwnMessages

GROUP = 200
"""Deliveries whose states are read in one go."""

_log = logging.getLogger("zonerelay.store")

States = dict[MessageId, dict[DeliveryKey, Delivery]]


class Survey:
    """One per store."""

    def __init__(self, objects: Objects, mine: OwnMessages) -> None:
        self._objects = objects
        self._mine = mine

    async def scan(self, zone: str | None, wanted: Wanted = everybody) -> AsyncGenerator[Delivery, None]:
        keys = [*self._mine.index.sorted_keys(zone)]
        foreign = await self._foreign_keys(zone)
        if foreign:
            keys = sorted({*keys, *foreign})
        if wanted is not everybody:
            keys = [key for key in keys if wanted(key.recipient)]
        for start in range(0, len(keys), GROUP):
            some = keys[start : start + GROUP]
            found = await self.states(dict.fromkeys(key.message_id for key in some))
            for key in some:
                delivery = found.get(key.message_id, {}).get(key)
                if delivery is not None:
                    yield delivery

    async def _foreign_keys(self, zone: str | None) -> list[DeliveryKey]:
        found: list[DeliveryKey] = []
        async for page in self._objects.bucket.pages(self._objects.keys.queue):
            ids = [self._objects.keys.message_of(listed.key) for listed in page]
            others = [each for each in ids if each is not None and each not in self._mine.ids]
            for state in (await self.states(others)).values():
                found += [key for key in state if zone is None or key.queue == zone]
        return found

    async def states(self, ids: Iterable[MessageId]) -> States:
        """The open deliveries of these messages. Raises StoreError."""
        found: States = {}
        unknown: list[MessageId] = []
        for message_id in ids:
            stored = self._mine.get(message_id)
            if stored is not None and stored.etag:
                found[message_id] = stored.deliveries
            else:
                unknown.append(message_id)
        for start in range(0, len(unknown), READS_AT_ONCE):
            some = unknown[start : start + READS_AT_ONCE]
            read = await asyncio.gather(*map(self._read, some))
            found |= dict(zip(some, read, strict=True))
        return found

    async def _read(self, message_id: MessageId) -> dict[DeliveryKey, Delivery]:
        try:
            version = await self._objects.find(message_id)
            return {} if version is None else spelled.deliveries_of(message_id, version.head.deliveries)
        except StoreCorruptError as error:
            _log.error("left for the operator: %s", error)
            return {}
