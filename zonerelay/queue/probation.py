"""Which part of a zone's connections may be held by destinations that have not answered yet. Pure.

A host that accepts connections and says nothing keeps each for minutes, one that takes messages and does not
say so for ten. So in a zone routed by MX:

- A destination that has not answered for any mail yet, or not in the last attempt, has `first` connections
  (an eighth of the zone's) until it does.
- All of them together have half of the zone's connections, those that are to end a suspension a quarter.
- Who finds no room waits here, and gets the next connection that is given back, oldest first, those with
  fresh mail and those without it by turns.

Promise: destinations that answer always find half of the zone's connections free of those that do not, and
new ones a quarter free of those that are known to fail.
"""

from __future__ import annotations

from zonerelay.queue.destinations import Destination


class Probation:
    """Of one zone; `most` is what it may have."""

    def __init__(self, most: int) -> None:
        self.first = max(1, most // 8)
        self._most = max(1, most // 2)
        self._most_troubled = max(1, most // 4)
        self._active = 0
        self._troubled = 0
        self._new: dict[Destination, None] = {}
        self._new_again: dict[Destination, None] = {}
        self._turn_of_again = False
        self._failed: dict[Destination, None] = {}

    def __bool__(self) -> bool:
        """Somebody waits."""
        return bool(self._new or self._new_again or self._failed)

    def admits(self, destination: Destination) -> bool:
        """It may start another transaction, as far as this goes."""
        if self._active >= self._most:
            return False
        return not destination.suspension.is_troubled or self._troubled < self._most_troubled

    def put_aside(self, destination: Destination) -> None:
        """It was not admitted."""
        if destination.suspension.is_troubled:
            self._failed[destination] = None
        else:
            (self._new if destination.has_fresh else self._new_again)[destination] = None

    def next(self) -> Destination | None:
        """One that was put aside and would be admitted now."""
        if self._active >= self._most:
            return None
        if self._new_again and (self._turn_of_again or not self._new):
            self._turn_of_again = False
            return _first(self._new_again)
        if self._new:
            self._turn_of_again = True
            return _first(self._new)
        if self._failed and self._troubled < self._most_troubled:
            return _first(self._failed)
        return None

    def started(self, destination: Destination) -> None:
        destination.unproven += 1
        self._active += 1
        if destination.suspension.is_troubled:
            destination.is_probed = True
            self._troubled += 1

    def ended(self, destination: Destination) -> None:
        """One of those that were started."""
        destination.unproven -= 1
        self._active -= 1
        if destination.is_probed:
            destination.is_probed = False
            self._troubled -= 1

    def proven(self, destination: Destination) -> bool:
        """It has answered: it counts no longer. True when it had been put aside."""
        while destination.unproven:
            self.ended(destination)
        rows = (self._new, self._new_again, self._failed)
        was_aside = any(destination in row for row in rows)
        for row in rows:
            row.pop(destination, None)
        return was_aside

    def clear(self) -> None:
        for row in (self._new, self._new_again, self._failed):
            row.clear()


def _first(aside: dict[Destination, None]) -> Destination:
    destination = next(iter(aside))
    del aside[destination]
    return destination
