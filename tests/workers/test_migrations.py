"""The tables have a version: they are brought to this one, and relays of two versions share them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.outbox import OutboxBed
from zonerelay.outbox.database import tables
from zonerelay.outbox.database.tables import MIGRATIONS, Names, check, has_priority, migrate
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import Access, Link
from zonerelay.store.postgres.schema import Migration

NEXT = "ALTER TABLE {messages} ADD COLUMN extra text DEFAULT 'x'"


@pytest.fixture
def names(bed: OutboxBed) -> Names:
    return Names(bed.schema, "outbound_messages", "mailboxes")


@pytest.fixture
async def link(bed: OutboxBed) -> AsyncIterator[Link]:
    link = await Link.open(Access(bed.server.url, str, bed.schema, "test", 60.0))
    yield link
    await link.close()


def versions(bed: OutboxBed) -> str:
    return bed.psql("SELECT version, oldest FROM outbound_messages_schema ORDER BY version")


async def test_tables_without_a_version_are_taken_as_they_are_if_they_fit(
    bed: OutboxBed, names: Names, link: Link
) -> None:
    await migrate(link, names)
    assert versions(bed) == "1|1\n2|1"
    bed.psql("DROP TABLE outbound_messages_schema; ALTER TABLE outbound_messages ADD COLUMN of_the_shop int")
    await check(link, names)
    await migrate(link, names)
    await migrate(link, names)
    assert versions(bed) == "1|1\n2|1"
    await check(link, names)


async def test_tables_of_an_application_that_do_not_fit_are_not_touched(
    bed: OutboxBed, names: Names, link: Link
) -> None:
    bed.server.psql(f"CREATE SCHEMA {bed.schema}")
    bed.psql("CREATE TABLE outbound_messages (id bigint, subject text)")
    await migrate(link, names)
    with pytest.raises(StoreOpenError, match=r"no column zone \(text\).*there is no table .*mailboxes"):
        await check(link, names)
    assert bed.psql("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbound_messages'::regclass") == "0"


async def test_a_relay_of_the_version_before_goes_on_with_newer_tables_that_allow_for_it(
    bed: OutboxBed, names: Names, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(link, names)
    row = bed.insert()
    bed.psql("INSERT INTO outbound_messages_relays VALUES (gen_random_uuid(), 'old', now() + interval '1 h')")
    with monkeypatch.context() as newer:
        newer.setattr(tables, "MIGRATIONS", (*MIGRATIONS, Migration(NEXT, oldest=1)))
        await migrate(link, names)
    assert versions(bed) == "1|1\n2|1\n3|1"
    assert bed.row(row)["extra"] == "x"
    await check(link, names)
    await migrate(link, names)


async def test_a_relay_refuses_tables_that_are_too_new_and_no_step_takes_them_from_a_running_one(
    bed: OutboxBed, names: Names, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(link, names)
    bed.psql("INSERT INTO outbound_messages_relays VALUES (gen_random_uuid(), 'old', now() + interval '1 h')")
    with monkeypatch.context() as newer:
        newer.setattr(tables, "MIGRATIONS", (*MIGRATIONS, Migration(NEXT, oldest=len(MIGRATIONS) + 1)))
        with pytest.raises(StoreOpenError, match="Stop all of them first"):
            await migrate(link, names)
        assert versions(bed) == "1|1\n2|1"
        bed.psql("DELETE FROM outbound_messages_relays")
        await migrate(link, names)
    for attempt in (check, migrate):
        with pytest.raises(StoreOpenError, match="a newer zonerelay has been here"):
            await attempt(link, names)


async def test_tables_of_the_first_version_get_a_priority(
    bed: OutboxBed, names: Names, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(tables, "MIGRATIONS", MIGRATIONS[:1])
        await migrate(link, names)
    row = bed.insert()
    await check(link, names)
    assert not await has_priority(link.fetch, names)
    await migrate(link, names)
    assert await has_priority(link.fetch, names)
    assert bed.row(row)["priority"] is None
    bed.psql("UPDATE outbound_messages SET priority = 'bulk'")
    refused = bed.server.psql(
        f"SET search_path = {bed.schema}; UPDATE outbound_messages SET priority = 'urgent' RETURNING 1",
        check=False,
    )
    assert refused == ""


async def test_a_priority_of_the_applications_own_is_left_as_it_is(
    bed: OutboxBed, names: Names, link: Link
) -> None:
    await migrate(link, names)
    bed.psql(
        "ALTER TABLE outbound_messages DROP COLUMN priority; DELETE FROM outbound_messages_schema;"
        " INSERT INTO outbound_messages_schema VALUES (1, now(), 1);"
        " ALTER TABLE outbound_messages ADD COLUMN priority int"
    )
    await migrate(link, names)
    await check(link, names)
    assert not await has_priority(link.fetch, names)
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
    bed: OutboxBed, names: Names, link: Link, statement: str, named: str
) -> None:
    await migrate(link, names)
    role = f"lacking_{bed.schema}"
    bed.server.psql(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {bed.schema} TO {role}")
    printed = tables.script(names).partition("The relay's role")[2]
    for line in printed.splitlines()[1:]:
        bed.server.psql(line.removeprefix("-- ").replace("TO relay;", f"TO {role};"))
    url = bed.server.url.replace("//mail@", f"//{role}@")
    lacking = await Link.open(Access(url, str, bed.schema, "test", 60.0))
    await check(lacking, names)
    bed.psql(statement.format(role=role))
    with pytest.raises(StoreOpenError, match=named.format(schema=bed.schema)):
        await check(lacking, names)
    await lacking.close()
