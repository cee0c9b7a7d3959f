"""The supervisor killed under load and started again at once: for how long nothing is delivered, nobody
answered.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.bench.crew.stage import longest_silence, stage
from tests.support.ports import greets
from tests.support.process import RelayProcess

BETWEEN = 3.0


async def gaps(directory: Path, times: int, *, workers: int) -> bool:
    """Prints; false when mail was lost."""
    async with stage(directory, workers) as at:
        await asyncio.sleep(BETWEEN)
        for _ in range(times):
            again = asyncio.create_task(asyncio.to_thread(_kill_and_start, at.relay))
            mail = await longest_silence(at.sink, again)
            print(f"nothing delivered for {mail:.2f} s, nobody greeted for {await again:.2f} s")
            await asyncio.sleep(BETWEEN)
    lost = at.lost()
    print(f"accepted: {len(at.clients.acknowledged)}, lost: {lost}, delivered twice: {at.twice()}")
    return not lost


def _kill_and_start(relay: RelayProcess) -> float:
    """Seconds from the kill until somebody is greeted by the new one."""
    began = time.monotonic()
    relay.kill()
    while greets(relay.smtp_port):
        time.sleep(0.01)
    relay.start()
    return time.monotonic() - began
