"""What a spool costs by itself: `python -m tests.bench.store_bench [directory] [leveldb disk redis …]`.

Rows: durable commits by 50 concurrent committers (4 KiB), the whole life of a message (commit,
claim, read, settle), and 2 MiB bodies written and read. CPU and octets written are those of this
process and of the spool's server.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import uvloop

from tests.bench.spools import SPOOLS, SpoolServer
from tests.store.builders import delivery_for, envelope_for
from tests.support.meters import read_stat
from zonerelay.config.settings import Backend, RedisSettings, SpoolSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, Store
from zonerelay.store.open import open_store
from zonerelay.store.surroundings import Surroundings

COMMITTERS = 50
IN_FLIGHT = 100
SMALL = os.urandom(4096)
LARGE = os.urandom(256 * 1024)


def cpu(pids: Sequence[int]) -> float:
    ticks = [sum(stat.ticks) for pid in pids if (stat := read_stat(pid)) is not None]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def written(pids: Sequence[int]) -> int:
    """Octets that went towards the disk."""
    texts = [Path(f"/proc/{pid}/io").read_text() for pid in pids]
    return sum(int(text.partition("\nwrite_bytes: ")[2].split()[0]) for text in texts)


class Bench:
    """A store and the figures of one row."""

    def __init__(self, store: Store, pids: Sequence[int]) -> None:
        self.store = store
        self.pids = pids
        self.waits: list[float] = []
        self.clock = SystemClock()
        self.ids = MessageIdSource(self.clock)
        self.mail = asyncio.Event()
        self.window = asyncio.Semaphore(IN_FLIGHT)

    async def commit(self, pieces: int, piece: bytes) -> None:
        began = time.perf_counter()
        envelope = envelope_for(self.ids.next(), "to@example.net", created=self.clock.now())
        async with self.store.begin(envelope) as writer:
            for _ in range(pieces):
                await writer.write(piece)
            await writer.commit([delivery_for(envelope, "to@example.net")])
        self.waits.append(time.perf_counter() - began)
        self.mail.set()

    async def deliver(self, count: int) -> None:
        """Claim, read and settle `count` messages, like a scheduler that is woken by new mail."""
        async with asyncio.TaskGroup() as tasks:
            done = 0
            while done < count:
                self.mail.clear()
                claimed = await self.store.claim(queue_of("default"), 50, now=self.clock.now())
                for delivery in claimed:
                    done += 1
                    await self.window.acquire()
                    tasks.create_task(self.carry(delivery))
                if len(claimed) < 50 and done < count:
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
        self.waits.clear()
        started, used, before = time.perf_counter(), cpu(self.pids), written(self.pids)
        await work()
        took, used = time.perf_counter() - started, cpu(self.pids) - used
        waits = sorted(self.waits) or [0.0]
        half, nearly = (1e3 * waits[len(waits) * percent // 100] for percent in (50, 99))
        print(
            f"{name:28} {count / took:7.0f} msg/s {1e3 * used / count:7.3f} ms CPU/msg"
            f"  commit p50 {half:6.1f} p99 {nearly:6.1f} ms"
            f"  {(written(self.pids) - before) / (count * octets):5.2f} written/octet"
        )


async def measure(directory: Path, spool: str, server: SpoolServer) -> None:
    print(f"{spool}:")
    store = await open_store(
        SpoolSettings(backend=Backend(spool), path=directory / "spool"),
        Surroundings(
            clock=SystemClock(), on_health=lambda _reason: None, observe_commit=lambda _seconds: None
        ),
        redis=RedisSettings(url=str(server.tables["redis"]["url"])) if "redis" in server.tables else None,
    )
    bench = Bench(store, [os.getpid(), *([server.pid] if server.pid else [])])
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


def main(place: str | None, spools: Sequence[str]) -> None:
    for spool in spools:
        with tempfile.TemporaryDirectory(dir=place) as name, SPOOLS[spool](()) as server:
            uvloop.run(measure(Path(name), spool, server))


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    main(sys.argv[1] if len(sys.argv) > 1 else None, sys.argv[2:] or ["leveldb"])
