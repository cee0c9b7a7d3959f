"""Builds the list of destinations for `zonerelay status`, from the counts of the queue and the scheduler's
state.

The scheduler knows the deliveries in its window; the others are counted in the store, domain by domain. A
count is reused for a while, and that of a large queue is made from a sample (`every`). An answer waits at
most `PATIENCE` seconds for a count; until the first count has ended, `every` is 0.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from itertools import islice

import msgspec

from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.reply import Attempt
from zonerelay.operations.answers import DestinationStatus, hurts
from zonerelay.process.tasks import cancel_all
from zonerelay.queue.destination.destinations import Destination
from zonerelay.queue.operator.operations import MAX_KEYS, SAMPLE
from zonerelay.queue.orders.orders import Orders
from zonerelay.queue.scheduler import Scheduler
from zonerelay.smtp.client.reputation import class_of
from zonerelay.store.contract import EveryNth, QueueCounts, Store, StoreError, everybody

PATIENCE = 2.0
FRESH = 2.0
"""Seconds that a count serves at least, and twenty times as long as it took."""
OTHERS = "(other domains)"
SLICE = 1000
ROWS = 100
"""Rows that are made in one turn of the loop."""


class WaitingDomain(msgspec.Struct):
    """The numbers of queued deliveries to one domain in one zone. `oldest` is a Unix time, `last` the latest
    attempt.
    """

    counts: QueueCounts = msgspec.field(default_factory=QueueCounts)
    oldest: float = float("inf")
    last: Attempt | None = None
    suspended: int = 0
    """Deliveries that wait because of an order."""
    held_by_order: int = 0
    """Deliveries that an order has held when they were due."""
    due: int = 0
    """Deliveries that were deferred and are due, which are counted as ready."""

    def count(self, delivery: Delivery, step: int, now: float, *, by_order: bool) -> None:
        """Add a delivery to the counts, as `step` deliveries if only a sample is counted. With `by_order`, a
        hold rule holds the delivery.
        """
        is_due = delivery.is_due(now)
        next_attempt = 0.0 if is_due else delivery.next_attempt
        self.due += step if is_due and delivery.next_attempt > 0 else 0
        if by_order:
            self.held_by_order += step
        else:
            self.counts.count(next_attempt, held=delivery.held, step=step)
        self.oldest = min(self.oldest, delivery.created)
        self._attempted(delivery.last)

    def add(self, other: "WaitingDomain", *, kept: bool) -> None:
        """Add the counts of another domain. With `kept`, an operator has suspended its deliveries."""
        counts = other.counts
        self.held_by_order += other.held_by_order
        if kept:
            self.suspended += counts.ready + counts.deferred
            counts = QueueCounts(held=counts.held)
        else:
            self.due += other.due
        self.counts.add(counts)
        self.oldest = min(self.oldest, other.oldest)
        self._attempted(other.last)

    def _attempted(self, last: Attempt | None) -> None:
        if last is not None and (self.last is None or last.at > self.last.at):
            self.last = last

    @property
    def total(self) -> int:
        return self.counts.total + self.suspended + self.held_by_order

    @property
    def reply(self) -> str:
        return "" if self.last is None else str(self.last.reply)

    @property
    def reply_class(self) -> str:
        return "" if self.last is None else class_of(self.last.reply, local=self.last.local)


class DestinationRows:
    """Computes the list of destinations for `status`. They belong to its event loop; call `close` before the
    store is closed.
    """

    def __init__(
        self, store: Store, scheduler: Scheduler, clock: Clock, orders: Orders | None = None
    ) -> None:
        self._orders = orders
        self._store = store
        self._scheduler = scheduler
        self._clock = clock
        self._domains: dict[tuple[str, str], WaitingDomain] = {}
        self._fresh_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._turns: dict[tuple[str, str], DestinationStatus] = {}
        self._turns_until = 0.0
        self.every = 0
        self.suspended: Counter[str] = Counter()
        """By zone: deliveries that wait because of an order, as they were last counted."""
        self.held_by_order: Counter[str] = Counter()
        self.unreachable: Counter[str] = Counter()
        """By zone: ready mail whose hosts cannot be reached."""

    async def rows(self, most: int = sys.maxsize, largest: int = 0) -> tuple[list[DestinationStatus], int]:
        """Return the first `most` destinations in the order of `hurts`, the `largest` of the others, and the
        number of all. Destinations are processed in slices, so that the event loop is not blocked.
        """
        await self._counted()
        now, count = self._clock.now(), 0
        best: list[tuple[tuple[object, ...], int, _DestinationData]] = []
        large: list[tuple[tuple[object, ...], int, _DestinationData]] = []
        found = self._found(now)
        while some := list(islice(found, SLICE)):
            best = sorted([*best, *((hurts(each.row), count + at, each) for at, each in enumerate(some))])
            large = sorted([*large, *best[most:]], key=lambda each: -each[2].mail.total)[:largest]
            best = best[:most]
            count += len(some)
            await asyncio.sleep(0)
        rows: list[DestinationStatus] = []
        tick = self._clock.monotonic()
        for _, _, each in [*best, *large]:
            rows.append(each.detailed(now, tick))
            if len(rows) % ROWS == 0:
                await asyncio.sleep(0)
        return rows, count

    async def waiting_for_rate(self, zone: str, domain: str) -> DestinationStatus | None:
        """Return the destination of a domain if its mail waits for a rate limit. The data may be `FRESH`
        seconds old.
        """
        destination = self._scheduler.destination_of(zone, domain)
        if destination is None or destination.turn_in(self._clock.monotonic()) is None:
            return None
        if self._clock.monotonic() >= self._turns_until:
            await self._counted()
            now, tick = self._clock.now(), self._clock.monotonic()
            self._turns = {
                (each.row.zone, each.known.key): each.detailed(now, tick)
                for each in self._found(now)
                if each.known is not None and each.known.turn_in(tick) is not None
            }
            self._turns_until = self._clock.monotonic() + FRESH
        return self._turns.get((zone, destination.key))

    async def _counted(self) -> None:
        if self._task is None and self._clock.monotonic() >= self._fresh_until:
            self._task = asyncio.get_running_loop().create_task(self._count())
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=PATIENCE)

    async def close(self) -> None:
        await cancel_all(self._task)

    async def _count(self) -> None:
        began, now = self._clock.monotonic(), self._clock.now()
        every = max(1, sum(counts.total for counts in self._store.counts().values()) // SAMPLE)
        found: dict[tuple[str, str], WaitingDomain] = {}
        seen = 0
        try:
            scan = self._store.scan(wanted=everybody if every == 1 else EveryNth(every))
            async with aclosing(scan) as deliveries:
                async for delivery in deliveries:
                    key = (delivery.zone, delivery.domain)
                    if key not in found and len(found) >= MAX_KEYS:
                        key = (delivery.zone, OTHERS)
                    by_order = self._orders is not None and self._orders.holds(delivery)
                    found.setdefault(key, WaitingDomain()).count(delivery, every, now, by_order=by_order)
                    seen += 1
                    if seen % SLICE == 0:
                        await asyncio.sleep(0)
            self._domains, self.every = found, every
        except StoreError:
            pass  # `unhealthy` has the reason; the last known state is shown
        finally:
            ended = self._clock.monotonic()
            self._fresh_until = ended + max(FRESH, 20 * (ended - began))
            self._task = None

    def _found(self, now: float) -> "Iterator[_DestinationData]":
        waiting: dict[tuple[str, str], WaitingDomain] = {}
        names = dict[tuple[str, str], str]()
        for (zone, domain), mail in self._domains.items():
            found = self._scheduler.destination_of(zone, domain)
            key = None if found is None else found.key
            where = (zone, f"{domain} " if key is None else key)
            next_hop = "" if key is None else self._scheduler.zone(zone).settings.next_hop
            names.setdefault(where, next_hop or domain)
            hosts = (key or "").partition(" ")[2]
            kept = self._orders is not None and self._orders.keeping(zone, domain, hosts) is not None
            waiting.setdefault(where, WaitingDomain()).add(mail, kept=kept)
        # Others may ask meanwhile, and read what the last one has counted.
        unreachable = Counter[str]()
        self.suspended, self.held_by_order = Counter(), Counter()
        for (zone, _), mail in waiting.items():
            self.suspended[zone] += mail.suspended
            self.held_by_order[zone] += mail.held_by_order
        for zone, each in self._scheduler.destinations():
            rate = self._scheduler.zone(zone).settings.max_rate
            mail = waiting.pop((zone, each.key), WaitingDomain())
            if each.suspended_until is not None:
                unreachable[zone] += mail.counts.ready - mail.due
            row = _row((zone, each.key), each.route.name, mail, now, each)
            yield _DestinationData(row, mail, each, 0.0 if rate is None else rate.interval)
        self.unreachable = unreachable
        for where, mail in waiting.items():
            yield _DestinationData(_row(where, names[where], mail, now), mail)


class _DestinationData(msgspec.Struct):
    """The status of a destination without the details that are expensive to compute, and the data for those.
    `known` is the scheduler's state of it. `interval` is the time in seconds between two turns of the zone's
    rate.
    """

    row: DestinationStatus
    mail: WaitingDomain
    known: Destination | None = None
    interval: float = 0.0

    def detailed(self, now: float, tick: float) -> DestinationStatus:
        known, mail = self.known, self.mail
        row = msgspec.structs.replace(self.row, reply=mail.reply, reply_class=mail.reply_class)
        if known is None:
            return row
        reply, turn_in, rate = known.suspension.reply, known.turn_in(tick), known.limits.max_rate
        interval = max(self.interval, 0.0 if rate is None else rate.interval)
        return msgspec.structs.replace(
            row,
            reply=row.reply if reply is None else str(reply),
            reply_class=row.reply_class if reply is None else class_of(reply, local=True),
            per_minute=known.per_minute(tick),
            max_rate=str(rate or ""),
            max_connections=known.limits.max_connections,
            next_turn=None if turn_in is None else now + turn_in,
            turns_seconds=None if turn_in is None else row.ready * interval,
        )


def _row(
    where: tuple[str, str], name: str, mail: WaitingDomain, now: float, known: Destination | None = None
) -> DestinationStatus:
    """Return the status of a destination with its counts; `where` is its zone and its key. The counts may be
    some seconds old, but at least the deliveries in the window are waiting. Mail for an unreachable host is
    counted as deferred, because it does not leave.
    """
    active, window = (0, 0) if known is None else (known.active, known.waiting)
    until = None if known is None else known.suspended_until
    ready, deferred = max(mail.counts.ready - active, window - mail.counts.deferred, 0), mail.counts.deferred
    if until is not None:
        ready, deferred = 0, deferred + ready
    return DestinationStatus(
        zone=where[0],
        destination=name,
        hosts=where[1].partition(" ")[2],
        active=active,
        waiting=window,
        suspended_until=until,
        ready=ready,
        deferred=deferred,
        held=mail.counts.held,
        suspended=mail.suspended + mail.held_by_order,
        oldest_seconds=max(now - mail.oldest, 0.0),
    )
