"""When the interpreter looks for reference cycles, so that the event loop never stands still for it for long.

CPython looks at a whole generation in one go, 0.1 to 0.5 µs for each object, and begins when much more has
been made than freed. A queue makes as much as it frees: the young generations grew and grew before they were
looked at, and that took 80 to 400 ms. So here

- the youngest is looked at `STEP` seconds after the last time at the latest (`IDLE_STEP` when the loop had
  next to nothing to do), the middle one every `OLDER_STEPS`: what has been made since then is few. What makes
  many cycles at once (DNS answers) is met by the interpreter's own thresholds, which are low.
- every `SETTLE_AFTER` seconds the rest is looked at, and what is left of it is settled (`gc.freeze`): no
  collection looks at it again. So the largest pause is that of what two seconds make and do not free.
- what was settled can still become an unused cycle, and is found only by a look at all of the memory
  (tens of milliseconds to some tenths of a second). That is due when memory has grown so much that cycles may
  be what it holds (`GROWTH`, `GROWN`), and, when the loop is idle, after `IDLE_GROWTH` of it already. A relay
  whose memory does not grow never looks at all of it.

Objects without cycles, as messages and deliveries are, are freed at once and have nothing to do with this.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
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


class Look(IntEnum):
    """The first three are the interpreter's generations."""

    YOUNG = 0
    OLDER = 1
    SETTLE = 2
    WHOLE = 3


class Rounds:
    """What to look at in each step. Pure: `now` and `cpu` are clocks' readings in seconds."""

    def __init__(self, now: float, cpu: float, blocks: int) -> None:
        self.pause = STEP
        """Seconds until the next step."""
        self._steps = 0
        self._cpu = cpu
        self._settled_at = now
        self.looked_at_all(now, blocks)

    def looked_at_all(self, now: float, blocks: int) -> None:
        """A look at all of the memory has ended and left so many allocated blocks."""
        self._whole_at = now
        self._limit = int(blocks * GROWTH) + GROWN
        self._idle_limit = int(blocks * IDLE_GROWTH) + IDLE_GROWN

    def next(self, now: float, cpu: float, blocks: int) -> Look:
        is_idle = cpu - self._cpu < IDLE
        self.pause = IDLE_STEP if is_idle else STEP
        self._cpu = cpu
        self._steps += 1
        if blocks > self._limit or (is_idle and self._is_due_when_idle(now, blocks)):
            self._settled_at = now
            return Look.WHOLE
        if now - self._settled_at >= SETTLE_AFTER:
            self._settled_at = now
            return Look.SETTLE
        return Look.YOUNG if self._steps % OLDER_STEPS else Look.OLDER

    def _is_due_when_idle(self, now: float, blocks: int) -> bool:
        return blocks > self._idle_limit and now - self._whole_at >= IDLE_AFTER


class CycleRounds:
    """Does so, on the loop that runs when it is started. One per process: the collector is the process's."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._before = gc.get_threshold()

    def start(self) -> None:
        """What is there now is settled."""
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
        look = self._rounds.next(time.monotonic(), time.thread_time(), sys.getallocatedblocks())
        collect(look)
        if look is Look.WHOLE:
            self._rounds.looked_at_all(time.monotonic(), sys.getallocatedblocks())
        self._arm(loop)


def collect(look: Look) -> None:
    """Free the cycles among what is looked at; after the two larger looks, what is left of it is settled."""
    if look is Look.WHOLE:
        gc.unfreeze()
    gc.collect(min(look, Look.SETTLE))
    if look >= Look.SETTLE:
        gc.freeze()
