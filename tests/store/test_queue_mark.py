"""A shared store that lost the queue, or is another one, is no fresh start."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool, until
from tests.support.postgres import shared_postgres
from tests.support.redis_server import RedisServer
from tests.support.toml import toml_document
from zonerelay.cli.main import main
from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings, S3Settings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common.queue_mark import FILE, QueueMark, place_of
from zonerelay.store.contract import StoreError, StoreOpenError, Unhealthy
from zonerelay.store.postgres import session as postgres_session
from zonerelay.store.redis import keeper as redis_keeper

LEASE = 2.0


class Place:
    """One shared store, and machines that use it. `lose` empties it."""

    def __init__(
        self,
        directory: Path,
        stack: AsyncExitStack,
        backend: Backend,
        settings: dict[str, Any],  # Any: by the names of a spool's arguments
        lose: Callable[[], None],
        lose_mark: Callable[[], None],
    ) -> None:
        self.lose, self.lose_mark = lose, lose_mark
        self._directory, self._stack = directory, stack
        self._backend, self._settings = backend, settings

    async def open(self, machine: str) -> Spool:
        spool = Spool(self._directory / machine, backend=self._backend, clock=SystemClock(), **self._settings)
        await spool.open()
        self._stack.push_async_callback(self._close, spool)
        return spool

    async def _close(self, spool: Spool) -> None:
        await spool.store.close()  # the one that is open then

    def mark_of(self, machine: str) -> QueueMark:
        none: dict[str, Any] = {"redis": RedisSettings(), "postgres": PostgresSettings(), "s3": S3Settings()}
        return QueueMark(self._directory / machine, place_of(self._backend, **(none | self._settings)))


def _redis(server: RedisServer) -> tuple[dict[str, Any], Callable[[], None], Callable[[], None]]:
    settings = RedisSettings(url=server.url, prefix="mail:", lease=LEASE)
    return (
        {"redis": settings},
        lambda: assert_ok(server.ask("FLUSHALL")),
        lambda: assert_ok(server.ask("DEL", "mail:mark")),
    )


def assert_ok(answer: bytes) -> None:
    assert answer in {b"+OK\r\n", b":1\r\n"}


def _postgres() -> tuple[dict[str, Any], Callable[[], None], Callable[[], None]]:
    server = shared_postgres()
    schema = f"mark_{uuid.uuid4().hex[:16]}"
    return (
        {"postgres": PostgresSettings(url=server.url, schema=schema, lease=LEASE)},
        lambda: void(server.psql(f"DROP SCHEMA {schema} CASCADE")),
        lambda: void(server.psql(f"DELETE FROM {schema}.queue_mark")),
    )


def void(_: object) -> None:
    pass


@pytest.fixture(params=[Backend.REDIS, Backend.POSTGRES], ids=str)
async def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    for module in (redis_keeper, postgres_session):
        monkeypatch.setattr(module, "LONGEST_PAUSE", 0.2)
    backend: Backend = request.param
    async with AsyncExitStack() as stack:
        is_redis = backend is Backend.REDIS
        parts = _redis(stack.enter_context(RedisServer())) if is_redis else _postgres()
        yield Place(tmp_path, stack, backend, *parts)


async def test_store_that_comes_back_empty_is_refused_until_an_operator_accepts_it(place: Place) -> None:
    first = await place.open("one")
    await store_message(first.store, 1)
    await first.store.close()
    place.lose()
    for _ in range(2):
        with pytest.raises(StoreOpenError, match="zonerelay spool accept-empty"):
            await place.open("one")
    assert place.mark_of("one").forget()
    again = await place.open("one")
    assert [delivery async for delivery in again.store.scan()] == []
    await store_message(again.store, 2)
    await again.reopen()


async def test_store_that_is_emptied_under_a_running_relay_is_a_problem_until_it_is_accepted(
    place: Place,
) -> None:
    spool = await place.open("one")
    await store_message(spool.store, 1)
    place.lose()
    await until(lambda: spool.store.unhealthy() is Unhealthy.OTHER_QUEUE)
    with pytest.raises(StoreError):
        await store_message(spool.store, 2)
    place.mark_of("one").forget()
    await until(lambda: spool.store.unhealthy() is None)
    await store_message(spool.store, 3)
    (delivery,) = await spool.store.claim(queue_of("default"), 10, now=NOW)
    assert delivery.message_id == message_id(3)


async def test_machine_that_joins_raises_no_alarm_and_knows_the_queue_from_then_on(place: Place) -> None:
    first = await place.open("one")
    known = place.mark_of("one").read()
    assert known
    await first.store.close()
    second = await place.open("two")
    assert second.health == []
    assert place.mark_of("two").read() == known
    await second.store.close()
    place.lose()
    with pytest.raises(StoreOpenError):
        await place.open("two")


async def test_queue_that_another_machine_has_begun_in_the_emptied_store_is_refused(place: Place) -> None:
    first = await place.open("one")
    await first.store.close()
    place.lose()
    new = await place.open("two")
    await new.store.close()
    with pytest.raises(StoreOpenError, match=r"its mark is '\d{4}-"):
        await place.open("one")


async def test_queue_of_an_older_version_is_given_a_mark_once(place: Place) -> None:
    first = await place.open("one")
    await store_message(first.store, 1)
    await first.store.close()
    place.lose_mark()
    (place.mark_of("one")._path).unlink()
    again = await place.open("one")
    assert len([delivery async for delivery in again.store.scan()]) == 1
    assert place.mark_of("one").read()


class TestCommand:
    @pytest.fixture
    def accept(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], tuple[int, str]]:
        def run(backend: str) -> tuple[int, str]:
            tables = {"spool": {"backend": backend, "path": str(tmp_path)}, "redis": {"prefix": "x:"}}
            document = toml_document({}, tables)
            (tmp_path / "relay.toml").write_text(document)
            status = main(["spool", "accept-empty", "--config", str(tmp_path / "relay.toml")])
            return status, "".join(capsys.readouterr())

        return run

    async def test_it_forgets_the_queue_of_the_configured_store_and_no_other(
        self, tmp_path: Path, accept: Callable[[str], tuple[int, str]]
    ) -> None:
        there = place_of(
            Backend.REDIS, redis=RedisSettings(prefix="x:"), postgres=PostgresSettings(), s3=S3Settings()
        )
        await QueueMark(tmp_path, there).adopt("one")
        await QueueMark(tmp_path, "elsewhere").adopt("two")
        status, said = await asyncio.to_thread(accept, "redis")
        assert status == 0
        assert "'one'" in said
        assert QueueMark(tmp_path, there).read() == ""
        assert QueueMark(tmp_path, "elsewhere").read() == "two"
        assert await asyncio.to_thread(accept, "redis") == (
            1,
            f"zonerelay: this machine knows no queue in {there}: the store is believed as it is already\n",
        )

    def test_spool_of_this_machine_has_nothing_to_accept(
        self, accept: Callable[[str], tuple[int, str]]
    ) -> None:
        status, said = accept("leveldb")
        assert status == 2
        assert "there is nothing to accept" in said


async def test_file_that_cannot_be_read_is_said_and_not_taken_for_nothing(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(StoreOpenError, match=FILE):
        await QueueMark(tmp_path, "somewhere").check(None)
