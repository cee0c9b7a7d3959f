"""`python -m tests.bench.big_queue [rates|mx|expiry]`: a relay that starts on a million queued deliveries.

`rates`: how long it takes to start, other mail against a relay with an empty queue, lists, operators' verbs.
`mx`: what makes its event loop pause, while 100,000 deliveries come due in one second; then lists, reloads, a
retry of the dead domain, a hold, a drop, the compaction after it, and a full garbage collection. `expiry`:
the same for one next hop that is down, everything older than `max_age`: what is ready expires with a bounce,
which is sent. Other mail comes in beside all of it but the start and the rates of `rates`, and `/metrics` is
read four times a second.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import islice
from pathlib import Path

import uvloop
from msgspec import structs

from tests.bench.big_queue.crowd import STANDARD, Crowd, fill, opened
from tests.bench.big_queue.pause_report import Phase, show
from tests.bench.big_queue.plays import PLAYS, TOGETHER, Play, Run
from tests.bench.big_queue.scene import Scene, Watch, other_mail, scene, watched
from tests.support.ports import free_port
from tests.support.toml import Table
from zonerelay.model.delivery import DeliveryKey, queue_of

DIRECTORY = Path("/var/tmp")
UPDATED = 5000
SUSPENDED: Table = {"suspend_min": "10s", "suspend_max": "20s"}
OLD: Table = {**SUSPENDED, "max_age": "1m"}
OTHER_MAIL = 400
OTHER_PAUSE = 0.5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.big_queue", description=__doc__)
    parser.add_argument("play", nargs="?", default="rates", choices=PLAYS)
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="deliveries and domains times X"
    )
    parser.add_argument("--messages", type=int, default=4000, help="other mail in one round of the rates")
    parser.add_argument("--spool", type=Path, help="a spool that was filled before, or is now")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where spools are put")
    parser.add_argument("--due", type=float, default=150.0, help="seconds from the start to the due second")
    parser.add_argument("--seconds", type=float, default=60.0, help="the longest that a phase may take")
    parser.add_argument("--only", default="", help="phases, with a comma between them")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    sizes = (STANDARD.deferred, STANDARD.dead, STANDARD.spread, STANDARD.domains)
    crowd = Crowd(*(int(size * options.scale) for size in sizes))
    with tempfile.TemporaryDirectory(prefix="zonerelay-big-", dir=options.directory) as name:
        uvloop.run(measure(Path(name), crowd, options))
    return 0


async def measure(directory: Path, crowd: Crowd, options: argparse.Namespace) -> None:
    async with scene(directory, crowd) as stage:
        pauses = directory / "pauses"
        rated = options.play == "rates"
        launcher = [] if rated else [sys.executable, "-m", "tests.bench.big_queue.watched", str(pauses)]
        tables = _down(stage) if options.play == "expiry" else {"retry": SUSPENDED}
        relay = stage.relay("big", tables={} if rated else tables, launcher=launcher)
        await filled(options.spool, relay.spool, crowd)
        due = time.time() + options.due
        if options.play == "mx":
            await make_due(relay.spool, min(TOGETHER, crowd.deferred), due)
        empty = stage.relay("empty")
        run = Run(stage, relay, empty, crowd, options.seconds, options.messages, due, pauses, Watch(relay))
        try:
            if rated:
                await asyncio.to_thread(empty.start)
                await other_mail(stage, empty, options.messages)
            await play(run, PLAYS[options.play].limited_to(options.only))
        finally:
            empty.kill()


async def play(run: Run, plays: Play) -> None:
    began = time.monotonic()
    try:
        await asyncio.to_thread(run.relay.start)
        print(f"ready after {time.monotonic() - began:.2f} s")
        async with watched(run.watch):
            for name, body in plays.alone.items():
                await run.phase(name, body)
            async with other_mail_always(run):
                for name, body in plays.beside.items():
                    await run.phase(name, body)
        print(f"exit {await asyncio.to_thread(run.relay.terminate)}")
    finally:
        run.relay.kill()
        if run.pauses.exists() and run.phases:
            show(run.pauses, [Phase("ready", 0.0, run.phases[0].began, 0.0, ""), *run.phases])
        for name in ("trouble", "suspended"):
            print(name, [e.get("error") or e.get("reply") for e in run.relay.events(name)][:5])


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


def _down(stage: Scene) -> dict[str, Table | list[Table]]:
    """The default zone's next hop refuses connections; bounces and other mail go to the sink."""
    sink = f"127.0.0.1:{stage.sink_port}"
    zones: list[Table] = [
        {"name": "default", "next_hop": f"127.0.0.1:{free_port()}", "tls": "none"},
        {"name": "back", "next_hop": sink, "tls": "none"},
    ]
    routes: list[Table] = [{"recipient_domain": ["example.org", "*.example.com"], "zone": "back"}]
    return {"zone": zones, "route": routes, "retry": OLD}


# The spool


async def filled(kept: Path | None, spool: Path, crowd: Crowd) -> None:
    began = time.monotonic()
    source = kept or spool
    if not source.exists():
        await fill(source, crowd, lambda _written: None)
        print(f"filled with {crowd.total:,} deliveries in {time.monotonic() - began:.0f} s")
    if kept is not None:
        await asyncio.to_thread(link, kept, spool)


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
        async with aclosing(store.scan(queue_of("default"))) as deliveries:
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
