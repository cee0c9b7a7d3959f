"""The authority's clock as seen from here: between which readings of ours a moment of its lies. Pure.

Each answer bounds the difference: the authority read its clock after we had asked and before we heard. The
tightest bounds of the last `MEMORY` seconds are used; a clock that was set makes them contradict each other,
and then the newest alone count.
"""

from __future__ import annotations

from collections import deque

MEMORY = 60.0


class ClockBounds:
    """`theirs - ours` is from `low` to `high`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()
        self.low = float("-inf")
        self.high = float("inf")

    def note(self, asked: float, theirs: float, heard: float) -> None:
        low, high = theirs - heard, theirs - asked
        while self._seen and self._seen[0][0] < heard - MEMORY:
            self._seen.popleft()
        if self._seen and (low > self.high or high < self.low):
            self._seen.clear()
        # Only what is tighter than before is worth its place.
        if not self._seen or low > self.low or high < self.high or heard > self._seen[-1][0] + MEMORY / 4:
            self._seen.append((heard, low, high))
        self.low = max(low for _, low, _ in self._seen)
        self.high = min(high for _, _, high in self._seen)

    def window(self, theirs: float, grace: float) -> tuple[float, float]:
        """When, by our clock, it is surely not before their moment, and surely not `grace` after it."""
        return theirs - self.low, theirs + grace - self.high
