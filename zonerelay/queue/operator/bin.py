"""The bin: what operators have dropped, until a day has passed.

Dropped deliveries are held in queues of their own (`bin_of`), which no list, count or claim of mail looks at.
`next_attempt` is when they are destroyed. An undo of their act moves them back.

The bin is looked at each `INTERVAL` seconds. What is over goes, and the oldest goes where messages take more
than `MAX_SIZE` together, or where the disk has too little space for new mail.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import Kind
from zonerelay.queue.aio import Tasks, closing
from zonerelay.store.contract import Store, StoreError, Unhealthy
from zonerelay.telemetry.events.events import Events

INTERVAL = 600.0
MAX_SIZE = 1024**3
BATCH = 500
SPAN = 60.0
"""Seconds of which the deliveries are counted, and destroyed for their size, together."""


class Bin:
    """One per worker; `start` once, `stop` before the store is closed."""

    def __init__(
        self, store: Store, *, events: Events, clock: Clock, skipped: Callable[[float], float] = lambda _: 0.0
    ) -> None:
        """`skipped` is that of `ClockLeaps`."""
        self._skipped = skipped
        self._store = store
        self._events = events
        self._clock = clock
        self._tasks = Tasks("queue.bin", events)

    def start(self) -> None:
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        await self._tasks.cancel()

    async def sweep(self) -> None:
        """Destroy what is over, and the oldest of what is too much. Raise StoreError."""
        now = self._clock.now()
        await self._destroy(now - self._skipped(now - 1.0))
        sizes: Counter[float] = Counter()
        async for batch in self._batches():
            messages = await self._store.read_messages(list({each.message_id for each in batch}))
            for each in batch:
                message = messages.pop(each.message_id, None)
                sizes[each.next_attempt // SPAN] += 0 if message is None else message.size
        room = 0 if self._store.unhealthy() is Unhealthy.NO_SPACE else MAX_SIZE
        over = None
        for span in sorted(sizes):
            if sizes.total() <= room:
                break
            over = span
            del sizes[span]
        if over is not None:
            await self._destroy((over + 1) * SPAN)

    async def _destroy(self, until: float) -> None:
        async for batch in self._batches():
            if over := [each.key for each in batch if each.next_attempt <= until]:
                await self._store.update(over, lambda _: None)

    async def _batches(self) -> AsyncIterator[Sequence[Delivery]]:
        for queue in [each for each in await self._store.queues() if each.kind is Kind.BIN]:
            batch: list[Delivery] = []
            async with closing(self._store.scan(queue)) as deliveries:
                async for delivery in deliveries:
                    batch.append(delivery)
                    if len(batch) == BATCH:
                        yield batch
                        batch = []
                        await asyncio.sleep(0)
            if batch:
                yield batch

    async def _watch(self) -> None:
        while True:
            try:
                await self.sweep()
            except StoreError as error:
                self._events.trouble("queue.bin", error)
            await asyncio.sleep(INTERVAL)
