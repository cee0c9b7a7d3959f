"""The tables, and how they come to be: numbered steps, applied in order, each in one transaction.

An advisory lock lets one relay at a time do it; the others wait and find it done. A schema that is newer than
this version knows is refused, and left alone. Every primary key holds the message's id, so that an operator
can partition each table by ranges of it.

    message   id, metadata (the JSON of docs/spool-format.md), body when it is one chunk at most
    chunk     larger bodies, 64 KiB a row
    delivery  one row per recipient that is still open. claimed_by: the session (of `node`) that has it.
              parked: passed over, because its destination was full. alone: its message has no other.
    upload    bodies that are arriving, so that what a crash leaves can be removed
    limit_book  of each zone what connections and turns all relays have (limits/book.py), replaced as a whole
    node      one row per relay: its session, until when that lives, and its highest message id
"""

from __future__ import annotations

from zonerelay.store.base import StoreOpenError
from zonerelay.store.postgres_driver import Fetch, Link

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

MIGRATIONS = (_FIRST, _SECOND)
"""Step n makes version n of version n - 1. A step that was released never changes."""

VERSION = len(MIGRATIONS)


async def migrate(link: Link, schema: str) -> None:
    """Bring the schema to this version. Raises StoreOpenError for one that is newer."""
    async with link.transaction() as fetch:
        await fetch("SELECT pg_advisory_xact_lock(hashtext($1))", f"zonerelay schema {schema}")
        version = await _version(fetch, schema)
        if version > VERSION:
            raise StoreOpenError(
                f"schema {schema} of the database has version {version} and this zonerelay knows {VERSION}:"
                " a newer zonerelay has been here; start that one"
            )
        for number, step in enumerate(MIGRATIONS[version:], version + 1):
            for statement in filter(str.strip, step.split(";")):
                await fetch(statement)
            await fetch("INSERT INTO schema_version (version) VALUES ($1)", number)


async def _version(fetch: Fetch, schema: str) -> int:
    if not await fetch("SELECT 1 FROM pg_namespace WHERE nspname = $1", schema):
        await fetch(f'CREATE SCHEMA "{schema}"')
    await fetch(
        "CREATE TABLE IF NOT EXISTS schema_version"
        " (version integer PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())"
    )
    ((version,),) = await fetch("SELECT coalesce(max(version), 0) FROM schema_version")
    return int(version)
