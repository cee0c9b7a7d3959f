"""What a message costs in each engine of ordered keys, and in the store of the same name.

    python -m tests.bench.keys [--engines memory,directory,…] [--seconds 2] [--sessions 1,8,64] [--no-stores]

Each session stores a message of 4 KiB with one recipient (four keys in one write), then finishes its delivery
(the same keys removed, lazily). `store` does it by `begin`, `commit`, `claim` and `settle`. CPU is that of
this process: servers have their own. By turns in one run: look at the ratios.
"""

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tests.store.builders import delivery_for, envelope_for
from tests.store.keys.places import PLACES
from tests.store.spools import Spool
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import MessageIdSource
from zonerelay.store.contract import Finish, Store
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.keys.port import Write

BODY = (b"0123456789 abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 64)[:4096]
METADATA = b'{"envelope": "%b"}' % (b"x" * 700)
STATE = b'{"attempts": 0, "next": 0}'
DELIVERIES = 16
STORES = {"directory": Backend.DISK}
"""The store that does what an engine of another name does."""

Session = Callable[[], Awaitable[Awaitable[None]]]
"""Stores a message. Returns what finishes its delivery."""


@dataclass
class Cost:
    messages: int = 0
    batches: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    def __str__(self) -> str:
        each = self.messages or 1
        return (
            f"{self.messages / self.seconds:9,.0f} {self.batches / self.seconds:9,.0f}"
            f" {each * 2 / max(1, self.batches):9.1f} {self.cpu / each * 1e3:9.3f}"
            f" {self.cpu / max(1, self.batches) * 1e3:9.3f}"
        )


async def run(session: Session, sessions: int, seconds: float, cost: Cost) -> None:
    started, cpu = time.monotonic(), time.process_time()
    until = started + seconds

    async def repeat() -> None:
        finishing: deque[asyncio.Future[None]] = deque()
        while time.monotonic() < until:
            finishing.append(asyncio.ensure_future(await session()))
            if len(finishing) >= DELIVERIES:
                await finishing.popleft()
            cost.messages += 1
        await asyncio.gather(*finishing)

    await asyncio.gather(*(repeat() for _ in range(sessions)))
    cost.seconds += time.monotonic() - started
    cost.cpu += time.process_time() - cpu


@contextlib.asynccontextmanager
async def keys_session(name: str, directory: Path, cost: Cost) -> AsyncIterator[Session]:
    place = PLACES[name](directory)
    engine = place.engine()
    partition = await open_partition(engine, 0, token="bench", clock=SystemClock())
    ids = MessageIdSource(SystemClock())

    async def session() -> Awaitable[None]:
        one = ids.next().encode()
        made: dict[bytes, bytes | None] = {
            b"message %b 000001" % one: BODY,
            b"message %b #" % one: b"1700000000",
            b"message %b *" % one: METADATA,
            b"delivery-zone default %b someone@example.net" % one: STATE,
        }
        await partition.write(Write(made))
        return partition.write(Write(dict.fromkeys(made), makes_room=True), lazy=True)

    before = partition.seen.last.number
    yield session
    cost.batches += partition.seen.last.number - before
    await partition.close()
    await engine.close()
    place.close()


@contextlib.asynccontextmanager
async def store_session(name: str, directory: Path, cost: Cost) -> AsyncIterator[Session]:
    async with Spool(
        directory / "spool",
        backend=STORES.get(name) or Backend(name),
        clock=SystemClock(),
        write_buffer=4 * 1024 * 1024,
    ) as spool:
        yield session_of(spool.store)
        cost.batches += len(spool.syncs)


def session_of(store: Store) -> Session:
    ids = MessageIdSource(SystemClock())

    async def finish(claimed: Sequence[Delivery]) -> None:
        if claimed:
            await store.settle([Finish(claimed[0])], lazy=True)

    async def session() -> Awaitable[None]:
        envelope = envelope_for(ids.next(), "someone@example.net")
        async with store.begin(envelope) as writer:
            await writer.write(BODY)
            await writer.commit([delivery_for(envelope, "someone@example.net")])
        return finish(await store.claim(queue_of("default"), 1, now=time.time()))

    return session


async def main(engines: list[str], sessions: list[int], seconds: float, *, stores: bool) -> None:
    print("engine       what   sessions messages/s batches/s  writes/b.  CPU ms/m.  CPU ms/b.")
    ways = [("keys", keys_session)]
    if stores:
        ways.append(("store", store_session))
    for name in engines:
        for count in sessions:
            costs = {what: Cost() for what, _ in ways}
            for _ in range(2):
                for what, opened in ways:
                    with tempfile.TemporaryDirectory() as directory:
                        async with opened(name, Path(directory), costs[what]) as session:
                            await run(session, count, seconds / 2, costs[what])
            for what, cost in costs.items():
                print(f"{name:12} {what:6} {count:8} {cost}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engines", default=",".join(name for name in PLACES if name != "sqlite"))
    parser.add_argument("--sessions", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--no-stores", action="store_true")
    words = parser.parse_args()
    uvloop.run(
        main(
            words.engines.split(","),
            [int(each) for each in words.sessions.split(",")],
            words.seconds,
            stores=not words.no_stores,
        )
    )
