"""Running sources and sinks as processes of their own, outside the measured groups."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from tests.bench.driver import Load
from tests.bench.driver import Report as DriverReport
from tests.bench.probe import Latencies, Probe
from tests.bench.rows import SENDER_DOMAIN, Row, Source, sink_address
from tests.bench.sink import BACKLOG, CounterFile, Counts
from tests.support.certificates import DAY, make
from tests.support.debian import REPOSITORY
from tests.support.ports import LOOPBACK, greets
from tests.support.postfix import PostfixTools
from tests.support.servers import running_server

TIME_LIMIT = 180.0
STALLED = 30.0
POLL = 0.002
_COUNTERS = re.compile(rb"sess=(\d+) quit=(\d+) mesg=(\d+)")


class BenchError(Exception):
    """A run that measured nothing; the text says what happened."""


class Sink(Protocol):
    def read(self) -> Counts: ...


class SmtpSink:
    """Postfix's smtp-sink. Its running counters go to a file, so that reading them does not slow it."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def read(self) -> Counts:
        with self._output.open("rb") as file:
            file.seek(max(0, self._output.stat().st_size - 200))
            return parse_counters(file.read())


def parse_counters(text: bytes) -> Counts:
    """The last complete set of what `smtp-sink -c` prints over and over, ended by a carriage return."""
    found = _COUNTERS.findall(text[: text.rfind(b"\r") + 1])
    return Counts(sessions=int(found[-1][0]), messages=int(found[-1][2])) if found else Counts()


@contextlib.contextmanager
def smtp_sink(tools: PostfixTools, port: int, directory: Path) -> Iterator[SmtpSink]:
    output = directory / f"sink-{port}"
    command = tools.sink_command("-c", "-m", "1000", f"{LOOPBACK}:{port}", str(BACKLOG))
    with running_server(command, output, lambda: greets(port), environment=tools.environment):
        yield SmtpSink(output)


@contextlib.contextmanager
def own_sink(port: int, directory: Path, row: Row) -> Iterator[CounterFile[Counts]]:
    addresses = [LOOPBACK, *(sink_address(number) for number in range(row.domains) if row.spread)]
    counters = directory / f"counters-{port}"
    certificate: list[object] = []
    if row.source is Source.SECURE:
        now = time.time()
        files = make("sink.test", starts=now - DAY, ends=now + 90 * DAY).write(directory, "sink")
        certificate = ["--tls", *files]
    command = [sys.executable, "-m", "tests.bench.sink", *certificate, port, counters, *addresses]
    with (
        contextlib.closing(CounterFile(counters, Counts)) as file,
        running_server(command, directory / f"sink-{port}.log", lambda: greets(port)),
    ):
        yield file


def send_with_smtp_source(tools: PostfixTools, row: Row, port: int) -> tuple[float, float]:
    """When it began and ended. Recipients do not repeat (-N), so that no cache of addresses helps."""
    arguments = ["-s", str(row.sessions), "-m", str(row.messages), "-l", str(row.size), "-N", "-C", "20"]
    arguments += ["-M", "bench.example.org", "-f", f"sender@{SENDER_DOMAIN}", "-t", "rcpt@d0.example.com"]
    if row.reuse:
        arguments.append("-d")
    began = time.monotonic()
    _run(tools.source_command(*arguments, f"{LOOPBACK}:{port}"), env=tools.environment)
    return began, time.monotonic()


def send_with_driver(row: Row, port: int) -> DriverReport:
    """Pipelines the envelope where a row has our own source, else waits for each reply as smtp-source."""
    load = Load(
        port=port,
        sessions=row.sessions,
        messages=row.messages,
        size=row.size,
        recipients=row.recipients,
        domains=row.domains,
        reuse=row.reuse,
        session_messages=row.session_messages,
        pipelining=row.source is Source.OWN,
        tls=row.tls,
        users=row.users,
        offered=row.offered,
    )
    return driven(load)


def driven(load: Load) -> DriverReport:
    return msgspec.json.decode(_module("driver", msgspec.json.encode(load)), type=DriverReport)


def probe(row: Row, relay_port: int, sink_port: int) -> Latencies:
    spec = Probe(relay_port=relay_port, sink_port=sink_port, messages=row.messages, size=row.size)
    return msgspec.json.decode(_module("probe", msgspec.json.encode(spec)), type=Latencies)


def _module(name: str, spec: bytes) -> bytes:
    return _run([sys.executable, "-m", f"tests.bench.{name}", spec.decode()], env=dict(os.environ))


def _run(command: Sequence[str], *, env: dict[str, str]) -> bytes:
    try:
        done = subprocess.run(
            command, env=env, cwd=REPOSITORY, capture_output=True, timeout=TIME_LIMIT, check=True
        )
    except subprocess.CalledProcessError as error:
        tail = error.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise BenchError(f"{Path(command[0]).name} failed: {' / '.join(tail)}") from error
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{Path(command[0]).name} took more than {TIME_LIMIT} s") from error
    return done.stdout


def await_arrival(sink: Sink, row: Row, before: Counts) -> float:
    """The time at which the last message, or recipient where the sink counts them, had arrived."""
    wanted = row.messages * row.recipients
    latest, changed = sink.read(), time.monotonic()
    while _arrived(row, latest, before) < wanted:
        time.sleep(POLL)
        now = time.monotonic()
        if (fresh := sink.read()) != latest:
            latest, changed = fresh, now
        elif now - changed > STALLED:
            arrived = _arrived(row, latest, before)
            raise BenchError(f"only {arrived} of {wanted} arrived, nothing more in {STALLED} s")
    return latest.last or time.monotonic()


def _arrived(row: Row, now: Counts, before: Counts) -> int:
    if row.source is Source.OWN:
        return now.recipients - before.recipients
    return now.messages - before.messages
