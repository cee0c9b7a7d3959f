"""Claims deliveries of the LevelDB spool, and fills a queue's window from disk when claims need it.

At most one read per queue runs at a time, under the queue's lock. The window notes changes to deliveries
during the read. A claim that fails or is cancelled releases the deliveries that it has claimed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from operator import attrgetter

from zonerelay.model.address import domain_of
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb.engine import Op
from zonerelay.store.leveldb.in_flight import InFlight
from zonerelay.store.leveldb.queue_keeper import QueueKeeper
from zonerelay.store.leveldb.reads import Page
from zonerelay.store.leveldb.ready_window import DiskRange, Taken, ZoneWindow

_by_message = attrgetter("message_id")
_READ_AHEAD = 200
"""The smallest number of ready deliveries that one read loads into memory."""


class Claims(dict[QueueName, ZoneWindow]):
    """The windows of all queues, created when they are first used, and the claims from them. The methods are
    those of `QueueStore`.
    """

    def __init__(self, keeper: QueueKeeper, in_flight: InFlight, *, empty: bool) -> None:
        """Create the claims. With `empty` the spool has no deliveries, so nothing needs to be read."""
        self._is_empty = empty
        self._keeper = keeper
        self._in_flight = in_flight
        self._locks: defaultdict[QueueName, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __missing__(self, queue: QueueName) -> ZoneWindow:
        window = self[queue] = ZoneWindow(queue, self._in_flight.is_busy, empty=self._is_empty)
        return window

    def reset(self) -> None:
        """Discard the windows after the spool failed. The queues are read from disk again."""
        self._is_empty = False
        self.clear()

    async def claim(
        self,
        queue: QueueName,
        limit: int,
        *,
        now: float,
        skip_domains: Collection[str] = (),
        since: MessageId | None = None,
        domain: str | None = None,
    ) -> list[Delivery]:
        self._keeper.check_claims()
        found = Taken()
        async with self._locks[queue]:
            try:
                while True:
                    window, taken, spill, room = self[queue], Taken(), Taken(), limit - len(found)
                    if domain is not None:
                        source = window.take_domain(domain, room, taken)
                    elif since is not None:
                        source = window.take_new(room, since, skip_domains, taken, spill)
                    else:
                        source = window.take(room, skip_domains, now, taken, spill)
                    # The attribute is read each time, because a failed write replaces the dict.
                    self._in_flight.claims.update(taken)
                    found |= taken
                    if spill:
                        await self._spill(window, spill)
                    if source is None:
                        break
                    await self._read(window, source, max(limit - len(found), _READ_AHEAD), now)
                    found = self._still_claimed(found)
            except BaseException:
                self.release(found)
                raise
        return sorted(self._still_claimed(found).values(), key=_by_message)

    def _still_claimed(self, found: Taken) -> Taken:
        """Return the current states of the claimed deliveries, because an operator may have changed or
        released some while others were read.
        """
        claims = self._in_flight.claims
        return {key: claims[key] or delivery for key, delivery in found.items() if key in claims}

    def release(self, keys: Collection[DeliveryKey]) -> None:
        in_flight = self._in_flight
        for key in keys:
            if key not in in_flight.claims:
                continue
            delivery = in_flight.claims.pop(key)
            if key in in_flight.writing:
                continue  # the pending write determines the next state
            if delivery is None:
                self[key.queue].look_for(key)
            else:
                self[key.queue].put_back(key, delivery)

    async def next_due(self, queue: QueueName) -> float | None:
        self._keeper.health.check_usable()
        async with self._locks[queue]:
            while (window := self[queue]).due_range.low is not None and not window.due_range.exact:
                await self._find_due(window)
        low = window.due_range.low
        times = (None if low is None else records.parse_due(low), window.due_in_memory())
        return min((due for due in times if due is not None), default=None)

    # --- reading

    @contextlib.contextmanager
    def _reading(self, window: ZoneWindow, source: DiskRange) -> Iterator[bytes]:
        """Yield the key to read from. The mark of the range moves only if the read succeeds."""
        try:
            yield window.start_reading(source)
        except BaseException:
            window.stop_reading(source)
            raise

    async def _read(self, window: ZoneWindow, source: DiskRange, wanted: int, now: float) -> None:
        with self._reading(window, source) as start:
            page = await self._read_page(window, source, start, wanted, now)
        if self.get(window.queue) is not window:
            return
        window.absorb(source, page.deliveries, page.low, now)
        if page.keys and source is not window.due_range:
            # Memory has them now. If the process dies, the next start finds them with the cursor.
            hints: list[Op] = [(key, None) for key in page.keys]
            self._keeper.committer.submit(hints, lazy=True)

    async def _read_page(
        self, window: ZoneWindow, source: DiskRange, start: bytes, wanted: int, now: float
    ) -> Page:
        read = self._keeper.read
        if source is window.fresh_range or source is window.new_range:
            return await read(lambda reads: reads.fresh(start, source.end, wanted))
        bound = source.end
        if source is window.due_range:
            bound = source.start + records.due_field(now) + b"!"
        return await read(lambda reads: reads.index(start, bound, source.end, wanted))

    async def _find_due(self, window: ZoneWindow) -> None:
        with self._reading(window, window.due_range) as start:
            keys = await self._keeper.read(lambda reads: reads.page_of_keys(start, window.due_range.end))
        window.skip_taken(keys)

    async def _spill(self, window: ZoneWindow, spill: Taken) -> None:
        """Write skipped deliveries that exceed the memory limit to the overflow index."""
        domains = {key: domain_of(key.recipient) for key in spill}
        ops: list[Op] = [(records.domain_key(key, domain), b"") for key, domain in domains.items()]

        def applied() -> None:
            for key, domain in domains.items():
                window.spilled(domain, key)

        try:
            await self._keeper.committer.submit(ops, size=100 * len(ops), applied=applied)
        except StoreError:
            # If the spool had failed before, the window is still in use, and no read will find these again.
            for key, delivery in spill.items():
                window.put_back(key, delivery)
            raise
