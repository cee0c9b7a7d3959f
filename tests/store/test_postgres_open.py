"""Opening a PostgreSQL store: what is refused, in words, and that no word of it is a secret."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import message_id, store_message
from tests.store.spools import Spool
from tests.support.postgres import PASSWORD, PostgresServer, shared_postgres
from zonerelay.config.settings import LOSS_WORDS, Backend, PostgresSettings, SpoolSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Store, StoreOpenError
from zonerelay.store.open import open_store
from zonerelay.store.surroundings import Surroundings

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def careless() -> Iterator[PostgresServer]:
    """A server that syncs nothing, and wants a password."""
    with PostgresServer({"fsync": "off", "full_page_writes": "off"}, auth="scram-sha-256") as server:
        yield server


async def opened(settings: PostgresSettings, environment: Mapping[str, str] | None = None) -> Store:
    return await open_store(
        SpoolSettings(backend=Backend.POSTGRES, path=Path("spool")),
        Surroundings(
            clock=ManualClock(),
            on_health=lambda _reason: None,
            observe_commit=lambda _seconds: None,
            environment=environment or {},
        ),
        postgres=settings,
    )


async def refusal(settings: PostgresSettings, environment: Mapping[str, str] | None = None) -> str:
    with pytest.raises(StoreOpenError) as caught:
        await opened(settings, environment)
    return str(caught.value)


async def test_server_that_does_not_sync_is_refused_unless_the_words_are_said(
    careless: PostgresServer,
) -> None:
    settings = PostgresSettings(url=careless.url, password="env:SECRET", lease=60.0)
    environment = {"SECRET": PASSWORD}
    said = await refusal(settings, environment)
    assert "fsync = off and full_page_writes = off" in said
    assert "accept_loss" in said
    store = await opened(replace(settings, accept_loss=LOSS_WORDS), environment)
    await store.close()


async def test_no_message_holds_the_password(careless: PostgresServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not-the-password\n")
    said = await refusal(PostgresSettings(url=careless.url, password=str(secret)))
    assert "password authentication failed" in said
    assert "not-the-password" not in said


async def test_password_that_is_not_there_is_said_so() -> None:
    said = await refusal(PostgresSettings(url=shared_postgres().url, password="env:NOWHERE"))
    assert said == "postgres.password: the environment variable NOWHERE is not set"


async def test_database_that_is_not_there_is_said_so() -> None:
    said = await refusal(PostgresSettings(url="postgresql://mail@127.0.0.1:1/mail"))
    assert said.startswith("the database cannot be opened: the database does not answer")


async def test_without_the_driver_the_command_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    said = await refusal(PostgresSettings(url=shared_postgres().url))
    assert "pip install -r locks/postgres.lock" in said


async def test_newer_schema_is_left_alone(tmp_path: Path) -> None:
    async with Spool(tmp_path, backend=Backend.POSTGRES) as spool:
        await store_message(spool.store, 1)
        settings = spool.postgres
        assert settings is not None
    server = shared_postgres()
    server.psql(f"INSERT INTO {settings.schema}.schema_version (version) VALUES (1000)")
    said = await refusal(settings)
    assert "has version 1000" in said
    server.psql(f"DELETE FROM {settings.schema}.schema_version WHERE version = 1000")
    store = await opened(settings)
    assert store.last_message_id() == message_id(1)
    await store.close()


async def test_two_relays_cannot_be_the_same_node(tmp_path: Path) -> None:
    async with Spool(tmp_path, backend=Backend.POSTGRES) as spool:
        assert spool.postgres is not None
        said = await refusal(spool.postgres)
        assert "another relay is connected to the database as node 0" in said
        other = await opened(replace(spool.postgres, node=7))
        assert (spool.store.node, other.node) == (0, 7)
        await other.close()


async def test_it_works_over_the_unix_socket(tmp_path: Path) -> None:
    settings = PostgresSettings(url=shared_postgres().socket_url, schema="by_socket", lease=60.0)
    async with Spool(tmp_path, backend=Backend.POSTGRES, postgres=settings) as spool:
        await store_message(spool.store, 1)
        assert len(await spool.store.claim(queue_of("default"), 1, now=spool.clock.now())) == 1


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("REVOKE DELETE ON delivery FROM {role}", "DELETE on delivery"),
        ("REVOKE UPDATE ON delivery FROM {role}", "UPDATE on delivery"),
        ("REVOKE INSERT ON chunk FROM {role}", "INSERT on chunk"),
        ("REVOKE SELECT ON message FROM {role}", "SELECT on message"),
        ("REVOKE USAGE, UPDATE ON SEQUENCE node_session FROM {role}", "USAGE on node_session"),
        (
            "ALTER TABLE delivery ENABLE ROW LEVEL SECURITY; ALTER TABLE delivery FORCE ROW LEVEL SECURITY",
            "rows without a policy on delivery",
        ),
        ("ALTER ROLE {role} SET default_transaction_read_only = on", "read-only transaction"),
    ],
)
async def test_a_right_that_is_missing_is_named_and_keeps_the_relay_from_starting(
    statement: str, named: str
) -> None:
    server = shared_postgres()
    role = f"lacking_{uuid.uuid4().hex[:8]}"
    server.psql(f"CREATE ROLE {role} LOGIN; CREATE SCHEMA {role} AUTHORIZATION {role}")
    settings = PostgresSettings(url=server.url.replace("//mail@", f"//{role}@"), schema=role, lease=60.0)
    store = await opened(settings)
    await store.close()
    server.psql(f"SET search_path = {role}; {statement.format(role=role)}")
    assert named in await refusal(settings)
    server.psql(f"DROP SCHEMA {role} CASCADE; DROP ROLE {role}")
