"""Keeps the number of deliveries of each queue by durable state, in memory.

After a start, a background scan adds the stored deliveries. A scan of a snapshot of the spool is combined
with all changes since the snapshot. A scan page by page is combined with the changes of keys that it has
passed (`left`). Until the scan ends, the counts are too low and may be negative, and `is_whole` is false, so
that callers do not rely on them. Meanwhile `current` returns the counts before a failed write, or zero for
negative ones.
"""

from __future__ import annotations

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common.records import delivery_key
from zonerelay.store.contract import QueueCounts


class Counts:
    """Counts of the deliveries in one spool. They are changed only on the event loop. The scan sets
    `is_whole` when it ends. `left` is the key at which the scan continues; it will count the changes from
    there on.
    """

    def __init__(self, left: bytes | None = None, before: Counts | None = None) -> None:
        """Create the counts that replace those before a failed write, which may be stored all the same."""
        self._before = None if before is None else before._shown
        self.is_whole = False
        self.left = left
        self._zones: dict[QueueName, QueueCounts] = {}

    def move(self, key: DeliveryKey, old: Delivery | None, new: Delivery | None) -> None:
        """Count a delivery that changed from `old` (None if it is new) to `new` (None if it was removed)."""
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
        """Add the deliveries that a scan of the spool has found."""
        for queue, more in found.items():
            self._zones.setdefault(queue, QueueCounts()).add(more)

    @property
    def moves(self) -> dict[QueueName, QueueCounts]:
        """The sums without correction, which may be negative."""
        return self._zones

    @property
    def total(self) -> int:
        return sum(max(0, counts.total) for counts in self._zones.values())

    @property
    def _shown(self) -> Counts:
        if self.is_whole or self._before is None or not self._before.is_whole:
            return self
        return self._before

    def waiting(self, queue: QueueName) -> int:
        zones = self._shown._zones
        return max(0, zones[queue].total) if queue in zones else 0

    def current(self) -> dict[QueueName, QueueCounts]:
        return {
            zone: QueueCounts(max(0, counts.ready), max(0, counts.deferred), max(0, counts.held))
            for zone, counts in self._shown._zones.items()
            if zone.is_mail
        }
