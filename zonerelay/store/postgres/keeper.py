"""Keeps the database usable: connections, this relay's lease, what others tell, reconnecting after trouble.

A relay is a session in the table `node`. While its heart beats the session lives, and with it every claim
it has made; a session that has not been heard of for `lease` ends, and whoever notices frees its claims. The
number of the node is held by an advisory lock, so no two relays make message ids with the same one.

On any trouble nothing more is written, new mail is refused and nothing is handed out until everything was
connected again, which is tried with growing pauses for as long as it takes. The store then compares what it
remembers with what the database says (`Store.resync`), because the fate of the last write is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Protocol

from zonerelay.store.common import claiming, health
from zonerelay.store.common.group_commit import GroupCommitter
from zonerelay.store.common.health import Health
from zonerelay.store.common.queue_mark import STRANGE, QueueMark, StrangeStoreError, new_mark
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.batch import Submission, TransactionWriter
from zonerelay.store.postgres.driver import Access, ClashError, Link
from zonerelay.store.postgres.expiry import Reaper
from zonerelay.store.postgres.links import Links
from zonerelay.store.postgres.rows import unword
from zonerelay.store.postgres.schema import check_schema, migrate
from zonerelay.store.postgres.server import UnsafeError, check_server
from zonerelay.store.surroundings import Surroundings

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to connect again."""
BEATS = 4
"""Renewals in one lease: three may fail."""
LONGEST_BEAT = 10.0

UNREACHABLE = "the database cannot be used"
UNSAFE = "the database may lose what it has acknowledged"

_log = logging.getLogger("zonerelay.store")


class Resync(Protocol):
    """What the store does when everything may have changed."""

    async def __call__(self, *, new_session: bool) -> None: ...


class PostgresKeeper:
    """One relay's place in one database. `node` is its number."""

    def __init__(
        self,
        access: Access,
        *,
        node: int,
        around: Surroundings,
        mark: QueueMark,
    ) -> None:
        self.node = node
        self.session = 0
        self.last_id = 0
        self.links = Links(access)
        self.channel = f"{access.schema}_news"
        self.on_failure: Callable[[StoreError], None] = _nobody
        self.resync: Resync | None = None
        self.reconcile: Callable[[], Awaitable[None]] | None = None
        self.all_zones: Callable[[], None] = lambda: None
        self._access = access
        self._mark = mark
        self._lease = access.lease
        self._beat_every = min(access.lease / BEATS, LONGEST_BEAT)
        self._clock = around.clock
        self._held_until = float("-inf")
        self.on_news = around.on_news
        self._control: Link | None = None
        self._writer: Link | None = None
        self._closed = False
        self._health = Health(around.on_health)
        self.check_usable = self._health.check_usable
        self.unhealthy = self._health.unhealthy
        self.problems = self._health.problems
        self.usable = self._health.usable
        self._tasks: set[asyncio.Task[None]] = set()
        self._heart: asyncio.Task[None] | None = None
        self._pause = FIRST_PAUSE
        self.has_company = False
        """Other nodes were there at the last beat."""
        self.committer: GroupCommitter[Submission, Sequence[Submission], float] = GroupCommitter(
            lambda batches, _size: [job for jobs in batches for job in jobs],
            self._start_writer,
            clock=around.clock,
            observe=around.observe_commit,
            failed=self._batch_failed,
        )

    def _start_writer(self, tell: Callable[..., None]) -> TransactionWriter:
        return TransactionWriter(
            tell,
            link=lambda: self._usable(self._writer),
            session=lambda: self.session,
            last_id=lambda: self.last_id,
            channel=self.channel,
            clock=self._clock,
        )

    # --- may it be used?

    def check_open(self) -> None:
        """Raises StoreError once the relay has closed the store."""
        if self._closed:
            raise StoreError(health.CLOSED)

    @property
    def holds_lease(self) -> bool:
        """Nobody can have taken over what we have claimed."""
        return self._clock.monotonic() < self._held_until

    async def probe(self) -> None:
        self.check_usable()
        try:
            renewed = await self._renew()
        except StoreError as error:
            self.trouble(error)
            raise
        if not renewed:
            raise self.lease_lost()

    # --- start and end

    async def start(self) -> None:
        """Raises StoreError, with everything closed."""
        try:
            await self._connect()
        except BaseException:
            self._cut()
            self.committer.stop()
            raise
        self._heart = self._spawn(self._beat())
        self._spawn(self._go_round())

    async def close(self) -> None:
        """Finish what was submitted, give every claim back, say good-bye."""
        if self._closed:
            return
        self._closed = True
        self._health.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        was_usable = self._health.refusal is None
        closed = StoreError(health.CLOSED)
        self._health.refusal = self._health.refusal or closed
        await self.committer.drain()
        self.committer.refuse(closed)
        self.committer.stop()
        self._health.refusal = closed
        if was_usable:
            with contextlib.suppress(StoreError):
                await self._reaper().leave(self.session, self.last_id)
        for link in (self._control, self._writer):
            if link is not None:
                await link.close()
        await self.links.close()

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- connecting

    async def _connect(self) -> bool:
        """True when claims of before are void."""
        sent = self._clock.monotonic()
        control = self._control = await Link.open(self._access)
        await self._check_server()
        await self._prepare(control)
        ((taken,),) = await control.fetch(sql.TAKE_NUMBER, f"zonerelay node {self._access.schema}", self.node)
        if not taken:
            raise StoreOpenError(
                f"another relay is connected to the database as node {self.node}: give every relay that"
                " shares it its own [postgres] node"
            )
        await control.listen(self.channel, self._hear)
        renewed = bool(self.session) and await self._renew()
        if not renewed:
            ((self.session,),) = await control.fetch(sql.REGISTER, self.node, self._lease)
            self._held_until = sent + self._lease
            await self._check_schema(control)
        self._writer = await Link.open(self._access)
        if self._writer.pid == control.pid:
            raise StoreOpenError(
                "a pooler in front of the database gives two connections the same session: connect to the"
                " database itself, or use a pool for sessions (pgbouncer: pool_mode = session)"
            )
        for link in (control, self._writer):
            link.on_end(lambda link=link: self._ended(link))  # type: ignore[misc]
        return not renewed

    async def _prepare(self, control: Link) -> None:
        """Also after trouble: an empty database may have been accepted."""
        ((is_there,),) = await control.fetch(sql.HAS_MARK)
        rows = await control.fetch(sql.MARK) if is_there else ()
        await self._mark.check(rows[0][0] if rows else None)
        await migrate(control, self._access.schema)
        if not rows:
            await control.fetch(sql.SET_MARK, new_mark(self._clock))  # or it is another relay's
            rows = await control.fetch(sql.MARK)
        await self._mark.adopt(rows[0][0])

    async def _check_server(self) -> None:
        await check_server(self._usable(self._control), accepts_loss=self._access.accepts_loss)

    async def _check_schema(self, control: Link) -> None:
        try:
            await check_schema(control, self._access.schema)
        except StoreOpenError:
            await control.fetch(sql.RETIRE, self.session, self.last_id)
            self.session = 0
            raise

    def _cut(self) -> None:
        for link in (self._control, self._writer):
            if link is not None:
                link.cut()
        self._control = self._writer = None
        self.links.cut()

    def _ended(self, link: Link) -> None:
        if link in {self._control, self._writer}:
            self.trouble(StoreError("the database has ended the connection"))

    def _usable(self, link: Link | None) -> Link:
        if link is None:
            raise StoreError(UNREACHABLE)
        return link

    # --- the lease

    async def _renew(self) -> bool:
        """A durable write; false when our session has ended."""
        sent = self._clock.monotonic()
        rows = await self._usable(self._control).fetch(
            sql.RENEW, self.session, self._lease, self.last_id, timeout=max(1.0, self._beat_every)
        )
        if rows:
            self._held_until = sent + self._lease
        return bool(rows)

    def lease_lost(self) -> StoreError:
        """Another node believed us dead: start again under a new session."""
        error = StoreError("the lease has run out: other nodes may have taken over what was claimed here")
        self.trouble(error)
        return error

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_every)
            if self._health.refusal is not None:
                continue
            try:
                if not await self._renew():
                    self.lease_lost()
                    continue
                self._pause = FIRST_PAUSE
                await self._check_server()
                await self.reap()
            except ClashError:
                continue  # somebody else was at the same; there is a next time
            except StoreError as error:
                self.trouble(error)

    async def _go_round(self) -> None:
        """Apart from the heart, which no claim or update that takes long may hold up."""
        while True:
            await asyncio.sleep(claiming.RECONCILE)
            if self._health.refusal is None and self.reconcile is not None:
                try:
                    await self.reconcile()
                except StoreError as error:
                    _log.warning("claims could not be compared with the database this time: %s", error)

    async def reap(self) -> None:
        """Free what dead nodes have left, and let everybody know."""
        ((others,),) = await self._usable(self._control).fetch(sql.OTHERS, self.session)
        self.has_company = others > 0
        zones, some_died = await self._reaper().reap(self.session)
        for zone in zones:
            self.on_news(zone)
        if some_died:
            # Nobody waits for what they had deferred, either.
            self.all_zones()

    def _reaper(self) -> Reaper:
        return Reaper(self._usable(self._control), self.channel, self._lease)

    def _hear(self, payload: str) -> None:
        session, _, zone = payload.partition(" ")
        if session == str(self.session) or self._closed:
            return
        if zone:
            self.on_news(unword(zone))
        else:
            self.all_zones()

    # --- trouble

    def _batch_failed(self, error: StoreError) -> None:
        """Everything that was submitted fails with it."""
        self.trouble(error)
        self.on_failure(error)

    def trouble(self, error: StoreError) -> None:
        """Stop using the database until it was connected again."""
        if self._closed or self._health.refusal is not None:
            return
        _log.error("the database cannot be used: %s", error)
        self._health.refusal = type(error)(str(error))
        self.committer.refuse(self._health.refusal)
        self._health.set("database", _reason(error))
        self._spawn(self._recover())

    async def _recover(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._pause)
            # Not shorter again before a heart has beaten: a full disk lets us in and takes nothing.
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            try:
                await self._reconnect()
            except StoreError as error:
                self._cut()
                self._health.set("database", _reason(error))
                if str(error) != said:
                    said = str(error)
                    _log.error("the database cannot be used yet: %s", error)
                continue
            self.committer.resume()
            self._health.refusal = None
            self._health.set("database", None)
            _log.warning("the database is back")
            self.all_zones()
            return

    async def _reconnect(self) -> None:
        self._cut()
        await self.committer.drain()
        new_session = await self._connect()
        assert self.resync is not None
        await self.resync(new_session=new_session)
        await self.reap()


def _reason(error: StoreError) -> str:
    if isinstance(error, StrangeStoreError):
        return STRANGE
    return UNSAFE if isinstance(error, UnsafeError) else UNREACHABLE


def _nobody(_error: StoreError) -> None:
    """Until the store listens."""
