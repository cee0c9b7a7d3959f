"""What is PostgreSQL's own: poolers, a server that is killed or unsafe, its role; each told in words."""

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest
from msgspec import structs

from tests.store.builders import NOW, store_message
from tests.store.keys.servers import write_through_kills, write_while_judged, written
from tests.support.pgbouncer import pooled
from tests.support.postgres import PASSWORD, PostgresServer, shared_postgres
from tests.support.waiting import until
from zonerelay.model.clock import SystemClock
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import FencedError, NodeTakenError, OlderStateError, Write
from zonerelay.store.postgres.driver import DatabaseAccess, DatabaseConnection
from zonerelay.store.postgres.engine import PostgresEngine, PostgresKeys, PostgresRecordStore
from zonerelay.store.queue.partition_keeper import open_queue

Opening = Callable[..., Awaitable[Partition]]

LEFT_BEHIND = """
SELECT string_agg(name || '=' || setting, ' ') FROM pg_settings
WHERE source = 'session' AND setting IS DISTINCT FROM reset_val
AND name NOT IN ('client_encoding', 'application_name', 'TimeZone', 'DateStyle')
"""


def access_to(url: str, *, lease: float = 60.0) -> DatabaseAccess:
    return DatabaseAccess(url, str, f"keys_{uuid.uuid4().hex[:12]}", "test", lease)


@pytest.fixture
async def opened() -> AsyncIterator[Opening]:
    async with AsyncExitStack() as stack:

        async def open_one(
            access: DatabaseAccess,
            node: int = 0,
            token: str = "here",
            *,
            failures: list[StoreError] | None = None,
            patience: float = 0.1,
        ) -> Partition:
            engine = PostgresEngine(access)
            made = await open_partition(engine, node, token=token, clock=SystemClock(), patience=patience)
            made.on_failure = (failures if failures is not None else []).append
            stack.push_async_callback(made.abandon)
            return made

        yield open_one


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """Whose settings may be changed."""
    with PostgresServer(auth="scram-sha-256") as server:
        yield server


@pytest.fixture
def access(server: PostgresServer) -> DatabaseAccess:
    return structs.replace(access_to(server.url), read_password=lambda: PASSWORD)


# --- keys


async def warm(url: str, count: int, statement: str) -> list[asyncpg.Connection]:
    """Connections of others to the pool, each with its own server connection."""
    made = [await asyncpg.connect(url, statement_cache_size=0) for _ in range(count)]

    async def use(connection: asyncpg.Connection) -> None:
        await connection.execute(f"BEGIN; {statement}; SELECT pg_sleep(0.1); COMMIT")

    await asyncio.gather(*(use(each) for each in made))
    return made


async def test_a_pool_for_transactions_does_no_harm(opened: Opening) -> None:
    """Server connections change from statement to statement, and have what others have set in them."""
    server = shared_postgres()
    with pooled(server, "transaction") as pool:
        others = await warm(pool, 6, "SET synchronous_commit = off; SET search_path = nowhere")
        access = access_to(pool)
        try:
            one, two = await opened(access, 0, patience=5.0), await opened(access, 1, patience=5.0)

            async def session(partition: Partition, number: int) -> None:
                for step in range(20):
                    key = b"%d %d" % (number, step)
                    await partition.write(Write({key: b"x", b"gone": None}))
                    assert await partition.get([key]) == [b"x"]

            await asyncio.gather(*(session(each, n) for each in (one, two) for n in range(8)))
            with pytest.raises(NodeTakenError):
                await opened(access, 0, token="another", patience=5.0)
            heir = await opened(access, 0, patience=5.0)  # our own successor
            with pytest.raises(FencedError):
                await one.write(Write({b"late": b""}))
            assert await heir.get([b"late", b"7 19"]) == [None, b"x"]
        finally:
            for each in others:
                await each.close()
    left = server.psql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
    assert left == "0"


async def test_a_batch_is_synced_whatever_others_have_set(opened: Opening) -> None:
    server = shared_postgres()
    with pooled(server, "transaction") as pool:
        others = await warm(pool, 4, "SET synchronous_commit = off")
        access = access_to(pool)
        partition = await opened(access, patience=5.0)
        server.psql(
            f"CREATE TABLE {access.schema}.seen (setting text);"
            f"CREATE FUNCTION {access.schema}.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            f" INSERT INTO {access.schema}.seen VALUES (current_setting('synchronous_commit'));"
            " RETURN NULL; END $$;"
            f"CREATE CONSTRAINT TRIGGER note AFTER INSERT OR UPDATE ON {access.schema}.entry"
            f" DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {access.schema}.note()"
        )
        for number in range(12):
            await partition.write(Write({b"%d" % number: b""}))
        assert server.psql(f"SELECT DISTINCT setting FROM {access.schema}.seen") == "on"
        for each in others:
            await each.close()


async def test_a_server_that_is_killed_under_load_loses_nothing(opened: Opening) -> None:
    with PostgresServer() as server:
        await write_through_kills(await opened(access_to(server.url), patience=5.0), server, 2)


async def test_a_former_primary_is_neither_read_nor_written(opened: Opening) -> None:
    """The connection ends, and the next one finds a state that is older than what was written."""
    with PostgresServer() as server:
        access = access_to(server.url)
        partition = await opened(access, patience=5.0)
        await partition.write(Write({b"a": b"1"}))
        server.psql(f"CREATE TABLE kept AS TABLE {access.schema}.partition")
        await partition.write(Write({b"a": b"2"}))
        server.psql(
            f"DELETE FROM {access.schema}.partition;"
            f"INSERT INTO {access.schema}.partition SELECT * FROM kept;"
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'test'"
        )
        await asyncio.sleep(0.1)
        with pytest.raises(OlderStateError):
            await partition.get([b"a"])
        with pytest.raises(StoreOpenError, match="an older state of the queue"):
            await partition.write(Write({b"a": b"3"}))
        assert server.psql(f"SELECT encode(value, 'escape') FROM {access.schema}.entry") == "2"
        await partition.abandon()


async def test_a_batch_that_ends_while_a_new_connection_is_judged_is_no_older_state(
    opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_while_judged(await opened(access_to(shared_postgres().url), patience=5.0), monkeypatch)


# --- the server


async def test_a_server_that_stops_syncing_is_noticed_at_the_next_beat(
    server: PostgresServer, access: DatabaseAccess, opened: Opening
) -> None:
    trouble: list[StoreError] = []
    partition = await opened(structs.replace(access, lease=1.0), failures=trouble)
    server.set("full_page_writes", "off")
    try:
        await until(lambda: trouble)
        assert "full_page_writes = off" in str(trouble[0])
        with pytest.raises(StoreError):
            await partition.write(Write({b"a": b"1"}))
        with pytest.raises(StoreOpenError, match="mail-loss"):
            await opened(access, 1)
        await (await opened(structs.replace(access, accepts_loss=True), 1)).write(Write({b"a": b"1"}))
    finally:
        server.set("full_page_writes", "on")
    await written(partition, b"a")


async def test_a_server_that_does_not_sync_is_refused(opened: Opening) -> None:
    with PostgresServer({"fsync": "off"}) as server, pytest.raises(StoreOpenError, match="fsync = off"):
        await opened(access_to(server.url))


async def test_a_standby_is_refused(opened: Opening) -> None:
    with PostgresServer() as server:
        server.shut_down()
        (server.data / "standby.signal").touch()
        server.start()
        with pytest.raises(StoreOpenError, match="the database server is a read-only standby"):
            await opened(access_to(server.url))


async def test_a_batch_that_stopped_waiting_for_its_standby_is_not_acknowledged(
    server: PostgresServer, access: DatabaseAccess, opened: Opening
) -> None:
    partition = await opened(access)
    waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    server.set("synchronous_standby_names", "elsewhere")
    try:
        storing = asyncio.ensure_future(partition.write(Write({b"a": b"1"})))
        await until(lambda: server.psql(waits))
        server.psql(f"SELECT pg_cancel_backend(pid) FROM ({waits}) AS waiting")
        await asyncio.sleep(0.3)
        assert not storing.done()
    finally:
        server.set("synchronous_standby_names", "")
    await asyncio.wait([storing])
    if storing.exception() is None:
        assert await partition.get([b"a"]) == [b"1"]


async def test_a_server_that_is_not_there_or_has_gone_is_told(opened: Opening) -> None:
    with pytest.raises(StoreError, match="the database does not respond"):
        await opened(access_to("postgresql://mail@127.0.0.1:1/mail"))
    trouble: list[StoreError] = []
    with PostgresServer() as server:
        await opened(access_to(server.url, lease=1.0), failures=trouble)
        await asyncio.to_thread(server.kill)
        await until(lambda: trouble)
        server.start()


async def test_a_server_that_ends_idle_connections_disturbs_nobody(
    server: PostgresServer, access: DatabaseAccess, opened: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    server.set("idle_session_timeout", "300ms")
    try:
        partition = await opened(access)
        shelf = PostgresRecordStore(access)
        async with shelf.listening(lambda _word: None) as ended:
            for number in range(3):
                await asyncio.sleep(0.7)
                await partition.write(Write({b"a": b"%d" % number}))
                assert await partition.get([b"a"]) == [b"%d" % number]
            assert partition.seen.epoch == 1
            assert not caplog.records
            assert not ended.is_set()
        await shelf.close()
    finally:
        server.set("idle_session_timeout", "0")


# --- the role


async def test_how_the_driver_is_installed_is_said(opened: Opening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(StoreOpenError, match=r"pip install -r locks/postgres\.lock"):
        await opened(access_to(shared_postgres().url))


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("REVOKE DELETE ON entry FROM {role}", "DELETE on entry"),
        ("REVOKE UPDATE ON partition FROM {role}", "UPDATE on partition"),
        ("REVOKE INSERT ON reservation FROM {role}", "INSERT on reservation"),
        ("REVOKE SELECT ON mark FROM {role}", "permission denied for table mark"),
        (
            "ALTER TABLE entry ENABLE ROW LEVEL SECURITY; ALTER TABLE entry FORCE ROW LEVEL SECURITY",
            "rows without a policy on entry",
        ),
        ("ALTER ROLE {role} SET default_transaction_read_only = on", "read-only transaction"),
    ],
)
async def test_a_right_that_is_missing_is_named_and_keeps_the_relay_from_starting(
    opened: Opening, statement: str, named: str
) -> None:
    server = shared_postgres()
    role = f"lacking_{uuid.uuid4().hex[:8]}"
    server.psql(f"CREATE ROLE {role} LOGIN; CREATE SCHEMA {role} AUTHORIZATION {role}")
    access = structs.replace(access_to(server.url.replace("//mail@", f"//{role}@")), schema=role)
    await (await opened(access)).close()
    server.psql(f"SET search_path = {role}; {statement.format(role=role)}")
    with pytest.raises(StoreError, match=named):
        await opened(access)
    server.psql(f"DROP SCHEMA {role} CASCADE; DROP ROLE {role}")


async def test_it_works_over_the_unix_socket(opened: Opening) -> None:
    await (await opened(access_to(shared_postgres().socket_url))).write(Write({b"a": b"1"}))


# --- poolers


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_nothing_is_left_behind_in_a_pool(mode: str, opened: Opening) -> None:
    with pooled(shared_postgres(), mode) as pool:
        access = access_to(pool)
        partition = await opened(access)
        shelf = PostgresRecordStore(access)
        async with shelf.listening(lambda _word: None):
            page = await shelf.read("default")
            assert await shelf.replace("default", page, b"data", ttl=1, notices=["word"])
            await partition.write(Write({b"a": b"1"}))
            await partition.close()
        await shelf.close()
        for _ in range(4):
            connection = await asyncpg.connect(pool, statement_cache_size=0)
            for statement, left in (
                (LEFT_BEHIND, None),
                ("SELECT count(*) FROM pg_prepared_statements WHERE name > ''", 0),
                ("SELECT count(*) FROM pg_listening_channels()", 0),
            ):
                assert [row[0] for row in await connection.fetch(statement)] in (
                    [left],
                    [] if left is None else [0],
                )
            await connection.close()


async def test_a_pool_that_is_too_small_is_told(opened: Opening) -> None:
    with pooled(shared_postgres(), "session", size=1) as pool:
        access = access_to(pool, lease=2.0)
        partition = await opened(access)
        with pytest.raises(StoreError, match="its pool may be too small"):
            await partition.get([b"a"])


# --- for people, and for all nodes


async def test_the_queue_is_read_by_sql(tmp_path: Path) -> None:
    server = shared_postgres()
    access = access_to(server.url)

    partition = await open_partition(PostgresEngine(access), 3, token="here", clock=SystemClock())
    store = await open_queue(partition, StoreContext(SystemClock()))
    await store_message(store, 1, "ä b@example.net", body=b"\xff" * 200_000)
    await store_message(store, 2, "b@example.net", next_attempt=NOW + 60)
    rows = server.psql(f"SELECT node, zone, message, record FROM {access.schema}.delivery ORDER BY 3")
    first, second = rows.splitlines()
    assert first.startswith("3|default|0000000000000001|{")
    assert json.loads(second.rpartition("|")[2])
    ids = server.psql(
        f"SELECT id, metadata -> 'envelope' IS NOT NULL FROM {access.schema}.message ORDER BY 1"
    )
    assert [line.partition("|")[0] for line in ids.splitlines()] == [f"{n:016x}" for n in (1, 2)]
    await store.close()


async def test_reservations_that_have_expired_are_removed(opened: Opening) -> None:
    access = access_to(shared_postgres().url)
    await opened(access)
    engine = PostgresEngine(access)
    await engine.reserve(b"short", b"5", 1.0)
    await engine.reserve(b"other", b"6", 4e9)
    assert shared_postgres().psql(f"SELECT count(*) FROM {access.schema}.reservation") == "1"
    await engine.close()


async def test_listening_waits_for_the_statement_of_another_caller() -> None:
    link = await DatabaseConnection.plain(access_to(shared_postgres().url))
    heard: list[str] = []
    await asyncio.gather(link.fetch("SELECT pg_sleep(0.1)"), link.listen("some_news", heard.append))
    await link.fetch("NOTIFY some_news, 'now'")
    await until(lambda: heard == ["now"])
    await link.close()


async def test_two_relays_that_start_together_both_make_the_tables(opened: Opening) -> None:
    access = access_to(shared_postgres().url)
    partitions = await asyncio.gather(*(opened(access, node) for node in range(4)))
    assert all(isinstance(each.keeper, PostgresKeys) for each in partitions)
    await asyncio.gather(*(each.write(Write({b"a": b"1"})) for each in partitions))
