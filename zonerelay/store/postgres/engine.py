"""Stores keys in PostgreSQL, in one table of keys by node.

    mark         one row: the name of this store
    partition    a row for each node: epoch, writer, position of the last batch, end of the lease (null: left)
    entry        node, key, value
    reservation  the keys stored by `reserve`
    limit_book   limits that relays share, a row for each zone
    message, delivery   views of `entry` for people

A batch is one statement, and so one transaction. It updates the row of its partition on the condition that
epoch and number match, and all other changes depend on that row, so a batch of an earlier epoch changes
nothing. The row's lock makes `enter` wait for an active batch. A batch sets the session options that it
depends on (`synchronous_commit`), no table is found by `search_path`, and no lock belongs to a session. So a
pooler in transaction mode works, and no state remains in its connections. A pooler is recognized because its
process number is not the server's. In that case no prepared statement is kept.

On failure: a broken connection is replaced at the next call. Each new one is compared with the last position
that this process has seen, so that a former primary is not read. Leases use the server's clock. A lease that
ends later than LONGEST_LEASE from now was written before that clock was set back, and counts as ended.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from zonerelay.limits.shared import VersionedRecord
from zonerelay.store import records
from zonerelay.store.context import authority_errors
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.keys import port
from zonerelay.store.keys.server import KeptConnection, ServerKeys
from zonerelay.store.postgres.driver import Columns, DatabaseAccess, DatabaseConnection, Fetch

OLDEST_VERSION = 13
LONGEST_LEASE = 3600.0

_TABLES = """
CREATE TABLE IF NOT EXISTS {s}.mark (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    mark text NOT NULL
);
CREATE TABLE IF NOT EXISTS {s}.partition (
    node smallint PRIMARY KEY,
    epoch bigint NOT NULL,
    writer text NOT NULL,
    batch_epoch bigint NOT NULL DEFAULT 0,
    batch bigint NOT NULL DEFAULT 0,
    expires timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
CREATE TABLE IF NOT EXISTS {s}.entry (
    node smallint NOT NULL,
    key bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (node, key)
) WITH (
    toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_limit = 2000
);
ALTER TABLE {s}.entry ALTER COLUMN value SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS {s}.reservation (
    key bytea PRIMARY KEY,
    value bytea NOT NULL,
    until timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS reservation_until ON {s}.reservation (until);
CREATE TABLE IF NOT EXISTS {s}.limit_book (
    zone text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,
    book bytea NOT NULL
);
CREATE OR REPLACE VIEW {s}.message AS
SELECT node, split_part(convert_from(key, 'UTF8'), ' ', 2) AS id,
    convert_from(value, 'UTF8')::json AS metadata
FROM {s}.entry
WHERE key >= 'message ' AND key < 'message!' AND substring(key FROM octet_length(key) - 1) = ' *';
CREATE OR REPLACE VIEW {s}.delivery AS
SELECT node, split_part(convert_from(key, 'UTF8'), ' ', 2) AS zone,
    split_part(convert_from(key, 'UTF8'), ' ', 3) AS message,
    split_part(convert_from(key, 'UTF8'), ' ', 4) AS recipient, convert_from(value, 'UTF8')::json AS record
FROM {s}.entry WHERE key >= 'delivery-webhook ' AND key < 'delivery-zone!'
"""

_MISSING = """
SELECT right_ || ' on ' || c.relname
FROM pg_class c, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) right_
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p')
    AND NOT has_table_privilege(c.oid, right_)
UNION ALL
SELECT 'rows without a policy on ' || c.relname
FROM pg_class c
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p')
    AND row_security_active(c.oid)
ORDER BY 1
"""

_DURABLE = """
set_config('synchronous_commit',
    CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)
"""

_FENCE = """
WITH fence AS (
    UPDATE {s}.partition SET batch_epoch = $2, batch = $3
    WHERE node = $1 AND epoch = $2 AND batch = $3 - 1 RETURNING {durable}
), gone AS (
    DELETE FROM {s}.entry e USING fence WHERE e.node = $1 AND e.key = ANY ($4::bytea[])
), made AS (
    INSERT INTO {s}.entry (node, key, value)
    SELECT $1, p.key, p.value FROM fence, unnest($5::bytea[], $6::bytea[]) AS p (key, value)
    ON CONFLICT (node, key) DO UPDATE SET value = excluded.value
)
"""

_PAGE = """
SELECT key, {value} FROM (
    SELECT key, value, sum(octet_length(key) + {length}) OVER (ORDER BY key) AS total
    FROM {s}.entry WHERE node = $1 AND key >= $2 AND key < $3 ORDER BY key LIMIT $4
) AS p WHERE total - octet_length(key) - {length} < $5 ORDER BY key
"""

_IS_OVER = "{p}expires IS NULL OR {p}expires NOT BETWEEN clock_timestamp() AND clock_timestamp() + {longest}"

_STATEMENTS = {
    "mark": "SELECT mark FROM {s}.mark",
    "set mark": "INSERT INTO {s}.mark (mark) VALUES ($1) ON CONFLICT DO NOTHING",
    "look": """
        SELECT mark, coalesce(epoch, 0), coalesce(writer, ''), coalesce(batch_epoch, 0), coalesce(batch, 0)
        FROM {s}.mark LEFT JOIN {s}.partition ON node = $1""",
    "enter": """
        INSERT INTO {s}.partition AS p (node, epoch, writer, expires)
        VALUES ($1, 1, $2, clock_timestamp() + $3 * interval '1 second')
        ON CONFLICT (node) DO UPDATE
        SET epoch = p.epoch + 1, writer = excluded.writer, expires = excluded.expires
        WHERE p.writer = $2 OR {p_is_over} RETURNING epoch, batch_epoch, batch, {durable}""",
    "renew": """
        UPDATE {s}.partition SET expires = clock_timestamp() + $3 * interval '1 second'
        WHERE node = $1 AND epoch = $2 RETURNING 1""",
    "leave": "UPDATE {s}.partition SET expires = NULL WHERE node = $1 AND epoch = $2 RETURNING 1",
    "peers": "SELECT node, epoch, writer, expires IS NULL, {is_over} FROM {s}.partition ORDER BY node",
    "get": "SELECT key, value FROM {s}.entry WHERE node = $1 AND key = ANY ($2)",
    "page": _PAGE.replace("{value}", "value").replace("{length}", "octet_length(value)"),
    "keys": _PAGE.replace("{value}", "''::bytea").replace("{length}", "0"),
    "last key": """
        SELECT key FROM {s}.entry WHERE node = $1 AND key >= $2 AND key < $3 ORDER BY key DESC LIMIT 1""",
    "expire": """
        DELETE FROM {s}.reservation WHERE key IN (
            SELECT key FROM {s}.reservation WHERE until <= clock_timestamp() ORDER BY until LIMIT 10
            FOR UPDATE SKIP LOCKED)""",
    "reserve": """
        INSERT INTO {s}.reservation AS r (key, value, until) VALUES ($1, $2, to_timestamp($3))
        ON CONFLICT (key) DO UPDATE SET value = excluded.value, until = excluded.until
        WHERE r.until <= clock_timestamp() RETURNING {durable}""",
    "reserved": "SELECT value FROM {s}.reservation WHERE key = $1",
    "unreserve": "DELETE FROM {s}.reservation WHERE key = $1 AND value = $2",
    "write": "{fence} SELECT 1 FROM fence",
    "limits": """
        SELECT (SELECT book FROM {s}.limit_book WHERE zone = $1),
               (SELECT version FROM {s}.limit_book WHERE zone = $1),
               extract(epoch FROM clock_timestamp())::double precision""",
    "replace limits": """
        WITH done AS (
            INSERT INTO {s}.limit_book AS old (zone, version, book) VALUES ($1, $2 + 1, $3)
            ON CONFLICT (zone) DO UPDATE SET version = $2 + 1, book = $3 WHERE old.version = $2
            RETURNING 1
        )
        SELECT (SELECT count(*) FROM done),
               (SELECT count(pg_notify($4, said)) FROM done, unnest($5::text[]) AS said)""",
}


def statements(access: DatabaseAccess) -> dict[str, str]:
    """Return the engine's SQL statements for the schema in `access`."""
    names = {"s": f'"{access.schema}"', "durable": "NULL" if access.accepts_loss else _DURABLE}
    longest = f"{LONGEST_LEASE} * interval '1 second'"
    names |= {
        "fence": _FENCE.format(**names),
        "is_over": _IS_OVER.format(p="", longest=longest),
        "p_is_over": _IS_OVER.format(p="p.", longest=longest),
    }
    return {name: text.format(**names) for name, text in _STATEMENTS.items()}


class PostgresEngine:
    """The engine for PostgreSQL, in the schema that `access` names."""

    def __init__(self, access: DatabaseAccess) -> None:
        self.access = access
        self.lease = access.lease
        self._control = _connection(access)
        self._sql = statements(access)

    def keeper(self, node: int) -> "PostgresKeys":
        return PostgresKeys(self.access, node)

    async def peers(self) -> list[port.PeerPartition]:
        link = await self._control.get()
        if not await _has_table(link.fetch, self.access.schema, "entry"):
            return []
        rows = await link.fetch(self._sql["peers"])
        return [port.PeerPartition(*row) for row in rows]

    async def reserve(self, key: bytes, value: bytes, until: float) -> bytes | None:
        """Reserve a key of the whole store with this value until `until` (Unix time), unless it has a value.
        Return the existing value, or None. The reservation is durable.
        """
        while True:
            async with (await self._control.get()).transaction() as fetch:
                await fetch(self._sql["expire"])
                if await fetch(self._sql["reserve"], key, value, until):
                    return None
                if rows := await fetch(self._sql["reserved"], key):
                    found: bytes = rows[0][0]
                    return found

    async def unreserve(self, key: bytes, value: bytes) -> None:
        """Remove the reservation of a key if it has this value."""
        link = await self._control.get()
        await link.fetch(self._sql["unreserve"], key, value)

    async def close(self) -> None:
        await self._control.close()


def _connection(access: DatabaseAccess) -> KeptConnection[DatabaseConnection]:
    """Return a persistent connection; whenever it is opened, the server is checked for suitability."""

    async def opened() -> DatabaseConnection:
        link = await DatabaseConnection.plain(access, timeout=max(1.0, access.lease / 2))
        with link.cut_on_error():
            await _check_server(link, access)
        return link

    return KeptConnection(opened)


_SERVER = """
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), array_remove(ARRAY[
    CASE current_setting('fsync') WHEN 'off' THEN 'fsync' END,
    CASE current_setting('full_page_writes') WHEN 'off' THEN 'full_page_writes' END], NULL)
"""


async def _check_server(link: DatabaseConnection, access: DatabaseAccess) -> None:
    """Raise StoreOpenError if the server is too old, a standby, or not durable."""
    ((version, is_standby, off),) = await link.fetch(_SERVER)
    if version < OLDEST_VERSION * 10_000:
        raise StoreOpenError(
            f"the database server is PostgreSQL {version // 10_000}; zonerelay requires {OLDEST_VERSION} "
            "or later"
        )
    if is_standby:
        raise StoreOpenError("the database server is a read-only standby; connect to the primary")
    if off and not access.accepts_loss:
        raise StoreOpenError(
            f"the database server has {' = off and '.join(off)} = off and would lose acknowledged mail. "
            'Enable it (docs/store/postgres.md), or set [postgres] unsafe = ["mail-loss"]'
        )


class PostgresKeys(ServerKeys[DatabaseConnection]):
    """A partition in PostgreSQL."""

    def __init__(self, access: DatabaseAccess, node: int) -> None:
        super().__init__(node, _connection(access), _connection(access))
        self._access = access
        self._sql = statements(access)

    # --- reading

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        link = await self._use(self._reader)
        rows = await link.fetch(self._sql["get"], self._node, list(dict.fromkeys(keys)))
        found: dict[bytes, bytes] = dict(map(tuple, rows))
        return [found.get(key) for key in keys]

    async def page(
        self, start: bytes, end: bytes, *, rows: int = port.PAGE_ROWS, values: bool = True
    ) -> port.KeyPage:
        statement = self._sql["page" if values else "keys"]
        link = await self._use(self._reader)
        found = await link.fetch(statement, self._node, start, end, rows + 1, port.PAGE_OCTETS)
        taken: list[port.Row] = [(row[0], row[1]) for row in found[:rows]]
        is_cut = len(found) > rows or sum(len(key) + len(value) for key, value in taken) >= port.PAGE_OCTETS
        return port.KeyPage(taken, port.after(taken[-1][0]) if is_cut else None)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        link = await self._use(self._reader)
        rows = await link.fetch(self._sql["last key"], self._node, start, end)
        return rows[0][0] if rows else None

    # --- entering

    async def _look(self, connection: DatabaseConnection) -> port.PartitionState | None:
        fetch = connection.fetch
        if not await _has_table(fetch, self._access.schema, "entry"):
            return None
        rows = await fetch(self._sql["look"], self._node)
        if not rows:
            return None
        ((mark, epoch, writer, batch_epoch, batch),) = rows
        return port.PartitionState(writer, mark, epoch, port.Position(batch_epoch, batch))

    async def enter(self, writer: str, *, mark: str) -> port.PartitionState:
        sql = self._sql
        async with (await self._writer.get()).transaction() as fetch:
            await _make_tables(fetch, self._access, "entry")
            await _check_rights(fetch, self._access.schema)
            await fetch(sql["set mark"], mark)
            ((mark,),) = await fetch(sql["mark"])
            rows = await fetch(sql["enter"], self._node, writer, self._access.lease)
        if not rows:
            raise port.NodeTakenError(
                f"another relay is node {self._node} of this database, and its lease has not expired; use "
                "a different [postgres] node for each relay that shares the database"
            )
        ((epoch, batch_epoch, batch, _),) = rows
        return self._entered(port.PartitionState(writer, mark, epoch, port.Position(batch_epoch, batch)))

    # --- writing

    async def apply(self, batch: port.WriteBatch) -> None:
        changes = batch.write.changes
        made = {key: value for key, value in changes.items() if value is not None}
        values: list[object] = [
            *(self._node, *batch.position),
            [key for key, value in changes.items() if value is None],
            *(list(made), list(made.values())),
        ]
        link = await self._use(self._writer)
        if not await link.fetch(self._sql["write"], *values):
            raise await self._refused(link, batch.position.epoch)
        self._last = batch.position

    async def _check(self, connection: DatabaseConnection) -> None:
        await _check_server(connection, self._access)

    async def _set_lease(self, connection: DatabaseConnection, *, renews: bool) -> None:
        statement, values = ("renew", [self._access.lease]) if renews else ("leave", [])
        if not await connection.fetch(self._sql[statement], self._node, self._epoch, *values):
            raise await self._refused(connection, self._epoch)


async def _has_table(fetch: Fetch, schema: str, name: str) -> bool:
    rows = await fetch("SELECT to_regclass($1) IS NOT NULL", f'"{schema}".{name}')
    return bool(rows[0][0])


async def _make_tables(fetch: Fetch, access: DatabaseAccess, wanted: str) -> None:
    """Create all tables if the table `wanted` is missing."""
    if await _has_table(fetch, access.schema, wanted):
        return
    schema = f'"{access.schema}"'
    if await _has_table(fetch, access.schema, "schema_version"):
        raise port.first_release(f"schema {access.schema} of the database", "another [postgres] schema")
    # The lock lasts for the transaction. Two relays that start together must not both create the schema.
    await fetch("SELECT pg_advisory_xact_lock(hashtext($1))", f"zonerelay keys {access.schema}")
    if not await fetch("SELECT 1 FROM pg_namespace WHERE nspname = $1", access.schema):
        await fetch(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    for statement in _TABLES.format(s=schema).split(";"):
        await fetch(statement)


async def _check_rights(fetch: Fetch, schema: str) -> None:
    """Raise StoreOpenError if the role lacks privileges. Otherwise mail would be accepted and could not be
    settled.
    """
    missing = [row[0] for row in await fetch(_MISSING, schema)]
    if missing:
        raise StoreOpenError(
            f"the role of [postgres] url lacks privileges in schema {schema}: {', '.join(missing)}. Grant "
            "them, or make the role the owner of the tables (docs/store/postgres.md)"
        )


# --- limits that relays share
#
# One statement replaces a row if it still has the version that was read. So no lock outlives a statement, and
# a stopped relay delays no other. All times use the server's clock. The limits have a separate connection,
# which also receives the notifications of other relays (NOTIFY). Through a pooler there are none, because
# LISTEN belongs to a session. Relays then see changes at their next exchange.

LIMITS_PATIENCE = 5.0
"""The timeout of one statement in seconds."""


class PostgresRecordStore:
    """Stores shared limits in PostgreSQL (a `SharedRecordStore`)."""

    name = "the spool's database"

    def __init__(self, access: DatabaseAccess) -> None:
        self._access = access
        self._sql = statements(access)
        self._notices = f"{access.schema}_limits"
        self._link = KeptConnection(self._connect)

    @contextlib.asynccontextmanager
    async def listening(self, on_notice: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        ended = asyncio.Event()
        with authority_errors():
            link = await self._link.get()
            link.on_end(ended.set)
            if not link.is_pooled:
                await link.listen(
                    self._notices, lambda said: on_notice(records.unfield(said.encode("ascii")))
                )
        yield ended

    async def _connect(self) -> DatabaseConnection:
        link = await DatabaseConnection.plain(self._access, timeout=LIMITS_PATIENCE)
        with link.cut_on_error():
            async with link.transaction() as fetch:
                await _make_tables(fetch, self._access, "limit_book")
        return link

    async def read(self, zone: str) -> VersionedRecord:
        ((data, version, now),) = await self._ask("limits", zone)
        return VersionedRecord(data or None, version or 0, float(now))

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        del ttl  # a row stays; zones are few
        said = [records.field(each).decode("ascii") for each in notices]
        values = (zone, record.version, data or b"", self._notices, said)
        ((done, _told),) = await self._ask("replace limits", *values)
        return bool(done)

    async def close(self) -> None:
        await self._link.close()

    async def _ask(self, statement: str, *values: object) -> Sequence[Columns]:
        with authority_errors():
            link = await self._link.get()
            try:
                return await link.fetch(self._sql[statement], *values)
            except StoreError:
                link.cut()  # the next connection looks for the table again
                raise
