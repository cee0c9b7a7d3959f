"""A relay creates the tables where there are none, and says what is wrong with tables that it finds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.outbox import OutboxBed
from zonerelay.outbox.database import tables
from zonerelay.outbox.database.tables import TableNames, check, create
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import DatabaseAccess, DatabaseConnection


@pytest.fixture
def names(bed: OutboxBed) -> TableNames:
    return TableNames(bed.schema, "outbound_messages", "mailboxes")


@pytest.fixture
async def link(bed: OutboxBed) -> AsyncIterator[DatabaseConnection]:
    link = await DatabaseConnection.open(DatabaseAccess(bed.server.url, str, bed.schema, "test", 60.0))
    yield link
    await link.close()


async def test_tables_that_fit_are_taken_as_they_are(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection
) -> None:
    await create(link, names)
    bed.psql("ALTER TABLE outbound_messages ADD COLUMN of_the_shop int")
    await create(link, names)
    assert await check(link, names)


async def test_tables_of_an_application_that_do_not_fit_are_not_touched(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection
) -> None:
    bed.server.psql(f"CREATE SCHEMA {bed.schema}")
    bed.psql("CREATE TABLE outbound_messages (id bigint, subject text)")
    await create(link, names)
    with pytest.raises(StoreOpenError, match=r"no column zone \(text\).*there is no table .*mailboxes"):
        await check(link, names)
    assert bed.psql("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbound_messages'::regclass") == "0"


async def test_a_priority_is_one_of_three(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection
) -> None:
    await create(link, names)
    row = bed.insert()
    assert bed.row(row)["priority"] is None
    bed.psql("UPDATE outbound_messages SET priority = 'bulk'")
    refused = bed.server.psql(
        f"SET search_path = {bed.schema}; UPDATE outbound_messages SET priority = 'urgent' RETURNING 1",
        check=False,
    )
    assert refused == ""


async def test_tables_without_a_priority_are_used_as_they_are(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection
) -> None:
    await create(link, names)
    bed.psql("ALTER TABLE outbound_messages DROP COLUMN priority")
    await create(link, names)
    assert not await check(link, names)


async def test_a_priority_of_the_applications_own_is_left_as_it_is(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection
) -> None:
    await create(link, names)
    bed.psql(
        "ALTER TABLE outbound_messages DROP COLUMN priority;"
        " ALTER TABLE outbound_messages ADD COLUMN priority int"
    )
    await create(link, names)
    assert not await check(link, names)
    bed.insert(priority=7)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("REVOKE UPDATE ON outbound_messages FROM {role}", "UPDATE on {schema}.outbound_messages"),
        (
            "REVOKE UPDATE ON outbound_messages FROM {role};"
            " GRANT UPDATE (status, claimed_by, claim_token) ON outbound_messages TO {role}",
            "UPDATE on {schema}.outbound_messages",
        ),
        ("REVOKE SELECT ON mailboxes FROM {role}", "SELECT on {schema}.mailboxes"),
        (
            "REVOKE DELETE ON outbound_messages_relays FROM {role}",
            "DELETE on {schema}.outbound_messages_relays",
        ),
    ],
)
async def test_a_right_that_is_missing_is_named(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection, statement: str, named: str
) -> None:
    await create(link, names)
    role = f"lacking_{bed.schema}"
    bed.server.psql(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {bed.schema} TO {role}")
    printed = tables.script(names).partition("The relay's role")[2]
    for line in printed.splitlines()[1:]:
        bed.server.psql(line.removeprefix("-- ").replace("TO relay;", f"TO {role};"))
    url = bed.server.url.replace("//mail@", f"//{role}@")
    lacking = await DatabaseConnection.open(DatabaseAccess(url, str, bed.schema, "test", 60.0))
    await check(lacking, names)
    bed.psql(statement.format(role=role))
    with pytest.raises(StoreOpenError, match=named.format(schema=bed.schema)):
        await check(lacking, names)
    await lacking.close()
