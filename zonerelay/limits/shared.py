"""Shares limits between machines through a store that holds one versioned record per zone.

There is no server that decides. Each relay reads the book, applies the pure code of `authority.py`, and
writes the book back. If another relay has written in between, the write is refused and the relay starts
again. So a relay that is slow or stopped does not delay the others.

Failure: a relay that is silent for `LEASE` seconds, by the store's clock, loses all its units. It stops using
them before that (`worker/keeper`). While the store is unreachable, every exchange fails at once. When the
store is reachable again, the relay declares everything it holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from zonerelay.limits.authority import Book
from zonerelay.limits.values import Answer, AuthorityError, Request
from zonerelay.process.tasks import cancel_all

LEASE = 15.0
"""Seconds for which the units of a relay that has died stay unused."""

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
"""The longest pause in seconds between two attempts to connect."""

MAX_TRIES = 100
"""Attempts to replace a book. Each one fails if another relay has written first."""

GOODBYE = 1.0
"""Seconds for giving everything back at the end."""


@dataclass(frozen=True, slots=True)
class BookVersion:
    """A stored version of the limits of one zone. `stamp` identifies the version, and `now` is the store's
    clock.
    """

    data: bytes | None
    stamp: int
    now: float


class BookStore(Protocol):
    """Interface: stores the limits of each zone with a version number. All methods raise AuthorityError.
    After an error `open` must be called first.
    """

    name: str

    async def open(self, hear: Callable[[str], None]) -> None:
        """Connect. `hear` is called with each word that another relay has sent."""

    async def read(self, zone: str) -> BookVersion: ...

    async def replace(
        self, zone: str, page: BookVersion, data: bytes | None, *, keep: float, words: Sequence[str]
    ) -> bool:
        """Replace the stored limits of a zone, keep them for at least `keep` seconds, and send `words` to the
        other relays. Return false, with nothing done, if the page has changed.
        """

    async def ended(self) -> None:
        """Return when the connection has ended."""

    async def close(self) -> None:
        """Close the connection. Never raises."""


class SharedAuthority:
    """Shares limits through a store. `holder` is a name of this process that no other process has had."""

    def __init__(self, shelf: BookStore, holder: str, *, lease: float = LEASE) -> None:
        self.name = shelf.name
        self.lease: float | None = lease
        self._lease = lease
        self._shelf = shelf
        self._holder = holder
        self._zones: dict[str, int] = {}
        self._news: Callable[[str], None] | None = None
        self._open = False
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        self._news = news
        with contextlib.suppress(AuthorityError):
            await self._connect()
        self._task = asyncio.get_running_loop().create_task(self._stay_connected(back, gone))

    async def exchange(self, zone: str, request: Request) -> Answer:
        if not self._open:
            raise AuthorityError(f"{self.name} cannot be reached")
        self._zones[zone] = request.zone_limit
        for _ in range(MAX_TRIES):
            page = await self._shelf.read(zone)
            book = self._read(page)
            answer, news = book.exchange(self._holder, request, page.now, until=page.now + self._lease)
            words = [f"{holder} {zone}" for holder in sorted(news)]
            keep = max(2 * self._lease, book.binds_until - page.now)
            data = None if book.is_empty else book.encode()
            if (data is None and page.data is None) or await self._shelf.replace(
                zone, page, data, keep=keep, words=words
            ):
                return answer
        raise AuthorityError(f"{self.name}: others were faster {MAX_TRIES} times")

    async def close(self) -> None:
        with contextlib.suppress(AuthorityError, TimeoutError):
            async with asyncio.timeout(GOODBYE):
                for zone, limit in list(self._zones.items()):
                    await self.exchange(zone, Request(limit, everything=True))
        await cancel_all(self._task)
        self._open = False
        await self._shelf.close()

    def _read(self, page: BookVersion) -> Book:
        try:
            return Book.decode(page.data)
        except ValueError as error:
            raise AuthorityError(f"{self.name}: what is written there makes no sense: {error}") from error

    async def _connect(self) -> None:
        await self._shelf.open(self._hear)
        self._open = True

    def _hear(self, word: str) -> None:
        holder, _, zone = word.partition(" ")
        if holder == self._holder and self._news is not None:
            self._news(zone)

    async def _stay_connected(self, back: Callable[[], None], gone: Callable[[str], None]) -> None:
        now = asyncio.get_running_loop().time
        pause = FIRST_PAUSE
        while True:
            if self._open:
                since = now()
                await self._shelf.ended()
                self._open = False
                gone("the connection has ended")
                if now() - since > LONGEST_PAUSE:
                    pause = FIRST_PAUSE
            # This also applies after a connection that was useless, because a failing server may accept many
            # of them.
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                await self._connect()
            except AuthorityError as error:
                gone(str(error))
            else:
                back()
