"""Keeps a relay's session in a PostgreSQL database alive: connections, lease, return after trouble.

A session is a row in a table, and every claim of the relay belongs to it. While the heart beats, the session
lives. A session that is not renewed for `lease` seconds ends, and any other relay frees its claims.

On any trouble the session is not used until everything is connected again, which is tried with growing pauses
for as long as it takes. The pauses are short again only after a beat: a server with a full disk accepts
connections and writes nothing. The class decides no more than that. The keepers of spool and outbox derive
from it, and say how they enter the database, what follows from each beat, and what trouble means.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from zonerelay.model.clock import Clock
from zonerelay.process.tasks import Tasks
from zonerelay.store.contract import StoreError, Unhealthy
from zonerelay.store.postgres.driver import (
    Access,
    ClashError,
    Columns,
    ConnectionLostError,
    Fetch,
    Link,
    Links,
)

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two attempts to connect again."""
BEATS = 4
"""Renewals in one lease: three may fail."""
LONGEST_BEAT = 10.0
LONGEST_LEASE = 3600.0
"""Seconds that a relay's lease may last from now on, as other relays see it. A longer one was written before
the server's clock was set back, and would keep a dead relay's mail for as long as the clock was ahead."""


class DatabaseSession(ABC):
    """A database session. `links` are for reads and claims; `_control` carries the lease, `_writer` the
    outcomes.
    """

    def __init__(self, access: Access, clock: Clock) -> None:
        self.links = Links(access)
        self.access = access
        self._lease = access.lease
        self._clock = clock
        self._control: Link | None = None
        self._writer: Link | None = None
        self._closed = False
        self._recovering = False
        self._pause = FIRST_PAUSE
        self._beat_every = min(access.lease / BEATS, LONGEST_BEAT)
        self._renew_timeout = max(1.0, self._beat_every)
        self._held_until = float("-inf")
        self._heart: asyncio.Task[None] | None = None
        self._tasks = Tasks()

    @property
    def holds_lease(self) -> bool:
        """No other relay can have taken over what this one has claimed."""
        return self._clock.boottime() < self._held_until

    # --- statements

    @abstractmethod
    def check_usable(self) -> None:
        """Raises StoreError during trouble and after the end."""

    async def fetch(self, statement: str, *values: object) -> Sequence[Columns]:
        """Raises StoreError; a connection that breaks is trouble for all users of the session."""
        self.check_usable()
        return await self.ask(statement, *values)

    async def ask(self, statement: str, *values: object) -> Sequence[Columns]:
        """Does as `fetch`, during trouble too: the return after trouble asks for the state of the claims."""
        async with self._link() as link:
            return await link.fetch(statement, *values)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Fetch]:
        """Runs a transaction over a connection of its own, committed when the block ends well. Raises
        StoreError.
        """
        async with self._link() as link, link.transaction() as fetch:
            yield fetch

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[Link]:
        try:
            async with self.links.use() as link:
                yield link
        except ConnectionLostError as error:
            # It is unknown which claims the lost statement made: only a new connection can tell.
            self.trouble(error)
            raise

    # --- connecting

    @abstractmethod
    async def _enter(self, control: Link) -> bool:
        """Prepares the tables, listens, and renews or begins the session. True when it is a new session."""

    async def _connect(self) -> bool:
        """Connects anew. Returns true when the claims of the session before are void. Raises StoreError."""
        control = self._control = await Link.open(self.access)
        is_new = await self._enter(control)
        writer = self._writer = await Link.open(self.access)
        for link in (control, writer):
            link.on_end(functools.partial(self._ended, link))
        return is_new

    def writing_link(self) -> Link:
        """Return the connection for outcomes. Raises StoreError while there is none."""
        return self._connected(self._writer)

    def _connected(self, link: Link | None) -> Link:
        if link is None:
            raise StoreError(Unhealthy.DATABASE_DOWN)
        return link

    def _cut(self) -> None:
        for link in (self._control, self._writer):
            if link is not None:
                link.cut()
        self._control = self._writer = None
        self.links.cut()

    def _ended(self, link: Link) -> None:
        if link in {self._control, self._writer}:
            self.trouble(StoreError("the database has ended the connection"))

    async def _hang_up(self) -> None:
        for link in (self._control, self._writer):
            if link is not None:
                await link.close()
        await self.links.close()

    # --- the lease

    @property
    def _longest_lease(self) -> float:
        """The longest lease in seconds; other relays may have one as long as this relay's."""
        return max(LONGEST_LEASE, 4 * self._lease)

    @abstractmethod
    async def _renew(self) -> bool:
        """Renews the lease with a durable write; false when the session has ended."""

    async def _take_lease(
        self, link: Link, statement: str, *values: object, timeout: float | None = None
    ) -> Sequence[Columns]:
        """Carries out a statement that begins or renews the session; without rows the session has ended."""
        sent = self._clock.boottime()
        rows = await link.fetch(statement, *values, timeout=timeout)
        if rows:
            self._held_until = sent + self._lease
        return rows

    def lease_lost(self) -> StoreError:
        """Begins again under a new session, because another relay has found this one dead."""
        error = StoreError("the lease has run out: other relays may have taken over what was claimed here")
        self.trouble(error)
        return error

    @abstractmethod
    async def _after_beat(self) -> None:
        """Does the rest of each beat, once the lease is renewed. Raises StoreError."""

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_every)
            if self._recovering:
                continue
            try:
                if not await self._renew():
                    self.lease_lost()
                    continue
                self._pause = FIRST_PAUSE
                await self._after_beat()
            except ClashError:
                continue  # another relay does the same just now; the next beat does the rest
            except StoreError as error:
                self.trouble(error)
            except Exception as error:  # noqa: BLE001 - a bug must not end the heart: the lease ends with it
                self._report_bug(error)

    # --- trouble

    def trouble(self, error: StoreError) -> None:
        """Stops using the database until everything is connected again."""
        if self._closed or self._recovering:
            return
        self._recovering = True
        self._begin_trouble(error)
        self._tasks.start(self._recover())

    async def _recover(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            self._cut()
            try:
                await self._return()
            except StoreError as error:
                self._cut()
                self._go_on_in_trouble(error)
            except Exception as error:  # noqa: BLE001 - without this task the relay never comes back
                self._report_bug(error)
            else:
                self._recovering = False
                self._end_trouble()
                return

    @abstractmethod
    async def _return(self) -> None:
        """Connects again and puts right what the trouble has left. Raises StoreError."""

    @abstractmethod
    def _begin_trouble(self, error: StoreError) -> None: ...

    @abstractmethod
    def _go_on_in_trouble(self, error: StoreError) -> None:
        """An attempt to return has failed."""

    @abstractmethod
    def _end_trouble(self) -> None: ...

    @abstractmethod
    def _report_bug(self, error: Exception) -> None:
        """Reports an unexpected error, after which the session goes on."""
