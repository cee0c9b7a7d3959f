"""The machine around the measured relay: DNS, a sink, an empty relay to compare with, and their figures."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.big_queue.crowd import Crowd, names
from tests.bench.big_queue.name_server import name_server
from tests.bench.big_queue.sink import Seen
from tests.bench.driver import Load
from tests.bench.load import driven
from tests.bench.sink import CounterFile
from tests.support.debian import REPOSITORY
from tests.support.meters import sizes
from tests.support.ports import free_port, greets
from tests.support.process import RelayProcess
from tests.support.servers import running_server
from tests.support.toml import Table

MB = 1 << 20
MESSAGE = 4096
SESSIONS = 20
SENDERS = 200
"""Of other mail. One alone would be taken for a list while the queue is long (`inbound/bursts.py`)."""


@dataclass(slots=True)
class Scene:
    """A sink on every loopback address, and a DNS that knows where everybody is."""

    directory: Path
    dns: str
    sink_port: int
    sink: CounterFile[Seen]
    probes: Path

    def relay(
        self,
        name: str,
        *,
        tables: Mapping[str, Table | Sequence[Table]] | None = None,
        launcher: Sequence[str] = (),
    ) -> RelayProcess:
        zone: Table = {
            "name": "default",
            "port": self.sink_port,
            "tls": "none",
            "allow_private_addresses": True,
        }
        return RelayProcess(
            self.directory / name,
            listener={
                "max_connections_per_client": 1000,
                "max_connections_per_network": 1000,
                "max_recipients": 10_000,
            },
            tables={"zone": [zone], "dns": {"servers": [self.dns]}, **(tables or {})},
            launcher=launcher,
            environment={"PYTHONPATH": str(REPOSITORY)},
        )


@contextlib.asynccontextmanager
async def scene(directory: Path, crowd: Crowd) -> AsyncIterator[Scene]:
    port = free_port(host="0.0.0.0")
    async with name_server(names(crowd)) as dns:
        probes = directory / "probes"
        with _sink(port, directory / "counters", probes) as sink:
            yield Scene(directory, dns, port, sink, probes)


@contextlib.contextmanager
def _sink(port: int, path: Path, probes: Path) -> Iterator[CounterFile[Seen]]:
    with contextlib.closing(CounterFile(path, Seen)) as counters:
        command = [sys.executable, "-m", "tests.bench.big_queue.sink", port, path, probes]
        with running_server(command, path.with_name("sink.log"), lambda: greets(port)):
            yield counters


@dataclass(slots=True)
class Watch:
    """What a relay shows while something happens to it: looks at it every `interval` seconds."""

    relay: RelayProcess
    interval: float = 0.25
    anonymous: int = 0
    """Peak of the memory that is the relay's own; `resident` has mapped files of the spool as well."""
    resident: int = 0
    lag: float = 0.0
    queue: dict[str, int] = field(default_factory=dict)
    delivered: int = 0

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.interval)

    async def look(self) -> None:
        await asyncio.to_thread(self._look)

    def _look(self) -> None:
        memory = sizes(self.relay.pid)
        self.anonymous = max(self.anonymous, memory["RssAnon"])
        self.resident = max(self.resident, memory["VmRSS"])
        shown = self.relay.metrics()
        if not shown:
            return
        self.lag = shown.get("zonerelay_loop_lag_longest_seconds", 0.0)
        state = 'zonerelay_queue_deliveries{{state="{}",zone="default"}}'
        self.queue = {
            name: int(shown.get(state.format(name), 0)) for name in ("ready", "active", "deferred", "held")
        }
        self.delivered = int(shown.get('zonerelay_deliveries_total{outcome="delivered",zone="default"}', 0))


@contextlib.asynccontextmanager
async def watched(watch: Watch) -> AsyncIterator[Watch]:
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await watch.look()


@dataclass(frozen=True, slots=True)
class Rate:
    """Messages a second; `latency` is the 99th percentile from the final dot to the 250."""

    accepted: float
    delivered: float
    latency: float


async def other_mail(scene: Scene, relay: RelayProcess, messages: int) -> Rate:
    """Send mail to an idle destination as fast as the relay takes it, until all of it has been delivered."""
    load = Load(
        port=relay.smtp_port, sessions=SESSIONS, messages=messages, size=MESSAGE, reuse=True, senders=SENDERS
    )
    goal = scene.sink.read().other + messages
    report, arrived = await asyncio.gather(asyncio.to_thread(driven, load), _arrived(scene, goal))
    waits = sorted(report.latencies)
    return Rate(
        accepted=messages / (report.ended - report.began),
        delivered=messages / (arrived - report.began),
        latency=waits[len(waits) * 99 // 100],
    )


async def _arrived(scene: Scene, goal: int) -> float:
    while scene.sink.read().other < goal:
        await asyncio.sleep(0.005)
    return time.monotonic()
