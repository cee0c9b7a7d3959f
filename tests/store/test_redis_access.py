"""The Redis spool over TLS, logged in as a user with no more rights than docs/redis.md says."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme

from tests.store.builders import NOW, store_message
from tests.store.spools import until
from tests.support.debian import REPOSITORY
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer
from zonerelay.config.settings import Backend, RedisSettings, SpoolSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.check import Examination, Fault, Findings
from zonerelay.store.contract import CHUNK_SIZE, Finish, Store, StoreOpenError
from zonerelay.store.open import open_store
from zonerelay.store.redis.check import check
from zonerelay.store.redis.connection import Server, open_wire
from zonerelay.store.redis.limits import RedisShelf
from zonerelay.store.redis.repair import repair
from zonerelay.store.surroundings import Surroundings

PASSWORD = "correct-horse"
PREFIX = "mail:"
FILES = Path("/proc/self/fd")


def documented_rights() -> list[str]:
    """The line of docs/redis.md, as the server takes it."""
    page = (REPOSITORY / "docs" / "redis.md").read_text()
    found = re.search(r"^ACL SETUSER (.+)$", page, re.MULTILINE)
    assert found is not None
    return found[1].replace("SECRET", PASSWORD).replace("PREFIX", PREFIX).split()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    home = tmp_path_factory.mktemp("papers")
    port = free_port()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(home / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(home / "cert.pem")
    authority.cert_pem.write_to_path(home / "ca.pem")
    settings = {
        "tls-port": str(port),
        "tls-cert-file": str(home / "cert.pem"),
        "tls-key-file": str(home / "key.pem"),
        "tls-ca-cert-file": str(home / "ca.pem"),
        "tls-auth-clients": "no",
    }
    with RedisServer(settings) as server:
        server.url = f"rediss://127.0.0.1:{port}/0"
        assert server.ask("ACL", "SETUSER", *documented_rights()) == b"+OK\r\n"
        yield server


async def opened(server: RedisServer, ca: Path | None, **other: str) -> Store:
    return await open_store(
        SpoolSettings(backend=Backend.REDIS, path=Path(other["path"])),
        Surroundings(
            clock=SystemClock(),
            on_health=lambda _reason: None,
            observe_commit=lambda _seconds: None,
            environment={"SECRET": PASSWORD},
        ),
        redis=RedisSettings(
            url=server.url,
            ca_file=ca,
            lease=1.5,
            timeout=5.0,
            prefix=other.get("prefix", PREFIX),
            user=other.get("user", "zonerelay"),
            password=other.get("password", "env:SECRET"),
        ),
    )


@pytest.fixture
async def store(server: RedisServer, authority: trustme.CA, tmp_path: Path) -> AsyncIterator[Store]:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    store = await opened(server, tmp_path / "ca.pem", path=str(tmp_path))
    yield store
    await store.close()


async def test_whole_life_of_mail_needs_no_more_rights_than_the_page_says(store: Store) -> None:
    body = bytes(3 * CHUNK_SIZE)
    await store_message(store, 1, body=body)
    await store_message(store, 2)
    first, second = await store.claim(queue_of("default"), 10, now=NOW)
    assert b"".join([chunk async for chunk in store.read_body(first.message_id)]) == body
    store.release([second.key])
    assert [delivery.key async for delivery in store.scan()] == [first.key, second.key]
    assert await store.update([second.key], lambda delivery: None) == 1
    await store.settle([Finish(first)])
    await store.probe()
    assert await store.oldest(queue_of("default"), now=NOW) is None
    assert store.unhealthy() is None


async def test_check_and_repair_need_no_more_rights(
    server: RedisServer, authority: trustme.CA, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    store = await opened(server, ca, path=str(tmp_path))
    await store_message(store, 7, body=bytes(2 * CHUNK_SIZE))
    await store.close()
    server.ask("HDEL", f"{PREFIX}message:{7:016x}", "2")
    settings = RedisSettings(
        url=server.url, ca_file=ca, prefix=PREFIX, user="zonerelay", password="env:SECRET"
    )
    environment = {"SECRET": PASSWORD}
    findings = Findings()
    examination = Examination(tmp_path / "scratch", findings, lambda _done, _total: None, environment)
    assert (await check(settings, examination)).deliveries == 1
    assert findings.counts == {Fault.CHUNK_MISSING: 1}
    done = await repair(
        settings,
        lambda _salvaged: None,
        lambda _done, _total: None,
        kept=tmp_path / "kept",
        carry_out=True,
        environment=environment,
    )
    assert (done.before, done.after) == (1, 0)


async def test_lease_is_renewed_with_those_rights(store: Store, server: RedisServer) -> None:
    def ends() -> bytes:
        return server.query("ZRANGE", f"{PREFIX}leases", "0", "-1", "WITHSCORES")

    before = ends()
    await until(lambda: ends() != before)
    assert store.unhealthy() is None


async def test_server_whose_certificate_nobody_vouches_for_is_refused(
    server: RedisServer, tmp_path: Path
) -> None:
    with pytest.raises(StoreOpenError, match="certificate verify failed"):
        await opened(server, None, path=str(tmp_path))


async def test_a_server_that_does_not_say_goodbye_keeps_no_socket(
    server: RedisServer, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setattr("zonerelay.store.redis.connection.GOODBYE", 0.02)
    before = len(list(FILES.iterdir()))
    at = Server(
        RedisSettings(url=server.url, user="zonerelay", ca_file=tmp_path / "ca.pem"), lambda: PASSWORD
    )
    wire = await open_wire(at, pytest.fail)
    server.signal(signal.SIGSTOP)
    try:
        await wire.close()
        await asyncio.sleep(0)  # what is aborted is closed in the loop's next turn
        assert len(list(FILES.iterdir())) == before
    finally:
        server.signal(signal.SIGCONT)


@pytest.mark.parametrize("other", [{"password": ""}, {"user": "nobody"}, {"prefix": "others:"}])
async def test_who_may_not_is_told_so(
    server: RedisServer, authority: trustme.CA, tmp_path: Path, other: dict[str, str]
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    with pytest.raises(StoreOpenError) as caught:
        await opened(server, tmp_path / "ca.pem", path=str(tmp_path), **other)
    assert PASSWORD not in str(caught.value)


async def test_limits_need_no_more_rights(server: RedisServer, authority: trustme.CA, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    settings = RedisSettings(url=server.url, ca_file=ca, prefix=PREFIX, user="zonerelay")
    shelf, heard = RedisShelf(Server(settings, lambda: PASSWORD)), asyncio.Queue[str]()
    await shelf.open(heard.put_nowait)
    page = await shelf.read("default")
    assert await shelf.replace("default", page, b"data", keep=60.0, words=["a word"])
    assert await asyncio.wait_for(heard.get(), 5) == "a word"
    await shelf.close()


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ("resetchannels &PREFIXnews", "PUBLISH mail:limits"),
        ("resetchannels &PREFIXlimits", "access one of the channels"),
        ("-publish", "PUBLISH mail:limits"),
        ("-subscribe", "subscribe"),
        ("-@hash", "HSET mail:message:rights"),
        ("-@sortedset", "ZADD mail:queue:rights"),
        ("-@set", "SADD mail:parked:rights"),
        ("-incr", "INCR mail:once:rights"),
        ("-unlink", "UNLINK mail:message:rights"),
        ("-scan", "SCAN 0"),
        ("-time", "TIME"),
        ("-eval", "eval"),
        ("-eval_ro", "eval_ro"),
        ("-multi", "multi"),
        ("-info", "info"),
        ("-config|get", "CONFIG GET"),
        ("resetkeys ~mail: ~mail:m*", "HSET mail:deliveries:rights"),
        ("resetkeys %R~mail:* ~mail: %W~mail:m*", "HSET mail:deliveries:rights"),
    ],
)
async def test_a_right_that_is_missing_is_named_and_keeps_the_relay_from_starting(
    server: RedisServer, authority: trustme.CA, tmp_path: Path, rule: str, named: str
) -> None:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    words = [word.replace("zonerelay", "lacking") for word in documented_rights()]
    server.ask("ACL", "DELUSER", "lacking")
    assert server.ask("ACL", "SETUSER", *words, *rule.replace("PREFIX", PREFIX).split()) == b"+OK\r\n"
    with pytest.raises(StoreOpenError, match=re.escape(named)):
        await opened(server, tmp_path / "ca.pem", path=str(tmp_path), user="lacking")
    assert not server.query("KEYS", "*rights*").strip(b"*0\r\n+OK")
