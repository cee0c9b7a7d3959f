"""Handing out deliveries of a bucket's queue: marks in the memory of the relay that owns them.

A state that is not in memory is read before it is handed out, in the turn of its message's changes, so that
what is read is not older than what is being written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.base import StoreError
from zonerelay.store.claiming import claim_and_read
from zonerelay.store.s3_keeper import S3Keeper
from zonerelay.store.s3_states import Mine
from zonerelay.store.s3_work import Job, State
from zonerelay.store.s3_writer import Writer


class Handout:
    """The claims of one relay."""

    def __init__(self, mine: Mine, writer: Writer, keeper: S3Keeper) -> None:
        self._mine = mine
        self._writer = writer
        self._keeper = keeper

    async def claim(
        self, zone: str, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        return await self._claim(
            limit, lambda wanted: self._mine.index[zone].take(wanted, skip_domains, now), now
        )

    async def claim_new(
        self, zone: str, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        # What is fresh is due at any time.
        return await self._claim(
            limit, lambda wanted: self._mine.index[zone].take_new(wanted, since, skip_domains), 0.0
        )

    async def claim_domain(self, zone: str, domain: str, limit: int, *, now: float) -> list[Delivery]:
        return await self._claim(
            limit, lambda wanted: self._mine.index[zone].take_domain(domain, wanted, now), now
        )

    async def _claim(
        self, limit: int, take: Callable[[int], list[DeliveryKey]], now: float
    ) -> list[Delivery]:
        self._keeper.check_usable()
        return await claim_and_read(limit, take, lambda keys: self._read_claimed(keys, now), self.release)

    async def _read_claimed(self, keys: Sequence[DeliveryKey], now: float) -> list[Delivery]:
        """Those that are still there and due; the other claims are given up."""
        mine, epoch = self._mine, self._mine.epoch
        pinned = [mine.use(message_id) for message_id in dict.fromkeys(key.message_id for key in keys)]
        try:
            unknown = [stored.id for stored in pinned if not stored.etag]
            if unknown:
                await asyncio.gather(*(self._writer.submit(each, Job((), _nothing)) for each in unknown))
            if epoch != mine.epoch:
                raise StoreError("the lease on the queue was lost meanwhile")
            found = [delivery for key in keys if (delivery := self._take(key, now)) is not None]
        except BaseException:
            self.release(keys)
            raise
        finally:
            for stored in pinned:
                mine.drop(stored)
        mine.claims.hand_out(found)
        return found

    def _take(self, key: DeliveryKey, now: float) -> Delivery | None:
        stored = self._mine.get(key.message_id)
        delivery = None if stored is None else stored.deliveries.get(key)
        if delivery is not None and delivery.is_due(now):
            return delivery
        zone = self._mine.index[key.queue]
        zone.drop_claim(key)
        if not zone.is_changing(key):
            self._mine.show(key, delivery)
        return None

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._mine.claims.drop(key)
            self._mine.index[key.queue].release(key)

    async def next_due(self, zone: str) -> float | None:
        self._keeper.check_usable()
        return self._mine.index[zone].next_due()

    def has_ready(self, zone: str) -> bool:
        return self._mine.index[zone].has_ready()


def _nothing(_: State) -> dict[DeliveryKey, Delivery | None]:
    """Nothing changes: the message is only read, if it has to be."""
    return {}
