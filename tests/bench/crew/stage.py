"""A relay with several workers, clients, and a receiver that remembers when each message came."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import LOOPBACK
from tests.support.process import RelayProcess
from tests.support.regulars import Regulars
from tests.support.sink import Sink
from tests.support.submit import tokens

CLIENTS = 4
PAUSE = 0.02


@dataclass(slots=True)
class Stage:
    relay: RelayProcess
    clients: Regulars
    sink: Sink

    def lost(self) -> int:
        return len(self.clients.acknowledged - tokens(self.sink.messages).keys())

    def twice(self) -> int:
        return sum(count > 1 for count in tokens(self.sink.messages).values())

    def complaints(self) -> Counter[str]:
        return self.clients.complaints


@asynccontextmanager
async def stage(directory: Path, workers: int) -> AsyncIterator[Stage]:
    """The relay has emptied its queue in the end."""
    sink = Sink()
    await sink.start()
    relay = RelayProcess(
        directory, next_hop=f"{LOOPBACK}:{sink.port}", top={"workers": workers, "shutdown_timeout": "10s"}
    )
    try:
        await asyncio.to_thread(relay.start)
        clients = Regulars(relay.smtp_port, pause=PAUSE)
        async with clients.at_work(CLIENTS):
            yield Stage(relay, clients, sink)
        await asyncio.to_thread(relay.wait_until_empty)
        await asyncio.to_thread(relay.terminate)
    finally:
        relay.kill()
        await sink.close()
