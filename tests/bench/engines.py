"""`python -m tests.bench --engines all`: the same load on every storage engine, and on three relays on one.

4 KiB messages over many sessions, each one client after the other on a kept connection, to a sink of our own;
and one session for each relay, for what an acceptance costs when nobody shares it. CPU is that of the relays
and, where there is one, of the spool's server. Repetitions take turns: a busy machine is busy for all.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from tests.bench import load
from tests.bench.driver import Report
from tests.bench.rows import KIB, Row, Source
from tests.bench.spools import SPOOLS
from tests.support.meters import cpu_of, family, settle
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess
from tests.support.toml import Table

SESSIONS = 48
MESSAGES = 4800
ALONE = 400
NODES = 3
SHARED = tuple(name for name in ("redis", "postgres", "s3") if name in SPOOLS)
ENGINES = (*SPOOLS, *(f"{name} x{NODES}" for name in SHARED))


class Figures(msgspec.Struct, frozen=True):
    """Of one engine under one load: what is printed, and written as JSON."""

    engine: str
    sessions: int
    rate: float
    relay_cpu_ms: float
    server_cpu_ms: float
    accept_p50_ms: float
    accept_p99_ms: float
    written: float


@dataclass(slots=True)
class Measures:
    """Of all repetitions."""

    rates: list[float] = field(default_factory=list)
    relay_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def figures(self, engine: str, sessions: int) -> Figures:
        middle = statistics.median
        cuts = statistics.quantiles(self.latencies, n=100)
        return Figures(
            engine=engine,
            sessions=sessions,
            rate=middle(self.rates),
            relay_cpu_ms=middle(self.relay_cpu),
            server_cpu_ms=middle(self.server_cpu),
            accept_p50_ms=1e3 * cuts[49],
            accept_p99_ms=1e3 * cuts[98],
            written=middle(self.written),
        )


@dataclass(frozen=True, slots=True)
class Engine:
    """The relays that run on it, and its server's process, if there is one."""

    name: str
    relays: Sequence[RelayProcess]
    sink: load.Sink
    server: int | None

    def relay_cpu(self) -> float:
        return sum(cpu(relay.pid) for relay in self.relays)

    def written(self) -> int:
        """Of the relays what the kernel counted, for they write to sockets, too. Of a server what was passed
        to write(): of small writes into large files the kernel counts whole blocks of memory.
        """
        octets = sum(_counted(relay.pid, "write_bytes") for relay in self.relays)
        return octets + _counted(self.server, "wchar")


def cpu(pid: int | None) -> float:
    """Of the process and of all that come from it, in seconds."""
    return 0.0 if pid is None else cpu_of(family(pid))


def _counted(pid: int | None, name: str) -> int:
    total = 0
    for each in () if pid is None else family(pid):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each}/io").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith(name)).split()[1])
    return total


@contextlib.contextmanager
def running(name: str, row: Row, directory: Path) -> Iterator[Engine]:
    """`redis x3` is three relays on one server."""
    backend = name.partition(" ")[0]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(SPOOLS[backend](()))
        folder = directory / name.replace(" ", "-")
        folder.mkdir()
        port = free_port()
        sink = stack.enter_context(load.own_sink(port, folder, row))
        relays = [
            stack.enter_context(_relay(folder / f"relay{number}", number, server.tables, port))
            for number in range(_count(name))
        ]
        yield Engine(name, relays, sink, server.pid or None)


def _relay(directory: Path, number: int, tables: Mapping[str, Table], sink_port: int) -> RelayProcess:
    others = {key: table for key, table in tables.items() if key != "spool"}
    if "postgres" in others:
        others["postgres"] = {**others["postgres"], "node": number}
    return RelayProcess(
        directory,
        next_hop=f"{LOOPBACK}:{sink_port}",
        spool=tables["spool"],
        listener={"max_connections_per_client": 1000},
        zone={"max_connections": 50, "max_connections_per_destination": 50},
        tables=others,
    )


def send(engine: Engine, row: Row) -> list[Report]:
    """An equal part to each relay, at the same time."""
    count = len(engine.relays)
    part = replace(row, messages=row.messages // count, sessions=_sessions(row, engine.name))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda relay: load.send_with_driver(part, relay.smtp_port), engine.relays))


def _count(name: str) -> int:
    return int(name.partition(" x")[2] or 1)


def _sessions(row: Row, name: str) -> int:
    """With each relay."""
    return max(1, row.sessions // _count(name))


def measure(engine: Engine, row: Row, found: Measures) -> None:
    row = replace(row, messages=row.messages // len(engine.relays) * len(engine.relays))
    before = engine.sink.read()
    used = engine.relay_cpu(), cpu(engine.server)
    octets = engine.written()
    reports = send(engine, row)
    arrived = load.await_arrival(engine.sink, row, before)
    settle(lambda: engine.relay_cpu() + cpu(engine.server))
    found.rates.append(row.messages / (arrived - min(report.began for report in reports)))
    found.relay_cpu.append(1e3 * (engine.relay_cpu() - used[0]) / row.messages)
    found.server_cpu.append(1e3 * (cpu(engine.server) - used[1]) / row.messages)
    found.written.append((engine.written() - octets) / (row.messages * row.size))
    found.latencies += [latency for report in reports for latency in report.latencies]


def loads(scale: float) -> tuple[Row, ...]:
    many = Row(
        key="engines",
        shape="4 KiB",
        source=Source.OWN,
        messages=MESSAGES,
        size=4 * KIB,
        sessions=SESSIONS,
        reuse=True,
    )
    return many.scaled(scale), replace(many, sessions=1, messages=max(NODES, round(ALONE * scale)))


def run(names: Sequence[str], *, repeat: int, scale: float, directory: Path) -> list[Figures]:
    rows = loads(scale)
    with tempfile.TemporaryDirectory(dir=directory) as place, contextlib.ExitStack() as stack:
        home = Path(place)
        home.chmod(0o755)  # PostgreSQL runs as somebody else
        engines = [stack.enter_context(running(name, rows[0], home)) for name in names]
        for engine in engines:
            measure(engine, rows[0].scaled(0.2), Measures())
        found = {(row, engine.name): Measures() for row in rows for engine in engines}
        for _ in range(repeat):
            for row in rows:
                for engine in engines:
                    measure(engine, row, found[row, engine.name])
    return [
        measures.figures(name, _sessions(row, name) * _count(name)) for (row, name), measures in found.items()
    ]


HEAD = """
| engine | sessions | messages/s | CPU relay | CPU server | to 250, p50 / p99 | written per byte |
|---|---|---|---|---|---|---|
"""


def table(figures: Sequence[Figures]) -> str:
    """Markdown, for docs/store/engines.md."""
    lines = [HEAD.strip()]
    for found in figures:
        server = f"{found.server_cpu_ms:.2f} ms" if found.server_cpu_ms else "–"
        times = f"{found.accept_p50_ms:.1f} / {found.accept_p99_ms:.1f} ms"
        lines.append(
            f"| {found.engine} | {found.sessions} | {found.rate:,.0f} | {found.relay_cpu_ms:.2f} ms"
            f" | {server} | {times} | {found.written:.1f} |"
        )
    return "\n".join(lines)
