"""Keeps the outbox's database usable: a session in the relays' table, its lease, and the rows of dead relays.

Claimed rows name the session. Whichever relay notices that a session has ended gives its rows back to the
queue. A relay that was killed and starts again under its `name` ends its earlier session itself.

On trouble nothing is claimed and nothing new is sent until the database is back. SMTP does not notice. Tables
that cannot be used are an error at the start only.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from zonerelay.config.settings import OutboxSettings
from zonerelay.model.clock import Clock
from zonerelay.model.queue_name import QueueName
from zonerelay.outbox.database import tables
from zonerelay.outbox.database.sql import Statements
from zonerelay.outbox.database.tables import Names, has_priority
from zonerelay.store.contract import Lost, StoreError, StoreOpenError
from zonerelay.store.postgres.driver import Access, Link
from zonerelay.store.postgres.session import DatabaseSession
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor

REAP_PAGES = 100

_log = logging.getLogger("zonerelay.outbox")


@dataclass(frozen=True, slots=True)
class OutboxSurroundings:
    """What a worker gives to all parts of its outbox. `redact` is always on: its texts go into the database.

    `on_lost(keys)`: what waits of these is to be dropped; `on_news(queue)`: there is something to be claimed.
    """

    settings: OutboxSettings
    clock: Clock
    redact: Redactor
    events: Events
    known_zones: Callable[[], Collection[str]]
    on_news: Callable[[QueueName], None]
    on_lost: Lost


def names_of(outbox: OutboxSettings) -> Names:
    return Names(outbox.schema, outbox.table, outbox.mailbox_table)


class OutboxKeeper(DatabaseSession):
    """One relay's place in the database of the outbox.

    `heard`: an application may have inserted rows. `paused` and `resumed(kept)` frame trouble; `kept` says
    whether what was claimed before still belongs to this relay. `regained`: the lease had lapsed, and no
    other relay has used that.
    """

    def __init__(self, access: Access, name: str, around: OutboxSurroundings) -> None:
        super().__init__(access, around.clock)
        self.session = ""
        self.usable = False
        self.problem = ""
        self.reaped = 0
        self.heard: Callable[[], None] = lambda: None
        self.paused: Callable[[], None] = lambda: None
        self.resumed: Callable[[bool], None] = lambda kept: None
        self.regained: Callable[[], None] = lambda: None
        self.statements = self._statements = Statements(names_of(around.settings))
        self._name = name
        self._around = around
        self._claimed_under = ""

    # --- may it be used?

    @property
    def may_begin(self) -> bool:
        """What is claimed may be attempted."""
        return self.usable and self.holds_lease

    def check_usable(self) -> None:
        if not self.usable:
            raise StoreError(f"the outbox cannot be used: {self.problem or 'it is closed'}")

    def writing_link(self) -> Link:
        self.check_usable()
        return super().writing_link()

    # --- start and end

    async def start(self) -> None:
        """Raises StoreOpenError for tables that will not do. A database out of reach is tried again."""
        try:
            await self._return()
        except StoreOpenError:
            self._cut()
            raise
        except StoreError as error:
            self._cut()
            self.trouble(error)
        else:
            self._begin_use()
        self._heart = self._tasks.start(self._beat())

    async def close(self) -> None:
        """Ends the session. Call it when nothing is written any more."""
        self._closed = True
        await self._tasks.cancel()
        if self.usable and self._control is not None:
            with contextlib.suppress(StoreError):
                await self._control.fetch(self._statements.retire, self.session)
                await self._reap_orphans(self._control)
        self.usable = False
        await self._hang_up()

    # --- connecting

    async def _enter(self, control: Link) -> bool:
        if self._around.settings.create_tables:
            await tables.migrate(control, self._statements.names)
        await tables.check(control, self._statements.names)
        self._statements.use(has_priority=await has_priority(control.fetch, self._statements.names))
        await control.listen(self._statements.names.channel, lambda _text: self.heard())
        if self.session and await self._renew():
            return False
        rows = await self._take_lease(control, self._statements.register, self._name, self._lease)
        self.session = rows[0][0]
        return True

    def _begin_use(self) -> None:
        # A session that a failed attempt to connect has begun holds no claims.
        kept = self.session == self._claimed_under
        self._claimed_under = self.session
        self.usable = True
        self.problem = ""
        self.resumed(kept)
        self.heard()

    # --- the lease

    async def _renew(self) -> bool:
        had_lapsed = not self.holds_lease
        values = (self._statements.renew, self.session, self._lease)
        rows = await self._take_lease(self._connected(self._control), *values, timeout=self._renew_timeout)
        if rows and had_lapsed and self.usable:
            self.regained()
        return bool(rows)

    async def _after_beat(self) -> None:
        """Gives back what dead relays have claimed."""
        control = self._connected(self._control)
        await control.fetch(self._statements.bound, self._longest_lease)
        await control.fetch(self._statements.bury, self.session, self._name)
        found = await self._reap_orphans(control)
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

    async def _return(self) -> None:
        await self._connect()
        await self._after_beat()

    def _begin_trouble(self, error: StoreError) -> None:
        self.usable = False
        self._go_on_in_trouble(error)
        self.paused()

    def _go_on_in_trouble(self, error: StoreError) -> None:
        if str(error) != self.problem:
            self.problem = str(error)
            _log.error("the outbox cannot be used: %s", self.problem)

    def _end_trouble(self) -> None:
        self._begin_use()
        _log.warning("the outbox can be used again")

    def _report_bug(self, error: Exception) -> None:
        self._around.events.trouble("outbox.connect", error)
