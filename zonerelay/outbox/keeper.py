"""Keeps the outbox's database usable: connections, the lease of this relay, dead relays, reconnecting.

A relay is a session in a table; its claims hang on it. While the heart beats the session lives. One that has
not been heard of for `lease` ends, and whoever notices gives its rows back to the queue. A relay that was
killed and starts again under its `name` ends its earlier session itself.

On any trouble nothing is claimed and nothing new is sent until the database is back, which is tried with
growing pauses. SMTP does not notice. A table that cannot be used is an error at the start only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence

from zonerelay.model.clock import Clock
from zonerelay.outbox.database import migrations
from zonerelay.outbox.database.sql import Statements
from zonerelay.outbox.database.tables import has_priority
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.postgres.driver import Access, ClashError, Columns, ConnectionLostError, Link
from zonerelay.store.postgres.expiry import LONGEST_LEASE
from zonerelay.store.postgres.links import Links

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
BEATS = 4
LONGEST_BEAT = 10.0
REAP_PAGES = 100


class OutboxKeeper:
    """`heard`: somebody may have put something in. `paused` and `resumed(kept)` frame trouble; `kept` says
    whether what was claimed before is still ours. `regained`: the lease had lapsed, and nobody has used it.
    `told(problem)`: `""` when all is well again. `sick`: of our own mistakes, which are tried again, too.
    """

    def __init__(
        self,
        access: Access,
        statements: Statements,
        *,
        name: str,
        create: bool,
        lease: float,
        clock: Clock,
        told: Callable[[str], None],
        sick: Callable[[Exception], None],
    ) -> None:
        self.session = ""
        self.usable = False
        self.problem = ""
        self.reaped = 0
        self.heard: Callable[[], None] = lambda: None
        self.paused: Callable[[], None] = lambda: None
        self.resumed: Callable[[bool], None] = lambda kept: None
        self.regained: Callable[[], None] = lambda: None
        self.links = Links(access)
        self.writer: Link | None = None
        self._control: Link | None = None
        self._access = access
        self._statements = statements
        self._name = name
        self._create = create
        self._lease = lease
        self._beat_every = min(lease / BEATS, LONGEST_BEAT)
        self._clock = clock
        self._told = told
        self._sick = sick
        self._claimed_under = ""
        self._held_until = float("-inf")
        self._closed = False
        self._recovering = False
        self._tasks: set[asyncio.Task[None]] = set()

    # --- may it be used?

    @property
    def holds_lease(self) -> bool:
        """Nobody can have taken over what we have claimed."""
        return self._clock.monotonic() < self._held_until

    @property
    def may_begin(self) -> bool:
        """What is claimed may be attempted."""
        return self.usable and self.holds_lease

    def check_usable(self) -> None:
        if not self.usable:
            raise StoreError(f"the outbox cannot be used: {self.problem or 'it is closed'}")

    def writing_link(self) -> Link:
        self.check_usable()
        assert self.writer is not None
        return self.writer

    async def fetch(self, statement: str, *values: object) -> Sequence[Columns]:
        """Raises StoreError; a connection that broke is trouble for all."""
        self.check_usable()
        try:
            async with self.links.use() as link:
                return await link.fetch(statement, *values)
        except ConnectionLostError as error:
            self.trouble(error)
            raise

    # --- start and end

    async def start(self) -> None:
        """Raises StoreOpenError for tables that will not do. One that cannot be reached is tried again."""
        try:
            await self._connect()
        except StoreOpenError:
            self._cut()
            raise
        except StoreError as error:
            self._cut()
            self.trouble(error)
        else:
            self._usable()
        self._spawn(self._beat())

    async def close(self) -> None:
        """Call when nothing is written any more."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.usable and self._control is not None:
            with contextlib.suppress(StoreError):
                await self._control.fetch(self._statements.retire, self.session)
                await self._reap_orphans(self._control)
        self.usable = False
        for link in (self._control, self.writer):
            if link is not None:
                await link.close()
        await self.links.close()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- connecting

    async def _connect(self) -> None:
        sent = self._clock.monotonic()
        control = self._control = await Link.open(self._access)
        if self._create:
            await migrations.migrate(control, self._statements.names)
        await migrations.check(control, self._statements.names)
        self._statements.use(has_priority=await has_priority(control.fetch, self._statements.names))
        await control.listen(self._statements.names.channel, lambda _text: self.heard())
        if not (self.session and await self._renew()):
            rows = await control.fetch(self._statements.register, self._name, self._lease)
            self.session = rows[0][0]
            self._held_until = sent + self._lease
        self.writer = await Link.open(self._access)
        for link in (control, self.writer):
            link.on_end(lambda link=link: self._ended(link))  # type: ignore[misc]
        await self._reap()

    def _usable(self) -> None:
        # A session that an attempt to connect has made, and that failed later, has no claims of ours.
        kept = self.session == self._claimed_under
        self._claimed_under = self.session
        self.usable = True
        self.problem = ""
        self.resumed(kept)
        self.heard()

    def _cut(self) -> None:
        for link in (self._control, self.writer):
            if link is not None:
                link.cut()
        self._control = self.writer = None
        self.links.cut()

    def _ended(self, link: Link) -> None:
        if link in {self._control, self.writer}:
            self.trouble(StoreError("the database has ended the connection"))

    # --- the lease

    async def _renew(self) -> bool:
        sent = self._clock.monotonic()
        assert self._control is not None
        wait = max(1.0, self._beat_every)
        rows = await self._control.fetch(self._statements.renew, self.session, self._lease, timeout=wait)
        if rows:
            lapsed = not self.holds_lease
            self._held_until = sent + self._lease
            if lapsed and self.usable:
                self.regained()
        return bool(rows)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_every)
            if not self.usable:
                continue
            try:
                if not await self._renew():
                    self.trouble(StoreError("the lease has run out: others may have what was claimed here"))
                    continue
                await self._reap()
            except ClashError:
                continue
            except StoreError as error:
                self.trouble(error)
            except Exception as error:  # noqa: BLE001 - the heart must not stop for a bug
                self._sick(error)

    async def _reap(self) -> None:
        """Give back what dead relays have claimed."""
        assert self._control is not None
        await self._control.fetch(self._statements.bound, max(LONGEST_LEASE, 4 * self._lease))
        await self._control.fetch(self._statements.bury, self.session, self._name)
        found = await self._reap_orphans(self._control)
        if found:
            self.reaped += found
            self.heard()

    async def _reap_orphans(self, link: Link) -> int:
        total = 0
        for _ in range(REAP_PAGES):
            rows = await link.fetch(self._statements.reap)
            total += len(rows)
            if not rows:
                break
        return total

    # --- trouble

    def trouble(self, error: StoreError) -> None:
        if self._closed or self._recovering:
            return
        self.usable = False
        self._recovering = True
        self.problem = str(error)
        self._told(self.problem)
        self.paused()
        self._spawn(self._recover())

    async def _recover(self) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE)
            self._cut()
            try:
                await self._connect()
            except StoreError as error:
                if str(error) != self.problem:
                    self.problem = str(error)
                    self._told(self.problem)
                continue
            except Exception as error:  # noqa: BLE001 - whatever it was, without us nobody comes back
                self._sick(error)
                continue
            self._recovering = False
            self._usable()
            self._told("")
            return
