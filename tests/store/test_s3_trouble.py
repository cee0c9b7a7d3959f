"""What goes wrong between a relay and its bucket: callers hear StoreError, and it mends itself."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import NOW, body_of, claim_ids, message_id, store_message
from tests.store.spools import Spool, s3_settings
from tests.support.s3_server import BUCKET, KEY, SECRET, MotoServer, shared_moto
from tests.support.waiting import until
from zonerelay.config.settings import Backend, S3Settings, Settings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store.contract import Finish, StoreError, StoreOpenError, Unhealthy
from zonerelay.store.objects import s3
from zonerelay.store.objects.s3 import Bucket
from zonerelay.store.offline import forget_queue


class Wire:
    """A way to the server that can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.failures = 0
        """So many requests that the service has done are answered with its 500."""
        self.holds = False
        """Requests are kept in `held`, and their connections end without an answer."""
        self.held: list[bytes] = []

    async def connect(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.holds:
            self.held.append(await reader.read())
            writer.close()
            return
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

    async def land(self) -> None:
        """What was held arrives, as it was sent."""
        for data in self.held:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._to)
            writer.write(data)
            await writer.drain()
            await reader.read(100)
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


def spool_with(settings: S3Settings, name: str = "spool") -> Spool:
    return Spool(Path(name), backend=Backend.S3, s3=settings, clock=SystemClock())


def spool_over(wire: Wire, **other: object) -> Spool:
    other = {"timeout": 2.0, "lease": 60.0, **other}
    return spool_with(s3_settings(f"http://127.0.0.1:{wire.port}", **other))


async def test_lost_service_is_waited_for_and_nothing_is_lost(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        store = spool.store
        await store_message(store, 1, body=b"x" * 400_000)
        await store_message(store, 2)
        (first,) = await store.claim(queue_of("default"), 1, now=NOW)
        await wire.cut()
        with pytest.raises(StoreError):
            await store_message(store, 3)
        assert store.unhealthy() is Unhealthy.WRITE_FAILED
        with pytest.raises(StoreError):
            await store.settle([Finish(first)])
        with pytest.raises(StoreError):
            await store.probe()
        await wire.connect()
        await until(lambda: store.unhealthy() is None)
        assert spool.lost == []
        assert await claim_ids(store) == [2]
        assert await body_of(store, first.message_id) == b"x" * 400_000
        await store.settle([Finish(first)])
        await store.probe()
        assert spool.health == [Unhealthy.WRITE_FAILED, None]


async def test_failed_question_is_asked_again_and_a_failed_change_is_found_out(wire: Wire) -> None:
    async with spool_over(wire) as spool:
        await store_message(spool.store, 1, body=b"x" * 400_000)
        await spool.reopen()  # nothing of it is in memory
        wire.failures = 2
        assert await body_of(spool.store, message_id(1)) == b"x" * 400_000
        wire.failures = 1
        await store_message(spool.store, 2)
        assert spool.store.unhealthy() is None
        assert await claim_ids(spool.store) == [1, 2]


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
        async with spool_with(settings) as spool:
            os.kill(moto.pid, signal.SIGSTOP)
            started = asyncio.get_running_loop().time()
            with pytest.raises(StoreError):
                await store_message(spool.store, 1)
            assert asyncio.get_running_loop().time() - started < 8.0  # PATIENCE of a partition
            os.kill(moto.pid, signal.SIGCONT)
            await until(lambda: spool.store.unhealthy() is None)
            # What arrived after all is not delivered: its client has heard 451.
            await asyncio.sleep(0.2)
            assert [d async for d in spool.store.scan()] == []
            await store_message(spool.store, 2)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_write_that_is_cut_off_and_lands_later_doubles_nothing(wire: Wire, shared: bool) -> None:
    """Its client has heard 451 and has come again; the write lands when the client has been answered."""
    async with spool_over(wire, timeout=1.0, shared=shared) as spool:
        await wire.cut()
        await wire.connect()
        wire.holds = True
        with pytest.raises(StoreError):
            await store_message(spool.store, 1)
        wire.holds = False
        await until(lambda: spool.store.unhealthy() is None)
        await store_message(spool.store, 2)
        assert any(b"/log/" in data and data.startswith(b"PUT") for data in wire.held)
        await wire.land()
        assert await claim_ids(spool.store) == [2]
        await spool.reopen()
        assert await claim_ids(spool.store) == [2]


async def test_a_bucket_that_comes_back_empty_is_refused_until_an_operator_accepts_it(home: None) -> None:
    settings = s3_settings(shared_moto().url, lease=60.0)
    spool = spool_with(settings)
    async with spool:
        await store_message(spool.store, 1)
    for key in shared_moto().keys(settings.prefix):
        shared_moto().ask("DELETE", f"/{BUCKET}/{key}")
    for _ in range(2):
        with pytest.raises(StoreOpenError, match="zonerelay spool accept-empty"):
            await spool.open()
    assert forget_queue(Settings(spool=spool.settings, s3=settings))
    async with spool:
        assert [each async for each in spool.store.scan()] == []
        await store_message(spool.store, 2)


async def test_a_relay_that_stopped_tells_another_now(home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "WAIT", 1)
    place = S3Settings(bucket=BUCKET, region="us-east-1", access_key=KEY)
    bucket = Bucket(place, lambda: SECRET)
    bucket._secret_key = SECRET  # which `open` would read
    async with bucket._make("sqs", shared_moto().url) as queues:
        url = (await queues.create_queue(QueueName=uuid.uuid4().hex))["QueueUrl"]
    settings = s3_settings(
        shared_moto().url, lease=600.0, queue_url=url, queue_endpoint_url=shared_moto().url
    )
    one, other = spool_with(settings, "one"), spool_with(settings, "other")
    async with one, other:
        await store_message(one.store, 1)
        await asyncio.sleep(0.5)  # both listen
        await one.store._tasks.cancel()  # type: ignore[attr-defined]
        await asyncio.sleep(1.5)  # its last question has ended in the service, too
        await one.store.close()
        await until(lambda: bool(other.news))
        assert await claim_ids(other.store) == [1]


async def test_a_missing_sqs_queue_stops_nothing(home: None, caplog: pytest.LogCaptureFixture) -> None:
    gone = f"{shared_moto().url}/123456789012/gone"
    settings = s3_settings(shared_moto().url, queue_url=gone, queue_endpoint_url=shared_moto().url)
    async with spool_with(settings) as spool:
        await store_message(spool.store, 1)
        assert spool.store.unhealthy() is None
        await until(lambda: "alerts of other relays cannot be received" in caplog.text)
    assert "could not be alerted" in caplog.text


async def test_one_relay_alone_refuses_a_second_while_it_lives(home: None) -> None:
    settings = s3_settings(shared_moto().url, lease=2.0, shared=False)
    first, second = spool_with(settings, "one"), spool_with(settings, "two")
    async with first:
        await store_message(first.store, 1)
        with pytest.raises(StoreOpenError, match="only one relay may run"):
            await second.open()
        await first.reopen()
        assert await claim_ids(first.store) == [1]


async def test_a_wrong_bucket_or_service_is_said_in_words(home: None) -> None:
    for other, text in (
        ({"bucket": "another"}, "NoSuchBucket"),
        ({"endpoint_url": "http://127.0.0.1:9", "timeout": 1.0}, BUCKET),
    ):
        with pytest.raises(StoreOpenError, match=text):
            await spool_with(replace(s3_settings(shared_moto().url), **other)).open()
