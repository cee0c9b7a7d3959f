"""The tasks that carry batches: each takes one batch after another, and a few are kept for the next one.

Making a task costs more than everything else that starting a batch does, so a lane that has run dry waits
for more work; only what is beyond `SPARE` ends. Promise: work that is handed to a lane is carried out, or
it is dropped (`drop`) when the lane is cancelled first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from zonerelay.queue.aio import Tasks
from zonerelay.queue.destination.destinations import Work
from zonerelay.telemetry.events.events import Events

SPARE = 16


class Lanes:
    """The lanes of one zone. `following` says what a lane goes on with after its last work, `None` when there
    is nothing.
    """

    def __init__(
        self,
        carry: Callable[[Work], Coroutine[object, object, None]],
        following: Callable[[Work], Work | None],
        drop: Callable[[Work], None],
        events: Events,
    ) -> None:
        self._carry = carry
        self._following = following
        self._drop = drop
        self._tasks = Tasks("queue.lane", events)
        self._spare: list[asyncio.Future[Work | None]] = []
        self._closed = False

    def start(self, work: Work) -> None:
        while self._spare:
            spare = self._spare.pop()
            if not spare.done():
                spare.set_result(work)
                return
        self._tasks.start(self._run(work))

    def close(self) -> None:
        """Let every lane end when it has run dry."""
        self._closed = True
        for spare in self._spare:
            if not spare.done():
                spare.set_result(None)
        self._spare.clear()

    async def wait(self, timeout: float | None) -> bool:
        """Until every lane has ended; false when the time is over first. After `close`."""
        return await self._tasks.wait(timeout)

    async def cancel(self) -> None:
        await self._tasks.cancel()

    async def _run(self, first: Work) -> None:
        work: Work | None = first
        while work is not None:
            await self._carry(work)
            work = self._following(work)
            if work is None and not self._closed and len(self._spare) < SPARE:
                work = await self._wait_for_work()

    async def _wait_for_work(self) -> Work | None:
        spare: asyncio.Future[Work | None] = asyncio.get_running_loop().create_future()
        self._spare.append(spare)
        try:
            return await spare
        except asyncio.CancelledError:
            work = None if spare.cancelled() else spare.result()
            if work is not None:
                self._drop(work)
            raise
