"""A thread that does one job after the other, and tells the event loop about each.

A `ThreadPoolExecutor` would do, but its futures, locks and chained callbacks cost as much time
as the hand-over itself, twice per synced write. Here a job costs one queue item and one callback.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

J = TypeVar("J")
R = TypeVar("R")


class Failed(NamedTuple):
    """The job raised this."""

    error: BaseException


class WriterThread(Generic[J, R]):
    """Runs `work(job)` in the thread, then `tell(result)` on the loop that was running at the start."""

    def __init__(self, name: str, work: Callable[[J], R], tell: Callable[[R | Failed], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._tell = tell
        self._jobs: SimpleQueue[J | None] = SimpleQueue()
        self.put: Callable[[J], None] = self._jobs.put
        # A daemon: a process that ends without `stop` has crashed, and must not wait for a thread.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the jobs that were put before, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        get, call_soon, tell = self._jobs.get, self._loop.call_soon_threadsafe, self._tell
        while (job := get()) is not None:
            result = self._do(job)
            try:
                call_soon(tell, result)
            except RuntimeError:  # the loop was closed: no listener is left
                return
            # A batch may be megabytes: it must not wait here for the next one.
            del job, result

    def _do(self, job: J) -> R | Failed:
        try:
            return self._work(job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop has to hear of it
            return Failed(error)
