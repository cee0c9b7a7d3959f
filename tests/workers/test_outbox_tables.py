"""A relay creates the tables where there are none, and says what is wrong with tables that it finds."""

import io
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.outbox import OutboxBed
from zonerelay.cli.main import main
from zonerelay.config.load import load_text
from zonerelay.outbox.database import tables
from zonerelay.outbox.database.passwords import unseal
from zonerelay.outbox.database.tables import TableNames, check, create, script
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import DatabaseAccess, DatabaseConnection


@pytest.fixture
def names(bed: OutboxBed) -> TableNames:
    return TableNames(bed.schema, "outbound_messages", "mailboxes")


@pytest.fixture
async def link(bed: OutboxBed) -> AsyncIterator[DatabaseConnection]:
    link = await bed.link()
    yield link
    await link.close()


async def test_tables_that_fit_are_used(bed: OutboxBed, names: TableNames, link: DatabaseConnection) -> None:
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
    with pytest.raises(
        StoreOpenError, match=r"no column zone \(text\).*the table .*mailboxes does not exist"
    ):
        await check(link, names)
    assert bed.psql("SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbound_messages'::regclass") == "0"


async def test_priority_is_one_of_three(bed: OutboxBed, names: TableNames, link: DatabaseConnection) -> None:
    await create(link, names)
    row = bed.insert()
    assert bed.row(row)["priority"] is None
    bed.psql("UPDATE outbound_messages SET priority = 'bulk'")
    refused = bed.server.psql(
        f"SET search_path = {bed.schema}; UPDATE outbound_messages SET priority = 'urgent' RETURNING 1",
        check=False,
    )
    assert refused == ""


@pytest.mark.parametrize("other", ["", "ADD COLUMN priority int"], ids=["none", "the application's own"])
async def test_tables_without_our_priority_are_used_as_they_are(
    bed: OutboxBed, names: TableNames, link: DatabaseConnection, other: str
) -> None:
    await create(link, names)
    bed.psql("ALTER TABLE outbound_messages DROP COLUMN priority")
    if other:
        bed.psql(f"ALTER TABLE outbound_messages {other}")
    await create(link, names)
    assert not await check(link, names)
    if other:
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


# docs/send/outbox.md


PAGE = (Path(__file__).parents[2] / "docs" / "send" / "outbox.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_work(bed: OutboxBed) -> None:
    assert load_text(blocks("toml")[0]).outbox.schema == "public"
    bed.server.psql(script(TableNames(bed.schema, "outbound_messages", "mailboxes")))
    for statements in blocks("sql"):
        bed.psql(statements)
    assert bed.psql("SELECT count(*) FROM outbound_messages WHERE status = 'queued'") == "1"
    found: dict[str, object] = {}
    exec(next(each for each in blocks("python") if "AESGCM" in each), found)
    encrypted = found["encrypted"]
    assert callable(encrypted)
    sealed = encrypted("secret", b"k" * 32, "SMTP.example.net", 587, "ann")
    assert unseal(sealed, [b"k" * 32], host="smtp.example.net", port=587, user="ann") == "secret"


async def test_the_sqlalchemy_example_inserts_with_the_applications_own_work(bed: OutboxBed) -> None:
    bed.server.psql(script(TableNames(bed.schema, "outbound_messages", "mailboxes")))
    bed.psql("CREATE TABLE orders (id int, shipped bool); INSERT INTO orders VALUES (7, false)")
    example = next(each for each in blocks("python") if "sqlalchemy" in each)
    engine = create_async_engine(
        bed.server.url.replace("postgresql:", "postgresql+asyncpg:"),
        connect_args={"server_settings": {"search_path": bed.schema}},
    )
    async with engine.connect() as connection:
        await connection.run_sync(
            lambda plain: exec(
                example, {"engine": plain.engine, "order": 7, "customer": "ann@example.com", "body": "sent"}
            )
        )
    await engine.dispose()
    assert bed.psql("SELECT shipped FROM orders") == "t"
    found = bed.row(1)
    assert (found["to_addresses"], found["text_body"]) == (["ann@example.com"], "sent")


def test_the_rights_that_are_printed_are_enough_for_the_page_and_for_no_more(bed: OutboxBed) -> None:
    """`error_log` could not be read, and no row be tried again or deleted."""
    text = script(TableNames(bed.schema, "outbound_messages", "mailboxes"))
    bed.server.psql(text)
    role = f"app_{bed.schema}"
    grants = [line[3:].replace(" TO app;", f" TO {role};") for line in text.splitlines() if "TO app;" in line]
    assert len(grants) == 4
    bed.psql(f"CREATE ROLE {role}; {' '.join(grants)}")
    try:
        insert = "INSERT INTO outbound_messages (to_addresses) VALUES ('{a@b.example}')"
        for statements in (insert, *blocks("sql")[:2], "SELECT error_log FROM outbound_messages"):
            bed.psql(f"SET ROLE {role}; {statements}")
        for statement in (
            "SELECT text_body FROM outbound_messages",
            "UPDATE outbound_messages SET text_body = 'another'",
            "INSERT INTO outbound_messages (status) VALUES ('sent')",
            "SELECT * FROM mailboxes",
        ):
            said = bed.server.psql(
                f"SET ROLE {role}; SET search_path = {bed.schema}; {statement}", check=False
            )
            assert said == "", statement
        assert "sent" not in bed.psql("SELECT status FROM outbound_messages")
    finally:
        bed.psql(f"DROP OWNED BY {role}; DROP ROLE {role}")


# zonerelay outbox


def test_tables_are_printed_and_checked_and_rows_counted(
    bed: OutboxBed, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "outbox.key"
    key.write_text("00" * 32)
    config = tmp_path / "zonerelay.toml"
    config.write_text(f'[outbox]\nurl = "{bed.server.url}"\nschema = "{bed.schema}"\nkeys = ["{key}"]\n')

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["outbox", arguments[0], "--config", str(config), *arguments[1:]])
        said = capsys.readouterr()
        return status, said.out + said.err

    status, said = run("status")
    assert status == 1
    assert f"the table {bed.schema}.outbound_messages does not exist" in said
    bed.server.psql(run("schema")[1])
    bed.insert()
    assert '"queued":1,"processing":0,"sent":0,"failed":0' in run("status", "--json")[1]
    assert "queued      1" in run("status")[1]
    bed.psql("ALTER TABLE outbound_messages DROP COLUMN sender, ALTER COLUMN subject TYPE bytea USING ''")
    status, said = run("status")
    assert "outbound_messages has no column sender (text)" in said
    assert "outbound_messages.subject is bytea, not text" in said
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"secret\n")))
    status, said = run("encrypt-password", "--host", "smtp.example.net", "--user", "relay")
    assert status == 0
    assert said.startswith("zr1.")
    assert "secret" not in said
