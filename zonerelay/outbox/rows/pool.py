"""The deliveries of one queue that this relay has claimed in the outbox and not yet passed to the
scheduler.
"""

from __future__ import annotations

from collections.abc import Collection

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.leveldb.ready_order import ReadyOrder


class ZonePool:
    """The claimed deliveries of one queue, in the order in which they are attempted."""

    def __init__(self) -> None:
        self._waiting: dict[DeliveryKey, Delivery] = {}
        self._order = ReadyOrder(self._when_of)

    @property
    def has_fresh(self) -> bool:
        return self._order.fresh.first() is not None

    def put(self, delivery: Delivery) -> None:
        self._waiting[delivery.key] = delivery
        self._order.push(delivery.key, delivery.next_attempt)

    def forget(self, key: DeliveryKey) -> None:
        self._waiting.pop(key, None)

    def take(self, limit: int, skip: Collection[str], now: float) -> tuple[list[Delivery], list[Delivery]]:
        """Take up to `limit` deliveries, alternating fresh and due ones. Also return those that were skipped
        because their domain is in `skip`.
        """
        found: list[Delivery] = []
        passed: list[Delivery] = []
        while len(found) < limit and (key := self._order.pop_next(now)) is not None:
            delivery = self._waiting.pop(key)
            (passed if skip and delivery.domain in skip else found).append(delivery)
        return found, passed

    def _when_of(self, key: DeliveryKey) -> float | None:
        known = self._waiting.get(key)
        return None if known is None else known.next_attempt
