"""Hands out deliveries from PostgreSQL with `FOR UPDATE SKIP LOCKED`, so nodes never wait for each other.

A claim belongs to the session of this relay. It is carried out to its end even when its caller has left;
the deliveries are then in the pool for the next caller. `exclusive` keeps every change of claims in the
database apart from a resync, which compares them with what is known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from operator import attrgetter
from typing import Any, TypeVar

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.process.tasks import Tasks
from zonerelay.store.common.claims.pool import NEVER, Claims, ZonePool
from zonerelay.store.contract import ClaimLostError, Lost, StoreCorruptError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import Columns
from zonerelay.store.postgres.keeper import PostgresKeeper
from zonerelay.store.postgres.rows import (
    column_of,
    delivery_key,
    delivery_of,
    key_columns,
    number,
    word,
    words,
)

_log = logging.getLogger("zonerelay.store")

LOOK_BATCH = 500
"""Claims that are looked at in one turn of the loop."""

T = TypeVar("T")
_Taken = tuple[list[Delivery], list[Delivery]]
"""What was found, and what was met of domains that are passed over."""

_by_message = attrgetter("message_id")


class PostgresClaims:
    """The claims of one relay, in all zones."""

    def __init__(self, keeper: PostgresKeeper, on_lost: Lost) -> None:
        self.claims = Claims()
        self.exclusive = asyncio.Lock()
        self._keeper = keeper
        self._on_lost = on_lost
        self._locks: dict[QueueName, asyncio.Lock] = {}
        self._tasks = Tasks()
        self._unreadable: set[DeliveryKey] = set()

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        pool = self.claims.zone(queue)

        async def fill(room: int) -> int:
            if not pool.more and pool.due > now:
                return 0
            return await self.finish(self._fill(queue, room, skip_domains, now))

        async with self._claiming(queue) as found:
            await self._collect(queue, limit, found, fill, lambda room: pool.take(room, skip_domains, now))
            if len(found) < limit and pool.parked:
                found.extend(await self._unpark(queue, limit - len(found), skip_domains))
        return self._still_handed_out(found)

    async def claim_new(
        self, queue: QueueName, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        pool = self.claims.zone(queue)

        async def fill(room: int) -> int:
            return await self.finish(self._fill_new(queue, room, since, skip_domains)) if pool.more else 0

        async with self._claiming(queue) as found:
            await self._collect(
                queue, limit, found, fill, lambda room: pool.take_new(room, since, skip_domains)
            )
        return self._still_handed_out(found)

    async def _collect(
        self,
        queue: QueueName,
        limit: int,
        found: list[Delivery],
        fill: Callable[[int], Awaitable[int]],
        take: Callable[[int], _Taken],
    ) -> None:
        """Fills the pool and takes from it by turns, until there are enough or no more."""
        while len(found) < limit:
            came = await fill(limit - len(found))
            some, passed = take(limit - len(found))
            self.claims.hand_out(some)
            found += some
            if passed:
                await self.finish(self._park(queue, passed))
            elif not came:
                return

    async def claim_domain(self, queue: QueueName, domain: str, limit: int, *, now: float) -> list[Delivery]:
        del now  # they were due when they were passed over
        async with self._alone(queue):
            found = await self._taken(self._take_parked(queue, word(domain), limit))
        return self._still_handed_out(found)

    def _still_handed_out(self, found: Sequence[Delivery]) -> list[Delivery]:
        """Returns them as they are now, without those given back or lost while the claim went on."""
        handed = self.claims.handed
        left = {delivery.key: handed.get(delivery.key) for delivery in found}
        for key, delivery in left.items():
            if delivery is None:
                self.claims.drop(key)
        return sorted((each for each in left.values() if each is not None), key=_by_message)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        for key in keys:
            self.claims.release(key)

    def has_ready(self, queue: QueueName) -> bool:
        pool = self.claims.zone(queue)
        return pool.more or pool.has_fresh

    async def next_due(self, queue: QueueName) -> float | None:
        pool = self.claims.zone(queue)
        async with self._alone(queue):
            if pool.due == 0.0:
                await self.finish(self._look_for_due(queue, pool))
        first = min(pool.due, pool.next_due())
        return None if first == NEVER else first

    async def resync(self, *, new_session: bool) -> None:
        """Believes the database about all claims. Called under `exclusive`, while nothing is written."""
        claims = self.claims
        there: dict[DeliveryKey, Delivery] = {}
        if not new_session:
            rows = await self._keeper.ask(sql.CLAIMED, self._keeper.session)
            there = {delivery.key: delivery for delivery in self._read(rows)}
        lost = [key for key in claims.handed if key not in there]
        claims.lose(lost)
        for pool in claims.zones.values():
            pool.clear()
            pool.doubt()
        for key, delivery in there.items():
            if key in claims.handed:
                claims.handed[key] = delivery  # an operator's change may have landed unheard
            elif not claims.regain(delivery):
                claims.zone(key.queue).put(delivery)
        if lost:
            self._on_lost(lost)

    async def give_back_strays(self, arriving: Callable[[], Collection[DeliveryKey]]) -> None:
        """Gives back what this session has claimed unknown to this relay: the claim outlived its connection.

        With `arriving`, the new ones that are being stored, nothing is between the database and our memory.
        What leaves while we look has no claim any more, and nothing is claimed meanwhile.
        """
        async with self.exclusive:
            session = self._keeper.session
            rows = await self._keeper.ask(sql.CLAIMED_KEYS, session)
            known = {*arriving(), *self._unreadable}
            stray: list[DeliveryKey] = []
            for start in range(0, len(rows), LOOK_BATCH):
                keys = map(delivery_key, rows[start : start + LOOK_BATCH])
                stray += [key for key in keys if key not in known and not self.claims.knows(key)]
                await asyncio.sleep(0)
            if stray:
                _log.warning("%d deliveries were claimed unheard: they are given back", len(stray))
                await self._keeper.ask(sql.GIVE_BACK, *key_columns(stray), session)

    @contextlib.asynccontextmanager
    async def _alone(self, queue: QueueName) -> AsyncIterator[None]:
        """Waits until nothing is under way, not even for a caller that has left. Raises StoreError."""
        self._keeper.check_usable()
        if not self._keeper.holds_lease:
            raise ClaimLostError("the lease on this relay's claims was not renewed in time")
        async with self._locks.setdefault(queue, asyncio.Lock()):
            await self._tasks.wait()
            yield

    @contextlib.asynccontextmanager
    async def _claiming(self, queue: QueueName) -> AsyncIterator[list[Delivery]]:
        """Collects deliveries, and gives them back when the block fails."""
        found: list[Delivery] = []
        async with self._alone(queue):
            try:
                yield found
            except BaseException:
                self.release([delivery.key for delivery in found])
                raise

    # --- asking the database

    async def _fill(self, queue: QueueName, limit: int, skip: Collection[str], now: float) -> int:
        """Claims the oldest fresh and the earliest due rows into the pool. Returns how many there were."""
        pool = self.claims.zone(queue)
        values = (column_of(queue), self._keeper.session, limit, words(skip))
        count = 0
        only_parked = True
        while pool.more and only_parked:  # behind what was parked there may be older mail than in the pool
            async with self.exclusive:
                with _doubting(pool):
                    pool.more = False
                    rows = await self._keeper.ask(sql.CLAIM_FRESH, *values)
                    pool.more = pool.more or len(rows) == limit
                    count += self._keep(pool, rows)
                    only_parked = all(row[-1] for row in rows)
        if pool.due <= now:
            async with self.exclusive:
                with _doubting(pool):
                    pool.due = NEVER
                    rows = await self._keeper.ask(sql.CLAIM_DUE, *values, now)
                    count += self._keep(pool, rows)
                    pool.due = min(pool.due, await self._first_due(queue))
        return count

    async def _fill_new(self, queue: QueueName, limit: int, since: MessageId, skip: Collection[str]) -> int:
        """Claims the oldest fresh rows of messages from `since` on. Returns how many there were."""
        async with self.exclusive:
            rows = await self._keeper.ask(
                sql.CLAIM_NEW, column_of(queue), self._keeper.session, limit, words(skip), number(since)
            )
            return self._keep(self.claims.zone(queue), rows)

    def _keep(self, pool: ZonePool, rows: Sequence[Columns]) -> int:
        pool.parked = pool.parked or any(row[6] for row in rows)
        for delivery in self._read(row for row in rows if not row[6]):
            if not self.claims.regain(delivery):
                pool.put(delivery)
        return len(rows)

    def _read(self, rows: Iterable[Columns]) -> Iterator[Delivery]:
        """An unreadable delivery stays claimed, so that it delays no other, and stored, for its repair."""
        for row in rows:
            try:
                yield delivery_of(row)
            except StoreCorruptError as error:
                self._unreadable.add(delivery_key(row))
                _log.error("%s", error)

    async def _look_for_due(self, queue: QueueName, pool: ZonePool) -> None:
        with _doubting(pool):
            pool.due = NEVER
            pool.due = min(pool.due, await self._first_due(queue))

    async def _first_due(self, queue: QueueName) -> float:
        rows = await self._keeper.ask(sql.NEXT_DUE, column_of(queue))
        return float(rows[0][0]) if rows else NEVER

    async def _park(self, queue: QueueName, passed: Sequence[Delivery]) -> None:
        """Gives deliveries of full destinations back to the database, where `claim_domain` finds them."""
        pool = self.claims.zone(queue)
        async with self.exclusive:
            try:
                columns = key_columns([delivery.key for delivery in passed])
                await self._keeper.ask(sql.PARK, *columns, self._keeper.session)
            except BaseException:
                for delivery in passed:
                    pool.put(delivery)
                raise
        pool.parked = True

    async def _unpark(self, queue: QueueName, limit: int, skip: Collection[str]) -> list[Delivery]:
        """Claims parked deliveries of domains that are no longer skipped, unless asked for by domain."""
        pool = self.claims.zone(queue)
        pool.parked = False
        try:
            domains = [row[0] for row in await self._keeper.ask(sql.PARKED_DOMAINS, column_of(queue))]
        except BaseException:
            pool.parked = True
            raise
        pool.parked = pool.parked or bool(domains)
        skipped = set(words(skip))
        found: list[Delivery] = []
        try:
            for domain in domains:
                if domain not in skipped and len(found) < limit:
                    found += await self._taken(self._take_parked(queue, domain, limit - len(found)))
        except BaseException:
            self.release([delivery.key for delivery in found])
            raise
        return found

    async def _take_parked(self, queue: QueueName, domain: str, limit: int) -> list[Delivery]:
        async with self.exclusive:
            rows = await self._keeper.ask(
                sql.CLAIM_PARKED, column_of(queue), self._keeper.session, limit, domain
            )
            found = [d for d in self._read(rows) if not self.claims.regain(d)]
            self.claims.hand_out(found)
        return found

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine sends is its business
        """Carries the work out to its end, also when its caller leaves."""
        return await asyncio.shield(self._tasks.start(work))

    async def _taken(self, work: Coroutine[Any, Any, list[Delivery]]) -> list[Delivery]:  # Any: as above
        """Returns the claims of the work, or gives them back when the caller has left meanwhile."""
        task = self._tasks.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)
            raise

    def _unwanted(self, task: asyncio.Task[list[Delivery]]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.release([delivery.key for delivery in task.result()])

    async def close(self) -> None:
        await self._tasks.wait()


@contextlib.contextmanager
def _doubting(pool: ZonePool) -> Iterator[None]:
    """Doubts the pool again when the question in the block fails."""
    try:
        yield
    except BaseException:
        pool.doubt()
        raise
