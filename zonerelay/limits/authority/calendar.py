"""Turns of rates at one site, or of one zone as a whole, over all workers: which moments are taken. Pure.

- Of two turns of one line the later is an interval of that line after the earlier. Of two lines it is the
  shorter interval of both that counts: so a line never exceeds its own rate, all together never the fastest.
- Who asks first is served first: the calendar is the queue. A turn that fits into a gap between turns of a
  slower line is given away too.
- Turns are only spoken of here; that they are taken in time is up to their holder (`turns.py`).
"""

from __future__ import annotations

from bisect import bisect_left, insort

from msgspec import Struct

LAST_KEPT = 10.0
"""Seconds that the last turn is known at least: a rate that has just become slower counts from it."""

_ROUNDING = 1e-6
"""Sums of clock readings are no more exact than this."""


class Turn(Struct, frozen=True, array_like=True, order=True):
    """`at` is a reading of the authority's clock."""

    at: float
    interval: float
    line: str


class Calendar:
    """Turns in their order. Those so old that they bind nobody are forgotten."""

    def __init__(self, turns: list[Turn] | None = None) -> None:
        self.turns = turns or []
        self._longest = max((turn.interval for turn in self.turns), default=0.0)

    @property
    def binds_until(self) -> float:
        return self.turns[-1].at + self._longest if self.turns else float("-inf")

    def earliest(self, at: float, interval: float, line: str) -> float:
        """The first moment from `at` on that a turn may have."""
        self._longest = max(self._longest, interval)
        turns = self.turns
        index = bisect_left(turns, at - self._longest, key=_moment)
        while index < len(turns) and turns[index].at < at + self._longest:
            turn = turns[index]
            apart = interval if turn.line == line else min(interval, turn.interval)
            index += 1
            if abs(turn.at - at) < apart - _ROUNDING:
                at = turn.at + apart
                index = bisect_left(turns, at - self._longest, key=_moment)
        return at

    def add(self, at: float, interval: float, line: str) -> None:
        # Also of one that was given before this calendar was begun: it binds as long as any other.
        self._longest = max(self._longest, interval)
        insort(self.turns, Turn(at, interval, line))

    def has(self, at: float, line: str) -> bool:
        return any(turn.at == at and turn.line == line for turn in self.turns)

    def remove(self, at: float) -> None:
        self.turns = [turn for turn in self.turns if turn.at != at]

    def forget(self, now: float) -> None:
        old = bisect_left(self.turns, now - self._longest, key=_moment)
        if old == len(self.turns) and old and self.turns[-1].at > now - LAST_KEPT:
            old -= 1
        del self.turns[:old]
        if not self.turns:
            self._longest = 0.0


def _moment(turn: Turn) -> float:
    return turn.at
