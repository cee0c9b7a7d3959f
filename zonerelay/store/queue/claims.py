"""Claims deliveries of the LevelDB spool, and reads pages from disk when claims need them.

At most one read per queue runs at a time, under the queue's lock. The cursors note changes to deliveries
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
from zonerelay.store import records
from zonerelay.store.contract import StoreError
from zonerelay.store.keys.port import Op
from zonerelay.store.queue.cursors import DiskRange, QueueCursors, Taken
from zonerelay.store.queue.in_flight import InFlight
from zonerelay.store.queue.keeper import QueueKeeper
from zonerelay.store.queue.reads import DeliveryPage

_by_message = attrgetter("message_id")
_READ_AHEAD = 200
"""The smallest number of ready deliveries that one read of a claim loads into memory."""
_MOST = 1000
"""The largest number that one read loads while claims skip most of what they read."""


class ClaimCursors(dict[QueueName, QueueCursors]):
    """The cursors of all queues, created when they are first used, and the claims from them. The methods are
    those of `QueueStore`.
    """

    def __init__(self, keeper: QueueKeeper, in_flight: InFlight, *, empty: bool) -> None:
        """Create the claims. With `empty` the spool has no deliveries, so nothing needs to be read."""
        self._is_empty = empty
        self._keeper = keeper
        self._in_flight = in_flight
        self._locks: defaultdict[QueueName, asyncio.Lock] = defaultdict(asyncio.Lock)

    def __missing__(self, queue: QueueName) -> QueueCursors:
        cursors = self[queue] = QueueCursors(queue, self._in_flight.is_busy, empty=self._is_empty)
        return cursors

    def reset(self) -> None:
        """Discard the cursors after the spool failed. The queues are read from disk again."""
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
        found, ahead = Taken(), _READ_AHEAD
        async with self._locks[queue]:
            try:
                while True:
                    cursors, taken, spill, room = self[queue], Taken(), Taken(), limit - len(found)
                    if domain is not None:
                        source = cursors.take_domain(domain)
                    elif since is not None:
                        source = cursors.take_new(room, since, skip_domains, taken, spill)
                    else:
                        source = cursors.take(room, skip_domains, now, taken, spill)
                    self._note_claimed(taken, found)
                    if spill:
                        ahead = min(2 * ahead, _MOST)
                        await self._spill(cursors, spill)
                    if source is None or len(found) >= limit:
                        break
                    room = limit - len(found)
                    is_index = cursors.is_domain(source)
                    read = await self._read(cursors, source, room if is_index else max(room, ahead), now)
                    if is_index:
                        self._note_claimed({delivery.key: delivery for delivery in read}, found)
                    else:
                        cursors.put_back(read)
                    found = self._still_claimed(found)
            except BaseException:
                self.release(found)
                raise
        return sorted(self._still_claimed(found).values(), key=_by_message)

    def _note_claimed(self, taken: Taken, found: Taken) -> None:
        # The attribute is read each time, because a failed write replaces the dict.
        self._in_flight.claims.update(taken)
        found.update(taken)

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
                self[key.queue].put_back([delivery])

    async def next_due(self, queue: QueueName) -> float | None:
        self._keeper.health.check_usable()
        async with self._locks[queue]:
            while (cursors := self[queue]).due_range.low is not None and not cursors.due_range.exact:
                await self._find_due(cursors)
        low = cursors.due_range.low
        times = (None if low is None else records.parse_due(low), cursors.due_in_memory())
        return min((due for due in times if due is not None), default=None)

    # --- reading

    @contextlib.contextmanager
    def _reading(self, cursors: QueueCursors, source: DiskRange) -> Iterator[bytes]:
        """Yield the key to read from. The mark of the range moves only if the read succeeds."""
        try:
            yield cursors.start_reading(source)
        except BaseException:
            cursors.stop_reading(source)
            raise

    async def _read(
        self, cursors: QueueCursors, source: DiskRange, wanted: int, now: float
    ) -> list[Delivery]:
        """Read a page, and return the deliveries that can be claimed now."""
        with self._reading(cursors, source) as start:
            page = await self._read_page(cursors, source, start, wanted, now)
        if self.get(cursors.queue) is not cursors:
            return []
        found = cursors.absorb(source, page.deliveries, page.low, now)
        if page.keys and cursors.is_domain(source):
            # They are claimed now. If the process dies, the next start finds them with the cursor.
            hints: list[Op] = [(key, None) for key in page.keys]
            self._keeper.submit(hints, lazy=True)
        return found

    async def _read_page(
        self, cursors: QueueCursors, source: DiskRange, start: bytes, wanted: int, now: float
    ) -> DeliveryPage:
        read = self._keeper.read
        if source is cursors.fresh_range or source is cursors.new_range:
            return await read(lambda reads: reads.fresh(start, source.end, wanted))
        bound = source.end
        if source is cursors.due_range:
            bound = source.start + records.due_field(now) + b"!"
        return await read(lambda reads: reads.index(start, bound, source.end, wanted))

    async def _find_due(self, cursors: QueueCursors) -> None:
        with self._reading(cursors, cursors.due_range) as start:
            keys = await self._keeper.read(lambda reads: reads.page_of_keys(start, cursors.due_range.end))
        cursors.skip_taken(keys)

    async def _spill(self, cursors: QueueCursors, spill: Taken) -> None:
        """Write skipped deliveries to the overflow index, from which a claim of their domain reads them."""
        domains = {key: domain_of(key.recipient) for key in spill}
        ops: list[Op] = [(records.domain_key(key, domain), b"") for key, domain in domains.items()]

        def applied() -> None:
            for key, domain in domains.items():
                cursors.spilled(domain, key)

        try:
            await self._keeper.submit(ops, size=100 * len(ops), applied=applied)
        except StoreError:
            # If the spool had failed before, the cursors are still in use, and no read will find these again.
            cursors.put_back(spill.values())
            raise
