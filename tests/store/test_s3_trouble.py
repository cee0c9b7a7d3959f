"""What goes wrong between a relay and its bucket: callers hear StoreError, and it mends itself."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.store.builders import NOW, body_of, delivery_for, envelope_for, message_id, store_message
from tests.store.fleet import claim_ids
from tests.store.spools import Spool, s3_settings, until
from tests.store.test_crash import Facts, check, command, whole_lines, work_for
from tests.support.s3_server import MotoServer, shared_moto
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, StoreCorruptError, StoreError
from zonerelay.store.s3 import store as s3

ROUNDS = 1


class Wire:
    """A way to the server that can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.failures = 0
        """So many requests that the service has done are answered with its 500."""

    async def connect(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, back}
        await asyncio.gather(_pump(reader, back), self._answer(there, writer), return_exceptions=True)
        self._writers -= {writer, back}

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if self.failures and b" 200 " in data[:16]:
                    self.failures -= 1
                    writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
                    return
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.05)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture
async def wire(home: None) -> AsyncIterator[Wire]:
    made = Wire(shared_moto().port)
    await made.connect()
    yield made
    await made.cut()


def spool_over(wire: Wire, **other: object) -> Spool:
    settings = s3_settings(f"http://127.0.0.1:{wire.port}", timeout=2.0, **{"lease": 60.0, **other})
    return Spool(Path("spool"), backend=Backend.S3, s3=settings, clock=SystemClock())


async def test_lost_service_is_waited_for_and_nothing_is_lost(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        store = spool.store
        await store_message(store, 1, body=b"x" * 400_000)
        await store_message(store, 2)
        (first,) = await store.claim(queue_of("default"), 1, now=NOW)
        await wire.cut()
        with pytest.raises(StoreError):
            await store_message(store, 3)
        assert store.unhealthy() == "the object store cannot be used"
        with pytest.raises(StoreError):
            await store.claim(queue_of("default"), 1, now=NOW)
        with pytest.raises(StoreError):
            await store.settle([Finish(first)])
        with pytest.raises(StoreError):
            await store.probe()
        spool.news.clear()
        await wire.connect()
        await until(lambda: store.unhealthy() is None)
        assert spool.news == [queue_of("default")]
        assert spool.lost == []
        assert await claim_ids(store) == [2]
        assert await body_of(store, first.message_id) == b"x" * 400_000
        await store.settle([Finish(first)])
        await store.probe()
        assert spool.health == ["the object store cannot be used", None]


async def test_failed_question_is_asked_again_and_a_failed_change_is_not(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        await store_message(spool.store, 1, body=b"x" * 400_000)
        stop_beating(spool)
        wire.failures = 2
        assert await body_of(spool.store, message_id(1)) == b"x" * 400_000
        wire.failures = 2
        assert [d.key.message_id async for d in spool.store.scan()] == [message_id(1)]
        assert (wire.failures, spool.store.unhealthy()) == (0, None)
        wire.failures = 1
        with pytest.raises(StoreError, match="500"):
            await store_message(spool.store, 2)
        assert (wire.failures, spool.store.unhealthy()) == (0, "the object store cannot be used")


def stop_beating(spool: Spool) -> None:
    """Its questions would take some of the failures."""
    task = spool.store._keeper._task  # type: ignore[attr-defined]
    assert task is not None
    task.cancel()


async def test_large_body_is_read_on_after_a_moment_without_the_service(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        body = bytes(range(256)) * (5 * 4096)
        await store_message(spool.store, 1, body=body)
        reading = aiter(spool.store.read_body(message_id(1)))
        read = await anext(reading)
        await wire.cut()
        asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(wire.connect()))
        async for chunk in reading:
            read += chunk
        assert read == body


async def test_service_that_does_not_answer_is_given_up_in_time(home: None) -> None:
    with MotoServer() as moto:
        settings = s3_settings(moto.url, timeout=0.5, lease=60.0)
        async with Spool(Path("spool"), backend=Backend.S3, s3=settings, clock=SystemClock()) as spool:
            os.kill(moto.pid, signal.SIGSTOP)
            started = asyncio.get_running_loop().time()
            with pytest.raises(StoreError):
                await store_message(spool.store, 1)
            assert asyncio.get_running_loop().time() - started < 3.0
            os.kill(moto.pid, signal.SIGCONT)
            await until(lambda: spool.store.unhealthy() is None)
            # What arrived after all is not delivered: its client has heard 451.
            await asyncio.sleep(0.2)
            assert [d async for d in spool.store.scan()] == []
            await store_message(spool.store, 2)


async def test_long_queue_is_read_while_the_relay_works(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "LOAD_PATIENCE", 0.0)
    monkeypatch.setattr("zonerelay.store.s3.client.PAGE_KEYS", 7)
    monkeypatch.setattr("zonerelay.store.s3.adopt.READS_AT_ONCE", 4)
    async with spool_over(wire) as spool:
        for number in range(30):
            await store_message(spool.store, number, next_attempt=NOW - 5)
        await spool.reopen()
        assert spool.store.counts() == {}
        await store_message(spool.store, 99)
        await until(lambda: spool.store.counts()[queue_of("default")].total == 31)
        assert await claim_ids(spool.store) == [*range(30), 99]


async def test_unreadable_objects_hold_nobody_up(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        await store_message(spool.store, 1)
        await store_message(spool.store, 2)
        bucket, keys = spool.store._objects.bucket, spool.store._objects.keys  # type: ignore[attr-defined]
        await bucket.put(keys.message(message_id(1)), b'{"format":1,"deliveries":"broken"}\n')
        await bucket.put(keys.message(message_id(3)), b"")
        await bucket.put(keys.message(message_id(4)), b'{"format":99}\n')
        await bucket.put(keys.queue + "something-else", b"of others")
        await spool.reopen()
        assert await claim_ids(spool.store) == [2]
        with pytest.raises(StoreCorruptError):
            await spool.store.read_message(message_id(4))


async def test_aborted_upload_leaves_nothing(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        async with spool.store.begin(envelope_for(message_id(1), "a@example.net")) as writer:
            await writer.write(b"x" * (11 * 1024 * 1024))
        envelope = envelope_for(message_id(2), "a@example.net")
        body = bytes(range(256)) * (45 * 1024)
        async with spool.store.begin(envelope) as writer:
            await writer.write(body)
            await writer.commit([delivery_for(envelope, "a@example.net")])
        assert await body_of(spool.store, message_id(2)) == body
        bucket, keys = spool.store._objects.bucket, spool.store._objects.keys  # type: ignore[attr-defined]
        assert await bucket.uploads(keys.bodies) == []
        assert len(shared_moto().keys(keys.bodies)) == 1


def test_acknowledged_mail_survives_kill_9_of_the_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = s3_settings(shared_moto().url)
    monkeypatch.setenv("CRASH_S3", f"{settings.endpoint_url} {settings.prefix}")
    facts = Facts()
    for _ in range(ROUNDS):
        with subprocess.Popen(command("take", Backend.S3, tmp_path), stdout=subprocess.PIPE) as process:
            first = work_for(0.5, process)
            process.kill()
            assert process.stdout is not None
            facts.hear(whole_lines(first + process.stdout.read()))
        check(facts, Backend.S3, tmp_path)
    assert len(facts.stored) > ROUNDS
