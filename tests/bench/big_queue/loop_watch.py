"""Finds out why an event loop paused: lives in the watched process, writes a line for each pause.

A timer of the loop ticks every `TICK` seconds. Where it comes late there was a pause, and the readings of its
thread since the tick before say whose it was: CPU of the loop's own thread is the relay's work; time in the
kernel's run queue (`/proc/…/schedstat`) is the machine's other work; the CPU of the relay's other threads is
waiting for the interpreter; the rest was spent asleep in a call that blocks. A watchdog thread looks at the
stack meanwhile. Garbage collections are counted by whichever thread they ran in: they hold the interpreter.

An upper bound: the watch itself takes about 20 µs for each tick and sample.
"""

import asyncio
import gc
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import msgspec

TICK = 0.005
LONG = 0.020
"""Seconds from which it counts as a pause."""
DEEP = 7
"""Frames of a stack that are kept, the innermost first."""


class Collection(msgspec.Struct, frozen=True):
    """A garbage collection; `began` is a reading of the monotonic clock, as all such here."""

    began: float
    seconds: float
    cpu: float
    generation: int
    collected: int


class Pause(msgspec.Struct, frozen=True):
    """Seconds each. `collecting` is within `cpu` or `others`. `stacks`: what the samples saw, how often."""

    ended: float
    wall: float
    cpu: float
    others: float
    waiting: float
    collecting: float
    stacks: dict[str, int]

    @property
    def blocked(self) -> float:
        """Neither at work nor waiting for a processor or the interpreter."""
        return max(0.0, self.wall - self.cpu - self.others - self.waiting)


class Seen(msgspec.Struct, frozen=True):
    """One line of the file."""

    pause: Pause | None = None
    collection: Collection | None = None


class _Reading:
    """What the clocks of the loop's thread say."""

    __slots__ = ("at", "cpu", "process", "waiting")

    def __init__(self, schedstat: int) -> None:
        self.at = time.monotonic()
        self.cpu = time.thread_time()
        self.process = time.process_time()
        self.waiting = int(os.pread(schedstat, 100, 0).split()[1]) / 1e9


class LoopWatch:
    """`start` on the loop that is to be watched; its lines go to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._out: deque[Seen] = deque()
        self._stacks: Counter[str] = Counter()
        self._collections: list[Collection] = []
        self._collecting = self._collecting_cpu = 0.0

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        status = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._schedstat = os.open(status, os.O_RDONLY)
        self._last = _Reading(self._schedstat)
        gc.callbacks.append(self._on_collection)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        was, now = self._last, _Reading(self._schedstat)
        wall = now.at - was.at - TICK
        if wall > LONG:
            self._out.append(Seen(pause=self._pause(was, now, wall)))
        self._collections.clear()
        self._stacks = Counter()
        self._last = now
        self._loop.call_later(TICK, self._tick)

    def _pause(self, was: _Reading, now: _Reading, wall: float) -> Pause:
        cpu = now.cpu - was.cpu
        return Pause(
            ended=now.at,
            wall=wall,
            cpu=cpu,
            others=max(0.0, now.process - was.process - cpu),
            waiting=now.waiting - was.waiting,
            collecting=sum(each.seconds for each in self._collections),
            stacks=dict(self._stacks),
        )

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting, self._collecting_cpu = time.monotonic(), time.thread_time()
            return
        began, seconds = self._collecting, time.monotonic() - self._collecting
        cpu = time.thread_time() - self._collecting_cpu
        seen = Collection(began, seconds, cpu, info["generation"], info["collected"])
        self._collections.append(seen)
        if seen.generation == 2 or seconds > LONG / 4:
            self._out.append(Seen(collection=seen))

    # In the watchdog's thread

    def _watch(self) -> None:
        encode = msgspec.json.encode
        with self._path.open("ab", buffering=0) as file:
            while True:
                time.sleep(TICK)
                if time.monotonic() - self._last.at > LONG:
                    self._stacks[_stack(sys._current_frames().get(self._thread))] += 1
                while self._out:
                    file.write(encode(self._out.popleft()) + b"\n")


def _stack(frame: FrameType | None) -> str:
    found: list[str] = []
    while frame is not None and len(found) < DEEP:
        code = frame.f_code
        found.append(f"{Path(code.co_filename).stem}.{code.co_name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
