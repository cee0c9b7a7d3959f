"""`python -m tests.bench.big_queue.injection`: how long single messages take while one sender injects a list.

One sender sends as fast as the relay takes it, in messages with 5,000 recipients each (`lists`) or one
for each recipient (`singles`), spread over many domains. Another sends one message at a time to an idle
destination. Printed: from MAIL to the final dot at the receiver, before, and while the list is in the queue.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from tests.bench.big_queue.crowd import Crowd, domain
from tests.bench.big_queue.scene import Scene, Watch, scene, watched
from tests.support.process import RelayProcess

DOMAINS = 10_000
IN_A_LIST = 5000
SESSIONS = 20
PROBE_EVERY = 0.1
BODY = b"From: <a@example.org>\r\nSubject: x\r\n\r\n" + b"x" * 1000 + b"\r\n.\r\n"


class Client:
    """One pipelining session."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, port: int) -> Client:
        client = cls(*await asyncio.open_connection("127.0.0.1", port))
        await client._replies(1)
        client._writer.write(b"EHLO client.example.org\r\n")
        await client._replies(1)
        return client

    async def send(self, sender: str, recipients: list[str]) -> None:
        lines = [f"MAIL FROM:<{sender}>", *(f"RCPT TO:<{each}>" for each in recipients), "DATA"]
        self._writer.write("".join(f"{line}\r\n" for line in lines).encode())
        await self._replies(len(lines))
        self._writer.write(BODY)
        await self._replies(1)

    async def _replies(self, count: int) -> None:
        while count:
            line = await self._reader.readline()
            if line[:1] not in (b"2", b"3"):
                raise ConnectionError(line.decode("latin-1"))
            count -= line[3:4] != b"-"

    def close(self) -> None:
        self._writer.close()


def batches(form: str, recipients: int) -> Iterator[list[str]]:
    size = IN_A_LIST if form == "lists" else 1
    for first in range(0, recipients, size):
        yield [f"u{n}@{domain(n % DOMAINS)}" for n in range(first, min(first + size, recipients))]


async def inject(port: int, form: str, recipients: int) -> None:
    waiting = batches(form, recipients)

    async def session() -> None:
        client = await Client.connect(port)
        for batch in waiting:
            await client.send("news@lists.example.org", batch)
        client.close()

    await asyncio.gather(*(session() for _ in range(SESSIONS)))


async def probe(port: int, began: dict[int, float]) -> None:
    """Until it is cancelled."""
    client = await Client.connect(port)
    while True:
        number = len(began)
        began[number] = time.monotonic()
        await client.send("reset@app.example.org", [f"probe{number}@d{1 + number % 9}.example.com"])
        await asyncio.sleep(PROBE_EVERY)


def waits(stage: Scene, began: dict[int, float], first: int, last: int) -> str:
    arrived = {
        int(number): float(when)
        for number, when in (line.split() for line in stage.probes.read_text().splitlines())
    }
    found = sorted(arrived[n] - began[n] for n in range(first, last) if n in arrived)
    missing = last - first - len(found)
    if not found:
        return f"none of {last - first} arrived"
    at = [found[min(len(found) - 1, int(len(found) * part))] for part in (0.5, 0.9, 0.99)]
    return (
        f"{len(found)} singles: p50 {at[0]:.3f} p90 {at[1]:.3f} p99 {at[2]:.3f} max {found[-1]:.3f} s,"
        f" {missing} not yet there"
    )


async def measure(stage: Scene, relay: RelayProcess, form: str, recipients: int) -> None:
    began: dict[int, float] = {}
    prober = asyncio.create_task(probe(relay.smtp_port, began))
    await asyncio.sleep(5)
    before = len(began)
    watch = Watch(relay)
    async with watched(watch):
        start = time.monotonic()
        await inject(relay.smtp_port, form, recipients)
        injected = time.monotonic() - start
        accepted = len(began)
        while stage.sink.read().crowd < recipients and time.monotonic() - start < 600:
            await asyncio.sleep(0.2)
        done = time.monotonic() - start
    end = len(began)
    await asyncio.sleep(5)
    prober.cancel()
    await asyncio.gather(prober, return_exceptions=True)
    print(f"{form}: {recipients} recipients accepted in {injected:.1f} s, delivered in {done:.1f} s")
    print("  before            ", waits(stage, began, 0, before))
    print("  while it comes in ", waits(stage, began, before, accepted))
    print("  until it has left ", waits(stage, began, accepted, end))
    print(f"  longest lag of the loop {watch.lag * 1e3:.0f} ms", flush=True)


async def run(directory: Path, options: argparse.Namespace) -> None:
    async with scene(directory, Crowd(deferred=0, dead=0, spread=0, domains=DOMAINS)) as stage:
        relay = stage.relay("relay")
        try:
            await asyncio.to_thread(relay.start)
            await measure(stage, relay, options.form, options.recipients)
        finally:
            relay.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.big_queue.injection", description=__doc__)
    parser.add_argument("form", choices=("lists", "singles"))
    parser.add_argument("--recipients", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zonerelay-list-", dir="/var/tmp") as name:
        uvloop.run(run(Path(name), options))


if __name__ == "__main__":
    main()
