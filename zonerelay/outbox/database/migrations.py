"""Finds which version the tables have, and brings them to this one by steps, each in one transaction.

One relay at a time does it. Each step says the `oldest` version that can work with its result, which should
be the version before, so that a fleet can be upgraded one by one: an older relay works with newer tables
that allow for it, and refuses others. A step that does not allow for the version before is only taken when
no relay is alive.

Tables without a recorded version were made by the application's owner. If their columns are those of this
version they are taken as they are; if not, they count as version 1. `tables.check` then says what is wrong.
"""

from __future__ import annotations

from zonerelay.outbox.database import tables
from zonerelay.outbox.database.tables import Names
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import Fetch, Link
from zonerelay.store.postgres.schema import check_version, run_alone


async def migrate(link: Link, names: Names) -> None:
    """Makes the tables, or brings them to this version. Raises StoreOpenError for those that are too new."""
    await run_alone(
        link,
        f"zonerelay outbox {names.channel}",
        lambda fetch: _migrate(fetch, names),
        f"[outbox]: {names.schema}.{names.messages} cannot be brought up to date: it is in use all the time",
    )


async def check(link: Link, names: Names) -> None:
    """Raises StoreOpenError for tables that this relay cannot work with."""
    await _recorded_version(link.fetch, names)
    await tables.check(link.fetch, names)


async def _migrate(fetch: Fetch, names: Names) -> None:
    if not await fetch("SELECT 1 FROM pg_namespace WHERE nspname = $1", names.schema):
        await fetch(f'CREATE SCHEMA "{names.schema}"')
    recorded = there = await _recorded_version(fetch, names)
    current = len(tables.MIGRATIONS)
    if not there and await tables.exist(fetch, names):
        there = current if not await tables.problems(fetch, names) else 1
    if recorded >= current:
        return
    steps = tables.MIGRATIONS[there:]
    if there and any(step.oldest > there for step in steps):
        await _await_nobody(fetch, names, there)
    for step in steps:
        for statement in tables.statements(step.statements, names):
            await fetch(statement)
    for statement in tables.recorded(names, tables.MIGRATIONS[recorded:], recorded):
        await fetch(statement)


async def _recorded_version(fetch: Fetch, names: Names) -> int:
    """The version that is written down, 0 for none. A role that may not see it is not hindered: the columns
    say enough. Raises StoreOpenError for tables that are too new.
    """
    if not await fetch(
        "SELECT 1 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1"
        " AND c.relname = $2 AND has_table_privilege(c.oid, 'SELECT')",
        names.schema,
        names.versions,
    ):
        return 0
    ((version, oldest),) = await fetch(
        f'SELECT coalesce(max(version), 0), coalesce(max(oldest), 0) FROM "{names.schema}"."{names.versions}"'  # noqa: S608 - names are checked in the configuration
    )
    what = f"[outbox]: {names.schema}.{names.messages}"
    check_version(what, version, oldest=oldest, known=len(tables.MIGRATIONS))
    return int(version)


async def _await_nobody(fetch: Fetch, names: Names, version: int) -> None:
    relays = f'"{names.schema}"."{names.relays}"'
    await fetch(f"LOCK TABLE {relays} IN SHARE ROW EXCLUSIVE MODE")
    alive = await fetch(f"SELECT name FROM {relays} WHERE expires > clock_timestamp()")  # noqa: S608 - as above
    if alive:
        raise StoreOpenError(
            f"[outbox]: {names.schema}.{names.messages} has version {version}, and {len(alive)} relays that"
            " may know no newer one are running: this version cannot work beside them. Stop all of them first"
        )
