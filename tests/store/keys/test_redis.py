"""What is Redis' own: a server that is killed, full or unsafe, a Cluster, rights, TLS; each told in words."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.store.builders import NOW, store_message
from tests.store.keys.servers import write_through_kills, write_while_judged, written
from tests.store.spools import Spool
from tests.support.debian import REPOSITORY
from tests.support.ports import free_port, wait_until
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from zonerelay.config.settings import Backend, RedisSettings, UnsafeStore
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store.contract import Finish, StoreError, StoreFullError, StoreOpenError, Unhealthy
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import OlderStateError, Write, clear, pages
from zonerelay.store.redis import engine as redis_engine
from zonerelay.store.redis.connection import Confirmation, RedisEndpoint, open_wire, subscribed
from zonerelay.store.redis.engine import RedisEngine, RedisRecordStore, server_facts, tell_foreign_queue

PASSWORD = "correct-horse"
PREFIX = "{mail}:"

Opening = Callable[..., Awaitable[Partition]]


@pytest.fixture
async def opened() -> AsyncIterator[Opening]:
    """Opens a partition whose troubles are in `trouble`."""
    async with AsyncExitStack() as stack:

        async def open_one(
            url: str,
            *,
            password: str = "",
            failures: list[StoreError] | None = None,
            patience: float = 0.1,
            **other: object,
        ) -> Partition:
            settings = RedisSettings(url=url, **{"prefix": PREFIX, "lease": 30.0, "timeout": 2.0, **other})  # type: ignore[arg-type]
            engine = RedisEngine(RedisEndpoint(settings, lambda: password))
            made = await open_partition(engine, 0, token="here", clock=SystemClock(), patience=patience)
            made.on_failure = (failures if failures is not None else []).append
            stack.push_async_callback(made.abandon)
            return made

        yield open_one


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


# --- keys


async def test_a_server_that_is_killed_under_load_loses_nothing(server: RedisServer, opened: Opening) -> None:
    await write_through_kills(await opened(server.url, patience=5.0), server, 3)


async def test_a_full_server_refuses_mail_and_takes_outcomes(server: RedisServer, opened: Opening) -> None:
    partition = await opened(server.url, patience=5.0)
    await partition.write(Write({b"old %d" % number: bytes(60_000) for number in range(100)}))
    server.configure("maxmemory", "6mb")
    refused = asyncio.ensure_future(partition.write(Write({b"new": bytes(1000)})))
    outcome = partition.write(Write({b"old 1": None, b"outcome": b"delivered"}, makes_room=True))
    with pytest.raises(StoreFullError, match="the spool's server is out of memory"):
        await refused
    await outcome
    assert await partition.get([b"new", b"old 1", b"outcome"]) == [None, None, b"delivered"]
    await clear(partition, b"old ", b"old!", partition.write)
    await partition.write(Write({b"new": b"1"}))
    room = await partition.room()
    assert room is not None
    assert room > 1_000_000


async def test_a_server_that_stands_still_is_cut_off_and_asked(server: RedisServer, opened: Opening) -> None:
    """It carries out later what was sent to it before the connection was given up."""
    partition = await opened(server.url, patience=20, timeout=0.5)
    await partition.write(Write({b"a": b"1"}))
    server.signal(signal.SIGSTOP)
    waiting = asyncio.ensure_future(partition.write(Write({b"a": b"2"})))
    await asyncio.sleep(1.5)
    server.signal(signal.SIGCONT)
    await waiting
    assert await partition.get([b"a"]) == [b"2"]
    assert partition.seen.last.number == 2
    assert partition.seen.epoch > 1


async def test_a_server_that_goes_on_standing_still_is_reported(server: RedisServer, opened: Opening) -> None:
    """The kernel accepts its connections. A new one waited for the server's first reply for ever."""
    failures: list[StoreError] = []
    partition = await opened(server.url, failures=failures, patience=0.5, timeout=0.5)
    await partition.write(Write({b"a": b"1"}))
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(10.0):
            with pytest.raises(StoreError, match="unknown whether"):
                await partition.write(Write({b"a": b"2"}))
            with pytest.raises(StoreError, match=r"unreachable: no answer within 0\.5 s"):
                await open_wire(RedisEndpoint(RedisSettings(url=server.url, timeout=0.5)))
    finally:
        server.signal(signal.SIGCONT)
    assert len(failures) == 1


async def test_a_log_that_was_cut_is_an_older_state(server: RedisServer, opened: Opening) -> None:
    partition = await opened(server.url, patience=0.1)
    for number in range(100):
        await partition.write(Write({b"k%03d" % number: bytes(1000)}))
    server.kill()
    (log,) = server.directory.glob("appendonlydir/*.incr.aof")
    with log.open("r+b") as file:
        file.truncate(log.stat().st_size - 40_000)
    server.start()
    with pytest.raises(OlderStateError, match="older state of the queue"):
        await partition.write(Write({b"new": b""}))
    found = server.ask("HGET", f"{PREFIX}node:0", "epoch")
    assert found.startswith(b"$1\r\n1\r\n")  # nothing was changed there


async def test_an_emptied_server_is_refused(server: RedisServer, opened: Opening) -> None:
    partition = await opened(server.url, patience=0.1)
    await partition.write(Write({b"a": b"1"}))
    server.ask("FLUSHALL")
    with pytest.raises(StoreOpenError, match="it has no mark, like an empty store"):
        await partition.write(Write({b"a": b"2"}))
    assert server.ask("DBSIZE") == b":0\r\n"


async def test_a_cluster_wants_a_prefix_in_braces_and_one_slot_is_enough(opened: Opening) -> None:
    with cluster_node() as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383")
        assert wait_until(lambda: b"cluster_state:ok" in server.query("CLUSTER", "INFO"), timeout=20)
        with pytest.raises(StoreOpenError, match=r'prefix = "\{zonerelay\}:"'):
            await opened(server.url, prefix="mail:")
        partition = await opened(server.url, patience=5.0)
        await partition.write(Write({b"k%d" % number: b"x" for number in range(2500)}))
        await partition.write(Write({b"k%d" % number: None for number in range(1200)}))
        found = [key async for rows in pages(partition, b"k", b"l") for key, _ in rows]
        assert found == sorted(b"k%d" % n for n in range(1200, 2500))


async def test_a_batch_that_ends_while_a_new_connection_is_judged_is_no_older_state(
    server: RedisServer, opened: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_while_judged(await opened(server.url, patience=5.0), monkeypatch)


# --- servers that cannot be used


async def test_a_sentinel_is_named_as_one(opened: Opening, tmp_path: Path) -> None:
    settings = tmp_path / "sentinel.conf"
    settings.touch()
    with (
        RedisServer(port=free_port(), arguments=(str(settings), "--sentinel")) as sentinel,
        pytest.raises(StoreOpenError, match="this is a Sentinel, which stores no data"),
    ):
        await opened(sentinel.url)


async def test_a_sentinel_of_valkey_8_is_one() -> None:
    """Debian 12 has no Valkey. This is what 8.1 answers to INFO."""

    class Sentinel:
        async def call(self, command: str, *_: object) -> bytes:
            assert command in ("INFO", "CONFIG GET")
            return b"redis_version:7.2.4\r\nvalkey_version:8.1.1\r\nserver_mode:sentinel\r\n"

    wire: Any = Sentinel()
    facts = await server_facts(wire)
    with pytest.raises(StoreOpenError, match="this is a Sentinel, which stores no data"):
        redis_engine.check_server(facts, RedisSettings())


async def test_a_replica_says_of_which_server(server: RedisServer, opened: Opening) -> None:
    with (
        RedisServer({"replicaof": "127.0.0.1 1"}) as replica,
        pytest.raises(StoreOpenError, match=re.escape("a read-only replica of 127.0.0.1:1")),
    ):
        await opened(replica.url)


async def test_settings_that_nobody_may_read_are_no_lack_of_memory(opened: Opening) -> None:
    with RedisServer(arguments=("--rename-command", "CONFIG", "nobody-knows")) as server:
        with pytest.raises(StoreOpenError, match="cannot be read with CONFIG GET"):
            await opened(server.url)
        await opened(server.url, unsafe=(UnsafeStore.MAIL_LOSS,))


async def test_too_few_replicas_are_told(server: RedisServer, opened: Opening) -> None:
    trouble: list[StoreError] = []
    partition = await opened(server.url, failures=trouble)
    server.configure("min-replicas-to-write", "1")
    with pytest.raises(StoreError, match="the server has fewer replicas than min-replicas-to-write"):
        await partition.write(Write({b"a": b"1"}))
    assert trouble
    with pytest.raises(StoreError, match="the server has fewer replicas than min-replicas-to-write"):
        await opened(server.url)
    server.configure("min-replicas-to-write", "0")
    await written(partition, b"a")


async def test_replicas_that_do_not_confirm_are_told(server: RedisServer, opened: Opening) -> None:
    with pytest.raises(StoreError, match=r"\[redis\] replicas: fewer than 1 have confirmed"):
        await (await opened(server.url, replicas=1, timeout=0.4)).write(Write({b"a": b"1"}))


async def test_a_right_that_is_taken_away_is_named_only(server: RedisServer, opened: Opening) -> None:
    trouble: list[StoreError] = []
    partition = await opened(server.url, failures=trouble)
    await partition.write(Write({b"a": b"1"}))
    server.ask("ACL", "SETUSER", "default", "-hset")
    with pytest.raises(StoreError, match="the user of the spool's server lacks privileges: HSET"):
        await partition.write(Write({b"a": None, b"b": b"2"}))
    assert server.query("ZRANGE", f"{PREFIX}keys:0", "0", "-1").startswith(b"*1\r\n$1\r\na")
    server.ask("ACL", "SETUSER", "default", "+hset", "-eval")
    await asyncio.sleep(0.2)
    with pytest.raises(StoreError):
        await partition.write(Write({b"b": b"2"}))
    server.ask("ACL", "SETUSER", "default", "+eval")
    await written(partition, b"b")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendonly", "no"),
        ("appendfsync", "everysec"),
        ("appendfsync", "no"),
        ("no-appendfsync-on-rewrite", "yes"),
        ("maxmemory-policy", "allkeys-lru"),
    ],
)
async def test_a_server_that_cannot_keep_the_promise_is_refused_unless_told_otherwise(
    server: RedisServer, opened: Opening, name: str, value: str
) -> None:
    server.configure(name, value)
    with pytest.raises(StoreOpenError, match=name):
        await opened(server.url)
    await (await opened(server.url, unsafe=(UnsafeStore.MAIL_LOSS,))).write(Write({b"a": b"1"}))


async def test_a_promise_that_is_broken_later_stops_writes(server: RedisServer, opened: Opening) -> None:
    trouble: list[StoreError] = []
    partition = await opened(server.url, lease=1.0, failures=trouble)
    server.configure("appendfsync", "everysec")
    await until(lambda: trouble, seconds=5)
    assert "appendfsync is everysec" in str(trouble[0])
    with pytest.raises(StoreError):
        await partition.write(Write({b"a": b"1"}))
    server.configure("appendfsync", "always")
    await written(partition, b"a")


async def test_an_idle_server_that_left_is_noticed_alone(server: RedisServer, opened: Opening) -> None:
    trouble: list[StoreError] = []
    await opened(server.url, lease=1.0, failures=trouble)
    server.kill()
    await until(lambda: trouble, seconds=5)
    assert "the spool's server is unreachable" in str(trouble[0])


async def test_a_server_that_ends_idle_connections_disturbs_nobody(
    server: RedisServer, opened: Opening, caplog: pytest.LogCaptureFixture
) -> None:
    partition = await opened(server.url)
    shelf = RedisRecordStore(RedisEndpoint(RedisSettings(url=server.url, prefix=PREFIX)))
    async with shelf.listening(lambda _word: None) as ended:
        page = await shelf.read("default")
        server.configure("timeout", "1")
        caplog.clear()
        for number in range(2):
            await asyncio.sleep(2.2)
            await partition.write(Write({b"a": b"%d" % number}))
            assert await partition.get([b"a"]) == [b"%d" % number]
            assert (await shelf.read("default")).data == page.data
        assert not caplog.records
        assert partition.seen.epoch == 1
        assert not ended.is_set()
    await shelf.close()


async def test_below_min_free_space_mail_is_refused_and_leaves(server: RedisServer, tmp_path: Path) -> None:
    settings = RedisSettings(url=server.url, prefix=PREFIX)
    async with Spool(tmp_path, backend=Backend.REDIS, redis=settings, clock=SystemClock()) as spool:
        await store_message(spool.store, 1)
    server.configure("maxmemory", "100mb")
    await spool.open(min_free_space=200 * 1024 * 1024)
    await until(lambda: spool.store.unhealthy() is Unhealthy.NO_SPACE)
    with pytest.raises(StoreFullError):
        await store_message(spool.store, 2)
    (delivery,) = await spool.store.claim(queue_of("default"), 10, now=NOW)
    await spool.store.settle([Finish(delivery)])
    await spool.store.close()


async def test_mail_of_another_system_is_told(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    of = RedisEndpoint(RedisSettings(url=server.url, prefix=PREFIX))
    await tell_foreign_queue(of)
    assert not caplog.records
    server.ask("HSET", f"{PREFIX}{'0' * 32}", "envelope", "x")
    await tell_foreign_queue(of)
    assert "zonerelay spool import --from slimta-redis" in caplog.text


# --- answers after which a connection is given up


@asynccontextmanager
async def given_up(server: RedisServer, *command: str) -> AsyncIterator[list[str]]:
    """The reasons for which a wire was given up that was asked this."""
    wire = await open_wire(RedisEndpoint(RedisSettings(url=server.url)))
    try:
        with pytest.raises(StoreError):
            await wire.call(*command)
        await asyncio.sleep(0)
        yield [str(wire._broken)] if wire._broken else []
    finally:
        await wire.close()


def cluster_node(**other: str) -> RedisServer:
    settings: Mapping[str, str] = {"cluster-enabled": "yes", "cluster-port": str(free_port()), **other}
    return RedisServer(settings, port=free_port())


async def test_a_node_of_a_cluster_without_slots_is_given_up() -> None:
    with cluster_node() as node:
        async with given_up(node, "SET", "a", "b") as reasons:
            assert reasons == [
                "the Cluster does not serve the slot of the key prefix: Hash slot not served"
            ] or reasons == [
                "the Cluster does not serve the slot of the key prefix: CLUSTERDOWN Hash slot not served"
            ]


async def test_a_node_of_a_cluster_that_points_elsewhere_is_given_up() -> None:
    with cluster_node() as node, cluster_node() as other:
        bus = other._settings["cluster-port"]
        assert node.ask("CLUSTER", "MEET", "127.0.0.1", str(other.port), bus) == b"+OK\r\n"
        assert other.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK\r\n"
        assert wait_until(lambda: b"cluster_state:ok" in node.query("CLUSTER", "INFO"), timeout=15)
        async with given_up(node, "SET", "a", "b") as (reason,):
            assert reason.startswith("the slot of the key prefix is on another node")
            assert reason.endswith(f"15495 127.0.0.1:{other.port}")


async def test_a_replica_that_has_lost_its_primary_is_given_up() -> None:
    with RedisServer({"replica-serve-stale-data": "no"}) as replica:
        assert replica.ask("REPLICAOF", "127.0.0.1", str(free_port())) == b"+OK\r\n"
        async with given_up(replica, "GET", "a") as (reason,):
            assert reason.startswith("the server is a replica and has lost its primary")


async def test_a_reply_of_an_unknown_form_leaves_nobody_waiting(server: RedisServer) -> None:
    wire = await open_wire(RedisEndpoint(RedisSettings(url=server.url)))
    wire.confirm = (Confirmation(("KEYS", "*"), 0, "not confirmed"),)
    for _ in range(2):
        with pytest.raises(StoreError):
            await asyncio.wait_for(wire.call("GET", "a"), 5.0)
    assert wire.is_over
    await wire.close()


async def test_a_notice_that_cannot_be_read_ends_the_subscription(server: RedisServer) -> None:
    def refuse(notice: str) -> None:
        raise ValueError(notice)

    endpoint = RedisEndpoint(RedisSettings(url=server.url))
    async with subscribed(endpoint, b"news", refuse) as ended:
        server.ask("PUBLISH", "news", "zone")
        await asyncio.wait_for(ended.wait(), 5.0)


# --- TLS, and a user with no more rights than docs/store/redis.md says


def documented_rights() -> list[str]:
    """The line of docs/store/redis.md, as the server takes it."""
    page = (REPOSITORY / "docs" / "store" / "redis.md").read_text()
    found = re.search(r"^ACL SETUSER (.+)$", page, re.MULTILINE)
    assert found is not None
    return found[1].replace("SECRET", PASSWORD).replace("PREFIX", PREFIX).split()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("papers") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


@pytest.fixture(scope="module")
def strict(authority: trustme.CA, ca: Path) -> Iterator[RedisServer]:
    port = free_port()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(ca.with_name("key.pem"))
    certificate.cert_chain_pems[0].write_to_path(ca.with_name("cert.pem"))
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(ca.with_name("cert.pem")),
        "tls-key-file": str(ca.with_name("key.pem")),
        "tls-ca-cert-file": str(ca),
        "tls-auth-clients": "no",
    }
    with RedisServer(settings) as server:
        server.url = f"rediss://127.0.0.1:{port}/0"
        assert server.ask("ACL", "SETUSER", *documented_rights()) == b"+OK\r\n"
        yield server


async def test_nothing_needs_more_rights_than_said(strict: RedisServer, ca: Path, opened: Opening) -> None:
    partition = await opened(
        strict.url, ca_file=ca, user="zonerelay", password=PASSWORD, lease=1.0, replicas=0
    )
    await partition.write(Write({b"a": b"1", b"b": b"2"}))
    await partition.write(Write({b"a": None}, makes_room=True))
    assert await partition.last_key(b"a", b"z") == b"b"
    assert (await partition.page(b"a", b"z")).rows == [(b"b", b"2")]
    before = strict.query("HGET", f"{PREFIX}node:0", "expires")
    await asyncio.sleep(0.7)
    assert strict.query("HGET", f"{PREFIX}node:0", "expires") != before
    settings = RedisSettings(url=strict.url, ca_file=ca, prefix=PREFIX, user="zonerelay")
    server = RedisEndpoint(settings, lambda: PASSWORD)
    engine = RedisEngine(server)
    assert [peer.node for peer in await engine.peers()] == [0]
    assert await engine.reserve(b"key", b"1", 4e9) is None
    await engine.unreserve(b"key", b"1")
    await engine.close()
    shelf, heard = RedisRecordStore(server), asyncio.Queue[str]()
    async with shelf.listening(heard.put_nowait):
        page = await shelf.read("default")
        assert await shelf.replace("default", page, b"data", ttl=60.0, notices=["a word"])
        assert await asyncio.wait_for(heard.get(), 5) == "a word"
    await shelf.close()
    await partition.close()


async def test_a_certificate_that_nobody_vouches_for_is_refused(strict: RedisServer, opened: Opening) -> None:
    with pytest.raises(StoreError, match="certificate verify failed"):
        await opened(strict.url, user="zonerelay", password=PASSWORD)


@pytest.mark.parametrize("other", [{"password": ""}, {"user": "nobody"}, {"prefix": "others:"}])
async def test_rights_are_told(strict: RedisServer, ca: Path, opened: Opening, other: dict[str, str]) -> None:
    with pytest.raises(StoreOpenError) as caught:
        await opened(strict.url, ca_file=ca, **{"user": "zonerelay", "password": PASSWORD, **other})
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("resetchannels &other", "PUBLISH {mail}:limits"),
        ("-publish", "PUBLISH {mail}:limits"),
        ("-subscribe", "subscribe"),
        ("-@hash", "HSET {mail}:node:rights"),
        ("-@sortedset", "ZADD {mail}:keys:rights"),
        ("-@set", "SADD {mail}:nodes:rights"),
        ("-del", "DEL {mail}:"),
        ("-time", "TIME"),
        ("-eval", "eval"),
        ("-info", "info"),
        ("-config|get", "config"),
        ("resetkeys ~{mail}: ~{mail}:n*", "HSET {mail}:values:rights"),
        ("resetkeys %R~{mail}:* ~{mail}: %W~{mail}:n*", "HSET {mail}:values:rights"),
    ],
)
async def test_a_right_that_is_missing_is_named_and_keeps_the_relay_from_starting(
    strict: RedisServer, ca: Path, opened: Opening, rule: str, named: str
) -> None:
    words = [word.replace("zonerelay", "lacking") for word in documented_rights()]
    strict.ask("ACL", "DELUSER", "lacking")
    assert strict.ask("ACL", "SETUSER", *words, *rule.split()) == b"+OK\r\n"
    with pytest.raises(StoreError, match=re.escape(named)):
        await opened(strict.url, ca_file=ca, user="lacking", password=PASSWORD)
    strict.ask("ACL", "SETUSER", "default", "+@all")
