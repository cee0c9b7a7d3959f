"""Time as a parameter: nothing below `worker.py` asks the operating system what time it is."""

from __future__ import annotations

import time as _time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the Unix epoch, UTC. May step when an operator sets the clock."""

    def monotonic(self) -> float:
        """Seconds that never go backwards; only differences mean something."""


class SystemClock:
    """The machine's clock. Built in `worker.py` and handed down."""

    # The functions themselves: the clock is read a dozen times per message.
    now = staticmethod(_time.time)
    monotonic = staticmethod(_time.monotonic)


class ManualClock:
    """A clock that moves when told to, so that a five-day retry schedule is tested in milliseconds."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds

    def step(self, seconds: float) -> None:
        """What NTP or an operator does: wall time jumps, the monotonic clock does not."""
        self._now += seconds
