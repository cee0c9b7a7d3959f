"""One timer for the earliest of many due times, on the clock that they are written in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LONGEST = 60.0
"""Seconds after which the clock is looked at again: a wall clock may have been set meanwhile."""


class Alarm:
    """Calls `ring` when the clock, read with `now`, has reached the earliest time it was set to."""

    def __init__(self, now: Callable[[], float], ring: Callable[[], None]) -> None:
        self._now = now
        self._round_robin = ring
        self._when: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        if self._when is None or when < self._when:
            self._when = when
            self._arm()

    def cancel(self) -> None:
        self._when = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._when is not None:
            delay = min(max(0.0, self._when - self._now()), LONGEST)
            self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._when is not None and self._now() < self._when:
            self._arm()
            return
        self._when = None
        self._round_robin()
