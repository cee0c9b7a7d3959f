"""Orders the destination queues that wait for the same resource: a connection, or a route lookup. Pure.

`FRESH_WEIGHT` lines with fresh mail go for each of the others. So a sender with an ordinary amount of mail
hardly notices a long queue that is being sent at the same time, and the queue gets all remaining capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from zonerelay.queue.destination.backlog import DestinationQueue

FRESH_WEIGHT = 7
"""Lines with fresh mail that go for each of the others. A ratio of one to one was too low for mail that
arrives as fast as it can be sent: with a million queued messages it was delivered at a tenth of its rate
until the backlog was gone.
"""

_Line = TypeVar("_Line", bound=DestinationQueue)


class _AlternatingQueue(OrderedDict[_Line, bool]):
    """Destination queues in order of arrival, except that every second selection takes a `new` one first."""

    # Not a deque, because a line that leaves early must be found quickly. And a dict can be checked for
    # emptiness without a call of Python code, which happens a dozen times per message.

    def __init__(self) -> None:
        super().__init__()
        self._new: OrderedDict[_Line, bool] = OrderedDict()
        self._may_overtake = True

    def append(self, waiting: _Line, *, new: bool = False) -> None:
        self[waiting] = new
        if new:
            self._new[waiting] = True

    def take(self) -> _Line:
        """Remove and return the next queue."""
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

    def remove(self, waiting: _Line) -> bool:
        """Remove a queue. Return false if it is not here."""
        self._new.pop(waiting, None)
        return self.pop(waiting, None) is not None

    def stale(self) -> list[_Line]:
        """Return the queues whose mail is no longer fresh."""
        return [each for each in self if not each.has_fresh]

    def clear(self) -> None:
        super().clear()
        self._new.clear()


class FairQueue(Generic[_Line]):
    """Destination queues with and without fresh mail, each at most once, in weighted order."""

    __slots__ = ("_first", "_fresh", "_fresh_taken", "_other")

    def __init__(self) -> None:
        self._first: OrderedDict[_Line, None] = OrderedDict()
        self._fresh: _AlternatingQueue[_Line] = _AlternatingQueue()
        self._other: _AlternatingQueue[_Line] = _AlternatingQueue()
        self._fresh_taken = 0
        """Lines with fresh mail that went since the last line without."""

    def __bool__(self) -> bool:
        return bool(self._fresh or self._other or self._first)

    def append(self, waiting: _Line, *, new: bool = False) -> None:
        """Add a queue. `new` says that no mail of it waited or was being sent when its mail arrived; it
        matters only for fresh mail.
        """
        if waiting.has_fresh:
            self._fresh.append(waiting, new=new)
        else:
            self._other.append(waiting)

    def put_first(self, waiting: _Line) -> None:
        """Put a queue that has waited elsewhere first."""
        self._first[waiting] = None

    def hasten(self, waiting: _Line) -> None:
        """Move a queue to those with fresh mail after fresh mail has arrived."""
        if waiting.has_fresh and self._other.remove(waiting):
            self._fresh.append(waiting)

    def sort(self) -> list[_Line]:
        """Move queues whose mail is no longer fresh to the others, and return them."""
        moved = self._fresh.stale()
        for each in moved:
            self._fresh.remove(each)
            self._other.append(each)
        return moved

    @property
    def has_fresh(self) -> bool:
        """Whether a queue with fresh mail is waiting."""
        return bool(self._fresh or self._first)

    @property
    def fresh_is_next(self) -> bool:
        """Whether a queue with fresh mail is next."""
        return bool(self._fresh) and self._fresh_taken < FRESH_WEIGHT

    def pop(self, *, fresh_only: bool = False) -> _Line:
        """Remove and return the next queue. A line must wait, and `has_fresh` must be true for
        `fresh_only`.
        """
        if self._first:
            waiting = self._first.popitem(last=False)[0]
            self._fresh_taken = self._fresh_taken + 1 if waiting.has_fresh else 0
            return waiting
        if self._other and not fresh_only and (self._fresh_taken >= FRESH_WEIGHT or not self._fresh):
            self._fresh_taken = 0
            return self._other.take()
        self._fresh_taken += 1
        return self._fresh.take()

    def remove(self, waiting: _Line) -> None:
        """Remove a queue out of order."""
        self._first.pop(waiting, None)
        self._fresh.remove(waiting)
        self._other.remove(waiting)

    def clear(self) -> None:
        self._first.clear()
        self._fresh.clear()
        self._other.clear()
