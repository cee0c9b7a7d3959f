"""Tasks that an object owns: they run to their end without a caller, and end with their owner.

Failure: the loop's exception handler reports an exception that no caller awaits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """The tasks of one owner, on one event loop."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()  # Any: any result

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:  # Any: what a coroutine sends
        """Runs the work to its end. A caller that may be cancelled shields the task."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def wait(self) -> None:
        """Waits until those that run now have ended. Raises nothing of theirs."""
        if self._running:
            await asyncio.wait(self._running)

    async def drain(self) -> None:
        """Waits until no task runs, those included that are started meanwhile."""
        while self._running:
            ended = set(self._running)
            await asyncio.gather(*ended, return_exceptions=True)
            # From Python 3.12 on the loop has no turn, and the callbacks with it, when all had ended already.
            self._running -= ended

    async def cancel(self) -> None:
        """Cancels those that run now, and waits for their end."""
        await cancel_all(*self._running)


async def cancel_all(*tasks: asyncio.Task[Any] | None) -> None:  # Any: any result
    """Cancels the tasks and waits for their end. Raises nothing of theirs."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
