"""The order of lines that wait for the same thing: a connection, or a look-up of their route. Pure.

Of lines with fresh mail `FRESH_WEIGHT` go for one of the others. So a sender with an ordinary amount of mail
hardly notices that a long queue is worked off beside it, and that queue has all that is left.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from zonerelay.queue.destination.backlog import Line

FRESH_WEIGHT = 7
"""Lines with fresh mail that go for one of the others. One for one was too few for mail that comes as fast as
it can be sent: with a million queued it was delivered at a tenth of its rate until the backlog had gone.
"""

_Line = TypeVar("_Line", bound=Line)


class _NewFirst(OrderedDict[_Line, bool]):
    """Lines in the order in which they came, but a `new` line overtakes the others, every other time."""

    # Not a deque: a line that leaves early is found at once. And a dict says without a call of Python whether
    # it is empty, a dozen times per message.

    def __init__(self) -> None:
        super().__init__()
        self._new: OrderedDict[_Line, bool] = OrderedDict()
        self._may_overtake = True

    def append(self, waiting: _Line, *, new: bool = False) -> None:
        self[waiting] = new
        if new:
            self._new[waiting] = True

    def take(self) -> _Line:
        """Removes and returns the next line."""
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
        """False when the line is not here."""
        self._new.pop(waiting, None)
        return self.pop(waiting, None) is not None

    def stale(self) -> list[_Line]:
        """Lines whose mail is no longer fresh."""
        return [each for each in self if not each.has_fresh]

    def clear(self) -> None:
        super().clear()
        self._new.clear()


class FairQueue(Generic[_Line]):
    """Lines with fresh mail and lines without it, each at most once, in weighted order."""

    __slots__ = ("_first", "_fresh", "_fresh_taken", "_other")

    def __init__(self) -> None:
        self._first: OrderedDict[_Line, None] = OrderedDict()
        self._fresh: _NewFirst[_Line] = _NewFirst()
        self._other: _NewFirst[_Line] = _NewFirst()
        self._fresh_taken = 0
        """Lines with fresh mail that went since one of the others did."""

    def __bool__(self) -> bool:
        return bool(self._fresh or self._other or self._first)

    def append(self, waiting: _Line, *, new: bool = False) -> None:
        """`new`: nothing of it waited or was under way when its mail came; used for fresh mail alone."""
        if waiting.has_fresh:
            self._fresh.append(waiting, new=new)
        else:
            self._other.append(waiting)

    def put_first(self, waiting: _Line) -> None:
        """Puts a line that has waited elsewhere before all others."""
        self._first[waiting] = None

    def hasten(self, waiting: _Line) -> None:
        """Fresh mail may have come for a line that waits: it goes where the fresh ones are."""
        if waiting.has_fresh and self._other.remove(waiting):
            self._fresh.append(waiting)

    def sort(self) -> list[_Line]:
        """Moves lines whose mail is no longer fresh behind the others, and returns them."""
        moved = self._fresh.stale()
        for each in moved:
            self._fresh.remove(each)
            self._other.append(each)
        return moved

    @property
    def has_fresh(self) -> bool:
        """A line waits that may go as one with fresh mail."""
        return bool(self._fresh or self._first)

    @property
    def fresh_is_next(self) -> bool:
        """A line with fresh mail waits and is the next to go."""
        return bool(self._fresh) and self._fresh_taken < FRESH_WEIGHT

    def pop(self, *, fresh_only: bool = False) -> _Line:
        """Removes and returns the next line. One must wait, and `has_fresh` if `fresh_only`."""
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
        """The line leaves early."""
        self._first.pop(waiting, None)
        self._fresh.remove(waiting)
        self._other.remove(waiting)

    def clear(self) -> None:
        self._first.clear()
        self._fresh.clear()
        self._other.clear()
