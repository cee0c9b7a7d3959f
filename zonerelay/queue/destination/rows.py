"""Who comes first where fresh mail and mail that has been put off wait for the same thing. Pure.

Fresh mail, and mail that was put off (deferred, one of very many recipients of its message, or backlog,
`window.py`), stand in two rows and take turns, oldest message first in each. So a single message passes a
hundred thousand that have come due together, or a list of a million, and these get half of the turns of their
destination all the same. Of the turns between destinations those with fresh mail have `FRESH_WEIGHT` for one
of the others: who sends in the ordinary way hardly notices that a long queue is worked off beside, which
has all the turns that are left.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from zonerelay.model.address import domain_of
from zonerelay.model.delivery import Delivery, DeliveryKey

FRESH_WEIGHT = 7
"""Of those with fresh mail, for one of the others. Half were too few for what comes as fast as it can be sent
(seen with a million queued: it was delivered at a tenth of its rate until the backlog had gone).
"""


class Row:
    """Deliveries by message, the oldest message first. Never asked for one when it is empty (`bool`).

    `apart`: each domain of a message by itself.
    """

    __slots__ = ("_apart", "_groups", "_order")

    def __init__(self, *, apart: bool = False) -> None:
        self._apart = apart
        # By recipient where a message has several: an operator may withdraw thousands, one after the other.
        self._groups: dict[str, Delivery | dict[str, Delivery]] = {}
        self._order: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, delivery: Delivery) -> None:
        name = self._group_of(delivery) if self._apart else delivery.message_id
        group = self._groups.get(name)
        if group is None:
            self._groups[name] = delivery
            heapq.heappush(self._order, name)
        elif isinstance(group, dict):
            group[delivery.recipient] = delivery
        else:
            both: dict[str, Delivery] = {group.recipient: group, delivery.recipient: delivery}
            self._groups[name] = both

    def take(self, limit: int, domains: int = 1) -> list[Delivery]:
        """Up to `limit` deliveries of the oldest message; where domains are apart, in up to so many."""
        taken = self._take_group(limit)
        while self._apart and domains > 1 and len(taken) < limit and self._next() == taken[0].message_id:
            taken += self._take_group(limit - len(taken))
            domains -= 1
        return taken

    def _take_group(self, limit: int) -> list[Delivery]:
        # Withdrawing leaves names behind in the heap: finding them there would cost a scan.
        while (name := self._order[0]) not in self._groups:
            heapq.heappop(self._order)
        group = self._groups[name]
        if not isinstance(group, dict) or len(group) <= limit:
            heapq.heappop(self._order)
            del self._groups[name]
            return _all(group)
        taken = list(islice(group.values(), limit))
        for delivery in taken:
            del group[delivery.recipient]
        return taken

    def remove(self, key: DeliveryKey) -> Delivery | None:
        """Forget one delivery; `None` when it was not here."""
        name = self._group_of(key) if self._apart else key.message_id
        group = self._groups.get(name)
        if isinstance(group, dict):
            delivery = group.pop(key.recipient, None)
            if group:
                return delivery
        else:
            delivery = group if group is not None and group.recipient == key.recipient else None
            if delivery is None:
                return None
        self._groups.pop(name, None)
        return delivery

    def __iter__(self) -> Iterator[Delivery]:
        for name in sorted(self._groups):
            yield from _all(self._groups[name])

    @staticmethod
    def _group_of(one: Delivery | DeliveryKey) -> str:
        """Where domains are apart. Names sort as the messages do, for ids have one length."""
        return f"{one.message_id} {domain_of(one.recipient)}"

    def _next(self) -> str:
        """The message of the next group; "" if there is none."""
        while self._order and self._order[0] not in self._groups:
            heapq.heappop(self._order)
        return self._order[0].partition(" ")[0] if self._order else ""


def _all(group: Delivery | dict[str, Delivery]) -> list[Delivery]:
    return list(group.values()) if isinstance(group, dict) else [group]


class Freshness(Protocol):
    """What waits for a turn."""

    @property
    def has_fresh(self) -> bool: ...


Waiting = TypeVar("Waiting", bound=Freshness)


class _NewFirst(OrderedDict[Waiting, bool]):
    """In the order in which they came, but who is `new` comes before the others, and overtakes no two of them
    running.
    """

    # No deque: a destination that leaves before its turn is found at once. And a dict is asked whether it is
    # empty, a dozen times per message, without a call of Python.

    def __init__(self) -> None:
        super().__init__()
        self._new: OrderedDict[Waiting, bool] = OrderedDict()
        self._may_overtake = True

    def append(self, waiting: Waiting, *, new: bool = False) -> None:
        self[waiting] = new
        if new:
            self._new[waiting] = True

    def take(self) -> Waiting:
        """The next, which leaves."""
        new = self._new
        if not new:
            return self.popitem(last=False)[0]
        first = next(iter(self))
        if first not in new:
            self._may_overtake = not self._may_overtake
            if not self._may_overtake:
                first = next(iter(new))
        self.remove(first)
        return first

    def remove(self, waiting: Waiting) -> bool:
        """False when it does not stand here."""
        self._new.pop(waiting, None)
        return self.pop(waiting, None) is not None

    def stale(self) -> list[Waiting]:
        """Those whose fresh mail is fresh no longer."""
        return [each for each in self if not each.has_fresh]

    def clear(self) -> None:
        super().clear()
        self._new.clear()


class FairQueue(Generic[Waiting]):
    """A queue of those that wait: with fresh mail and without it, by turns; nobody twice."""

    __slots__ = ("_first", "_fresh", "_other", "_turns")

    def __init__(self) -> None:
        self._first: OrderedDict[Waiting, None] = OrderedDict()
        self._fresh: _NewFirst[Waiting] = _NewFirst()
        self._other: _NewFirst[Waiting] = _NewFirst()
        self._turns = 0
        """Of those with fresh mail since one of the others had its turn."""

    def __bool__(self) -> bool:
        return bool(self._fresh or self._other or self._first)

    def append(self, waiting: Waiting, *, new: bool = False) -> None:
        """`new`: nothing of it waited or was on its way when its mail came; counts for fresh mail."""
        if waiting.has_fresh:
            self._fresh.append(waiting, new=new)
        else:
            self._other.append(waiting)

    def put_first(self, waiting: Waiting) -> None:
        """Before all others: it has waited for its turn elsewhere."""
        self._first[waiting] = None

    def hasten(self, waiting: Waiting) -> None:
        """Fresh mail may have come for one that waits."""
        if waiting.has_fresh and self._other.remove(waiting):
            self._fresh.append(waiting)

    def sort(self) -> list[Waiting]:
        """Those whose fresh mail is fresh no longer, which stand behind the others now."""
        moved = self._fresh.stale()
        for each in moved:
            self._fresh.remove(each)
            self._other.append(each)
        return moved

    @property
    def has_fresh(self) -> bool:
        """Somebody waits whose turn may be one of those with fresh mail."""
        return bool(self._fresh or self._first)

    @property
    def is_of_fresh(self) -> bool:
        """The next turn is one of those with fresh mail, which waits."""
        return bool(self._fresh) and self._turns < FRESH_WEIGHT

    def pop(self, *, fresh_only: bool = False) -> Waiting:
        """The next; there must be one, and `has_fresh` if only those are wanted."""
        if self._first:
            waiting = self._first.popitem(last=False)[0]
            self._turns = self._turns + 1 if waiting.has_fresh else 0
            return waiting
        if self._other and not fresh_only and (self._turns >= FRESH_WEIGHT or not self._fresh):
            self._turns = 0
            return self._other.take()
        self._turns += 1
        return self._fresh.take()

    def remove(self, waiting: Waiting) -> None:
        """It leaves before its turn."""
        self._first.pop(waiting, None)
        self._fresh.remove(waiting)
        self._other.remove(waiting)

    def clear(self) -> None:
        self._first.clear()
        self._fresh.clear()
        self._other.clear()
