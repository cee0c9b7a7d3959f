"""`python -m tests.bench.spool_table leveldb postgres …`: the same load on a relay with one or another spool.

4 KiB messages over many sessions, each one client after the other on a kept connection; to a sink of our own.
CPU is that of the relay and, where there is one, of the spool's server; octets written are from
`/proc/PID/io`. Repetitions take turns, so that a busy machine is busy for all.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import load
from tests.bench.rows import KIB, Row, Source
from tests.bench.spools import DIRECTORY, SPOOLS
from tests.support.meters import descendants, parents, read_stat, settle
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess

TICKS = 100.0
SESSIONS = 50


@dataclass(slots=True)
class Spool:
    """One relay with its spool, running, and what was measured of it."""

    name: str
    port: int
    sink: load.Sink
    relay: int
    server: int | None
    rates: list[float] = field(default_factory=list)
    relay_cpu: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)


def cpu(pid: int | None) -> float:
    """Of the process and of all that come from it, in seconds."""
    stats = [read_stat(each) for each in family(pid)]
    return sum(sum(stat.ticks) for stat in stats if stat is not None) / TICKS


def written(spool: Spool) -> int:
    """Of the relay what the kernel counted, for it writes to sockets, too. Of a server what was passed to
    write(): of small writes into large files the kernel counts whole blocks of memory.
    """
    return _counted(spool.relay, "write_bytes") + _counted(spool.server, "wchar")


def _counted(pid: int | None, name: str) -> int:
    total = 0
    for each in family(pid):
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{each}/io").read_text().splitlines()
            total += int(next(line for line in lines if line.startswith(name)).split()[1])
    return total


def family(pid: int | None) -> Sequence[int]:
    return [] if pid is None else sorted({pid} | descendants([pid], parents()))


@contextlib.contextmanager
def running(name: str, row: Row, directory: Path) -> Iterator[Spool]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(SPOOLS[name](()))
        sink_port = free_port()
        folder = directory / name
        folder.mkdir()
        sink = stack.enter_context(load.own_sink(sink_port, folder, row))
        relay = RelayProcess(
            folder / "relay",
            next_hop=f"{LOOPBACK}:{sink_port}",
            spool=server.tables["spool"],
            listener={"max_connections_per_client": 1000},
            zone={"max_connections": 50, "max_connections_per_destination": 50},
            tables={key: table for key, table in server.tables.items() if key != "spool"},
        )
        stack.enter_context(relay)
        assert relay.pid is not None
        yield Spool(name, relay.smtp_port, sink, relay.pid, server.pid or None)


def measure(spool: Spool, row: Row, *, keep: bool) -> None:
    before = spool.sink.read()
    used = cpu(spool.relay), cpu(spool.server)
    octets = written(spool)
    report = load.send_with_driver(row, spool.port)
    arrived = load.await_arrival(spool.sink, row, before)
    settle(lambda: cpu(spool.relay) + cpu(spool.server))
    if not keep:
        return
    spool.rates.append(row.messages / (arrived - report.began))
    spool.relay_cpu.append(1e3 * (cpu(spool.relay) - used[0]) / row.messages)
    spool.server_cpu.append(1e3 * (cpu(spool.server) - used[1]) / row.messages)
    spool.written.append((written(spool) - octets) / (row.messages * row.size))
    spool.latencies += report.latencies


def line(spool: Spool) -> str:
    middle = statistics.median
    cuts = statistics.quantiles(spool.latencies, n=100)
    return (
        f"{spool.name:10} {middle(spool.rates):7.0f} msg/s"
        f"  {middle(spool.relay_cpu):6.2f} ms CPU relay {middle(spool.server_cpu):6.2f} ms CPU server"
        f"  {1e3 * cuts[49]:6.1f} ms p50 {1e3 * cuts[98]:6.1f} ms p99"
        f"  {middle(spool.written):5.1f} octets written per octet"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.spool_table")
    parser.add_argument("spools", nargs="+", choices=sorted(SPOOLS))
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="for spools and databases")
    options = parser.parse_args()
    row = Row(
        key="spools",
        shape="4 KiB",
        source=Source.OWN,
        messages=options.messages,
        size=4 * KIB,
        sessions=options.sessions,
        reuse=True,
    )
    with tempfile.TemporaryDirectory(dir=options.directory) as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        directory.chmod(0o755)
        spools = [stack.enter_context(running(each, row, directory)) for each in options.spools]
        for spool in spools:
            measure(spool, row.scaled(0.2), keep=False)
        for _ in range(options.repeat):
            for spool in spools:
                measure(spool, row, keep=True)
        for spool in spools:
            print(line(spool))


if __name__ == "__main__":
    main()
