"""Counts the deliveries of each zone over all nodes: the database counts once, then own changes are added.

A count reads one snapshot in the background while changes go on, and adds what was changed since the
snapshot. Changes of other nodes are seen by the next count only, so with several nodes the counts are up to
`RECOUNT` seconds old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import QueueName
from zonerelay.process.tasks import cancel_all
from zonerelay.store.common.counts import Counts
from zonerelay.store.common.records import DeliveryStatus
from zonerelay.store.contract import QueueCounts, StoreError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import Fetch, Link
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.rows import queue_in

RECOUNT = 60.0

_log = logging.getLogger("zonerelay.store")


class QueueCounter:
    """One per store; changed only on the event loop."""

    def __init__(self, keeper: PostgresKeeper) -> None:
        self._keeper = keeper
        self._again: asyncio.Task[None] | None = None
        self._counts = Counts()
        self._since: Counts | None = None
        self._counting: asyncio.Task[None] | None = None
        self._link: Link | None = None

    def move(self, queue: QueueName, old: Delivery | DeliveryStatus | None, new: Delivery | None) -> None:
        self._counts.move(queue, old, new)
        if self._since is not None:
            self._since.move(queue, old, new)

    def current(self) -> dict[QueueName, QueueCounts]:
        return {zone: counts for zone, counts in self._counts.current().items() if counts.total}

    def is_counted(self) -> bool:
        return self._counts.is_whole

    async def start(self) -> None:
        """Takes a snapshot now and counts it in the background. Raises StoreError when there is none."""
        await self._give_up()
        if self._again is None:
            self._again = asyncio.get_running_loop().create_task(self._count_again())
        stack = contextlib.AsyncExitStack()
        try:
            link = self._link = await Link.open(self._keeper.access, reads=True)
            stack.push_async_callback(link.close)
            fetch = await stack.enter_async_context(link.transaction(one_moment=True))
            await fetch("SELECT txid_current_snapshot()")
        except BaseException:
            await stack.aclose()
            raise
        self._since = Counts()
        self._counting = asyncio.get_running_loop().create_task(self._count(fetch, stack))

    async def _count(self, fetch: Fetch, stack: contextlib.AsyncExitStack) -> None:
        try:
            async with stack:
                found = {
                    queue_in(zone): QueueCounts(ready, deferred, held)
                    for zone, ready, deferred, held in await fetch(sql.COUNTS, timeout=600.0)
                }
        except StoreError as error:
            _log.warning("the queue could not be counted: %s", error)
        else:
            counts = Counts()
            counts.add(found)
            counts.add(self._since.moves if self._since is not None else {})
            counts.is_whole = True
            self._counts = counts
        finally:
            self._since = None

    async def _count_again(self) -> None:
        """Counts again while other nodes change the queue, and once more when they have gone."""
        had_company = False
        while True:
            await asyncio.sleep(RECOUNT)
            has_company = self._keeper.has_company
            if (has_company or had_company) and self._since is None:
                try:
                    await self.start()
                except StoreError as error:
                    _log.warning("the queue could not be counted: %s", error)
            had_company = has_company

    async def stop(self) -> None:
        again, self._again = self._again, None
        await cancel_all(again)
        await self._give_up()

    async def _give_up(self) -> None:
        counting, self._counting = self._counting, None
        await cancel_all(counting)
        if self._link is not None and not self._link.is_closed:
            # A task that is cancelled before its first step does not clean up.
            self._link.cut()
            await asyncio.sleep(0)
