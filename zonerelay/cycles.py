"""When the interpreter looks for reference cycles, so that the event loop never stands still for it for long.

CPython looks at a whole generation in one go, 0.1 to 0.5 µs for each object, and begins when much more has
been made than freed. A queue makes as much as it frees: the young generations grew and grew before they were
looked at, and that took 80 to 400 ms. So here

- the youngest is looked at `STEP` seconds after the last time at the latest (`IDLE_STEP` when the loop had
  next to nothing to do), the middle one every `OLDER_STEPS`: what has been made since then is few. What makes
  many cycles at once (DNS answers) is met by the interpreter's own thresholds, which are low.
- all of the memory is looked at (tens of milliseconds) when the loop has been idle and `FULL_AFTER` has
  passed, and otherwise after `FULL_AT_LAST`, or when memory has grown so much that cycles may be what it
  holds (`GROWTH`, `GROWN`).

Objects without cycles, as messages and deliveries are, are freed at once and have nothing to do with this.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time

STEP = 0.1
IDLE_STEP = 0.5
"""Each step wakes up an idle machine. What a burst that begins just after one makes until the next takes some
ten milliseconds to look at.
"""
OLDER_STEPS = 5
FULL_AFTER = 600.0
FULL_AT_LAST = 3600.0
IDLE = 0.002
"""CPU seconds in a step: with less the loop had next to nothing to do."""
GROWTH = 1.5
GROWN = 400_000
"""Allocated blocks (about 40 MB) on top of `GROWTH` times what there was after the last full collection."""
YOUNG, OLDER, FULL = 0, 1, 2
THRESHOLDS = (5_000, 10, 1_000_000)
"""Of the interpreter itself: allocations less deallocations, collections of the youngest, of the middle one.
Messages make no cycles, and the default of 700 would look several times per message.
"""


class Rounds:
    """Which generation to look at in each step. Pure: `now` and `cpu` are clocks' readings in seconds."""

    def __init__(self, now: float, cpu: float, blocks: int) -> None:
        self.pause = STEP
        """Seconds until the next step."""
        self._steps = 0
        self._cpu = cpu
        self.collected_all(now, blocks)

    def collected_all(self, now: float, blocks: int) -> None:
        """A full collection has ended and left so many allocated blocks."""
        self._full_at = now
        self._limit = int(blocks * GROWTH) + GROWN

    def next(self, now: float, cpu: float, blocks: int) -> int:
        is_idle = cpu - self._cpu < IDLE
        self.pause = IDLE_STEP if is_idle else STEP
        self._cpu = cpu
        self._steps += 1
        passed = now - self._full_at
        if blocks > self._limit or passed >= FULL_AT_LAST or (is_idle and passed >= FULL_AFTER):
            return FULL
        return YOUNG if self._steps % OLDER_STEPS else OLDER


class CycleRounds:
    """Does so, on the loop that runs when it is started. One per process: the collector is the process's."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()

    def start(self) -> None:
        """What is there now stays for good, so no collection looks at it."""
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        self._rounds = Rounds(time.monotonic(), time.thread_time(), sys.getallocatedblocks())
        self._arm(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            gc.set_threshold(*self._before)

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(self._rounds.pause, self._step, loop)

    def _step(self, loop: asyncio.AbstractEventLoop) -> None:
        generation = self._rounds.next(time.monotonic(), time.thread_time(), sys.getallocatedblocks())
        gc.collect(generation)
        if generation == FULL:
            self._rounds.collected_all(time.monotonic(), sys.getallocatedblocks())
        self._arm(loop)
