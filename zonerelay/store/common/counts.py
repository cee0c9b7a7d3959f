"""Counts the deliveries of each queue by durable state, without asking the disk.

After a start a walk in the background adds what the spool holds. A walk over one moment of the spool goes
with all changes since then, a walk page by page with those of keys that it has passed (`left`). Until it ends
the counts are too low and may be below zero: `current` shows zero instead, and `is_whole` is false, so that
callers do not take the counts for the queue.
"""

from __future__ import annotations

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common.records import delivery_key
from zonerelay.store.contract import QueueCounts


class Counts:
    """Changed only on the event loop. The walk over the spool sets `is_whole` when it ends. `left` is where
    the walk goes on: changes from there on are left to it.
    """

    def __init__(self, left: bytes | None = None) -> None:
        self.is_whole = False
        self.left = left
        self._zones: dict[QueueName, QueueCounts] = {}

    def move(self, key: DeliveryKey, old: Delivery | None, new: Delivery | None) -> None:
        """A delivery changed from `old` (None: it is new) to `new` (None: it left)."""
        if self.left is not None and delivery_key(key) >= self.left:
            return
        counts = self._zones.get(key.queue)
        if counts is None:
            counts = self._zones[key.queue] = QueueCounts()
        if old is not None:
            counts.count(old.next_attempt, held=old.held, step=-1)
        if new is not None:
            counts.count(new.next_attempt, held=new.held)

    def add(self, found: dict[QueueName, QueueCounts]) -> None:
        """Add what a walk over the spool found."""
        for queue, more in found.items():
            self._zones.setdefault(queue, QueueCounts()).add(more)

    @property
    def moves(self) -> dict[QueueName, QueueCounts]:
        """The plain sums, which may be below zero."""
        return self._zones

    @property
    def total(self) -> int:
        return sum(max(0, counts.total) for counts in self._zones.values())

    def current(self) -> dict[QueueName, QueueCounts]:
        return {
            zone: QueueCounts(max(0, counts.ready), max(0, counts.deferred), max(0, counts.held))
            for zone, counts in self._zones.items()
            if zone.is_mail
        }
