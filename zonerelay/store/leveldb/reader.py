"""The spool's reader thread. The event loop never touches a disk: this reads, `group_commit` writes.

While a write syncs, reads go on. Opening and reopening happen here too, when nothing is being
written, so no read ever meets a half-open database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from zonerelay.store.common.keeper import health
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.engine import LevelDb

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SpoolReader:
    """Runs blocking functions of an open spool. Belongs to one event loop."""

    def __init__(self, db: LevelDb, *, name: str = "spool-reader") -> None:
        self.db = db
        self._executor = ThreadPoolExecutor(1, name)
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    async def read(self, function: Callable[[LevelDb, *Ts], T], *args: *Ts) -> T:
        """`function(db, …)` in the reader thread. Raises what it raises: StoreError."""
        if self._stopped:
            raise StoreError(health.CLOSED)
        return await self._loop.run_in_executor(self._executor, function, self.db, *args)

    def stop(self) -> None:
        self._stopped = True
        self._executor.shutdown()
