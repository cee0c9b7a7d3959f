"""Stores the limits that all relays on a PostgreSQL spool share: the books of zones, a row each.

One statement replaces a row and names the version that was read, so no lock outlives a statement and a
relay that stops delays no other. The server's clock counts. The limits have one connection of their own,
which also hears the news of other relays (NOTIFY).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zonerelay.limits.shared import BookVersion
from zonerelay.limits.values import AuthorityError
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres.driver import Access, Columns, Link
from zonerelay.store.postgres.rows import unword, word

PATIENCE = 5.0
"""Seconds for one statement."""

_READ = """
SELECT (SELECT book FROM limit_book WHERE zone = $1),
       (SELECT version FROM limit_book WHERE zone = $1),
       extract(epoch FROM clock_timestamp())::double precision
"""
_REPLACE = """
WITH done AS (
    INSERT INTO limit_book AS old (zone, version, book) VALUES ($1, $2 + 1, $3)
    ON CONFLICT (zone) DO UPDATE SET version = $2 + 1, book = $3 WHERE old.version = $2
    RETURNING 1
)
SELECT (SELECT count(*) FROM done),
       (SELECT count(pg_notify($4, said)) FROM done, unnest($5::text[]) AS said)
"""


class PostgresShelf:
    """`BookStore` over one database."""

    name = "the spool's database"

    def __init__(self, access: Access) -> None:
        self._access = access
        self._words = f"{access.schema}_limits"
        self._link: Link | None = None
        self._broken = asyncio.Event()

    async def open(self, hear: Callable[[str], None]) -> None:
        await self.close()
        self._broken.clear()
        try:
            link = await Link.open(self._access)
            self._link = link
            link.on_end(self._broken.set)
            await link.listen(self._words, lambda said: hear(unword(said)))
        except StoreError as error:
            await self.close()
            raise AuthorityError(str(error)) from error

    async def read(self, zone: str) -> BookVersion:
        ((data, version, now),) = await self._ask(_READ, zone)
        return BookVersion(data or None, version or 0, float(now))

    async def replace(
        self, zone: str, page: BookVersion, data: bytes | None, *, keep: float, words: Sequence[str]
    ) -> bool:
        del keep  # a row stays; zones are few
        said = [word(each) for each in words]
        ((done, _told),) = await self._ask(_REPLACE, zone, page.stamp, data or b"", self._words, said)
        return bool(done)

    async def ended(self) -> None:
        await self._broken.wait()

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _ask(self, statement: str, *values: object) -> Sequence[Columns]:
        link = self._link
        if link is None:
            raise AuthorityError("not connected")
        try:
            return await link.fetch(statement, *values, timeout=PATIENCE)
        except StoreError as error:
            # What is under way on it is not known: connect anew.
            link.cut()
            self._broken.set()
            raise AuthorityError(str(error)) from error
