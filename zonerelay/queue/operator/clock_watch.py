"""Corrects the due times that were written while the wall clock was ahead.

An attempt that is recorded in the future shows that the clock was ahead when it was made; the next one then
waits for as long as the retry policy said, from now on. Other times are left alone: a sender's release (RFC
4865) and an operator's choice record no attempt, and a policy's long step starts in the past.

The queue is read when there is a reason: the clock has gone back by more than `TOLERANCE` seconds, or the
store's highest message id, which holds a time, is in the future at a start. A store that refuses is read at
the next look, `INTERVAL` seconds later.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId, first_at
from zonerelay.queue.aio import Tasks
from zonerelay.queue.operator.operations import Operations
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.events.events import Events

TOLERANCE = 60.0
INTERVAL = 30.0


class ClockWatch:
    """One per worker; `start` once, `stop` before the store is closed."""

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
            corrected = await self._operations.correct(lambda delivery: corrected_at(delivery, now))
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


def corrected_at(delivery: Delivery, now: float) -> Delivery:
    """The delivery with the due time that it has by the clock as it is at `now` (Unix seconds)."""
    last = delivery.last
    if last is None or last.at <= now or delivery.next_attempt <= last.at:
        return delivery
    return replace(delivery, next_attempt=now + delivery.next_attempt - last.at, last=replace(last, at=now))
