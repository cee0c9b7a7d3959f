"""A worker of the relay as a process of the simulation, which can be started and killed.

Replaced are the things outside the process: clock, randomness, threads, sockets, DNS answers, and the files
of LevelDB (`disk`). Everything else is the relay's own, wired by `zonerelay.worker.build` as in production.
"""

import asyncio
import contextvars
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.simulation.bucket import ObjectStore, SimBucket
from tests.simulation.disk import Disk, SimLevelDb, SimWriter
from tests.simulation.loop import Process, SimLoop
from zonerelay.config.settings import Settings
from zonerelay.model.delivery import DeliveryKey
from zonerelay.process.setup import Identity
from zonerelay.queue.scheduler import Scheduler
from zonerelay.routing.dns.answers import ParsedAnswer
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.telemetry.events.events import Events, Field
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.worker.build import build

Answers = Callable[[str, str], "tuple[float, ParsedAnswer[Any]]"]
REDACTOR = Redactor(b"k" * 32, enabled=False)


@dataclass
class Log:
    """The relay's log: `record` is called with every event of a living process."""

    process: Process
    record: Callable[[Process, str, Mapping[str, Field]], None]
    name = "simulated log"

    def emit(self, level: str, event: str, fields: Mapping[str, Field]) -> None:
        self.record(self.process, event, {**fields, "level": level})


@dataclass
class Node:
    """One worker: a spool that stays, and processes that come and go."""

    name: str
    settings: Settings
    loop: SimLoop
    disk: Disk
    record: Callable[[Process, str, Mapping[str, Field]], None]
    identity: Identity = field(default_factory=Identity)
    process: Process | None = None
    worker: Any = None
    handler: Any = None
    starts: int = 0
    wall: float = 0.0

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.alive and self.handler is not None

    async def start(self) -> None:
        """Raises StartError, and ProcessDiedError."""
        process = self.process = Process(f"{self.name}.{self.starts}", self.loop)
        process.wall, process.disk = self.wall, self.disk
        self.starts += 1
        self.handler = None
        built = build(
            self.settings,
            hostname="relay.test",
            log=Log(process, self.record),
            redactor=REDACTOR,
            clock=process,
            randomness=Random(self.loop.random.getrandbits(64)),
            identity=self.identity,
        )
        self.worker = await process.finish(built)
        self.handler = self.worker.handler

    async def stop(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that remain. Raise ProcessDiedError if it is killed meanwhile."""
        assert self.process is not None
        process, self.handler = self.process, None
        await process.finish(self.worker.stop())
        await asyncio.sleep(0.1)
        remaining = [each for each in process.tasks if not each.done()]
        process.kill()
        self.process = None
        return remaining

    def kill(self, *, power: bool) -> None:
        assert self.process is not None
        self.process.kill()
        self.process = None
        if not power:
            self.disk.synced()
        self.disk.fall_back()

    @property
    def address(self) -> str | None:
        found = self.worker.addresses() if self.is_up else ()
        return found[0] if found else None


@contextmanager
def narrow() -> Iterator[None]:
    """Makes windows and caches so small that some messages overflow them, as a million do in production."""
    with ExitStack() as stack:
        for name, value in NARROW.items():
            stack.enter_context(patch(f"zonerelay.{name}", value))
        stack.enter_context(patch.dict(Scheduler.__init__.__kwdefaults__, window=NARROW_WINDOW))
        yield


NARROW_WINDOW = 6
NARROW = {
    "queue.zone.window.CLAIM_LIMIT": 3,
    "queue.zone.window.MAX_PASSED_OVER": 2,
    "queue.settle.settler.MAX_CHANGES": 2,
    "store.queue.body.CAPACITY": 4096,
    "store.queue.body.LARGEST": 1024,
    "store.queue.claims._READ_AHEAD": 2,
    "store.queue.in_flight.HOT_MESSAGES": 2,
    "store.queue.in_flight.HOT_RECIPIENTS": 4,
    "store.objects.engine.LEAST_LOG": 2_000,
    "store.objects.engine.SHARE": 0.5,
}


@contextmanager
def simulated(loop: SimLoop, answers: Answers, objects: ObjectStore) -> Iterator[None]:
    """Replaces what is outside of a process."""

    class _Resolver(Resolver):
        async def _read(self, name: str, kind: Any, lifetime: float) -> Any:
            seconds, reading = answers(name, kind.name)
            await asyncio.sleep(min(seconds, lifetime))
            return reading

    SimBucket.objects = objects
    draw = Random(loop.random.getrandbits(64))
    with (
        patch("zonerelay.store.leveldb.keeper.WriterThread", SimWriter),
        patch("zonerelay.store.leveldb.keeper.LevelDb", SimLevelDb),
        patch("zonerelay.queue.settle.settler.UNREADABLE_DELAY", 150.0),  # no longer than other pauses
        patch("zonerelay.limits.worker.TICK", 0.3),  # idle timers are what costs most
        patch("zonerelay.store.queue.keeper.INTERVAL", 60.0),
        patch("zonerelay.telemetry.metrics.instruments.LoopLag.start", lambda self: None),
        patch("zonerelay.worker.outbound.Resolver", _Resolver),
        patch("zonerelay.store.objects.s3.Bucket", SimBucket),
        patch("zonerelay.process.threads.ThreadPool.run", _run_on_loop),
        patch.object(Events, "dropped", _dropped),
        patch("zonerelay.worker.worker.CpuDemand", lambda: SimpleNamespace(since_last=lambda: 0.0)),
        patch.object(secrets, "token_hex", lambda size=16: draw.randbytes(size).hex()),
        patch.object(secrets, "token_bytes", lambda size=16: draw.randbytes(size)),
        patch("zonerelay.store.directories.ThreadPoolExecutor"),  # the loop runs it
    ):
        yield


def _dropped(events: Events, keys: Sequence[DeliveryKey]) -> None:
    """The log has one line for all that an operator drops; the ledger needs each."""
    for key in keys:
        events.emit("info", "dropped", {"id": key.message_id, "recipient": str(key.recipient)})


async def _run_on_loop(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Stands where `ThreadPool.run` is; the loop runs what is for threads."""
    work = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(None, work)
