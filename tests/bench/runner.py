"""Runs one row on every relay: warm-up, timed repetitions in alternation, then the runs that observe.

What disturbs is measured apart from what is timed: memory sampling, the latency driver, strace and
py-spy each get a repetition of their own whose times are not used. A relay that fails a row keeps
the figures it has and gets a note; the other relay and the other rows go on.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench import load
from tests.bench.fsyncs import FsyncTrace
from tests.bench.load import BenchError, Sink
from tests.bench.profiling import profiled
from tests.bench.relays import Starter, Subject
from tests.bench.results import Result, Sample
from tests.bench.rows import ZONERELAY, Row, Source
from tests.support.meters import PeakMemory, ProcessGroup, open_group, settle
from tests.support.ports import free_port, wait_until
from tests.support.postfix import PostfixError, PostfixTools
from tests.support.process import RelayFailed

WARM_UP = 0.2
TRACED = 0.2
FAILURES = (BenchError, PostfixError, RelayFailed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a bench is run."""

    directory: Path
    tools: PostfixTools
    starters: Mapping[str, Starter]
    repetitions: int = 3
    strace: Path | None = None
    profiles: Path | None = None
    say: Callable[[str], None] = lambda _: None

    def relays(self, row: Row) -> list[str]:
        """Those of the row that can be had here."""
        return [name for name in row.relays if name in self.starters]


@dataclass(frozen=True, slots=True)
class Bench:
    """A started subject and the result that fills up."""

    subject: Subject
    result: Result


def run_row(plan: Plan, row: Row) -> list[Result]:
    with contextlib.ExitStack() as stack:
        benches = []
        results = []
        for name in plan.relays(row):
            result = Result(row, name)
            results.append(result)
            with noting(result.notes):
                subject = stack.enter_context(started(plan, row, name, "timed"))
                benches.append(Bench(subject, result))
        _timed(plan, row, benches)
        _observed(plan, row, benches)
    for result in results:
        if plan.strace is not None and not result.notes:
            plan.say(f"{row.key}: {result.relay}: counting fsyncs")
            with noting(result.notes):
                _count_fsyncs(plan, row, result, plan.strace)
    return results


def _timed(plan: Plan, row: Row, benches: Sequence[Bench]) -> None:
    for bench in benches:
        plan.say(f"{row.key}: {bench.result.relay}: warm-up")
        with noting(bench.result.notes):
            _repeat(plan, row.scaled(WARM_UP), bench)
    for repetition in range(plan.repetitions):
        for bench in benches:
            if bench.result.notes:
                continue
            plan.say(f"{row.key}: {bench.result.relay}: {repetition + 1} of {plan.repetitions}")
            with noting(bench.result.notes):
                bench.result.samples.append(_repeat(plan, row, bench, keep=True))


def _observed(plan: Plan, row: Row, benches: Sequence[Bench]) -> None:
    for bench in benches:
        if bench.result.notes:
            continue
        plan.say(f"{row.key}: {bench.result.relay}: memory and latencies")
        with noting(bench.result.notes):
            memory = PeakMemory(bench.subject.group)
            with memory.running():
                _repeat(plan, row, bench)
            bench.result.memory = memory.peak
            if row.source is Source.POSTFIX:
                _measure_latencies(row, bench)
        if plan.profiles is not None and bench.result.relay == ZONERELAY:
            pid = bench.subject.relay.pid
            with noting(bench.result.notes), profiled(pid, profile_path(plan.profiles, row)):
                _repeat(plan, row, bench)


def profile_path(folder: Path, row: Row) -> Path:
    return folder / f"{row.key}.speedscope.json"


def _repeat(plan: Plan, row: Row, bench: Bench, *, keep: bool = False) -> Sample:
    """Sends the row once and waits until all arrived and the relay is at rest."""
    subject = bench.subject
    cpu = subject.group.cpu_seconds()
    if bench.subject.sink is None:
        began, accepted, arrived = _probe(row, bench, keep=keep)
    else:
        before = bench.subject.sink.read()
        began, accepted = _send(plan, row, bench, keep=keep)
        arrived = load.await_arrival(bench.subject.sink, row, before)
    settle(subject.group.cpu_seconds)
    return Sample(accepted - began, arrived - began, subject.group.cpu_seconds() - cpu)


def _send(plan: Plan, row: Row, bench: Bench, *, keep: bool) -> tuple[float, float]:
    if row.source is Source.POSTFIX:
        return load.send_with_smtp_source(plan.tools, row, bench.subject.port)
    report = load.send_with_driver(row, bench.subject.port)
    if keep:
        bench.result.accept += report.latencies
        bench.result.source_busy = max(bench.result.source_busy, report.busy)
    return report.began, report.ended


def _probe(row: Row, bench: Bench, *, keep: bool) -> tuple[float, float, float]:
    found = load.probe(row, bench.subject.port, bench.subject.sink_port)
    if keep:
        bench.result.accept += found.accept
        bench.result.arrive += found.arrive
    # One at a time: the sums are the time spent; the pauses between are not.
    return 0.0, sum(found.accept), sum(found.arrive)


def _measure_latencies(row: Row, bench: Bench) -> None:
    """smtp-source tells no latencies, so our driver sends the same load once more."""
    assert bench.subject.sink is not None
    before = bench.subject.sink.read()
    report = load.send_with_driver(row, bench.subject.port)
    load.await_arrival(bench.subject.sink, row, before)
    bench.result.accept += report.latencies


def _count_fsyncs(plan: Plan, row: Row, result: Result, strace: Path) -> None:
    """A shorter run after the usual warm-up, so that starting up is not counted."""
    trace = FsyncTrace(strace, plan.directory / f"{row.key}-{result.relay}.strace")
    short = row.scaled(TRACED)
    with started(plan, row, result.relay, "traced", trace.launcher()) as subject:
        bench = Bench(subject, result)
        _repeat(plan, short, bench)
        before = trace.count()
        _repeat(plan, short, bench)
        result.fsyncs = (trace.count() - before) / short.messages


@contextlib.contextmanager
def started(plan: Plan, row: Row, name: str, kind: str, launcher: Sequence[str] = ()) -> Iterator[Subject]:
    """The relay, its process group and its sink, fresh; all gone afterwards."""
    directory = plan.directory / f"{row.key}-{name}-{kind}".replace(" ", "-")
    directory.mkdir(mode=0o755)
    plan.say(f"{row.key}: {name}: starting")
    sink_port = free_port()
    with contextlib.ExitStack() as stack:
        group = open_group()
        stack.callback(group.close)
        sink = _start_sink(plan, row, sink_port, directory, stack)
        stack.callback(_await_end, group)
        starter = plan.starters[name]
        running = stack.enter_context(starter(directory, row, sink_port, [*group.launcher(), *launcher]))
        group.adopt(running.relay.pid)
        yield Subject(name, running.relay, running.port, group, sink_port, sink)


def _start_sink(plan: Plan, row: Row, port: int, directory: Path, stack: contextlib.ExitStack) -> Sink | None:
    if row.source in (Source.POSTFIX, Source.DRIVER):
        return stack.enter_context(load.smtp_sink(plan.tools, port, directory))
    if row.source in (Source.OWN, Source.SECURE):
        return stack.enter_context(load.own_sink(port, directory, row))
    return None


def _await_end(group: ProcessGroup) -> None:
    """Postfix's children outlive its master by a moment, and their directories are removed next."""
    wait_until(lambda: not group.pids(), timeout=10.0)


@contextlib.contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """A failure becomes a note on the result, in its first line's words."""
    try:
        yield
    except FAILURES as error:
        notes.append(str(error))
