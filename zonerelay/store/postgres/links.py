"""A few connections for everything that reads or claims. A broken one is replaced when it is next needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from zonerelay.store.postgres.driver import Access, ConnectionLostError, Link

MOST = 4


class Links:
    """Opened one by one as they are needed."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._places = asyncio.Semaphore(MOST)

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Link]:
        """One for the block alone. Raises ConnectionLostError when there is no way to the database."""
        async with self._places:
            link = await self._take()
            self._busy.add(link)
            try:
                yield link
            except ConnectionLostError:
                link.cut()
                raise
            finally:
                self._busy.discard(link)
                if not link.is_closed:
                    self._idle.append(link)

    async def _take(self) -> Link:
        while self._idle:
            link = self._idle.pop()
            if not link.is_closed:
                return link
        return await Link.open(self._access)

    def cut(self) -> None:
        """End all of them at once: what is under way fails."""
        for link in (*self._idle, *self._busy):
            link.cut()
        self._idle.clear()

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().close()
        for link in self._busy:
            link.cut()
