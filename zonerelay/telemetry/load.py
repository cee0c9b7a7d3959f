"""How busy the event loop is: how late its timers run, and which part of the time its thread needs a
processor.

`LoopLag` measures with one timer how much later than asked it is called, which is how long a client, a peer
or another timer waits because the relay is busy. A pause of the loop shows as a lag between its length and
its length less the interval; the interval is longer while the loop is idle. `longest` is the worst lag of the
last one to two minutes, so that every reader of the metrics sees it, whatever its interval.

`CpuDemand` adds the time in the kernel's run queue (/proc/thread-self/schedstat) to the thread's CPU time,
because CPU time alone would say little where other programs use the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds: running, and waiting to run; then a count."""


class CpuDemand:
    """The demand of the thread that calls it for a processor."""

    def __init__(self, *, schedstat: Path = SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._at = 0.0
        self._needed = 0.0

    def since_last(self) -> float:
        """0.0 to 1.0, since the last call; 0.0 at the first."""
        now, needed = time.monotonic(), time.thread_time() + self._waited()
        passed, more = now - self._at, needed - self._needed
        is_first, self._at, self._needed = self._at == 0.0, now, needed
        if is_first or passed <= 0:
            return 0.0
        return min(1.0, max(0.0, more / passed))

    def _waited(self) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(self._schedstat.read_bytes().split()[1]) / 1e9
        return 0.0


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
    """Returns the seconds until the next look, after so much CPU time and so late a timer."""
    return IDLE_INTERVAL if cpu < IDLE and lag < INTERVAL else INTERVAL
