"""Latency of one message at a time: sender and sink in one process, so that they share a clock.

Run as `python -m tests.bench.probe '{"relay_port": …}'` with the fields of Probe as JSON; prints the
fields of Latencies as JSON. One client session is kept; the next message is sent a pause after the
previous one was both acknowledged and received.
"""

import asyncio
import gc
import sys
import time

import msgspec
import uvloop

from tests.bench.client import Refused, give_up
from tests.bench.driver import Load, envelope, message
from tests.bench.sink import SinkProtocol
from tests.support.smtp_client import SmtpClient, connected

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


async def accepted(client: SmtpClient, data: bytes) -> None:
    client.write(data)
    if refused := await client.refusals(1):
        raise Refused(refused[0].decode(errors="replace"))


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
    async with server, connected(probe.relay_port, b"EHLO bench.example.org") as client:
        for number in range(probe.messages):
            for command in envelope(load, number):
                await accepted(client, command)
            arrived = loop.create_future()
            began = time.monotonic()
            await accepted(client, content)
            accept.append(time.monotonic() - began)
            async with asyncio.timeout(ARRIVAL_LIMIT):
                arrive.append(await arrived - began)
            await asyncio.sleep(probe.pause)
        await client.say(b"QUIT")
    return Latencies(accept=accept, arrive=arrive)


def main() -> None:
    gc.disable()
    probe = msgspec.json.decode(sys.argv[1], type=Probe)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(probe))))


if __name__ == "__main__":
    main()
