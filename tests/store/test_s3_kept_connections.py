"""No library repeats a write below the relay's own rule, when a kept connection ends instead of an answer."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.store.spools import s3_settings
from tests.support.peer import Peer
from tests.support.ports import LOOPBACK
from zonerelay.store.objects.s3 import Bucket, UnknownResultError


class Ending(Peer):
    """A service that answers the first request of each connection, reads the next one, and hangs up."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.requests: Counter[str] = Counter()
        self.hangs_up = False

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with_answer = True
        while head := await reader.readuntil(b"\r\n\r\n"):
            fields = dict(line.split(b": ", 1) for line in head.lower().splitlines()[1:] if line)
            await reader.readexactly(int(fields.get(b"content-length", b"0")))
            self.requests[head.split()[0].decode()] += 1
            if self.hangs_up and not with_answer:
                writer.close()
                return
            with_answer = False
            writer.write(b'HTTP/1.1 200 OK\r\nETag: "a"\r\nContent-Length: 0\r\n\r\n')


@pytest.fixture
async def service() -> AsyncIterator[Ending]:
    async with Ending() as service:
        yield service


@pytest.fixture
async def bucket(service: Ending) -> AsyncIterator[Bucket]:
    bucket = Bucket(s3_settings(f"http://{LOOPBACK}:{service.port}"), lambda: "secret")
    await bucket.open()
    await bucket.replace("a", b"1")  # the connection is kept
    service.requests.clear()
    service.hangs_up = True
    yield bucket
    await bucket.close()


async def test_a_write_is_sent_once(bucket: Bucket, service: Ending) -> None:
    with pytest.raises(UnknownResultError):
        await bucket.create("a", b"2")
    assert service.requests == {"PUT": 1}


async def test_a_removal_is_sent_once(bucket: Bucket, service: Ending) -> None:
    with pytest.raises(UnknownResultError):
        await bucket.remove(["a"])
    assert service.requests == {"DELETE": 1}


async def test_a_question_is_asked_again(bucket: Bucket, service: Ending) -> None:
    assert await bucket.read("a") == b""
    assert service.requests == {"GET": 2}
