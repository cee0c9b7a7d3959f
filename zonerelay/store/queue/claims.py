"""Claims the deliveries of a queue, and reads pages of its keys from disk when a claim needs them.

The store keeps no mail in memory that waits: the window of the scheduler does (`queue/zone/window.py`). New
mail is given to the scheduler when it is stored (`is_next`), and everything else is read from disk page by
page when the scheduler claims it. In memory are only deliveries that were read or released and are not
claimed yet, which are never more than a page and the scheduler's window.

No delivery is missed, because of one invariant. Every delivery that may be claimed (it is due, not held, and
not claimed) is in this memory, or it is on disk in a `DiskRange`, at or above the low-water mark `low` of
that range (for the keys see docs/store/spool-format.md):

- a fresh delivery (never deferred) is in `delivery-zone`, the range `fresh_range`;
- a deferred delivery is in the index `deferred-zone`, the range `due_range`;
- a delivery that was skipped because its destination was full is in the index `delivery-domain`, with a
  range for each domain.

`take_new(since)` returns mail that was accepted since the message id `since`, even if there is a long queue
of older mail. It has its own range, `new_range`, over the same rows as `fresh_range`. Its deliveries also
stay above `fresh_range.low`, and the scan from there skips rows that are claimed or were removed.

A `low` of None means that nothing of the range is left on disk. Otherwise `low` is how far the range has been
read. A mark moves up when rows are read, and down when a row is stored below it that was not given to the
scheduler. A row that is stored during a read moves the mark back down when the read ends. So nothing is
missed, and reads never return to the start of a range, where LevelDB would step over the tombstones of
delivered mail.

At most one read per queue runs at a time, under the queue's lock. The cursors note changes to deliveries
during the read. A claim that fails or is cancelled releases the deliveries that it has claimed.

`ReadyMail` and `QueueCursors` do no I/O; `ClaimCursors` reads.
"""

import asyncio
import contextlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter

from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import MessageId, domain_of
from zonerelay.store import records
from zonerelay.store.contract import StoreError
from zonerelay.store.keys.port import Op
from zonerelay.store.queue.in_flight import InFlight
from zonerelay.store.queue.keeper import QueueKeeper
from zonerelay.store.queue.reads import DeliveryPage

_READ_AHEAD = 200
"""The smallest number of ready deliveries that one read of a claim loads into memory."""
_MOST = 1000
"""The largest number that one read loads while claims skip most of what they read."""

Due = tuple[float, DeliveryKey]
"""The Unix time of the next attempt, and a deferred delivery."""

_by_message = attrgetter("message_id")


class ReadyMail:
    """The deliveries of one queue that are in memory and can be claimed, in the order of claims.

    Fresh mail is sorted by message, and deferred mail by due time. The two alternate, so that neither starves
    the other.

    The lists have some thousand entries at most, so that inserting and removing entries in the middle costs
    little.
    """

    __slots__ = ("_due", "_fresh", "_known", "_turn_of_due")

    def __init__(self) -> None:
        self._known: dict[DeliveryKey, Delivery] = {}
        self._fresh: list[DeliveryKey] = []
        self._due: list[Due] = []
        self._turn_of_due = False

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: DeliveryKey) -> bool:
        return key in self._known

    def add(self, key: DeliveryKey, delivery: Delivery) -> None:
        """Add a delivery, or replace its state."""
        if key in self._known:
            self.remove(key)
        self._known[key] = delivery
        if delivery.next_attempt > 0:
            insort(self._due, (delivery.next_attempt, key))
        else:
            insort(self._fresh, key)

    def remove(self, key: DeliveryKey) -> Delivery | None:
        """Remove a delivery and return it, or return `None` if it is not in memory."""
        delivery = self._known.pop(key, None)
        if delivery is None:
            return None
        if delivery.next_attempt > 0:
            del self._due[bisect_left(self._due, (delivery.next_attempt, key))]
        else:
            del self._fresh[bisect_left(self._fresh, key)]
        return delivery

    def first_fresh(self) -> DeliveryKey | None:
        """Return the first delivery, by message, that was never deferred, or None."""
        return self._fresh[0] if self._fresh else None

    def first_since(self, since: MessageId) -> DeliveryKey | None:
        """Return the first delivery that was never deferred and whose message is not older than `since`, or
        None.
        """
        at = bisect_left(self._fresh, since, key=_by_message)
        return self._fresh[at] if at < len(self._fresh) else None

    def first_due(self) -> Due | None:
        """Return the deferred delivery with the earliest due time."""
        return self._due[0] if self._due else None

    def pop_either(self, fresh: DeliveryKey | None, due: Due | None) -> Delivery | None:
        """Remove and return one of these two deliveries, which are the results of `first_fresh` and
        `first_due`. If there are both, the two kinds alternate.
        """
        if due is not None and (fresh is None or self._turn_of_due):
            key = due[1]
        elif fresh is not None:
            key = fresh
        else:
            return None
        self._turn_of_due = not self._turn_of_due
        return self.remove(key)


class DiskRange:
    """A sorted range of keys on disk. Everything below `low` is in memory or was processed.

    `exact` is true while a row is known to exist at `low`.
    """

    __slots__ = ("_lowest_noted", "end", "exact", "low", "start")

    def __init__(self, prefix: bytes, low: bytes | None) -> None:
        self.start = prefix
        self.end = records.after(prefix)
        self.low = low
        self.exact = False
        self._lowest_noted: bytes | None = None
        """The lowest key that was noted since the last read began."""

    def note(self, key: bytes) -> None:
        """Record that `key` exists on disk and is not in memory."""
        if self._lowest_noted is None or key < self._lowest_noted:
            self._lowest_noted = key
        if self.low is None or key < self.low:
            self.low = key
            self.exact = True

    def gone(self, key: bytes) -> None:
        """Record that the row at `key` was removed."""
        if key == self.low:
            self.exact = False

    def start_reading(self) -> bytes:
        self._lowest_noted = None
        return self.low or self.start

    def read_up_to(self, low: bytes | None, *, exact: bool = True) -> None:
        """End a read: memory now holds all rows below `low` that existed when the read began. None means all
        rows of the range.
        """
        self.exact = exact
        noted = self._lowest_noted
        # The read may have missed rows that were stored during it.
        self.low = noted if low is None or (noted is not None and noted < low) else low


Taken = dict[DeliveryKey, Delivery]


class QueueCursors:
    """Tracks how far each key range of one queue has been read for claims. `is_busy` returns whether a
    delivery is claimed or being changed.
    """

    def __init__(self, queue: QueueName, is_busy: Callable[[DeliveryKey], bool], *, empty: bool) -> None:
        """Create the cursors of a queue. With `empty` the spool was empty when it was opened, so the disk
        need not be read.
        """
        self.queue = queue
        self._is_busy = is_busy
        fresh, due = records.queue_prefix(queue), records.deferred_prefix(queue)
        self.fresh_range = DiskRange(fresh, None if empty else fresh)
        self.due_range = DiskRange(due, None if empty else due)
        self.new_range: DiskRange | None = None
        self.domain_ranges: dict[str, DiskRange] = {}
        self._ready = ReadyMail()
        self._touched: set[DeliveryKey] | None = None
        # The queue has no older key than this one, so the search for the oldest starts here.
        self.oldest = b""

    # --- durable changes

    def is_next(self, delivery: Delivery) -> bool:
        """Return whether a new delivery may be given to the scheduler now, because no older one waits for a
        claim.
        """
        if delivery.next_attempt > 0:
            return False
        new, low = self.new_range, self.fresh_range.low
        if low is None:
            return self._ready.first_fresh() is None
        row = records.delivery_key(delivery.key)
        if row < low and self._ready.first_fresh() is None:
            return True
        is_new = new is not None and row >= new.start and (new.low is None or row < new.low)
        return is_new and self._ready.first_since(delivery.message_id) is None

    def note_stored(self, key: DeliveryKey) -> None:
        """Record a stored delivery, whose message may be older than all others in the queue."""
        if self.oldest:
            # Ids are assigned when a message begins, not when it is committed.
            self.oldest = min(self.oldest, self.fresh_range.start + key.message_id.encode("ascii"))

    def add(self, key: DeliveryKey, delivery: Delivery) -> None:
        """Add an unclaimed delivery that was stored in this state."""
        if self._touched is not None:
            self._touched.add(key)
        self.note_stored(key)
        if delivery.held:
            return
        if delivery.next_attempt > 0:
            self.due_range.note(records.deferred_key(key, delivery.next_attempt))
        else:
            self._note_fresh(records.delivery_key(key))

    def put_back(self, deliveries: Iterable[Delivery]) -> None:
        """Add deliveries whose claims were released, or that were read but not claimed."""
        for delivery in deliveries:
            if not delivery.held:
                self._ready.add(delivery.key, delivery)

    def look_for(self, key: DeliveryKey) -> None:
        """Record that the delivery may be ready, so that the next claim reads its state from disk."""
        self._note_fresh(records.delivery_key(key))
        self.due_range.note(self.due_range.start)
        self.due_range.exact = False

    def forget(self, key: DeliveryKey) -> None:
        """Remove a delivery from memory because it is being changed or was removed."""
        if self._touched is not None:
            self._touched.add(key)
        self._ready.remove(key)

    def spilled(self, domain: str, key: DeliveryKey) -> None:
        """Record that a delivery skipped by `take` is now in the `delivery-domain` index."""
        index_key = records.domain_key(key, domain)
        self.domain_range(domain).note(index_key)

    # --- claims

    def take(
        self, limit: int, skip: Collection[str], now: float, found: Taken, spill: Taken
    ) -> DiskRange | None:
        """Move up to `limit` ready deliveries to `found`. Return the range that must be read first, if any.

        Deliveries to a domain in `skip` are moved to `spill`, for the index.
        """
        while len(found) < limit:
            fresh, due = self._peek_fresh(), self._ready.first_due()
            if fresh is None and self.fresh_range.low is not None:
                return self.fresh_range
            if due is None and self.due_range.low is not None and self._is_due(now):
                return self.due_range
            delivery = self._ready.pop_either(fresh, due)
            if delivery is None:
                return self._unskipped(skip)
            (spill if skip and delivery.domain in skip else found)[delivery.key] = delivery
        return None

    def take_new(
        self, limit: int, since: MessageId, skip: Collection[str], found: Taken, spill: Taken
    ) -> DiskRange | None:
        """Move deliveries that were never deferred to `found`, for messages from `since` on. Works like
        `take`.
        """
        source = self._range_from(self.fresh_range.start + since.encode("ascii"))
        while len(found) < limit:
            key = self._ready.first_since(since)
            if source.low is not None and (key is None or records.delivery_key(key) >= source.low):
                return source
            delivery = None if key is None else self._ready.remove(key)
            if delivery is None:
                return None
            (spill if skip and delivery.domain in skip else found)[delivery.key] = delivery
        return None

    def take_domain(self, domain: str) -> DiskRange | None:
        """Return the range of skipped deliveries of one domain, or `None` if there are no more."""
        source = self.domain_ranges.get(domain)
        if source is not None and source.low is None:
            del self.domain_ranges[domain]
            return None
        return source

    def is_domain(self, source: DiskRange) -> bool:
        """Return whether the range belongs to the skipped deliveries of a domain."""
        return source not in (self.fresh_range, self.new_range, self.due_range)

    def skip_taken(self, keys: list[tuple[bytes, DeliveryKey]]) -> None:
        """Move the mark of `due_range` to the first of `keys` that is neither claimed nor in memory, or after
        all of them. `keys` are the rows that begin at the mark.
        """
        touched = self._touched or set()
        self._touched = None
        for raw, key in keys:
            if key not in self._ready and not self._is_busy(key):
                self.due_range.read_up_to(raw, exact=key not in touched)
                return
        self.due_range.read_up_to(keys[-1][0] + b" " if keys else None, exact=False)

    def due_in_memory(self) -> float | None:
        """Return the time of the first unclaimed deferred delivery in memory."""
        first = self._ready.first_due()
        return None if first is None else first[0]

    def domain_range(self, domain: str) -> DiskRange:
        found = self.domain_ranges.get(domain)
        if found is None:
            found = DiskRange(records.domain_prefix(self.queue, domain), None)
            self.domain_ranges[domain] = found
        return found

    # --- reading from disk (the caller reads, one range of the zone at a time)

    def start_reading(self, source: DiskRange) -> bytes:
        self._touched = set()
        return source.start_reading()

    def stop_reading(self) -> None:
        """End a read that failed. The mark of the range stays."""
        self._touched = None

    def absorb(
        self, source: DiskRange, deliveries: list[Delivery], low: bytes | None, now: float
    ) -> list[Delivery]:
        """Return the deliveries of a page that are ready, not yet in memory, and unchanged since the read
        began.
        """
        touched = self._touched or set()
        self._touched = None
        source.read_up_to(low)
        found: list[Delivery] = []
        for delivery in deliveries:
            key = delivery.key
            if key in touched or key in self._ready or self._is_busy(key) or delivery.held:
                continue
            if delivery.is_due(now):
                found.append(delivery)
            else:
                # It was deferred after it was skipped, or the clock was set back. The mark may be above it.
                self.due_range.note(records.deferred_key(key, delivery.next_attempt))
        return found

    # --- inside

    def _note_fresh(self, row: bytes) -> None:
        self.fresh_range.note(row)
        if self.new_range is not None and row >= self.new_range.start:
            self.new_range.note(row)

    def _range_from(self, start: bytes) -> DiskRange:
        """Return the range of deliveries from the key `start` on that were never deferred and are not in
        memory.
        """
        new = self.new_range
        if new is None or start < new.start:
            low = self.fresh_range.low
            new = self.new_range = DiskRange(self.fresh_range.start, low)
        if new.low is not None:
            new.low = max(start, new.low)
        new.start = start
        return new

    def _peek_fresh(self) -> DeliveryKey | None:
        """Return the next delivery that was never deferred, or `None` if there is none or an older one may be
        on disk.
        """
        first, cursor = self._ready.first_fresh(), self.fresh_range.low
        if cursor is None:
            self.new_range = None  # memory holds everything
            return first
        return first if first is not None and records.delivery_key(first) < cursor else None

    def _is_due(self, now: float) -> bool:
        low = self.due_range.low
        return low is not None and low < self.due_range.start + records.due_field(now) + b"!"

    def _unskipped(self, skip: Collection[str]) -> DiskRange | None:
        """Return the range of a domain that is no longer in `skip`, so that its deliveries are claimed with
        the others.
        """
        for domain in list(self.domain_ranges):
            if domain not in skip and (source := self.take_domain(domain)) is not None:
                return source
        return None


class ClaimCursors(dict[QueueName, QueueCursors]):
    """The cursors of all queues, which are created when first used. It implements the claims of
    `QueueStore`.
    """

    def __init__(self, keeper: QueueKeeper, in_flight: InFlight, *, empty: bool) -> None:
        """Create the claim cursors. With `empty` the spool has no deliveries, so nothing needs to be read."""
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
        """Return the current states of the claimed deliveries. An operator may have changed or released some
        while others were read.
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
        """Yield the key from which to read a range. The mark of the range moves only if the read succeeds."""
        try:
            yield cursors.start_reading(source)
        except BaseException:
            cursors.stop_reading()
            raise

    async def _read(
        self, cursors: QueueCursors, source: DiskRange, wanted: int, now: float
    ) -> list[Delivery]:
        """Read a page of a range, and return the deliveries that can be claimed now."""
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
