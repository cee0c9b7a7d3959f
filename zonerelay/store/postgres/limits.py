"""Stores the limits that all relays on a PostgreSQL spool share, one row for each zone.

One statement replaces a row if it still has the version that was read. So no lock outlives a statement, and a
stopped relay delays no other. All times use the server's clock. The limits have a separate connection, which
also receives the notifications of other relays (NOTIFY). Through a pooler there are none, because LISTEN
belongs to a session. Relays then see changes at their next exchange.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from zonerelay.limits.shared import VersionedRecord
from zonerelay.store import records
from zonerelay.store.context import authority_errors
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres.driver import Columns, DatabaseAccess, DatabaseConnection, DatabasePool

PATIENCE = 5.0
"""The timeout of one statement in seconds."""

_TABLE = """
CREATE TABLE {s}.limit_book (zone text COLLATE "C" PRIMARY KEY, version bigint NOT NULL, book bytea NOT NULL)
"""
_READ = """
SELECT (SELECT book FROM {s}.limit_book WHERE zone = $1),
       (SELECT version FROM {s}.limit_book WHERE zone = $1),
       extract(epoch FROM clock_timestamp())::double precision
"""
_REPLACE = """
WITH done AS (
    INSERT INTO {s}.limit_book AS old (zone, version, book) VALUES ($1, $2 + 1, $3)
    ON CONFLICT (zone) DO UPDATE SET version = $2 + 1, book = $3 WHERE old.version = $2
    RETURNING 1
)
SELECT (SELECT count(*) FROM done),
       (SELECT count(pg_notify($4, said)) FROM done, unnest($5::text[]) AS said)
"""


class PostgresRecordStore:
    """Stores shared limits in PostgreSQL (a `SharedRecordStore`)."""

    name = "the spool's database"

    def __init__(self, access: DatabaseAccess) -> None:
        self._access = access
        self._schema = f'"{access.schema}"'
        self._notices = f"{access.schema}_limits"
        self._links = DatabasePool(self._connect, 1)

    @contextlib.asynccontextmanager
    async def listening(self, on_notice: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        ended = asyncio.Event()
        with authority_errors():
            async with self._links.use() as link:
                link.on_end(ended.set)
                if not link.is_pooled:
                    await link.listen(
                        self._notices, lambda said: on_notice(records.unfield(said.encode("ascii")))
                    )
        yield ended

    async def _connect(self) -> DatabaseConnection:
        link = await DatabaseConnection.plain(self._access, timeout=PATIENCE)
        with link.cut_on_error():
            ((is_there,),) = await link.fetch(
                "SELECT to_regclass($1) IS NOT NULL", f"{self._schema}.limit_book"
            )
            if not is_there:
                await link.fetch(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                await link.fetch(_TABLE.format(s=self._schema))
        return link

    async def read(self, zone: str) -> VersionedRecord:
        ((data, version, now),) = await self._ask(_READ.format(s=self._schema), zone)
        return VersionedRecord(data or None, version or 0, float(now))

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        del ttl  # a row stays; zones are few
        said = [records.field(each).decode("ascii") for each in notices]
        statement = _REPLACE.format(s=self._schema)
        ((done, _told),) = await self._ask(statement, zone, record.version, data or b"", self._notices, said)
        return bool(done)

    async def close(self) -> None:
        await self._links.close()

    async def _ask(self, statement: str, *values: object) -> Sequence[Columns]:
        with authority_errors():
            async with self._links.use() as link:
                try:
                    return await link.fetch(statement, *values)
                except StoreError:
                    link.cut()  # the next connection looks for the table again
                    raise
