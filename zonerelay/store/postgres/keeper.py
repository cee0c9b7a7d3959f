"""Keeps the spool's database usable: a session in the table `node`, news of other relays, dead relays' mail.

An advisory lock holds the number of the node, so no two relays make message ids with the same number. Each
beat checks that the server can keep what a 250 promises, and frees what dead relays have left: their claims,
and the bodies that were arriving there. What is locked meanwhile is freed at a later beat.

On trouble nothing more is written, new mail is refused and nothing is handed out. After the return the store
compares what it remembers with what the database says (`resync`), because the fate of the last write is not
known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from zonerelay.model.queue_name import QueueName
from zonerelay.store.common.claims import index_claims
from zonerelay.store.common.keeper.health import Health
from zonerelay.store.common.queue_mark import QueueMark, StrangeStoreError
from zonerelay.store.common.write.group_commit import GroupCommitter
from zonerelay.store.contract import StoreError, StoreOpenError, Unhealthy
from zonerelay.store.postgres import sql
from zonerelay.store.postgres.batch import Submission, Target, TransactionWriter
from zonerelay.store.postgres.driver import Access, Link
from zonerelay.store.postgres.rows import queue_in
from zonerelay.store.postgres.schema import check_rights, check_schema, migrate
from zonerelay.store.postgres.session import DatabaseSession
from zonerelay.store.surroundings import Surroundings

FREE_ROWS = 1000
"""Claims that are freed in one transaction."""
OLDEST_VERSION = 13
"""Of PostgreSQL."""
KEEPS = ("fsync", "full_page_writes", "synchronous_commit")
"""The settings that make a commit durable, as `sql.SERVER` asks for them."""


_log = logging.getLogger("zonerelay.store")


class UnsafeError(StoreOpenError):
    """The server would lose what it has acknowledged."""


@dataclass(frozen=True, slots=True)
class PostgresHooks:
    """The calls by which the store hears of news and trouble, on the event loop.

    `failed`: everything that was submitted has failed. `resync`: anything may have changed, true under a new
    session. `reconcile`: compare the claims with the database. `on_news(zone)` and `all_zones`: others have
    left something there.
    """

    failed: Callable[[StoreError], None]
    resync: Callable[[bool], Awaitable[None]]
    reconcile: Callable[[], Awaitable[None]]
    on_news: Callable[[QueueName], None]
    all_zones: Callable[[], None]


class PostgresKeeper(DatabaseSession):
    """One relay's place in one database. `node` is its number. `hooks` are set before `start`."""

    hooks: PostgresHooks

    def __init__(self, access: Access, *, node: int, around: Surroundings, mark: QueueMark) -> None:
        super().__init__(access, around.clock)
        self.node = node
        self.session = 0
        self.last_id = 0
        self.channel = f"{access.schema}_news"
        self._mark = mark
        self.health = Health(around.on_health)
        self._said = ""
        self.has_company = False
        """Other nodes were there at the last beat."""
        self.committer: GroupCommitter[Submission, Sequence[Submission], float] = GroupCommitter(
            lambda batches, _size: [job for jobs in batches for job in jobs],
            lambda tell: TransactionWriter(tell, self._target, around.clock),
            clock=around.clock,
            observe=around.observe_commit,
            failed=self._batch_failed,
        )

    def _target(self) -> Target:
        return Target(self.writing_link(), self.session, self.last_id, self.channel)

    # --- may it be used?

    def check_usable(self) -> None:
        self.health.check_usable()

    def check_open(self) -> None:
        """Raises StoreError once the relay has closed the store."""
        if self._closed:
            raise StoreError(Unhealthy.CLOSED)

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
        self._heart = self._tasks.start(self._beat())
        self._tasks.start(self._go_round())

    async def close(self) -> None:
        """Finishes what was submitted, gives every claim back and ends the session."""
        if self._closed:
            return
        self._closed = True
        self.health.close()
        await self._tasks.cancel()
        was_usable = self.health.refusal is None
        closed = StoreError(Unhealthy.CLOSED)
        self.health.refusal = self.health.refusal or closed
        await self.committer.drain()
        self.committer.refuse(closed)
        self.committer.stop()
        self.health.refusal = closed
        if was_usable:
            with contextlib.suppress(StoreError):
                await self._leave(self._connected(self._control))
        await self._hang_up()

    # --- connecting

    async def _connect(self) -> bool:
        is_new = await super()._connect()
        if self._connected(self._writer).pid == self._connected(self._control).pid:
            raise StoreOpenError(
                "a pooler in front of the database gives two connections the same session: connect to the"
                " database itself, or use a pool for sessions (pgbouncer: pool_mode = session)"
            )
        return is_new

    async def _enter(self, control: Link) -> bool:
        await check_server(control, accepts_loss=self.access.accepts_loss)
        await self._prepare(control)
        ((taken,),) = await control.fetch(sql.TAKE_NUMBER, f"zonerelay node {self.access.schema}", self.node)
        if not taken:
            raise StoreOpenError(
                f"another relay is connected to the database as node {self.node}: give every relay that"
                " shares it its own [postgres] node"
            )
        await control.listen(self.channel, self._hear)
        if self.session and await self._renew():
            return False
        ((self.session,),) = await self._take_lease(control, sql.REGISTER, self.node, self._lease)
        try:
            await check_schema(control.fetch, self.access.schema)
        except StoreOpenError:
            await control.fetch(sql.RETIRE, self.session, self.last_id)
            self.session = 0
            raise
        return True

    async def _prepare(self, control: Link) -> None:
        """Checks the mark and makes the tables, also after trouble: an operator may have accepted an empty
        database.
        """

        async def read() -> str | None:
            ((is_there,),) = await control.fetch(sql.HAS_MARK)
            rows = await control.fetch(sql.MARK) if is_there else ()
            return rows[0][0] if rows else None

        await self._mark.check(await read())
        await migrate(control, self.access.schema)
        await check_rights(control.fetch, self.access.schema)
        await self._mark.recognise(read, lambda mark: control.fetch(sql.SET_MARK, mark), self._clock)

    # --- the lease

    async def _renew(self) -> bool:
        control = self._connected(self._control)
        values = (self.session, self._lease, self.last_id)
        return bool(await self._take_lease(control, sql.RENEW, *values, timeout=self._renew_timeout))

    async def _after_beat(self) -> None:
        await check_server(self._connected(self._control), accepts_loss=self.access.accepts_loss)
        await self.reap()

    async def _go_round(self) -> None:
        """Runs apart from the heart, which no claim or update that takes long may hold up."""
        while True:
            await asyncio.sleep(index_claims.RECONCILE)
            if not self._recovering:
                try:
                    await self.hooks.reconcile()
                except StoreError as error:
                    _log.warning("claims could not be compared with the database this time: %s", error)

    # --- dead relays, and what relays tell each other

    async def reap(self) -> None:
        """Frees what dead nodes have left, and tells every relay. Raises StoreError."""
        control, session = self._connected(self._control), self.session
        ((others,),) = await control.fetch(sql.OTHERS, session)
        self.has_company = others > 0
        await control.fetch(sql.BOUND, self._longest_lease)
        dead = await control.fetch(sql.REAP, session)
        zones: set[str] = set()
        for (orphan,) in await control.fetch(sql.ORPHANS):
            zones |= await _free(control, orphan)
        await control.fetch(sql.DROP_DEAD_UPLOADS)
        told = [f"{session} {zone}" for zone in zones] + [f"{session} "] * bool(dead)
        if told:
            await control.fetch(sql.TELL, self.channel, told)
        for zone in zones:
            self.hooks.on_news(queue_in(zone))
        if dead:
            # No relay waits for what the dead ones had deferred, either.
            self.hooks.all_zones()

    async def _leave(self, control: Link) -> None:
        """Ends this relay's own session in good order."""
        await control.fetch(sql.RETIRE, self.session, self.last_id)
        await _free(control, self.session)
        await control.fetch(sql.DROP_DEAD_UPLOADS)
        await control.fetch(sql.TELL, self.channel, [f"{self.session} "])

    def _hear(self, payload: str) -> None:
        session, _, zone = payload.partition(" ")
        if session == str(self.session) or self._closed:
            return
        if zone:
            self.hooks.on_news(queue_in(zone))
        else:
            self.hooks.all_zones()

    # --- trouble

    def _batch_failed(self, error: StoreError) -> None:
        """Fails everything that was submitted."""
        self.trouble(error)
        self.hooks.failed(error)

    def _begin_trouble(self, error: StoreError) -> None:
        _log.error("the database cannot be used: %s", error)
        self.health.refusal = type(error)(*error.args)
        self.committer.refuse(self.health.refusal)
        self.health.set("database", _reason(error))
        self._said = ""

    async def _return(self) -> None:
        await self.committer.drain()
        is_new = await self._connect()
        await self.hooks.resync(is_new)
        await self.reap()

    def _go_on_in_trouble(self, error: StoreError) -> None:
        self.health.set("database", _reason(error))
        if str(error) != self._said:
            self._said = str(error)
            _log.error("the database cannot be used yet: %s", error)

    def _end_trouble(self) -> None:
        self.committer.resume()
        self.health.refusal = None
        self.health.set("database", None)
        _log.warning("the database is back")
        self.hooks.all_zones()

    def _report_bug(self, error: Exception) -> None:
        _log.error("unexpected in the keeper of the database", exc_info=error)


async def check_server(link: Link, *, accepts_loss: bool) -> None:
    """Checks that the server can keep what a 250 promises, unless the operator's words accept a loss.

    Raises StoreOpenError. It costs little: settings may be changed while the relay runs, so each beat asks.
    """
    ((version, standby, *values),) = await link.fetch(sql.SERVER)
    if version < OLDEST_VERSION * 10_000:
        raise StoreOpenError(
            f"the database server is PostgreSQL {version // 10_000}; zonerelay needs {OLDEST_VERSION}"
        )
    if standby:
        raise StoreOpenError("the database server is a standby, which only reads: connect to the primary")
    wrong = [f"{name} = off" for name, value in zip(KEEPS, values, strict=True) if value == "off"]
    if wrong and not accepts_loss:
        raise UnsafeError(
            f"the database server has {' and '.join(wrong)}: it would lose mail that was acknowledged. Turn"
            " it on (docs/postgres.md), or say the words of [postgres] accept_loss"
        )


async def _free(link: Link, session: int) -> set[str]:
    """Frees the claims of a session, and returns their zones."""
    zones: set[str] = set()
    while rows := await link.fetch(sql.FREE, session, FREE_ROWS):
        zones |= {row[0] for row in rows}
    return zones


def _reason(error: StoreError) -> Unhealthy:
    if isinstance(error, StrangeStoreError):
        return Unhealthy.OTHER_QUEUE
    return Unhealthy.DATABASE_UNSAFE if isinstance(error, UnsafeError) else Unhealthy.DATABASE_DOWN
