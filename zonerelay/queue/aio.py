"""Event loop helpers of the queue: owned tasks and time-sliced work.

No task that `Tasks` starts outlives `Tasks.cancel`. An error in such a task is reported as a `trouble` event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from zonerelay.process import tasks
from zonerelay.telemetry.events.events import Events

SLICE = 0.005
"""Seconds of work on the event loop before other tasks get their turn. A longer step is a slice of its own.
"""

_Result = TypeVar("_Result")
_Step = TypeVar("_Step")


class Tasks(tasks.Tasks):
    """The running background tasks of one owner. Unlike in a TaskGroup, the other tasks continue when one
    fails.
    """

    def __init__(self, where: str, events: Events) -> None:
        super().__init__()
        self._where = where
        self._events = events

    def start(self, work: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:  # Any: as in the base
        task = super().start(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:  # Any: tasks may have any result
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.error(self._where, error)


class NextIteration:
    """Runs a function once in the next iteration of the event loop, however often it is requested before."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._asked = False

    def ask(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._asked = False
        self._call()


class Slices:
    """Limits long work on the event loop to `SLICE` seconds per iteration, over all tasks that share this
    object.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._is_open = False
        self._until = 0.0

    async def next(self) -> None:
        """Wait, before a step of work, for the next loop iteration if the slice of this one is used up."""
        while self._is_open and self._monotonic() >= self._until:  # noqa: ASYNC110 - for a round of the loop, not an event
            await asyncio.sleep(0)
        if not self._is_open:
            self._is_open = True
            self._until = self._monotonic() + SLICE
            asyncio.get_running_loop().call_soon(self._close)

    def _close(self) -> None:
        """Close the slice, because the event loop has started a new iteration."""
        self._is_open = False


async def in_slices(steps: Iterable[_Step], monotonic: Callable[[], float]) -> AsyncIterator[_Step]:
    """Yield the result of each step. The time that the caller spends on a result counts towards the slice.

    The data that the steps work on may change between two slices.
    """
    slices = Slices(monotonic)
    for step in steps:
        await slices.next()
        yield step
