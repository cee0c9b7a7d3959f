"""Makes the tables, and brings them to this version by numbered steps, in order, each in one transaction.

An advisory lock lets one relay at a time do it; the others wait and find it done.

Versions may be mixed while a fleet is upgraded one by one. Each step says the `oldest` version that can work
on with what it makes, which ought to be the one before its own: columns are added with a default, nothing is
renamed or taken away while a relay uses it, and no statement says `SELECT *` of a table. An older relay
works with a newer schema that allows for it, and refuses any other. A step that does not allow for the
version before is only taken when no relay is alive, for what is running is not asked again. A step waits for
a table no longer than `LOCK_PATIENCE` at a time: a statement that waits for one makes all others wait behind.

Every primary key holds the message's id, so that an operator can partition each table by ranges of it.

    message   id, metadata (the JSON of docs/spool-format.md), body when it is one chunk at most
    chunk     larger bodies, 64 KiB a row
    delivery  one row per recipient that is still open. claimed_by: the session (of `node`) that has it.
              parked: passed over, because its destination was full. alone: its message has no other.
    upload    bodies that are arriving, so that what a crash leaves can be removed
    limit_book  one row per zone: the connections and turns of all relays (limits/authority/book.py), replaced
              as a whole
    kept      one row for each idempotency key: its message and content, until it expires
    queue_mark  one row, by which relays know the queue again (common/queue_mark.py)
    node      one row per relay: its session, until when that lives, and its highest message id
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import BusyError, Fetch, Link

LOCK_PATIENCE = 2.0
TRIES = 10
"""With a pause between that is as long as the wait."""

_FIRST = """
CREATE TABLE message (
    id bigint PRIMARY KEY,
    metadata bytea NOT NULL,
    body bytea
) WITH (toast_tuple_target = 8160);
ALTER TABLE message ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE message ALTER COLUMN metadata SET STORAGE EXTERNAL;

CREATE TABLE chunk (
    message_id bigint NOT NULL,
    number integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (message_id, number)
);
ALTER TABLE chunk ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE delivery (
    zone text COLLATE "C" NOT NULL,
    message_id bigint NOT NULL,
    recipient text COLLATE "C" NOT NULL,
    domain text COLLATE "C" NOT NULL,
    created double precision NOT NULL,
    next_attempt double precision NOT NULL,
    held boolean NOT NULL,
    alone boolean NOT NULL,
    claimed_by bigint,
    parked boolean NOT NULL DEFAULT false,
    record bytea NOT NULL,
    PRIMARY KEY (zone, message_id, recipient)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX delivery_fresh ON delivery (zone, message_id, recipient)
    WHERE claimed_by IS NULL AND NOT held AND NOT parked AND next_attempt <= 0;
CREATE INDEX delivery_due ON delivery (zone, next_attempt, message_id, recipient)
    WHERE claimed_by IS NULL AND NOT held AND NOT parked AND next_attempt > 0;
CREATE INDEX delivery_parked ON delivery (zone, domain, message_id, recipient)
    WHERE claimed_by IS NULL AND parked;
CREATE INDEX delivery_claimed ON delivery (claimed_by) WHERE claimed_by IS NOT NULL;
CREATE INDEX delivery_shared ON delivery (message_id) WHERE NOT alone;

CREATE TABLE upload (
    message_id bigint PRIMARY KEY,
    session bigint NOT NULL
);

CREATE TABLE node (
    node smallint PRIMARY KEY,
    session bigint UNIQUE,
    expires timestamptz NOT NULL,
    last_id bigint NOT NULL DEFAULT 0
);
CREATE SEQUENCE node_session;
"""

_SECOND = """
CREATE TABLE limit_book (
    zone text COLLATE "C" PRIMARY KEY,
    version bigint NOT NULL,
    book bytea NOT NULL
)
"""


class Migration(NamedTuple):
    """`oldest`: the version that a relay must know at least to work with what this step makes."""

    statements: str
    oldest: int


_THIRD = """
CREATE TABLE queue_mark (one boolean PRIMARY KEY DEFAULT true CHECK (one), mark text NOT NULL)
"""

_FOURTH = """
CREATE TABLE kept (
    identity text COLLATE "C" PRIMARY KEY,
    digest text NOT NULL,
    message_id bigint NOT NULL,
    until double precision NOT NULL
);
CREATE INDEX kept_until ON kept (until)
"""

MIGRATIONS: tuple[Migration, ...] = (
    Migration(_FIRST, oldest=1),
    Migration(_SECOND, oldest=1),
    Migration(_THIRD, oldest=1),
    Migration(_FOURTH, oldest=1),
)
"""Migration n makes version n of version n - 1. A step that was released never changes."""

VERSION = len(MIGRATIONS)


def check_version(what: str, version: int, *, oldest: int, known: int) -> None:
    """Raises StoreOpenError when this relay knows no version that can work with these tables."""
    if oldest > known:
        raise StoreOpenError(
            f"{what} has version {version}, which relays must know at least version {oldest} for, and this"
            f" zonerelay knows {known}: a newer zonerelay has been here; start that one"
        )


async def migrate(link: Link, name: str) -> None:
    """Brings the schema to this version. Raises StoreOpenError for one that is too new."""
    await run_alone(
        link,
        f"zonerelay schema {name}",
        lambda fetch: _migrate(fetch, name),
        f"schema {name} of the database cannot be brought up to date: its tables are in use all the time",
    )


async def run_alone(link: Link, lock: str, work: Callable[[Fetch], Awaitable[None]], busy: str) -> None:
    """Does `work` in one transaction under the advisory lock of that name, so one relay at a time does it.

    Waits for a locked table no longer than `LOCK_PATIENCE` seconds at a time. Raises StoreOpenError with the
    text `busy` after `TRIES`.
    """
    for left in reversed(range(TRIES)):
        try:
            async with link.transaction() as fetch:
                await fetch(f"SET LOCAL lock_timeout = '{LOCK_PATIENCE:g}s'")
                await fetch("SELECT pg_advisory_xact_lock(hashtext($1))", lock)
                await work(fetch)
                return
        except BusyError as error:
            if not left:
                raise StoreOpenError(busy) from error
        await asyncio.sleep(LOCK_PATIENCE)


async def check_schema(fetch: Fetch, name: str) -> None:
    """Checks again after the registration: a relay that changes the schema sees it, or we see the change."""
    await _read_version(fetch, name)


_MISSING = """
SELECT right_, c.relname
FROM pg_class c, unnest(CASE c.relkind WHEN 'S' THEN ARRAY['USAGE']
    ELSE ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE'] END) right_
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p', 'S')
    AND NOT CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, right_)
        ELSE has_table_privilege(c.oid, right_) END
UNION ALL
SELECT 'rows without a policy', c.relname
FROM pg_class c
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND c.relkind IN ('r', 'p')
    AND row_security_active(c.oid)
ORDER BY 2, 1
"""


async def check_rights(fetch: Fetch, name: str) -> None:
    """Raises StoreOpenError when the role may not do to a table what the queue needs, because mail would be
    taken and could not be settled.
    """
    missing = [f"{right} on {table}" for right, table in await fetch(_MISSING, name)]
    if missing:
        raise StoreOpenError(
            f"the role of [postgres] url lacks rights in schema {name}: {', '.join(missing)}. Grant them, or"
            " make the role the owner of the tables (docs/postgres.md)"
        )


async def _read_version(fetch: Fetch, name: str) -> tuple[int, int]:
    """The version, and the oldest that can work with it. Raises StoreOpenError."""
    ((version, oldest),) = await fetch(_SCHEMA)
    check_version(f"schema {name} of the database", version, oldest=oldest, known=VERSION)
    return version, oldest


async def _migrate(fetch: Fetch, name: str) -> None:
    await _prepare(fetch, name)
    version, oldest = await _read_version(fetch, name)
    steps = MIGRATIONS[version:]
    if version and any(step.oldest > version for step in steps):
        await _check_no_relay_runs(fetch, name, version)
    for number, step in enumerate(steps, version + 1):
        for statement in filter(str.strip, step.statements.split(";")):
            await fetch(statement)
        oldest = max(oldest, step.oldest)
        await fetch("INSERT INTO schema_version (version, oldest) VALUES ($1, $2)", number, oldest)


# The first revision's table has no column `oldest`, and a check changes nothing.
_SCHEMA = """
SELECT coalesce(max(version), 0), coalesce(max(coalesce((to_jsonb(s) ->> 'oldest')::integer, version)), 0)
FROM schema_version s
"""


async def _prepare(fetch: Fetch, name: str) -> None:
    if not await fetch("SELECT 1 FROM pg_namespace WHERE nspname = $1", name):
        await fetch(f'CREATE SCHEMA "{name}"')
    await fetch(
        "CREATE TABLE IF NOT EXISTS schema_version (version integer PRIMARY KEY,"
        " applied timestamptz NOT NULL DEFAULT now(), oldest integer)"
    )
    columns = "SELECT 1 FROM pg_attribute WHERE attrelid = 'schema_version'::regclass AND attname = 'oldest'"
    if not await fetch(columns):
        await fetch("ALTER TABLE schema_version ADD COLUMN oldest integer")


async def _check_no_relay_runs(fetch: Fetch, name: str, version: int) -> None:
    """Sessions that are over end here, so that a relay that comes back has to look at the schema first."""
    await fetch("LOCK TABLE node IN SHARE ROW EXCLUSIVE MODE")
    await fetch("UPDATE node SET session = NULL WHERE expires < clock_timestamp()")
    alive = await fetch("SELECT node FROM node WHERE session IS NOT NULL ORDER BY node")
    if alive:
        nodes = ", ".join(str(node) for (node,) in alive)
        raise StoreOpenError(
            f"schema {name} of the database has version {version}, and relays that know no newer one may be"
            f" running (node {nodes}): this version cannot work beside them. Stop all of them first"
        )
