"""Schedules garbage collection to avoid long pauses of the event loop.

CPython scans a whole generation at once, at 0.1 to 0.5 µs per object, and starts when many more objects were
created than freed. A queue frees as many as it creates, so the young generations grew for a long time, and
scanning them took 80 to 400 ms. Therefore this module decides:

- The youngest generation is collected at most `STEP` seconds after the last time (`IDLE_STEP` if the loop was
  idle), because few objects have been created since then. The interpreter's own thresholds, which are low,
  handle code that creates many cycles at once (DNS answers).
- Every `SETTLE_AFTER` seconds the rest is collected, and the remaining objects are frozen (`gc.freeze`): no
  collection scans them again. So the longest pause is the scan of the objects that two seconds create and do
  not free.
- Frozen objects can still become an unused cycle, which only a scan of the whole memory finds (tens of
  milliseconds to some tenths of a second). It is due when memory has grown so much that cycles may hold it
  (`GROWTH`, `GROWN`), or after `IDLE_GROWTH` of growth if the loop is idle. A relay whose memory does not
  grow never scans all of it.

Objects without cycles, such as messages and deliveries, are freed at once and are not affected.
"""

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
    """The kinds of garbage collection. The first two values are generations of Python's garbage collector."""

    YOUNG = 0
    SETTLE = 2
    WHOLE = 3


class GcSchedule:
    """Decides which garbage collection is due at each step. Pure: `now` and `cpu` are readings of clocks in
    seconds.
    """

    def __init__(self, now: float, cpu: float, blocks: int) -> None:
        self.pause = STEP
        """Seconds until the next step."""
        self._cpu = cpu
        self._settled_at = now
        self.looked_at_all(now, blocks)

    def looked_at_all(self, now: float, blocks: int) -> None:
        """Record that `blocks` allocated blocks remained after a full collection."""
        self._whole_at = now
        self._limit = int(blocks * GROWTH) + GROWN
        self._idle_limit = int(blocks * IDLE_GROWTH) + IDLE_GROWN

    def next(self, now: float, cpu: float, blocks: int) -> Collection:
        is_idle = cpu - self._cpu < IDLE
        self.pause = IDLE_STEP if is_idle else STEP
        self._cpu = cpu
        may_look = is_idle and now - self._whole_at >= IDLE_AFTER
        if blocks > self._limit or (may_look and blocks > self._idle_limit):
            self._settled_at = now
            return Collection.WHOLE
        if now - self._settled_at >= SETTLE_AFTER:
            self._settled_at = now
            return Collection.SETTLE
        return Collection.YOUNG


class GcTimer:
    """Collects garbage according to the schedule, on the event loop that runs at `start`. There is one per
    process, because the collector is global.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()
        self._waits = False

    def start(self) -> None:
        """Freeze all existing objects (`gc.freeze`) and start the timer."""
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        self._schedule = GcSchedule(time.monotonic(), time.thread_time(), sys.getallocatedblocks())
        self._arm(asyncio.get_running_loop())

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Pause the collector while many permanent objects are created, such as those of a configuration.
        Scanning them would take tenths of a second, so they are frozen without a scan.
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
    """Free the reference cycles of a generation. After the two larger collections, freeze the remaining
    objects.
    """
    if look is Collection.WHOLE:
        gc.unfreeze()
    gc.collect(min(look, Collection.SETTLE))
    if look >= Collection.SETTLE:
        gc.freeze()
