"""Tasks with an owner: nothing that a part of the queue starts outlives its `stop`, and no error is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from zonerelay.telemetry.events.events import Events


class Tasks:
    """A set of running tasks. A TaskGroup would end them all when one fails; here each stands alone."""

    def __init__(self, where: str, events: Events) -> None:
        self._where = where
        self._events = events
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def wait(self, timeout: float | None) -> bool:
        """Until every task has ended, those started meanwhile included; false when the time is over first."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while self._running:
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return False
            await asyncio.wait(self._running, timeout=left)
        return True

    async def cancel(self) -> None:
        """Cancel what is left and wait until it has ended."""
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._events.trouble(self._where, error)


class Once:
    """Runs a callable at the next turn of the loop, however often it is asked to until then."""

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


class Linger:
    """Runs a callable after `seconds`, or `now`; once for all who asked until then."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.now)

    def now(self) -> None:
        self.cancel()
        self._call()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
