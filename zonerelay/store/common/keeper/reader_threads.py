"""Runs the threads that touch a disk for a store: the event loop never does.

While a write syncs, reads go on. A spool is opened and repaired in its one reader thread too, when nothing is
being written, so no read ever meets a half-open database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar, TypeVarTuple

from zonerelay.store.contract import StoreError, Unhealthy

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Opened = TypeVar("Opened")


class ReaderThreads(Generic[Opened]):
    """Runs blocking functions of what an engine has opened. Belongs to one event loop."""

    def __init__(self, opened: Opened, name: str, *, threads: int = 1) -> None:
        self.opened = opened
        self._executor = ThreadPoolExecutor(threads, name)
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """`function(…)` in a thread. Raises StoreError after `stop`."""
        if self._stopped:
            raise StoreError(Unhealthy.CLOSED)
        return self._loop.run_in_executor(self._executor, function, *args)

    async def read(self, function: Callable[[Opened, *Ts], T], *args: *Ts) -> T:
        """`function(opened, …)` in a thread. Raises what the function raises: StoreError."""
        return await self.run(function, self.opened, *args)

    def stop(self) -> None:
        """Blocks until every function has returned."""
        self._stopped = True
        self._executor.shutdown()
