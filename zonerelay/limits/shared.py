"""Shares limits between machines through a store: one book for each zone, read, decided on, and replaced.

No server decides: each relay reads the book, applies the pure code of `authority/`, and writes the book back
unless another relay has written meanwhile; then it begins again. A relay that is slow or stopped in between
delays no other one; its outdated write is refused.

Failure: a relay that is not heard of for `LEASE` seconds, by the store's clock, loses all units; it stops
using them before (`worker/keeper`). While the store is out of reach every exchange fails at once; when the
store is there again the relay declares everything it holds.
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
"""Seconds. A relay that dies leaves its part unused for so long."""

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
"""Seconds between two attempts to connect."""

MAX_TRIES = 100
"""Attempts to replace a book; each one fails because another relay was faster."""

GOODBYE = 1.0
"""Seconds for giving everything back at the end."""


@dataclass(frozen=True, slots=True)
class BookVersion:
    """A book as it is written down. `stamp` tells this state from any other, `now` is the store's clock."""

    data: bytes | None
    stamp: int
    now: float


class BookStore(Protocol):
    """A store of books. All methods raise AuthorityError; after an error `open` comes first."""

    name: str

    async def open(self, hear: Callable[[str], None]) -> None:
        """Connects. `hear` is called with each word that is passed on."""

    async def read(self, zone: str) -> BookVersion: ...

    async def replace(
        self, zone: str, page: BookVersion, data: bytes | None, *, keep: float, words: Sequence[str]
    ) -> bool:
        """Puts this in the page's place, for `keep` seconds at least, and passes on the words. Returns false,
        with nothing done, when the page has changed.
        """

    async def ended(self) -> None:
        """Returns when the connection has ended."""

    async def close(self) -> None:
        """Release the connection. Raises nothing."""


class SharedAuthority:
    """The authority of a shared store. `holder`: a name of this process that no other has had."""

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
            # Also after a connection that was made and was of no use: a server in trouble takes many of them.
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                await self._connect()
            except AuthorityError as error:
                gone(str(error))
            else:
                back()
