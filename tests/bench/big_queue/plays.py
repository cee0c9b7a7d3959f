"""What happens to a relay with a big queue, phase by phase."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Self

import msgspec

from tests.bench.big_queue import census
from tests.bench.big_queue.crowd import DEAD, Crowd
from tests.bench.big_queue.pause_report import Phase
from tests.bench.big_queue.probe import probed, waits
from tests.bench.big_queue.scene import MB, Scene, Watch, other_mail, watched
from tests.support.process import PROGRAM, RelayProcess

TOGETHER = 100_000
"""Deliveries that come due in the same second."""
ROUNDS = 6


@dataclass(slots=True)
class Run:
    """One relay under watch, and one with an empty queue beside it. `phases` are filled as they pass."""

    stage: Scene
    relay: RelayProcess
    empty: RelayProcess
    crowd: Crowd
    seconds: float
    messages: int
    due: float
    pauses: Path
    watch: Watch
    phases: list[Phase] = field(default_factory=list)

    async def phase(self, name: str, body: "Body") -> None:
        began = time.monotonic()
        cpu = self.relay.cpu_seconds()
        said = await body(self)
        self.phases.append(Phase(name, began, time.monotonic(), self.relay.cpu_seconds() - cpu, said))
        watch = self.watch
        print(
            f"{name}: {self.phases[-1].seconds:.1f} s; {said}; RSS {watch.resident / MB:.0f} MB"
            f" ({watch.anonymous / MB:.0f} its own), longest lag {watch.lag * 1e3:.0f} ms,"
            f" delivered {watch.delivered}, queue {watch.queue}",
            flush=True,
        )


Body = Callable[[Run], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Play:
    """Phases by name: those in which no other mail is sent, and those beside which it always is."""

    alone: Mapping[str, Body]
    beside: Mapping[str, Body]

    def limited_to(self, names: str) -> Self:
        """Those of some names, with a comma between them; none means all."""
        parts = (
            {name: body for name, body in part.items() if not names or name in names.split(",")}
            for part in (self.alone, self.beside)
        )
        return type(self)(*parts)


async def started(run: Run) -> str:
    """All of the spool is counted, and all that was ready for hosts that answer has had its first attempt."""
    began, first, counted = time.monotonic(), 0.0, 0.0
    watch = run.watch
    while time.monotonic() - began < 4 * run.seconds:
        await asyncio.sleep(0.01 if not first else 0.25)
        if not first and run.stage.sink.read().crowd:
            first = time.monotonic() - began
        if not counted and sum(watch.queue.values()) + watch.delivered >= run.crowd.total:
            counted = time.monotonic() - began
        if counted and watch.delivered >= run.crowd.spread:
            break
    return (
        f"first delivery after {first:.2f} s, counted after {counted:.1f} s,"
        f" first attempts made after {time.monotonic() - began:.1f} s"
    )


async def rates(run: Run) -> str:
    """Other mail as fast as it goes, and beside it one message at a time: how long that takes.

    The relay with the queue stands still while the empty one is measured: it would take half of the machine.
    """
    ratios = []
    stage, big = run.stage, run.relay
    async with probed(big) as began:
        for _ in range(ROUNDS):
            os.kill(big.pid, signal.SIGSTOP)
            async with watched(Watch(run.empty)):  # as the other one is: a scrape takes time, too
                one = await other_mail(stage, run.empty, run.messages)
            os.kill(big.pid, signal.SIGCONT)
            before, first = stage.sink.read().crowd, len(began)
            other = await other_mail(stage, big, run.messages)
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
    return f"ratio {median(ratios):.2f} (the lag is of standing still on purpose)"


async def quiet(run: Run) -> str:
    await asyncio.sleep(run.seconds / 3)
    return ""


async def come_due(run: Run) -> str:
    """From before the second until all that was due has left."""
    await asyncio.sleep(max(0.0, run.due - time.time() - 2.0))
    before, began = run.watch.delivered, time.monotonic()
    goal = before + min(TOGETHER, run.crowd.deferred)
    while run.watch.delivered < goal and time.monotonic() - began < run.seconds:
        await asyncio.sleep(0.25)
    return f"{run.watch.delivered - before} delivered"


async def listed(run: Run) -> str:
    lists = ("--domain crowd77.example", f"--domain {DEAD}", "--state held")
    return "; ".join([await asyncio.to_thread(_list, run.relay, each) for each in lists])


def _list(relay: RelayProcess, selection: str) -> str:
    began = time.monotonic()
    command = [str(PROGRAM), "queue", "list", "--config", str(relay.config), "--json", *selection.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first, rows = 0.0, 0
        for _ in process.stdout:
            first = first or time.monotonic() - began
            rows += 1
    return f"{selection}: first line {first:.2f} s, {rows} lines in {time.monotonic() - began:.1f} s"


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


def verb(name: str) -> Body:
    async def act(run: Run) -> str:
        command = [str(PROGRAM), "queue", name, "--config", str(run.relay.config), "--yes", "--domain", DEAD]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return output.decode().strip().splitlines()[-1]

    return act


async def expire(run: Run) -> str:
    await asyncio.sleep(run.seconds)
    expired = run.relay.metric("zonerelay_deliveries_total", outcome="expired")
    return f"{expired:.0f} expired, {len(run.relay.events('dsn'))} bounces made"


VERBS = {name: verb(name) for name in ("retry", "hold", "release", "drop")}
PLAYS = {
    "rates": Play({"start": started, "rates": rates}, {"list": listed, **VERBS}),
    "mx": Play(
        {},
        {
            "start": started,
            "other mail": quiet,
            "due": come_due,
            "list": listed,
            "reload": reloaded,
            **VERBS,
            "compaction": quiet,
            "collection": collected,
        },
    ),
    "expiry": Play({}, {"expiry": expire}),
}
