"""One message after the other to an idle destination: how long each takes from MAIL to the receiver."""

from __future__ import annotations

import asyncio
import time

from tests.bench.big_queue.scene import Scene

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
