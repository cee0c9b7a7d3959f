"""`python -m tests.bench.big_queue.pauses`: what makes the event loop pause on a million deliveries.

`mx`: the crowd of `crowd.py`, of which 100,000 deliveries come due in one second; then lists, reloads, a
retry of the dead domain, a hold, a drop, the compaction after it, and a full garbage collection. `expiry`:
the same spool behind one next hop that is down, everything older than `max_age`: what is ready expires with a
bounce, which is sent. Other mail comes in all the time, and `/metrics` is read four times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import msgspec
import uvloop
from msgspec import structs

from tests.bench.big_queue import census
from tests.bench.big_queue.__main__ import DIRECTORY, lists
from tests.bench.big_queue.crowd import DEAD, STANDARD, Crowd, fill, opened
from tests.bench.big_queue.pause_report import Phase, show
from tests.bench.big_queue.scene import MB, Scene, Watch, other_mail, scene, watched
from tests.support.ports import free_port
from tests.support.process import PROGRAM, RelayProcess
from tests.support.toml import Table
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.queue_name import queue_of
from zonerelay.queue.aio import closing

TOGETHER = 100_000
"""Deliveries that come due in the same second."""
UPDATED = 5000
SUSPENDED: Table = {"suspend_min": "10s", "suspend_max": "20s"}
OLD: Table = {**SUSPENDED, "max_age": "1m"}
OTHER_MAIL = 400
OTHER_PAUSE = 0.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.big_queue.pauses", description=__doc__)
    parser.add_argument("play", choices=("mx", "expiry"))
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="deliveries and domains times X"
    )
    parser.add_argument("--spool", type=Path, help="a spool that was filled before (its tables are linked)")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where spools are put")
    parser.add_argument("--due", type=float, default=150.0, help="seconds from the start to the due second")
    parser.add_argument("--seconds", type=float, default=60.0, help="the longest that a phase may take")
    parser.add_argument("--only", default="", help="phases, with a comma between them")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    sizes = (STANDARD.deferred, STANDARD.dead, STANDARD.spread, STANDARD.domains)
    crowd = Crowd(*(int(size * options.scale) for size in sizes))
    with tempfile.TemporaryDirectory(prefix="zonerelay-pauses-", dir=options.directory) as name:
        uvloop.run(measure(Path(name), crowd, options))
    return 0


@dataclass(slots=True)
class Run:
    """One relay under watch. `phases` are filled as they pass."""

    stage: Scene
    relay: RelayProcess
    crowd: Crowd
    seconds: float
    pauses: Path
    watch: Watch
    phases: list[Phase] = field(default_factory=list)

    async def phase(self, name: str, body: Callable[[Run], Awaitable[str]]) -> None:
        began = time.monotonic()
        cpu = self.relay.cpu_seconds()
        said = await body(self)
        self.phases.append(Phase(name, began, time.monotonic(), self.relay.cpu_seconds() - cpu, said))
        rss = f"RSS {self.watch.resident / MB:.0f} MB ({self.watch.anonymous / MB:.0f} its own)"
        print(f"{name}: {self.phases[-1].seconds:.1f} s; {said}; {rss}", flush=True)


async def measure(directory: Path, crowd: Crowd, options: argparse.Namespace) -> None:
    async with scene(directory, crowd) as stage:
        pauses = directory / "pauses"
        launcher = [sys.executable, "-m", "tests.bench.big_queue.watched", str(pauses)]
        tables = _down(stage) if options.play == "expiry" else {"retry": SUSPENDED}
        relay = stage.relay("big", tables=tables, launcher=launcher)
        if options.spool is None:
            await fill(relay.spool, crowd, lambda _written: None)
        else:
            await asyncio.to_thread(link, options.spool, relay.spool)
        due = time.time() + options.due
        if options.play == "mx":
            await make_due(relay.spool, min(TOGETHER, crowd.deferred), due)
        run = Run(stage, relay, crowd, options.seconds, pauses, Watch(relay))
        plays = EXPIRY if options.play == "expiry" else mx(due)
        await play(run, {n: b for n, b in plays.items() if not options.only or n in options.only.split(",")})


async def play(run: Run, plays: dict[str, Callable[[Run], Awaitable[str]]]) -> None:
    began = time.monotonic()
    try:
        await asyncio.to_thread(run.relay.start)
        print(f"ready after {time.monotonic() - began:.2f} s")
        async with watched(run.watch), other_mail_always(run):
            for name, body in plays.items():
                await run.phase(name, body)
        print(f"exit {await asyncio.to_thread(run.relay.terminate)}")
    finally:
        run.relay.kill()
        show(
            run.pauses, [Phase("ready", 0.0, run.phases[0].began, 0.0, ""), *run.phases] if run.phases else []
        )
        print("trouble:", [e.get("error") for e in run.relay.events("trouble")][:5])


@contextlib.asynccontextmanager
async def other_mail_always(run: Run) -> AsyncIterator[None]:
    """Some each second; how long a 250 took is printed at the end."""
    waits: list[float] = []

    async def send() -> None:
        while True:
            rate = await other_mail(run.stage, run.relay, OTHER_MAIL)
            waits.append(rate.latency)
            await asyncio.sleep(OTHER_PAUSE)

    task = asyncio.create_task(send())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        worst = ", ".join(f"{wait * 1e3:.0f}" for wait in sorted(waits, reverse=True)[:5])
        print(f"p99 of 250 in {len(waits)} rounds of {OTHER_MAIL}: the worst {worst} ms")


# What happens


async def fully_scheduled(run: Run) -> str:
    """All of the spool is counted, and all that was ready for hosts that answer has had its first attempt."""
    began, counted = time.monotonic(), 0.0
    watch = run.watch
    while time.monotonic() - began < 4 * run.seconds:
        await asyncio.sleep(0.25)
        if not counted and sum(watch.queue.values()) + watch.delivered >= run.crowd.total:
            counted = time.monotonic() - began
        if counted and watch.delivered >= run.crowd.spread:
            break
    return f"counted after {counted:.1f} s, first attempts made after {time.monotonic() - began:.1f} s"


async def quiet(run: Run) -> str:
    await asyncio.sleep(run.seconds / 3)
    return ""


def mx(due: float) -> dict[str, Callable[[Run], Awaitable[str]]]:
    async def come_due(run: Run) -> str:
        """From before the second until all that was due has left."""
        await asyncio.sleep(max(0.0, due - time.time() - 2.0))
        before, began = run.watch.delivered, time.monotonic()
        goal = before + min(TOGETHER, run.crowd.deferred)
        while run.watch.delivered < goal and time.monotonic() - began < run.seconds:
            await asyncio.sleep(0.25)
        return f"{run.watch.delivered - before} delivered"

    return {
        "start": fully_scheduled,
        "other mail": quiet,
        "due": come_due,
        "list": listed,
        "reload": reloaded,
        "retry": verb("retry"),
        "hold": verb("hold"),
        "drop": verb("drop"),
        "compaction": quiet,
        "collection": collected,
    }


async def listed(run: Run) -> str:
    await lists(run.relay)
    return ""


async def reloaded(run: Run) -> str:
    """Five times, every time with another schedule: all that waits is given back and claimed again."""
    text = run.relay.config.read_text()
    for number in range(5):
        run.relay.config.write_text(text.replace("[retry]", f'[retry]\nschedule = ["{number + 2}m", "1h"]'))
        run.relay.signal(signal.SIGHUP)
        await asyncio.sleep(2.0)
    return f"{len(run.relay.events('reloaded'))} reloads"


async def collected(run: Run) -> str:
    """A full collection, and what it looks at (the census itself takes longer)."""
    path = run.pauses.with_suffix(".census")
    run.relay.signal(census.SIGNAL)
    while not path.exists():
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)
    return census.text(msgspec.json.decode(path.read_bytes().splitlines()[-1], type=census.Census))


def verb(name: str) -> Callable[[Run], Awaitable[str]]:
    async def act(run: Run) -> str:
        command = [str(PROGRAM), "queue", name, "--config", str(run.relay.config), "--yes", "--domain", DEAD]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return output.decode().strip().splitlines()[-1]

    return act


def _down(stage: Scene) -> dict[str, Table | list[Table]]:
    """The default zone's next hop refuses connections; bounces and other mail go to the sink."""
    sink = f"127.0.0.1:{stage.sink_port}"
    zones: list[Table] = [
        {"name": "default", "next_hop": f"127.0.0.1:{free_port()}", "tls": "none"},
        {"name": "back", "next_hop": sink, "tls": "none"},
    ]
    routes: list[Table] = [{"recipient_domain": ["example.org", "*.example.com"], "zone": "back"}]
    return {"zone": zones, "route": routes, "retry": OLD}


async def expire(run: Run) -> str:
    await asyncio.sleep(run.seconds)
    expired = run.relay.metric("zonerelay_deliveries_total", outcome="expired")
    return f"{expired:.0f} expired, {len(run.relay.events('dsn'))} bounces made"


EXPIRY: dict[str, Callable[[Run], Awaitable[str]]] = {"expiry": expire}


# The spool


def link(source: Path, target: Path) -> None:
    """A copy. LevelDB never writes to a table again, so those need no copying."""
    target.mkdir(parents=True, mode=0o700)
    for path in source.iterdir():
        if path.suffix == ".ldb":
            os.link(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)


async def make_due(path: Path, count: int, when: float) -> None:
    """Let the first `count` deferred deliveries of a spool come due in the same second."""
    async with opened(path) as store:
        keys: list[DeliveryKey] = []
        async with closing(store.scan(queue_of("default"))) as deliveries:
            async for delivery in deliveries:
                if delivery.next_attempt:
                    keys.append(delivery.key)
                    if len(keys) == count:
                        break
        some = iter(keys)
        while part := list(islice(some, UPDATED)):
            await store.update(part, lambda delivery: structs.replace(delivery, next_attempt=when))


if __name__ == "__main__":
    sys.exit(main())
