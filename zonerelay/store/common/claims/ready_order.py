"""Deliveries in memory that can be handed out: fresh ones and deferred ones, in turns. No I/O.

The heaps may hold keys that were taken, changed or forgotten meanwhile: `when_of` decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from zonerelay.model.delivery import DeliveryKey
from zonerelay.store.common.claims.fresh_order import FreshOrder

Due = tuple[float, DeliveryKey]
"""A deferred delivery behind the Unix time of its next attempt."""


class ReadyOrder:
    """The order of one queue.

    `when_of(key)` returns the Unix time of the next attempt of a delivery that may be handed out, 0.0 or less
    of a fresh one, and `None` of a delivery that may not be.
    """

    def __init__(self, when_of: Callable[[DeliveryKey], float | None]) -> None:
        self.fresh = FreshOrder(self._is_fresh)
        self._when_of = when_of
        self._due: list[Due] = []
        self._turn_of_due = False

    def __len__(self) -> int:
        """Keys that are gone included."""
        return len(self.fresh) + len(self._due)

    def push(self, key: DeliveryKey, next_attempt: float) -> None:
        if next_attempt > 0:
            heapq.heappush(self._due, (next_attempt, key))
        else:
            self.fresh.push(key)

    def refill(self, entries: Iterable[Due]) -> None:
        """Replaces all that is here. Fresh deliveries come with a time of 0.0 or less."""
        entries = list(entries)
        self.fresh.refill(key for when, key in entries if when <= 0)
        self._due = [entry for entry in entries if entry[0] > 0]
        heapq.heapify(self._due)

    def first_due(self) -> Due | None:
        """The deferred delivery with the earliest time."""
        heap = self._due
        while heap:
            if self._when_of(heap[0][1]) == heap[0][0]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def pop_next(self, now: float) -> DeliveryKey | None:
        """Removes and returns the next delivery that is due at `now`, `None` when there is none."""
        due = self.first_due()
        return self.pop_either(self.fresh.first(), None if due is None or due[0] > now else due)

    def pop_either(self, fresh: DeliveryKey | None, due: Due | None) -> DeliveryKey | None:
        """Removes one of what `fresh.first` and `first_due` have just returned. The kinds take turns, so that
        neither starves the other.
        """
        if due is not None and (fresh is None or self._turn_of_due):
            key = heapq.heappop(self._due)[1]
        elif fresh is not None:
            key = fresh
            self.fresh.pop(key)
        else:
            return None
        self._turn_of_due = not self._turn_of_due
        return key

    def _is_fresh(self, key: DeliveryKey) -> bool:
        when = self._when_of(key)
        return when is not None and when <= 0
