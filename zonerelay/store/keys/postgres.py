"""Keeps keys in PostgreSQL: one table of keys by node.

    mark       one row: the name of this store partition  a row for each node: epoch, writer, position of the
    last batch, end of the lease (null: it was left) entry      node, key, value

A batch is one statement, and so one transaction. It updates the row of its partition on the condition that
epoch and number are those of the batch, and everything else in it depends on that row: a batch of an earlier
epoch changes nothing. The row's lock makes `enter` wait for a batch that is under way. What a batch relies on
is set in the batch (`synchronous_commit`), no table is found by `search_path`, and no lock belongs to a
session, so a pooler in transaction mode does no harm and finds nothing of ours in its connections. A pooler
shows by its process number: it is not the server's. Then no prepared statement is kept.

Failure: a connection that broke is replaced at the next call, and each new one is compared with the last
position that this process has seen, so that a former primary is not read. Leases go by the server's clock;
one that ends later than LONGEST_LEASE from now was written before that clock was set back, and counts as
over.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from zonerelay.process.threads import FILES
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.keys.port import (
    NOTHING,
    PAGE_OCTETS,
    PAGE_ROWS,
    Batch,
    FencedError,
    KeyPage,
    NodeTakenError,
    OlderStateError,
    Peer,
    Position,
    Row,
    State,
    page_of,
)
from zonerelay.store.postgres.driver import (
    COMMAND_TIMEOUT,
    CONNECT_TIMEOUT,
    Access,
    ConnectionLostError,
    Fetch,
    Link,
    load_driver,
    translated,
)

OLDEST_VERSION = 13
LONGEST_LEASE = 3600.0
APPLICATION = "zonerelay keys"

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
);
CREATE TABLE IF NOT EXISTS {s}.entry (
    node smallint NOT NULL,
    key bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (node, key)
) WITH (
    toast_tuple_target = 8160, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000
);
ALTER TABLE {s}.entry ALTER COLUMN value SET STORAGE EXTERNAL
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

# Two changes of one row in one statement are undefined, so a range spares what the batch changes by name.
_EMPTIED = """
, emptied AS (
    DELETE FROM {s}.entry e USING fence, unnest($7::bytea[], $8::bytea[]) AS r (low, high)
    WHERE e.node = $1 AND e.key >= r.low AND e.key < r.high AND e.key <> ALL ($4::bytea[] || $5::bytea[])
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
    "schema": "CREATE SCHEMA IF NOT EXISTS {s}",
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
    "peers": "SELECT node, epoch, expires IS NULL, {is_over} FROM {s}.partition ORDER BY node",
    "get": "SELECT key, value FROM {s}.entry WHERE node = $1 AND key = ANY ($2)",
    "page": _PAGE.replace("{value}", "value").replace("{length}", "octet_length(value)"),
    "keys": _PAGE.replace("{value}", "''::bytea").replace("{length}", "0"),
    "last key": """
        SELECT key FROM {s}.entry WHERE node = $1 AND key >= $2 AND key < $3 ORDER BY key DESC LIMIT 1""",
    "write": "{fence} SELECT 1 FROM fence",
    "write ranges": "{fence} {emptied} SELECT 1 FROM fence",
}


def statements(access: Access) -> dict[str, str]:
    """Return every statement for one schema."""
    names = {"s": f'"{access.schema}"', "durable": "NULL" if access.accepts_loss else _DURABLE}
    longest = f"{LONGEST_LEASE} * interval '1 second'"
    names |= {
        "fence": _FENCE.format(**names),
        "emptied": _EMPTIED.format(**names),
        "is_over": _IS_OVER.format(p="", longest=longest),
        "p_is_over": _IS_OVER.format(p="p.", longest=longest),
    }
    return {name: text.format(**names) for name, text in _STATEMENTS.items()}


class PostgresEngine:
    """The schema that `access` names. Its lease is that of the partitions."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.lease = access.lease
        self._control = _Connection(access)

    def keeper(self, node: int) -> PostgresKeys:
        return PostgresKeys(self.access, node)

    async def peers(self) -> list[Peer]:
        async with self._control.use() as link:
            if not await _has_tables(link.fetch, self.access.schema):
                return []
            rows = await link.fetch(statements(self.access)["peers"])
        return [Peer(*row) for row in rows]

    async def close(self) -> None:
        await self._control.close()


class _Connection:
    """One connection, which is made at its first use and replaced when it broke. One caller at a time."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._link: Link | None = None
        self._is_closed = False
        self._opening = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[Link]:
        """Lend the connection. Raises StoreError."""
        async with self._opening:
            link = self._link
            if link is None or link.is_closed:
                link = self._link = await self._open()
        try:
            yield link
        except ConnectionLostError:
            link.cut()
            raise

    async def _open(self) -> Link:
        if self._is_closed:
            raise StoreError("the partition is closed")
        link = await self._connect(cached=True)
        try:
            ((pid, version, is_standby, fsync, pages),) = await link.fetch(
                "SELECT pg_backend_pid(), current_setting('server_version_num')::int, pg_is_in_recovery(),"
                " current_setting('fsync'), current_setting('full_page_writes')"
            )
            self._check(version, is_standby=is_standby, unsafe="off" in (fsync, pages))
            if pid == link.pid:
                # Statistics of a queue are always old: a plan must never walk the whole table.
                await link.fetch(
                    "SELECT set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false)"
                )
                return link
        except BaseException:
            link.cut()
            raise
        await link.close()
        return await self._connect(cached=False)

    async def _connect(self, *, cached: bool) -> Link:
        driver = load_driver()
        password = await FILES.run(self._access.read_password)
        with translated(driver, password):
            connection = await driver.connect(
                self._access.url,
                password=password or None,
                timeout=CONNECT_TIMEOUT,
                command_timeout=min(COMMAND_TIMEOUT, max(1.0, self._access.lease / 2)),
                statement_cache_size=100 if cached else 0,
                server_settings={"application_name": APPLICATION},
            )
        link = Link(connection, driver)
        link.pid = connection.get_server_pid()
        return link

    def _check(self, version: int, *, is_standby: bool, unsafe: bool) -> None:
        if version < OLDEST_VERSION * 10_000:
            raise StoreOpenError(
                f"the database server is PostgreSQL {version // 10_000}; zonerelay needs {OLDEST_VERSION}"
            )
        if is_standby:
            raise StoreOpenError("the database server is a standby, which only reads: connect to the primary")
        if unsafe and not self._access.accepts_loss:
            raise StoreOpenError(
                "the database server has fsync or full_page_writes off: it would lose mail that was"
                " acknowledged. Turn them on (docs/postgres.md)"
            )

    async def close(self) -> None:
        self._is_closed = True
        if self._link is not None and not self._link.is_closed:
            await self._link.close()


class PostgresKeys:
    """One partition, over two connections: one writes, the other reads and renews the lease."""

    def __init__(self, access: Access, node: int) -> None:
        self._access = access
        self._node = node
        self._writer = _Connection(access)
        self._reader = _Connection(access)
        self._checked: dict[_Connection, Link] = {}
        self._epoch = 0
        self._last = NOTHING
        self._sql = statements(access)

    # --- reading

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        async with self._use(self._reader) as link:
            rows = await link.fetch(self._sql["get"], self._node, list(dict.fromkeys(keys)))
        found: dict[bytes, bytes] = dict(map(tuple, rows))
        return [found.get(key) for key in keys]

    async def page(
        self,
        start: bytes,
        end: bytes,
        *,
        rows: int = PAGE_ROWS,
        octets: int = PAGE_OCTETS,
        values: bool = True,
    ) -> KeyPage:
        statement = self._sql["page" if values else "keys"]
        async with self._use(self._reader) as link:
            found = await link.fetch(statement, self._node, start, end, rows + 1, octets)
        taken: list[Row] = [(row[0], row[1]) for row in found[:rows]]
        is_cut = len(found) > rows or sum(len(key) + len(value) for key, value in taken) >= octets
        return page_of(taken, is_last=not is_cut)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        async with self._use(self._reader) as link:
            rows = await link.fetch(self._sql["last key"], self._node, start, end)
        return rows[0][0] if rows else None

    # --- entering

    async def look(self) -> State | None:
        async with self._writer.use() as link:
            return await self._look(link.fetch)

    async def _look(self, fetch: Fetch) -> State | None:
        if not await _has_tables(fetch, self._access.schema):
            return None
        rows = await fetch(self._sql["look"], self._node)
        if not rows:
            return None
        ((mark, epoch, writer, batch_epoch, batch),) = rows
        return State(mark, epoch, writer, Position(batch_epoch, batch))

    async def enter(self, writer: str, *, mark: str) -> State:
        sql = self._sql
        async with self._writer.use() as link, link.transaction() as fetch:
            if not await _has_tables(fetch, self._access.schema):
                await _make_tables(fetch, self._access)
            await fetch(sql["set mark"], mark)
            ((mark,),) = await fetch(sql["mark"])
            rows = await fetch(sql["enter"], self._node, writer, self._access.lease)
        if not rows:
            raise NodeTakenError(
                f"another relay is node {self._node} of this database, and its lease has not ended: give each"
                " relay that shares it its own [postgres] node"
            )
        ((epoch, batch_epoch, batch, _),) = rows
        self._epoch, self._last = epoch, Position(batch_epoch, batch)
        return State(mark, epoch, writer, self._last)

    # --- writing

    async def apply(self, batch: Batch) -> None:
        changes, ranges = batch.write.changes, batch.write.ranges
        made = {key: value for key, value in changes.items() if value is not None}
        values: list[object] = [
            *(self._node, *batch.position),
            [key for key, value in changes.items() if value is None],
            *(list(made), list(made.values())),
        ]
        if ranges:
            values += [[each.start for each in ranges], [each.end for each in ranges]]
        async with self._use(self._writer) as link:
            if not await link.fetch(self._sql["write ranges" if ranges else "write"], *values):
                raise await self._refused(link.fetch, batch.position.epoch)
        self._last = batch.position

    async def renew(self) -> None:
        await self._set_lease("renew", self._access.lease)

    async def leave(self) -> None:
        await self._set_lease("leave")

    async def _set_lease(self, statement: str, *values: object) -> None:
        async with self._use(self._reader) as link:
            rows = await link.fetch(self._sql[statement], self._node, self._epoch, *values)
            if not rows:
                raise await self._refused(link.fetch, self._epoch)

    async def _refused(self, fetch: Fetch, epoch: int) -> StoreError:
        """What it means that no row of the partition has this epoch, and the number before."""
        state = await self._look(fetch)
        if state is not None and state.epoch > epoch:
            return FencedError(f"node {self._node} has epoch {state.epoch}, the writer {epoch}")
        return StoreError(f"the database does not hold the state that node {self._node} has written: {state}")

    async def room(self) -> int | None:
        return None

    @contextlib.asynccontextmanager
    async def _use(self, connection: _Connection) -> AsyncIterator[Link]:
        """A connection on which no older state is read or written."""
        async with connection.use() as link:
            if self._epoch and self._checked.get(connection) is not link:
                epoch, last = self._epoch, self._last  # before the server is asked: a batch may be under way
                state = await self._look(link.fetch)
                if state is None or state.epoch < epoch or state.last.number < last.number:
                    link.cut()
                    raise OlderStateError(f"a new connection finds an older state of the queue: {state}")
                self._checked[connection] = link
            yield link

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()


async def _has_tables(fetch: Fetch, schema: str) -> bool:
    rows = await fetch("SELECT to_regclass($1) IS NOT NULL", f'"{schema}".entry')
    return bool(rows[0][0])


async def _make_tables(fetch: Fetch, access: Access) -> None:
    # For the transaction alone: two relays that start together must not both create.
    await fetch("SELECT pg_advisory_xact_lock(hashtext($1))", f"zonerelay keys {access.schema}")
    await fetch(statements(access)["schema"])
    for statement in _TABLES.format(s=f'"{access.schema}"').split(";"):
        await fetch(statement)
