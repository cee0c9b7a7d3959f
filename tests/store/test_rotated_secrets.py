"""A secret in a file is read at each connection, so a new one needs no restart and no signal."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from aiohttp import web

from tests.store.builders import NOW, store_message
from tests.store.spools import Spool, s3_settings
from tests.support.https import served
from tests.support.postgres import PASSWORD, PostgresServer
from tests.support.redis_server import RedisServer
from tests.support.waiting import until
from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store.objects import s3
from zonerelay.store.objects.s3 import Bucket, RequestRejectedError

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer(auth="scram-sha-256") as server:
        yield server


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(PASSWORD)
    return path


@pytest.mark.parametrize("form", ["file", "passfile"])
async def test_a_postgresql_password_that_was_replaced(
    postgres: PostgresServer, secret: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    role = f"relay_{uuid.uuid4().hex[:8]}"
    url = postgres.url.replace("//mail@", f"//{role}@")

    def use(password: str) -> None:
        secret.write_text(password if form == "file" else f"*:*:*:*:{password}")
        secret.chmod(0o600)

    use(PASSWORD)
    postgres.psql(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD '{PASSWORD}'")
    settings = PostgresSettings(url=url, password=str(secret), schema=role, lease=4.0)
    if form == "passfile":
        settings = replace(settings, url=f"{url}?passfile={secret}", password="")
    async with Spool(
        secret.parent, backend=Backend.POSTGRES, postgres=settings, clock=SystemClock()
    ) as spool:
        await store_message(spool.store, 1)
        cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"
        await asyncio.to_thread(postgres.psql, f"ALTER ROLE {role} PASSWORD 'another'; {cut}")
        await until(lambda: spool.store.unhealthy() is not None)
        assert "password authentication failed" in caplog.text
        assert PASSWORD not in caplog.text
        use("another")
        await until(lambda: spool.store.unhealthy() is None)
        await store_message(spool.store, 2)
        assert len(await spool.store.claim(queue_of("default"), 10, now=NOW)) == 2


async def test_a_redis_password_that_was_replaced(secret: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        assert server.ask("ACL", "SETUSER", "relay", "on", f">{PASSWORD}", "~*", "&*", "+@all") == b"+OK\r\n"
        settings = RedisSettings(url=server.url, user="relay", password=str(secret), lease=4.0)
        async with Spool(secret.parent, backend=Backend.REDIS, redis=settings, clock=SystemClock()) as spool:
            await store_message(spool.store, 1)
            server.ask("ACL", "SETUSER", "relay", "resetpass", ">another")
            server.ask("CLIENT", "KILL", "USER", "relay")
            await until(lambda: spool.store.unhealthy() is not None)
            assert "rejects the login of relay" in caplog.text
            secret.write_text("another")
            await until(lambda: spool.store.unhealthy() is None)
            await store_message(spool.store, 2)


@dataclass
class Denying:
    """A service that knows one key."""

    known: str = "old"
    signed_by: Callable[[], str] = str

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        if self.signed_by() == self.known:
            return web.Response(headers={"ETag": '"a"'})
        return web.Response(status=403, text="<Error><Code>SignatureDoesNotMatch</Code></Error>")


@pytest.fixture
async def service() -> AsyncIterator[tuple[Denying, str]]:
    denying, application = Denying(), web.Application()
    application.router.add_route("*", "/{path:.*}", denying.answer)
    async with served(application) as url:
        yield denying, url


async def test_an_s3_key_that_was_replaced(service: tuple[Denying, str], secret: Path) -> None:
    denying, url = service
    secret.write_text("old")
    bucket = Bucket(s3_settings(url), secret.read_text)
    await bucket.open()
    denying.signed_by = lambda: str(bucket._client._request_signer._credentials.secret_key)
    await bucket.replace("a", b"1")
    denying.known = "new"
    with pytest.raises(RequestRejectedError):
        await bucket.replace("a", b"2")
    with pytest.raises(RequestRejectedError):
        await bucket.replace("a", b"3")
    secret.write_text("new")
    await bucket.replace("a", b"4")
    await bucket.close()


async def test_clients_of_an_s3_key_that_stays_refused_are_closed(
    service: tuple[Denying, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search for other credentials makes a client. An outage of hours must not fill the memory."""
    denying, url = service
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "revoked")
    monkeypatch.setattr(s3, "READ_AGAIN", 0.0)
    monkeypatch.setattr(s3, "LONGEST_USE", -4.9)
    bucket = Bucket(replace(s3_settings(url), access_key="", timeout=5.0), str)
    make, opened = bucket._make, [0, 0]

    @asynccontextmanager
    async def counted(service: str, url: str) -> AsyncIterator[object]:
        async with make(service, url) as client:
            opened[:] = opened[0] + 1, opened[1] + 1
            yield client
            opened[0] -= 1

    monkeypatch.setattr(bucket, "_make", counted)
    denying.signed_by = lambda: "revoked"
    for number in range(5):
        with pytest.raises(RequestRejectedError):
            await bucket.replace("a", b"%d" % number)
    assert opened[1] == 5
    await until(lambda: opened[0] == 1)
    await bucket.close()
    assert opened == [0, 5]
