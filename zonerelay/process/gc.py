"""The garbage collector's schedule: when the interpreter looks for reference cycles, without long pauses of
the loop.

CPython looks at a whole generation at once, 0.1 to 0.5 µs for each object, and begins when many more objects
were made than freed. A queue makes as many as it frees: the young generations grew before they were looked
at, and that took 80 to 400 ms. So this module decides:

- The youngest generation is collected `STEP` seconds after the last time at the latest (`IDLE_STEP` when the
  loop was idle), the middle one every `OLDER_STEPS` steps: few objects have been made since then. The
  interpreter's own thresholds, which are low, catch code that makes many cycles at once (DNS answers).
- Every `SETTLE_AFTER` seconds the rest is collected, and the objects that are left are settled (`gc.freeze`):
  no collection looks at them again. So the longest pause is that for the objects that two seconds make and do
  not free.
- Settled objects can still become an unused cycle, which only a look at the whole memory finds (tens of
  milliseconds to some tenths of a second). It is due when memory has grown so much that cycles may hold it
  (`GROWTH`, `GROWN`), and, when the loop is idle, after `IDLE_GROWTH` of it already. A relay whose memory
  does not grow never looks at the whole.

Objects without cycles, such as messages and deliveries, are freed at once and are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from enum import IntEnum

STEP = 0.1
IDLE_STEP = 0.5
"""Each step wakes up an idle machine. What a burst that begins just after one makes until the next takes some
ten milliseconds to look at.
"""
OLDER_STEPS = 5
SETTLE_AFTER = 2.0
IDLE = 0.002
"""CPU seconds in a step: with less the loop had next to nothing to do."""
GROWTH = 1.5
GROWN = 400_000
"""Allocated blocks (about 40 MB) on top of `GROWTH` times what there was after the last look at all."""
IDLE_GROWTH = 1.1
IDLE_GROWN = 40_000
IDLE_AFTER = 600.0
"""Seconds after the last look at all from which an idle loop may have the next."""
THRESHOLDS = (5_000, 10, 1_000_000)
"""Of the interpreter itself: allocations less deallocations, collections of the youngest, of the middle one.
Messages make no cycles, and the default of 700 would look several times per message.
"""


class Collection(IntEnum):
    """The first three are the interpreter's generations."""

    YOUNG = 0
    OLDER = 1
    SETTLE = 2
    WHOLE = 3


class GcSchedule:
    """The generation to collect in each step. Pure: `now` and `cpu` are readings of clocks in seconds."""

    def __init__(self, now: float, cpu: float, blocks: int) -> None:
        self.pause = STEP
        """Seconds until the next step."""
        self._steps = 0
        self._cpu = cpu
        self._settled_at = now
        self.looked_at_all(now, blocks)

    def looked_at_all(self, now: float, blocks: int) -> None:
        """Notes that a look at the whole memory has left so many allocated blocks."""
        self._whole_at = now
        self._limit = int(blocks * GROWTH) + GROWN
        self._idle_limit = int(blocks * IDLE_GROWTH) + IDLE_GROWN

    def next(self, now: float, cpu: float, blocks: int) -> Collection:
        is_idle = cpu - self._cpu < IDLE
        self.pause = IDLE_STEP if is_idle else STEP
        self._cpu = cpu
        self._steps += 1
        if blocks > self._limit or (is_idle and self._is_due_when_idle(now, blocks)):
            self._settled_at = now
            return Collection.WHOLE
        if now - self._settled_at >= SETTLE_AFTER:
            self._settled_at = now
            return Collection.SETTLE
        return Collection.YOUNG if self._steps % OLDER_STEPS else Collection.OLDER

    def _is_due_when_idle(self, now: float, blocks: int) -> bool:
        return blocks > self._idle_limit and now - self._whole_at >= IDLE_AFTER


class GcTimer:
    """Collects by the schedule, on the loop that runs at `start`. One per process: there is one collector."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()
        self._waits = False

    def start(self) -> None:
        """Settles all present objects and starts the timer."""
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        self._schedule = GcSchedule(time.monotonic(), time.thread_time(), sys.getallocatedblocks())
        self._arm(asyncio.get_running_loop())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Pause the collector while many objects are made that stay and have no cycles, such as those of a
        configuration: to look at them would take tenths of a second, so they are settled without.
        """
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            gc.freeze()
            self._schedule.looked_at_all(time.monotonic(), sys.getallocatedblocks())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.set_threshold(*self._before)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._schedule.pause, self._step, loop)

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waits:
            gc.freeze()
            self._arm(loop)
            return
        look = self._schedule.next(time.monotonic(), time.thread_time(), sys.getallocatedblocks())
        collect(look)
        if look is Collection.WHOLE:
            self._schedule.looked_at_all(time.monotonic(), sys.getallocatedblocks())
        self._arm(loop)


def collect(look: Collection) -> None:
    """Frees the cycles of a generation; after the two larger collections the objects that are left are
    settled.
    """
    if look is Collection.WHOLE:
        gc.unfreeze()
    gc.collect(min(look, Collection.SETTLE))
    if look >= Collection.SETTLE:
        gc.freeze()
