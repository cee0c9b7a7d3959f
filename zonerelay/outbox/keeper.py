"""Keeps the outbox's database usable: maintains the relay's session and lease, and releases the rows of dead
relays.

Claimed rows name the session. The first relay that notices that a session has ended returns its rows to the
queue. A relay that was killed and starts again under its `name` ends its earlier session itself. A session
that is not renewed for `lease` seconds ends, and any other relay releases its claims.

On failure nothing is claimed and nothing new is sent until every connection is restored. The relay retries
without limit, with growing pauses. The pauses become short again only after a renewal has succeeded, because
a server with a full disk accepts connections but writes nothing. SMTP is not affected. Tables that cannot be
used are an error at the start only.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Sequence

import msgspec

from zonerelay.config.settings import OutboxSettings
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import QueueName
from zonerelay.outbox.database import tables
from zonerelay.outbox.database.sql import OutboxStatements
from zonerelay.outbox.database.tables import TableNames
from zonerelay.process.tasks import Tasks
from zonerelay.store.contract import Lost, StoreError, StoreOpenError
from zonerelay.store.postgres import driver
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to reconnect."""
BEATS = 4
"""Renewals in one lease, of which three may fail."""
LONGEST_BEAT = 10.0
LONGEST_LEASE = 3600.0
"""The longest remaining lease, in seconds, that other relays accept. A longer one was written before the
server's clock was set back, and would keep a dead relay's mail until the clock has caught up.
"""
REAP_PAGES = 100
LINKS = 6
"""Connections for statements. Five of them may read large rows at the same time."""

_log = logging.getLogger("zonerelay.outbox")


class OutboxContext(msgspec.Struct, frozen=True):
    """The dependencies that a worker passes to all parts of its outbox.

    `redact` is always on, because its texts go into the database. `on_lost(keys)` is called with deliveries
    that must no longer wait, and `on_news(queue)` if a queue may have rows to claim.
    """

    settings: OutboxSettings
    clock: Clock
    redact: Redactor
    events: Events
    known_zones: Callable[[], Collection[str]]
    on_news: Callable[[QueueName], None]
    on_lost: Lost


def names_of(outbox: OutboxSettings) -> TableNames:
    return TableNames(outbox.schema, outbox.table, outbox.mailbox_table)


class OutboxKeeper:
    """Maintains the database connections and the lease of one relay with an outbox.

    It calls `heard` if an application may have inserted rows, and `paused` and `resumed(kept)` before and
    after a failure; `kept` is whether earlier claims still belong to this relay. It calls `resumed` too if
    the lease had lapsed and no other relay has taken advantage of that. Statements use `_links`, and
    `_control` carries the lease.
    """

    def __init__(self, access: driver.DatabaseAccess, name: str, around: OutboxContext) -> None:
        self._links = driver.DatabasePool(lambda: driver.DatabaseConnection.open(access), LINKS)
        self._access = access
        self._lease = access.lease
        self._control: driver.DatabaseConnection | None = None
        self._unusable = asyncio.Event()
        self._unusable.set()
        self._pause = FIRST_PAUSE
        self._beat_every = min(access.lease / BEATS, LONGEST_BEAT)
        self._renew_timeout = max(1.0, self._beat_every)
        self._held_until = float("-inf")
        self._tasks = Tasks()
        self.session = ""
        self.problem = ""
        self.reaped = 0
        self.heard: Callable[[], None] = lambda: None
        self.paused: Callable[[], None] = lambda: None
        self.resumed: Callable[[bool], None] = lambda kept: None
        self.statements = OutboxStatements(names_of(around.settings))
        self._name = name
        self.around = around
        self._claimed_under = ""

    # --- availability

    @property
    def usable(self) -> bool:
        return not self._unusable.is_set()

    @property
    def holds_lease(self) -> bool:
        """Whether this relay's lease is valid, so that no other relay can have taken over its claims."""
        return self.around.clock.boottime() < self._held_until

    @property
    def may_begin(self) -> bool:
        """Whether delivery attempts for claimed rows may start."""
        return self.usable and self.holds_lease

    def check_usable(self) -> None:
        if not self.usable:
            raise StoreError(f"the outbox cannot be used: {self.problem or 'it is closed'}")

    async def fetch(self, statement: str, *values: object) -> Sequence[driver.Columns]:
        """Run a statement and return its rows. Raises StoreError. A lost connection pauses every user of the
        session.
        """
        self.check_usable()
        try:
            async with self._links.use() as link:
                return await link.fetch(statement, *values)
        except driver.ConnectionLostError as error:
            # It is unknown which rows the lost statement has claimed. Only a new connection can find out.
            self.failed(error)
            raise

    # --- start and end

    async def start(self) -> None:
        """Connect to the database and acquire the lease. Raises StoreOpenError if the tables cannot be used.
        If the database cannot be reached, the relay keeps trying.
        """
        try:
            await self._connect()
        except StoreOpenError:
            self._cut()
            raise
        except StoreError as error:
            self._report(error)
        self._tasks.start(self._run())

    async def close(self) -> None:
        """End this relay's session in the database. Call this after the last write."""
        await self._tasks.cancel()
        if self.usable and self._control is not None:
            with contextlib.suppress(StoreError):
                await self._control.fetch(self.statements.retire, self.session)
                await self._reap_orphans(self._control)
        self._unusable.set()
        if self._control is not None:
            await self._control.close()
        await self._links.close()

    # --- connecting

    async def _connect(self) -> None:
        """Connect, prepare the tables, renew or begin the session, and clean up after a failure. Then start
        to use the database. Raises StoreError.
        """
        self._cut()
        control = self._control = await driver.DatabaseConnection.open(self._access)
        if self.around.settings.create_tables:
            await tables.create(control, self.statements.names)
        self.statements.use(has_priority=await tables.check(control, self.statements.names))
        await control.listen(self.statements.names.channel, lambda _text: self.heard())
        if not (self.session and await self._renew(control)):
            rows = await self._take_lease(control, self.statements.register, self._name, self._lease)
            self.session = rows[0][0]
        control.on_end(functools.partial(self._ended, control))
        await self._after_beat(control)
        # A session that began in a failed attempt to connect has no claims.
        kept = self.session == self._claimed_under
        self._claimed_under = self.session
        self._unusable.clear()
        self.problem = ""
        self.resumed(kept)
        self.heard()

    def _cut(self) -> None:
        if self._control is not None:
            self._control.cut()
            self._control = None
        self._links.cut()

    def _ended(self, link: driver.DatabaseConnection) -> None:
        if link is self._control:
            self.failed(StoreError("the database closed the connection"))

    # --- the lease

    async def _take_lease(
        self, link: driver.DatabaseConnection, statement: str, *values: object, timeout: float | None = None
    ) -> Sequence[driver.Columns]:
        """Run a statement that begins or renews the session. It returns no rows if the session has ended."""
        sent = self.around.clock.boottime()
        rows = await link.fetch(statement, *values, timeout=timeout)
        if rows:
            self._held_until = sent + self._lease
        return rows

    async def _run(self) -> None:
        """Renew the lease regularly while the database is usable, and reconnect when it is not."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unusable.wait(), self._beat_every)
            try:
                if not self.usable or self._control is None:
                    await asyncio.sleep(self._pause)
                    self._pause = min(self._pause * 2, LONGEST_PAUSE)
                    await self._connect()
                    _log.warning("the outbox is usable again")
                elif await self._renew(self._control):
                    self._pause = FIRST_PAUSE
                    await self._after_beat(self._control)
                else:
                    # Another relay has ended this session as dead. This relay begins again under a new one.
                    self.failed(
                        StoreError("the lease has expired; other relays may have taken over the rows")
                    )
            except driver.TransactionConflictError:
                continue  # another relay does the same just now; the next beat does the rest
            except StoreError as error:
                if self.usable:
                    self.failed(error)
                else:
                    self._report(error)
            except Exception as error:  # noqa: BLE001 - without this task the lease ends, and nobody reconnects
                self.around.events.error("outbox.connect", error)

    async def _renew(self, control: driver.DatabaseConnection) -> bool:
        """Renew the lease with a durable write, and return false if the session has ended."""
        had_lapsed = not self.holds_lease
        values = (self.statements.renew, self.session, self._lease)
        rows = await self._take_lease(control, *values, timeout=self._renew_timeout)
        if rows and had_lapsed and self.usable:
            self.resumed(True)
        return bool(rows)

    async def _after_beat(self, control: driver.DatabaseConnection) -> None:
        """Release the claims of dead relays, after each renewal of the lease."""
        # Other relays may have longer leases than this one.
        await control.fetch(self.statements.bound, max(LONGEST_LEASE, 4 * self._lease))
        await control.fetch(self.statements.bury, self.session, self._name)
        found = await self._reap_orphans(control)
        if found:
            self.reaped += found
            self.heard()

    async def _reap_orphans(self, link: driver.DatabaseConnection) -> int:
        total = 0
        for _ in range(REAP_PAGES):
            rows = await link.fetch(self.statements.reap)
            total += len(rows)
            if not rows:
                break
        return total

    # --- failures

    def failed(self, error: StoreError) -> None:
        """Report that the database has failed, and stop using it until it is connected again."""
        if self.usable:
            self._unusable.set()
            self._report(error)
            self.paused()

    def _report(self, error: StoreError) -> None:
        if str(error) != self.problem:
            self.problem = str(error)
            _log.error("the outbox cannot be used: %s", self.problem)
