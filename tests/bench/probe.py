"""Latency of one message at a time: sender and sink in one process, so that they share a clock.

Run as `python -m tests.bench.probe '{"relay_port": …}'` with the fields of Probe as JSON; prints the
fields of Latencies as JSON. One client session is kept; the next message is sent a pause after the
previous one was both acknowledged and received.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import cast

import msgspec
import uvloop

from tests.bench.client import Refused, give_up
from tests.bench.driver import Load, envelope, message
from tests.bench.sink import SinkProtocol

ARRIVAL_LIMIT = 30.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    relay_port: int
    sink_port: int
    messages: int
    size: int
    pause: float = 0.010


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from writing the final dot until the 250, and until the sink saw its final dot."""

    accept: list[float]
    arrive: list[float]


class Client(asyncio.Protocol):
    """Sends and waits for a number of replies; notes when the last of them came."""

    def __init__(self) -> None:
        self._awaited = 1
        self._partial = b""
        self._answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, only alike.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        *lines, self._partial = (self._partial + data).split(b"\r\n")
        for line in lines:
            if line[:1] not in (b"2", b"3"):
                self._fail(line.decode(errors="replace"))
                return
            self._awaited -= line[3:4] != b"-"
        if self._awaited == 0 and not self._answered.done():
            self._answered.set_result(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"connection lost: {exc}")

    def _fail(self, text: str) -> None:
        if not self._answered.done():
            self._answered.set_exception(Refused(text))

    def send(self, data: bytes, replies: int) -> asyncio.Future[float]:
        """The returned future gives the time at which the last reply came."""
        assert self._transport is not None
        self._awaited = replies
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._answered

    async def greeting(self) -> float:
        return await self._answered


async def run(probe: Probe) -> Latencies:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(give_up)
    arrived: asyncio.Future[float] = loop.create_future()

    def note(_recipients: int, now: float) -> None:
        if not arrived.done():
            arrived.set_result(now)

    server = await loop.create_server(lambda: SinkProtocol(note), "127.0.0.1", probe.sink_port)
    load = Load(port=probe.relay_port, sessions=1, messages=probe.messages, size=probe.size)
    content = message(probe.size) + b".\r\n"
    accept, arrive = [], []
    async with server:
        _, client = await loop.create_connection(Client, "127.0.0.1", probe.relay_port)
        await client.greeting()
        await client.send(b"EHLO bench.example.org\r\n", 1)
        for number in range(probe.messages):
            for command in envelope(load, number):
                await client.send(command, 1)
            arrived = loop.create_future()
            began = time.monotonic()
            accept.append(await client.send(content, 1) - began)
            async with asyncio.timeout(ARRIVAL_LIMIT):
                arrive.append(await arrived - began)
            await asyncio.sleep(probe.pause)
        await client.send(b"QUIT\r\n", 1)
    return Latencies(accept=accept, arrive=arrive)


def main() -> None:
    gc.disable()
    probe = msgspec.json.decode(sys.argv[1], type=Probe)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(probe))))


if __name__ == "__main__":
    main()
