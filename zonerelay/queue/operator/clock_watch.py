"""Corrects the due times that were written while the wall clock was ahead.

`Delivery.corrected_at` says which, and what becomes of them. Other times are left alone: a sender's release
(RFC 4865), an operator's choice, and a policy's long step that starts in the past. What is held is corrected
when it is released, or when an undo restores its due time.

The queue is read when there is a reason: the clock has gone back by more than `TOLERANCE` seconds, or the
store's highest message id, which holds a time, is in the future at a start. A store that refuses is read at
the next look, `INTERVAL` seconds later.
"""

from __future__ import annotations

import asyncio

from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageId, first_at
from zonerelay.queue.aio import Tasks
from zonerelay.queue.operator.operations import Operations
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.events import Events

TOLERANCE = 60.0
INTERVAL = 30.0


class ClockWatch:
    """The clock watch of a worker; `start` once, `stop` before the store is closed."""

    def __init__(self, operations: Operations, *, events: Events, clock: Clock) -> None:
        self._operations = operations
        self._events = events
        self._clock = clock
        self._tasks = Tasks("queue.clock", events)
        self._ahead = self._difference()
        """Seconds by which the wall clock was ahead of the monotonic one at the last look."""
        self._is_suspect = False

    def start(self, last: MessageId | None) -> None:
        """`last` is the highest id that the store has committed."""
        self._is_suspect = last is not None and last > first_at(self._clock.now() + TOLERANCE)
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        await self._tasks.cancel()

    async def look(self) -> None:
        difference = self._difference()
        if difference < self._ahead - TOLERANCE:
            self._is_suspect = True
        self._ahead = difference
        if not self._is_suspect:
            return
        now = self._clock.now()
        try:
            corrected = await self._operations.correct(lambda delivery: delivery.corrected_at(now))
        except StoreError as error:
            self._events.trouble("queue.clock", error)
            return
        self._is_suspect = False
        self._events.lifecycle("clock-set-back", corrected=corrected)

    async def _watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(INTERVAL)

    def _difference(self) -> float:
        return self._clock.now() - self._clock.monotonic()
