"""Orders the deliveries in memory that can be claimed. Fresh and deferred ones alternate. No I/O.

The heaps may contain keys that were claimed, changed or removed since. `when_of` decides which are valid.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageId

# `FreshOrder` has two heaps: one for messages from the last `since` of `first_since` on, and one for the
# rest. They may contain keys that were claimed or removed since; `is_there` decides.


class FreshOrder:
    """The fresh deliveries of one queue, the oldest first, or the oldest of the new ones."""

    __slots__ = ("_is_there", "_new", "_old", "_since")

    def __init__(self, is_there: Callable[[DeliveryKey], bool]) -> None:
        self._is_there = is_there
        self._since: MessageId | None = None
        self._old: list[DeliveryKey] = []
        self._new: list[DeliveryKey] = []

    def __len__(self) -> int:
        """Return the number of keys, including invalid ones."""
        return len(self._old) + len(self._new)

    def push(self, key: DeliveryKey) -> None:
        is_new = self._since is not None and key.message_id >= self._since
        heapq.heappush(self._new if is_new else self._old, key)

    def first(self) -> DeliveryKey | None:
        old = self._peek(self._old)
        if not self._new:
            return old
        new = self._peek(self._new)
        return new if old is None or (new is not None and new < old) else old

    def first_since(self, since: MessageId) -> DeliveryKey | None:
        """Return the first delivery of a message that is not older than `since`."""
        if since != self._since:
            self._since = since
            self.refill([*self._old, *self._new])
        return self._peek(self._new)

    def pop(self, key: DeliveryKey) -> None:
        """Remove the key that `first` or `first_since` has just returned."""
        heapq.heappop(self._new if self._new and self._new[0] == key else self._old)

    def refill(self, keys: Iterable[DeliveryKey]) -> None:
        """Replace all keys."""
        self._old, self._new = [], []
        for key in keys:
            is_new = self._since is not None and key.message_id >= self._since
            (self._new if is_new else self._old).append(key)
        heapq.heapify(self._old)
        heapq.heapify(self._new)

    def _peek(self, heap: list[DeliveryKey]) -> DeliveryKey | None:
        while heap:
            if self._is_there(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None


Due = tuple[float, DeliveryKey]
"""The Unix time of the next attempt, and a deferred delivery."""


class ReadyOrder:
    """The order of one queue.

    `when_of(key)` returns the Unix time of the next attempt if the delivery may be claimed, 0.0 or less if it
    is fresh, and `None` if it may not be claimed.
    """

    def __init__(self, when_of: Callable[[DeliveryKey], float | None]) -> None:
        self.fresh = FreshOrder(self._is_fresh)
        self._when_of = when_of
        self._due: list[Due] = []
        self._turn_of_due = False

    def __len__(self) -> int:
        """Return the number of keys, including invalid ones."""
        return len(self.fresh) + len(self._due)

    def push(self, key: DeliveryKey, next_attempt: float) -> None:
        if next_attempt > 0:
            heapq.heappush(self._due, (next_attempt, key))
        else:
            self.fresh.push(key)

    def refill(self, entries: Iterable[Due]) -> None:
        """Replace all entries. Fresh deliveries have a time of 0.0 or less."""
        entries = list(entries)
        self.fresh.refill(key for when, key in entries if when <= 0)
        self._due = [entry for entry in entries if entry[0] > 0]
        heapq.heapify(self._due)

    def first_due(self) -> Due | None:
        """Return the deferred delivery with the earliest time."""
        heap = self._due
        while heap:
            if self._when_of(heap[0][1]) == heap[0][0]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def pop_next(self, now: float) -> DeliveryKey | None:
        """Remove and return the next delivery that is due at `now`, or `None` if there is none."""
        due = self.first_due()
        return self.pop_either(self.fresh.first(), None if due is None or due[0] > now else due)

    def pop_either(self, fresh: DeliveryKey | None, due: Due | None) -> DeliveryKey | None:
        """Remove one of the deliveries that `fresh.first` and `first_due` have just returned. The kinds
        alternate, so that neither starves the other.
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
