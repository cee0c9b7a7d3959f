"""How late the event loop is: what a client, a peer or a timer has to wait because the relay is busy.

One timer measures how much later than asked it is called. A pause of the loop shows as a lag between its
length and the interval less; the interval is longer while the loop has next to nothing to do. `longest` is
the worst of the last one to two minutes, so that every reader of the metrics sees it, however often each of
them asks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

INTERVAL = 0.025
"""Seconds: short against a pause that matters (0.05)."""
IDLE_INTERVAL = 0.1
"""Forty wake-ups a second were more than half of what an idle relay cost."""
IDLE = 0.002
"""CPU seconds since the last look: with less the loop had next to nothing to do."""
SPAN = 60.0
"""Seconds that the worst lag is remembered for, at least."""


class LoopLag:
    """Belongs to the loop that runs when it is started."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._used = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._worst = self._worst_before = 0.0
        self._span_ends = 0.0

    @property
    def longest(self) -> float:
        """Seconds."""
        return max(self._worst, self._worst_before)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._span_ends = self._loop.time() + SPAN
        self._used = time.thread_time()
        self._arm(self._loop, INTERVAL)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._due = loop.time() + interval
        self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        # Timers have a resolution of a millisecond, and may come that much too early.
        lag = max(0.0, now - self._due)
        self._observe(lag)
        if now >= self._span_ends:
            self._worst_before, self._worst, self._span_ends = self._worst, 0.0, now + SPAN
        self._worst = max(self._worst, lag)
        before, self._used = self._used, time.thread_time()
        self._arm(self._loop, interval_after(self._used - before, lag))


def interval_after(cpu: float, lag: float) -> float:
    """Until the next look, when so much was used and the timer came so late."""
    return IDLE_INTERVAL if cpu < IDLE and lag < INTERVAL else INTERVAL
