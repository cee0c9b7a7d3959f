"""The deliveries of one queue that are in memory and can be claimed, in the order of claims. No I/O.

Fresh mail is sorted by message, and deferred mail by due time. The lists have some thousand entries at most,
so that inserting and removing entries in the middle costs little.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import TypeVar

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId

Due = tuple[float, DeliveryKey]
"""The Unix time of the next attempt, and a deferred delivery."""

_by_message = attrgetter("message_id")
_Entry = TypeVar("_Entry", DeliveryKey, Due)


class ReadyMail:
    """The deliveries in memory. Fresh and deferred ones alternate, so that neither starves the other."""

    __slots__ = ("_due", "_fresh", "_known", "_turn_of_due")

    def __init__(self) -> None:
        self._known: dict[DeliveryKey, Delivery] = {}
        self._fresh: list[DeliveryKey] = []
        self._due: list[Due] = []
        self._turn_of_due = False

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: DeliveryKey) -> bool:
        return key in self._known

    def add(self, key: DeliveryKey, delivery: Delivery) -> None:
        """Add a delivery, or replace its state."""
        if key in self._known:
            self.remove(key)
        self._known[key] = delivery
        if delivery.next_attempt > 0:
            insort(self._due, (delivery.next_attempt, key))
        else:
            insort(self._fresh, key)

    def remove(self, key: DeliveryKey) -> Delivery | None:
        """Remove a delivery and return it, or return `None` if it is not here."""
        delivery = self._known.pop(key, None)
        if delivery is None:
            return None
        if delivery.next_attempt > 0:
            _discard(self._due, (delivery.next_attempt, key))
        else:
            _discard(self._fresh, key)
        return delivery

    def first_fresh(self) -> DeliveryKey | None:
        """Return the fresh delivery of the oldest message."""
        return self._fresh[0] if self._fresh else None

    def first_since(self, since: MessageId) -> DeliveryKey | None:
        """Return the first fresh delivery of a message that is not older than `since`."""
        at = bisect_left(self._fresh, since, key=_by_message)
        return self._fresh[at] if at < len(self._fresh) else None

    def first_due(self) -> Due | None:
        """Return the deferred delivery with the earliest time."""
        return self._due[0] if self._due else None

    def pop_either(self, fresh: DeliveryKey | None, due: Due | None) -> Delivery | None:
        """Remove and return one of the deliveries that `first_fresh` and `first_due` have returned."""
        if due is not None and (fresh is None or self._turn_of_due):
            key = due[1]
        elif fresh is not None:
            key = fresh
        else:
            return None
        self._turn_of_due = not self._turn_of_due
        return self.remove(key)

    def take(self, limit: int, now: float, is_wanted: Callable[[Delivery], bool]) -> list[Delivery]:
        """Remove and return up to `limit` wanted deliveries that are due at `now`."""
        found: list[Delivery] = []
        others: list[Delivery] = []
        while len(found) < limit:
            due = self.first_due()
            delivery = self.pop_either(self.first_fresh(), due if due is not None and due[0] <= now else None)
            if delivery is None:
                break
            (found if is_wanted(delivery) else others).append(delivery)
        for delivery in others:
            self.add(delivery.key, delivery)
        return found


def _discard(entries: list[_Entry], entry: _Entry) -> None:
    """Remove an entry of a sorted list."""
    del entries[bisect_left(entries, entry)]
