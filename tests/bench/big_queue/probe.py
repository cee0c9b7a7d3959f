"""One message after the other to an idle destination: how long each takes from MAIL to the receiver."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from tests.bench.big_queue.scene import Scene
from tests.support.process import RelayProcess
from tests.support.smtp_client import connected

PROBE_EVERY = 0.1
BODY = b"From: <a@example.org>\r\nSubject: x\r\n\r\n" + b"x" * 1000 + b"\r\n.\r\n"


async def probe(port: int, began: dict[int, float]) -> None:
    """Until it is cancelled."""
    async with connected(port, b"EHLO client.example.org") as client:
        while True:
            number = len(began)
            began[number] = time.monotonic()
            recipient = f"probe{number}@d{1 + number % 9}.example.com"
            client.write(f"MAIL FROM:<reset@app.example.org>\r\nRCPT TO:<{recipient}>\r\nDATA\r\n".encode())
            refused = await client.refusals(3)
            client.write(BODY)
            if refused := refused or await client.refusals(1):
                raise ConnectionError(refused[0].decode("latin-1"))
            await asyncio.sleep(PROBE_EVERY)


@contextlib.asynccontextmanager
async def probed(relay: RelayProcess) -> AsyncIterator[dict[int, float]]:
    """One message after the other to destinations that are idle otherwise; when each began."""
    began: dict[int, float] = {}
    task = asyncio.create_task(probe(relay.smtp_port, began))
    try:
        yield began
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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
