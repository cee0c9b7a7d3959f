"""Clocks that are passed as parameters, so that tests can control the time."""

import time as _time
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """Interface: wall-clock time, monotonic time and sleep."""

    def now(self) -> float:
        """Return the wall-clock time in seconds since the Unix epoch, UTC. It may jump when an operator sets
        the clock.
        """

    def monotonic(self) -> float:
        """Return seconds that never decrease; only differences between two values are meaningful."""

    def boottime(self) -> float:
        """Return seconds like `monotonic`, but including the time in which the machine was suspended, because
        other nodes go on measuring leases.
        """


class SystemClock:
    """The clock of the operating system. It is created in `worker.py` and passed to other objects."""

    # The functions themselves: the clock is read a dozen times per message.
    now = staticmethod(_time.time)
    monotonic = staticmethod(_time.monotonic)
    boottime = staticmethod(partial(_time.clock_gettime, _time.CLOCK_BOOTTIME))


class ManualClock:
    """A clock that tests advance manually, so that a retry schedule of days runs in milliseconds."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0
        self._suspended = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def boottime(self) -> float:
        return self._monotonic + self._suspended

    def suspend(self, seconds: float) -> None:
        """Move only the wall clock, as if the machine had been suspended."""
        self._now += seconds
        self._suspended += seconds

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._monotonic += seconds

    def step(self, seconds: float) -> None:
        """Change the wall clock as NTP or an operator does, without changing the monotonic clock."""
        self._now += seconds
