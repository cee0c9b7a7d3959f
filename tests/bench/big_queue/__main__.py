"""`python -m tests.bench.big_queue`: a relay that starts on a million queued deliveries, as a table."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import uvloop

from tests.bench.big_queue.crowd import STANDARD, Crowd, fill
from tests.bench.big_queue.probe import probe, waits
from tests.bench.big_queue.scene import MB, SENDERS, Scene, Watch, other_mail, scene, watched
from tests.support.process import PROGRAM, RelayProcess

DIRECTORY = Path("/var/tmp")
START_LIMIT = 240.0
ROUNDS = 6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.big_queue", description=__doc__)
    parser.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="deliveries and domains times X"
    )
    parser.add_argument("--messages", type=int, default=4000, help="other mail in one round")
    parser.add_argument("--spool", type=Path, help="a spool that was filled before (it is copied), or is now")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="where spools are put")
    parser.add_argument(
        "--at-once", action="store_true", help="send other mail while the start is still being worked off"
    )
    parser.add_argument("--senders", type=int, default=SENDERS, help="of the other mail")
    parser.add_argument("--skip", default="", help="parts to leave out: rate, list, verbs")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    crowd = Crowd(
        *(
            int(n * options.scale)
            for n in (STANDARD.deferred, STANDARD.dead, STANDARD.spread, STANDARD.domains)
        )
    )
    with tempfile.TemporaryDirectory(prefix="zonerelay-big-", dir=options.directory) as name:
        uvloop.run(measure(Path(name), crowd, options))
    return 0


async def measure(directory: Path, crowd: Crowd, options: argparse.Namespace) -> None:
    async with scene(directory, crowd) as stage:
        empty, big = stage.relay("empty"), stage.relay("big")
        await filled(options.spool, big.spool, crowd)
        try:
            await asyncio.to_thread(empty.start)
            await other_mail(stage, empty, options.messages)
            await start(stage, big, crowd, until_sent=not options.at_once)
            skipped = options.skip.split(",")
            if "rate" not in skipped:
                await rates(stage, empty, big, options)
            if "list" not in skipped:
                await lists(big)
            if "verbs" not in skipped:
                await verbs(stage, big, options.messages)
            print(f"exit {await asyncio.to_thread(big.terminate)}")
        finally:
            empty.kill()
            big.kill()
            for name in ("trouble", "suspended"):
                print(name, [e.get("error") or e.get("reply") for e in big.events(name)][:5])


async def filled(kept: Path | None, spool: Path, crowd: Crowd) -> None:
    began = time.monotonic()
    source = kept or spool
    if not source.exists():
        await fill(source, crowd, lambda _written: None)
        print(f"filled with {crowd.total:,} deliveries in {time.monotonic() - began:.0f} s")
    if kept is not None:
        await asyncio.to_thread(shutil.copytree, kept, spool)


async def start(stage: Scene, relay: RelayProcess, crowd: Crowd, *, until_sent: bool) -> None:
    """Until the first delivery, and until nothing that is ready waits outside of memory."""
    before = stage.sink.read().crowd
    began = time.monotonic()
    await asyncio.to_thread(relay.start)
    ready = time.monotonic() - began
    watch, counted = Watch(relay), 0.0
    async with watched(watch):
        while stage.sink.read().crowd == before:
            await asyncio.sleep(0.005)
        first = time.monotonic() - began
        while time.monotonic() - began < START_LIMIT:
            await asyncio.sleep(0.25)
            if not counted and sum(watch.queue.values()) + watch.delivered >= crowd.total:
                counted = time.monotonic() - began
            if watch.delivered >= crowd.spread or (counted and not until_sent):
                break
        through = time.monotonic() - began
    print(
        f"start: ready {ready:.2f} s, first delivery {first:.2f} s, counted {counted:.1f} s,"
        f" all that can be delivered {through:.1f} s"
    )
    describe(watch)


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


def describe(watch: Watch) -> None:
    print(
        f"    RSS {watch.resident / MB:.0f} MB ({watch.anonymous / MB:.0f} MB its own),"
        f" longest lag {watch.lag * 1e3:.0f} ms, delivered {watch.delivered}, queue {watch.queue},"
        f" cpu {watch.relay.cpu_seconds():.1f} s",
        flush=True,
    )


async def rates(stage: Scene, empty: RelayProcess, big: RelayProcess, options: argparse.Namespace) -> None:
    """Other mail as fast as it goes, and beside it one message at a time: how long that takes.

    The relay with the queue stands still while the empty one is measured: it would take half of the machine.
    """
    ratios = []
    watch = Watch(big)
    async with watched(watch), probed(big) as began:
        for _ in range(ROUNDS):
            os.kill(big.pid, signal.SIGSTOP)
            async with watched(Watch(empty)):  # as the other one is: a scrape takes time, too
                one = await other_mail(stage, empty, options.messages, options.senders)
            os.kill(big.pid, signal.SIGCONT)
            before, first = stage.sink.read().crowd, len(began)
            other = await other_mail(stage, big, options.messages, options.senders)
            crowd = stage.sink.read().crowd - before
            ratios.append(other.delivered / one.delivered)
            print(
                f"other mail: accepted {one.accepted:.0f}/s empty, {other.accepted:.0f}/s big;"
                f" delivered {one.delivered:.0f}, {other.delivered:.0f}, ratio {ratios[-1]:.2f};"
                f" p99 of 250 {one.latency * 1e3:.0f}, {other.latency * 1e3:.0f} ms"
            )
            last = len(began)
            await asyncio.sleep(1)
            print(f"    meanwhile {crowd} of the queue were delivered; {waits(stage, began, first, last)}")
    print(f"ratio {median(ratios):.2f}")
    watch.lag = math.nan  # it stood still on purpose
    describe(watch)


async def lists(relay: RelayProcess) -> None:
    watch = Watch(relay)
    async with watched(watch):
        for name in ("--domain crowd77.example", "--domain dead.example", "--state held"):
            await asyncio.to_thread(_list, relay, name)
    describe(watch)


def _list(relay: RelayProcess, selection: str) -> None:
    began = time.monotonic()
    command = [str(PROGRAM), "queue", "list", "--config", str(relay.config), "--json", *selection.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first, rows = 0.0, 0
        for _ in process.stdout:
            first = first or time.monotonic() - began
            rows += 1
    print(
        f"queue list {selection}: first line {first:.2f} s, {rows} lines in {time.monotonic() - began:.1f} s"
    )


async def verbs(stage: Scene, relay: RelayProcess, messages: int) -> None:
    for verb in ("hold", "release", "drop"):
        watch = Watch(relay)
        async with watched(watch):
            began = time.monotonic()
            command = [
                str(PROGRAM),
                "queue",
                verb,
                "--config",
                str(relay.config),
                "--yes",
                "--domain",
                "dead.example",
            ]
            process = await asyncio.create_subprocess_exec(*command)
            rate = await other_mail(stage, relay, messages)
            await process.wait()
        print(f"queue {verb}: {time.monotonic() - began:.1f} s, other mail meanwhile {rate}")
        describe(watch)


if __name__ == "__main__":
    sys.exit(main())
