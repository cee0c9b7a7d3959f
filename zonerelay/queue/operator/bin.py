"""The bin: keeps dropped mail for a day so that it can be restored.

Dropped deliveries are held in separate queues (`bin_of`), which lists, counts and claims of mail skip.
`next_attempt` is the time at which they are destroyed. An undo of the drop moves them back.

The bin is checked every `INTERVAL` seconds, and when mail is moved into it. Expired mail is destroyed. The
oldest mail is destroyed early if the messages together exceed `MAX_SIZE`, or if the disk has too little free
space for new mail. If the store fails, the check is repeated after `INTERVAL`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import QueueKind
from zonerelay.queue.aio import Tasks, closing
from zonerelay.store.contract import Store, StoreError, Unhealthy
from zonerelay.telemetry.events.events import Events

INTERVAL = 600.0
PAUSE = 5.0
"""Seconds between two checks at least. A check that takes long is followed by a pause ten times as long."""
MAX_SIZE = 1024**3
BATCH = 500
SPAN = 60.0
"""Seconds of due time that are counted, and destroyed to save space, together."""


class Bin:
    """Keeps dropped mail for undo. Call `start` once, and `stop` before the store is closed."""

    def __init__(
        self, store: Store, *, events: Events, clock: Clock, skipped: Callable[[float], float] = lambda _: 0.0
    ) -> None:
        """Create the bin. `skipped` is `ClockLeaps.skipped`."""
        self._skipped = skipped
        self._store = store
        self._events = events
        self._clock = clock
        self._tasks = Tasks("queue.bin", events)
        self._moved = asyncio.Event()

    def start(self) -> None:
        self._tasks.start(self._watch())

    async def stop(self) -> None:
        await self._tasks.cancel()

    def look(self) -> None:
        """Check the bin soon, because mail was moved into it."""
        self._moved.set()

    async def sweep(self) -> None:
        """Delete expired mail, and the oldest mail if the bin is too large. Raise StoreError."""
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
        for queue in [each for each in await self._store.queues() if each.kind is QueueKind.BIN]:
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
            began = self._clock.monotonic()
            try:
                await self.sweep()
            except StoreError as error:
                self._events.error("queue.bin", error)
            await asyncio.sleep(max(PAUSE, 10 * (self._clock.monotonic() - began)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL):
                    await self._moved.wait()
            self._moved.clear()
