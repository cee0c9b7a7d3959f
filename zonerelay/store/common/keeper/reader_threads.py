"""Runs the threads that read the disk for a store, because the event loop must not block.

Reads continue while a write syncs. A spool is opened and repaired in its only reader thread, while no write
is active, so a read never sees a half-opened database.
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
    """Runs blocking functions on the object that an engine has opened. An instance belongs to one event
    loop.
    """

    def __init__(self, opened: Opened, name: str) -> None:
        self.opened = opened
        self._executor = ThreadPoolExecutor(1, name)
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Call `function(…)` in a thread. Raises StoreError after `stop`."""
        if self._stopped:
            raise StoreError(Unhealthy.CLOSED)
        return self._loop.run_in_executor(self._executor, function, *args)

    async def read(self, function: Callable[[Opened, *Ts], T], *args: *Ts) -> T:
        """Call `function(opened, …)` in a thread. Raises the exceptions of the function, which are
        StoreErrors.
        """
        return await self.run(function, self.opened, *args)

    def stop(self) -> None:
        """Block until every function has returned."""
        self._stopped = True
        self._executor.shutdown()
