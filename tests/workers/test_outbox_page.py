"""Checks docs/send/outbox.md: runs its SQL, opens what its Python encrypts, loads its configuration."""

from __future__ import annotations

import re
from pathlib import Path

from sqlalchemy.ext.asyncio import create_async_engine

from tests.support.outbox import OutboxBed
from zonerelay.config.load import load_text
from zonerelay.outbox.database.passwords import unseal
from zonerelay.outbox.database.tables import TableNames, script

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


def test_the_rights_that_are_printed_are_enough_for_the_page(bed: OutboxBed) -> None:
    """`error_log` could not be read, and no row be tried again or deleted."""
    printed = script(TableNames(bed.schema, "outbound_messages", "mailboxes"))
    bed.server.psql(printed)
    role = f"app_{bed.schema}"
    bed.server.psql(f"CREATE ROLE {role}")
    rights = printed.partition("An application's role")[2].partition("The relay's role")[0]
    for grant in re.findall(r"-- (GRANT .*) TO app;", rights):
        bed.server.psql(f"{grant} TO {role}")
    for statements in (*blocks("sql")[:2], "SELECT error_log FROM outbound_messages"):
        bed.psql(f"SET ROLE {role}; {statements}")


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


def test_an_application_with_the_rights_that_are_printed_can_insert_and_no_more(bed: OutboxBed) -> None:
    text = script(TableNames(bed.schema, "outbound_messages", "mailboxes"))
    bed.server.psql(text)
    role = f"app_{bed.schema}"
    grants = [line[3:].replace(" TO app;", f" TO {role};") for line in text.splitlines() if "TO app;" in line]
    assert len(grants) == 4
    bed.psql(f"CREATE ROLE {role}; {' '.join(grants)}")
    try:
        insert = "INSERT INTO outbound_messages (to_addresses) VALUES ('{a@b.example}')"
        assert bed.psql(f"SET ROLE {role}; {insert}") == ""
        for statement in (
            "SELECT text_body FROM outbound_messages",
            "UPDATE outbound_messages SET text_body = 'another'",
            "INSERT INTO outbound_messages (status) VALUES ('sent')",
            "SELECT * FROM mailboxes",
        ):
            assert (
                bed.server.psql(f"SET ROLE {role}; SET search_path = {bed.schema}; {statement}", check=False)
                == ""
            )
        assert bed.psql("SELECT status FROM outbound_messages") == "queued"
    finally:
        bed.psql(f"DROP OWNED BY {role}; DROP ROLE {role}")
