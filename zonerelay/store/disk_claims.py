"""Handing out deliveries from the disk queue: the index says which, their files say in what state.

A claim whose file says something else than the index is given up, and the index is put right. One that fails
or is cancelled half-way gives back what it took.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.store.claiming import claim_and_read
from zonerelay.store.disk_index import Index
from zonerelay.store.disk_keeper import DiskKeeper
from zonerelay.store.disk_states import States


class DiskClaims:
    """The claims of all zones."""

    def __init__(self, keeper: DiskKeeper, index: Index, states: States) -> None:
        self._keeper = keeper
        self._index = index
        self._states = states

    async def claim(
        self, zone: str, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        index = self._index[zone]
        return await self._claim(limit, lambda wanted: index.take(wanted, skip_domains, now), now)

    async def claim_new(
        self, zone: str, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        index = self._index[zone]
        # What is fresh is due at any time.
        return await self._claim(limit, lambda wanted: index.take_new(wanted, since, skip_domains), 0.0)

    async def claim_domain(self, zone: str, domain: str, limit: int, *, now: float) -> list[Delivery]:
        index = self._index[zone]
        return await self._claim(limit, lambda wanted: index.take_domain(domain, wanted, now), now)

    async def _claim(
        self, limit: int, take: Callable[[int], list[DeliveryKey]], now: float
    ) -> list[Delivery]:
        self._keeper.check_usable()
        return await claim_and_read(limit, take, lambda keys: self._read_claimed(keys, now), self.release)

    async def _read_claimed(self, keys: Sequence[DeliveryKey], now: float) -> list[Delivery]:
        """Those of the claimed deliveries that are still there and due; the other claims are given up."""
        try:
            held = await self._states.hold({key.message_id for key in keys})
        except BaseException:
            self.release(keys)
            raise
        found: list[Delivery] = []
        for key in keys:
            state = held.get(key.message_id)
            delivery = None if state is None else state.deliveries.get(key)
            if delivery is not None and delivery.is_due(now):
                found.append(delivery)
            else:
                self._correct(key, delivery)
        self._states.drop(held.values())
        return found

    def _correct(self, key: DeliveryKey, delivery: Delivery | None) -> None:
        """The file says something else than the index: dropped meanwhile, unreadable, or changed by hand."""
        zone = self._index[key.queue]
        zone.drop_claim(key)
        if not zone.is_changing(key):
            self._index.show(key, delivery)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self._index[key.queue].release(key)

    async def next_due(self, zone: str) -> float | None:
        self._keeper.check_usable()
        return self._index[zone].next_due()

    def has_ready(self, zone: str) -> bool:
        return self._index[zone].has_ready()
