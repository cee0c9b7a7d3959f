"""Writes the outcomes of rows: many in one statement, in order for each row, until each is stored.

While the database is down, outcomes are kept in memory and written when it is back. The caller does not wait.
The writer never holds more outcomes than the relay has claims. A row whose claim was lost is not changed, and
the callback `written` is called. A write that the database rejects for its values is tried once more without
error texts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from zonerelay.outbox.keeper import OutboxKeeper
from zonerelay.outbox.rows.row import RowWrite
from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres.driver import StatementRejectedError, TransactionConflictError

MAX_TOGETHER = 500
GATHERING = 0.005
"""Seconds that outcomes wait for others to share their statement."""
PAUSE = 0.5


class OutboxWriter:
    """Writes the outcomes of rows to the database. It calls `written(write, kept)` when a write is durable
    or, with `kept` false, when the claim was lost.
    """

    def __init__(self, keeper: OutboxKeeper, written: Callable[[RowWrite, bool], None]) -> None:
        self._keeper = keeper
        self._events = keeper.around.events
        self._written = written
        self._waiting: dict[tuple[int, str], RowWrite] = {}
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, write: RowWrite) -> None:
        """Queue a write. It replaces an earlier one of the same claim, because it includes that one's
        outcomes.
        """
        self._waiting[write.id, write.token] = write
        self._idle.clear()
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def has(self, row: int, token: str) -> bool:
        """Return whether a write of this claim is pending."""
        return (row, token) in self._waiting

    def go_on(self) -> None:
        """Resume writing, because the database is back."""
        if self._waiting:
            self._wanted.set()

    def forget(self) -> None:
        """Drop all writes, because every claim was lost."""
        for write in self._waiting.values():
            self._written(write, False)
        self._waiting.clear()
        self._idle.set()

    async def close(self, timeout: float) -> None:
        """Write the remaining outcomes within `timeout`. The relay that takes over the other rows attempts
        them again.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)
        await cancel_all(self._task)

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.sleep(GATHERING)
            self._wanted.clear()
            while self._waiting:
                batch = list(self._waiting.values())[:MAX_TOGETHER]
                if not await self._safely(batch):
                    await asyncio.sleep(PAUSE)
                    break
            if self._waiting:
                self._wanted.set()
            else:
                self._idle.set()

    async def _safely(self, batch: Sequence[RowWrite]) -> bool:
        try:
            return await self._write(batch)
        except Exception as error:  # noqa: BLE001 - a bug must not end the writing
            self._events.error("outbox.write", error)
            return False

    async def _write(self, batch: Sequence[RowWrite]) -> bool:
        """Write a batch. Return false if the same batch is to be tried again later."""
        try:
            kept = await self._update(batch)
        except StatementRejectedError as error:
            if len(batch) > 1:
                return all([await self._write([each]) for each in batch])
            self._events.error("outbox.write", error)
            kept = set()
            if batch[0].error_log is not None:
                key = batch[0].id, batch[0].token
                self._waiting[key] = batch[0]._replace(error_log=None, state=None)
                return False
        except TransactionConflictError:
            return False
        except StoreError as error:
            self._keeper.failed(error)
            return False
        self._done(batch, kept)
        return True

    async def _update(self, batch: Sequence[RowWrite]) -> set[int]:
        columns: Iterable[Sequence[object]] = zip(*batch, strict=True)
        link, statement = self._keeper.writing_link(), self._keeper.statements.write
        return {row[0] for row in await link.fetch(statement, *map(list, columns))}

    def _done(self, batch: Sequence[RowWrite], kept: set[int]) -> None:
        for write in batch:
            key = write.id, write.token
            if self._waiting.get(key) is write:
                del self._waiting[key]
            self._written(write, write.id in kept)
