"""How much was counted in the last hour or day, in a bounded number of slots.

The window slides by one slot (a sixtieth) at a time and always covers its whole length, so that no hour
has more than the hour's limit; what is counted leaves it up to one slot late.
"""

from __future__ import annotations

from collections import deque

SLOTS = 60


class Window:
    """One sliding window; `now` is any clock that never goes backwards."""

    __slots__ = ("_counts", "_slot", "total")

    def __init__(self, length: float) -> None:
        self._slot = length / SLOTS
        self._counts: deque[tuple[int, int]] = deque()  # (slot number, count), oldest first
        self.total = 0

    def slide(self, now: float) -> None:
        """Forget what has left the window."""
        first = int(now // self._slot) - SLOTS
        while self._counts and self._counts[0][0] < first:
            self.total -= self._counts.popleft()[1]

    def add(self, now: float) -> None:
        slot = int(now // self._slot)
        count = self._counts.pop()[1] if self._counts and self._counts[-1][0] == slot else 0
        self._counts.append((slot, count + 1))
        self.total += 1

    def room_at(self, limit: int) -> float:
        """When, without further counting, the total will be below `limit` (at least 1)."""
        left = self.total
        for slot, count in self._counts:
            left -= count
            if left < limit:
                return (slot + SLOTS + 1) * self._slot
        return 0.0
