"""Fresh deliveries in memory that can be handed out: the oldest first, or the oldest new ones. No I/O.

There are two heaps: one from the message on that `first_since` last named, and one of the
rest. They may hold keys that were taken or forgotten meanwhile: `is_there` decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.message_id import MessageId


class FreshOrder:
    """The fresh deliveries of one queue."""

    __slots__ = ("_is_there", "_new", "_old", "_since")

    def __init__(self, is_there: Callable[[DeliveryKey], bool]) -> None:
        self._is_there = is_there
        self._since: MessageId | None = None
        self._old: list[DeliveryKey] = []
        self._new: list[DeliveryKey] = []

    def __len__(self) -> int:
        """Keys that are gone included."""
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
        """The first of a message that is not older than this one."""
        if since != self._since:
            self._since = since
            self.refill([*self._old, *self._new])
        return self._peek(self._new)

    def pop(self, key: DeliveryKey) -> None:
        """Removes the key that `first` or `first_since` has just returned."""
        heapq.heappop(self._new if self._new and self._new[0] == key else self._old)

    def refill(self, keys: Iterable[DeliveryKey]) -> None:
        """These instead of what was here."""
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
