"""What a store costs by itself: `python -m tests.bench.store_bench [--spool BACKEND] [directory]`.

Rows: durable commits by 50 concurrent committers (4 KiB), the whole life of a message (commit,
claim, read, settle), and 2 MiB bodies written and read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from tests.store.builders import delivery_for, envelope_for
from zonerelay.config.models import Backend, SpoolSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageIdSource
from zonerelay.store.base import Finish, Store
from zonerelay.store.open import open_store

COMMITTERS = 50
IN_FLIGHT = 100
SMALL = os.urandom(4096)
LARGE = os.urandom(256 * 1024)


def cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Bench:
    """A store and the figures of one row."""

    def __init__(self, store: Store, syncs: list[float]) -> None:
        self.store = store
        self.syncs = syncs
        self.clock = SystemClock()
        self.ids = MessageIdSource(self.clock)
        self.mail = asyncio.Event()
        self.window = asyncio.Semaphore(IN_FLIGHT)

    async def commit(self, pieces: int, piece: bytes) -> None:
        envelope = envelope_for(self.ids.next(), "to@example.net", created=self.clock.now())
        async with self.store.begin(envelope) as writer:
            for _ in range(pieces):
                await writer.write(piece)
            await writer.commit([delivery_for(envelope, "to@example.net")])
        self.mail.set()

    async def deliver(self, count: int) -> None:
        """Claim, read and settle `count` messages, like a scheduler that is woken by new mail."""
        async with asyncio.TaskGroup() as tasks:
            done = 0
            while done < count:
                self.mail.clear()
                for delivery in await self.store.claim("default", 50, now=self.clock.now()):
                    done += 1
                    await self.window.acquire()
                    tasks.create_task(self.carry(delivery))
                if not self.store.has_ready("default") and done < count:
                    await self.mail.wait()

    async def carry(self, delivery: Delivery) -> None:
        await self.store.read_message(delivery.message_id)
        async for _chunk in self.store.read_body(delivery.message_id):
            pass
        await self.store.settle([Finish(delivery)], lazy=True)
        self.window.release()

    async def committers(self, count: int, sessions: int, pieces: int, piece: bytes) -> None:
        async def session() -> None:
            for _ in range(count // sessions):
                await self.commit(pieces, piece)

        await asyncio.gather(*(session() for _ in range(sessions)))

    async def row(self, name: str, count: int, octets: int, work: Callable[[], Awaitable[object]]) -> None:
        self.syncs.clear()
        started, used = time.perf_counter(), cpu()
        await work()
        took, used = time.perf_counter() - started, cpu() - used
        print(
            f"{name:28} {count / took:8.0f} msg/s {1e3 * used / count:7.3f} ms CPU/msg"
            f" {len(self.syncs) / count:6.3f} syncs/msg {count * octets / took / 1e6:7.0f} MB/s"
        )


async def main(directory: Path, backend: Backend) -> None:
    syncs: list[float] = []
    settings = SpoolSettings(backend=backend, path=directory / "spool")
    store = await open_store(
        settings, clock=SystemClock(), on_health=lambda _reason: None, observe_commit=syncs.append
    )
    bench = Bench(store, syncs)
    small, large = 10_000, 100
    await bench.row("commit 4 KiB", small, 4096, lambda: bench.committers(small, COMMITTERS, 1, SMALL))
    await bench.row("claim, read, settle 4 KiB", small, 4096, lambda: bench.deliver(small))
    await bench.row(
        "both at once, 4 KiB",
        small,
        4096,
        lambda: asyncio.gather(bench.committers(small, COMMITTERS, 1, SMALL), bench.deliver(small)),
    )
    size = 2 * 1024 * 1024
    await bench.row("write 2 MiB", large, size, lambda: bench.committers(large, 10, 8, LARGE))
    await bench.row("read and settle 2 MiB", large, size, lambda: bench.deliver(large))
    await bench.row(
        "both at once, 2 MiB",
        large,
        size,
        lambda: asyncio.gather(bench.committers(large, 10, 8, LARGE), bench.deliver(large)),
    )
    await store.close()
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB")


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", nargs="?", help="where the store is put")
    parser.add_argument("--spool", type=Backend, choices=list(Backend), default=Backend.LEVELDB)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        uvloop.run(main(Path(name), options.spool))
