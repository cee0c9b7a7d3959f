"""Stores the limits that all relays on a PostgreSQL spool share, one row for each zone.

One statement replaces a row if it still has the version that was read. So no lock outlives a statement, and a
stopped relay delays no other. All times use the server's clock. The limits have a separate connection, which
also receives the notifications of other relays (NOTIFY). Through a pooler there are none, because LISTEN
belongs to a session. Relays then see changes at their next exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from zonerelay.limits.shared import VersionedRecord
from zonerelay.limits.values import AuthorityError
from zonerelay.store import records
from zonerelay.store.contract import StoreError
from zonerelay.store.postgres.driver import Columns, DatabaseAccess, DatabaseConnection

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
    """Stores shared limits in PostgreSQL (a `RecordStore`)."""

    name = "the spool's database"

    def __init__(self, access: DatabaseAccess) -> None:
        self._access = access
        self._schema = f'"{access.schema}"'
        self._notices = f"{access.schema}_limits"
        self._link: DatabaseConnection | None = None
        self._broken = asyncio.Event()

    async def open(self, on_notice: Callable[[str], None]) -> None:
        await self.close()
        self._broken.clear()
        try:
            link = self._link = await DatabaseConnection.plain(self._access, timeout=PATIENCE)
            link.on_end(self._broken.set)
            if not link.is_pooled:
                await link.listen(
                    self._notices, lambda said: on_notice(records.unfield(said.encode("ascii")))
                )
            if not (await link.fetch("SELECT to_regclass($1) IS NOT NULL", f"{self._schema}.limit_book"))[0][
                0
            ]:
                await link.fetch(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
                await link.fetch(_TABLE.format(s=self._schema))
        except StoreError as error:
            await self.close()
            raise AuthorityError(str(error)) from error

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
            # The fate of active statements is unknown, so connect again.
            link.cut()
            self._broken.set()
            raise AuthorityError(str(error)) from error
