"""Bodies larger than memory should be: flow control, flat memory, and a peer that reads slowly."""

from __future__ import annotations

import asyncio
import hashlib
import tracemalloc
from collections.abc import AsyncIterator

from tests.integration.delivery.conftest import Bed, talk
from tests.support.mail import Bodies
from zonerelay.config.settings import DeliverySettings
from zonerelay.delivery.connection.client_protocol import WRITE_LIMIT
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Verdict
from zonerelay.store.contract import CHUNK_SIZE

MIB = 1024 * 1024


class Endless(Bodies):
    """The same piece again and again, so that the test itself holds nothing."""

    def __init__(self, pieces: int) -> None:
        super().__init__(b".line of text!\r\n" * (CHUNK_SIZE // 16))
        self.pieces = pieces
        self.read_so_far = 0

    @property
    def size(self) -> int:
        return self.pieces * CHUNK_SIZE

    async def read(self, message_id: MessageId) -> AsyncIterator[bytes]:
        for _ in range(self.pieces):
            self.read_so_far += CHUNK_SIZE
            yield self.body

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for _ in range(self.pieces):
            digest.update(self.body)
        return digest.hexdigest()


async def test_hundred_megabytes_pass_through_a_few(bed: Bed) -> None:
    sink = await bed.sink(keep_bodies=False)
    bodies = Endless(1600)
    courier = bed.courier(bodies)
    tracemalloc.start()
    try:
        [outcome] = await bed.send(sink.port, courier=courier, size=bodies.size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outcome.verdict is Verdict.DELIVERED
    assert (sink.messages[0].size, sink.messages[0].sha256) == (bodies.size, bodies.sha256())
    assert peak < 8 * MIB  # sender and sink together


async def test_body_is_read_no_faster_than_the_peer_takes_it(bed: Bed) -> None:
    stop = asyncio.Event()

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await stop.wait()

    bodies = Endless(1600)
    courier = bed.courier(bodies, settings=DeliverySettings(block_timeout=0.5, quit_timeout=0.2))
    port = await bed.peer(stall)
    tracemalloc.start()
    try:
        [outcome] = await bed.send(port, courier=courier, size=bodies.size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        stop.set()
    assert (outcome.verdict, outcome.in_doubt) == (Verdict.DEFERRED, False)
    assert "timed out" in outcome.reply.text
    assert peak < WRITE_LIMIT + 4 * MIB
    assert bodies.read_so_far < bodies.size / 2  # the kernels' buffers took some


async def test_peer_that_reads_slowly_but_steadily_is_not_given_up(bed: Bed) -> None:
    async def sip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        tail = b""
        while not tail.endswith(b"\r\n.\r\n"):
            piece = await reader.read(MIB)
            if not piece:
                return
            tail = (tail + piece)[-5:]
            await asyncio.sleep(0.002)
        writer.write(b"250 taken\r\n")
        await reader.read()

    bodies = Endless(300)
    settings = DeliverySettings(block_timeout=0.3, final_dot_timeout=5.0)
    courier = bed.courier(bodies, settings=settings)
    port = await bed.peer(sip)
    [outcome] = await bed.send(port, courier=courier, size=bodies.size)
    assert outcome.verdict is Verdict.DELIVERED
