"""Workers as processes: one that is wanted again while it is being let go is started again."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.event_log import EventLog
from tests.support.waiting import until
from zonerelay.config.settings import Settings, SpoolSettings
from zonerelay.control.socket import control_socket_path
from zonerelay.model.clock import SystemClock
from zonerelay.process.setup import StartError
from zonerelay.process.sockets import NOTHING
from zonerelay.supervisor import lock
from zonerelay.supervisor.sockets import RelaySockets
from zonerelay.supervisor.workers.launching import Launcher
from zonerelay.supervisor.workers.restart_policy import WorkerPhase, WorkerTimeouts
from zonerelay.supervisor.workers.workers import Launch, Workers
from zonerelay.telemetry.metrics.families import Family
from zonerelay.telemetry.metrics.instruments import MetricTotals

STAYS = """
import os, signal, socket, time
channel = socket.socket(fileno=int(os.environ["ZONERELAY_CHANNEL"]))
def stop(*_):
    channel.send(b"STOPPING=1")
    time.sleep(0.3)
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
channel.send(b"READY=1")
time.sleep(60)
"""
HEARS = """
import os, signal, socket, time
channel = socket.socket(fileno=int(os.environ["ZONERELAY_CHANNEL"]))
signal.signal(signal.SIGHUP, lambda *_: channel.send(b"STATUS=told"))
time.sleep(0.3)
channel.send(b"READY=1")
while True:
    time.sleep(60)
"""
EMPTIES = """
import os, signal, socket, time
channel = socket.socket(fileno=int(os.environ["ZONERELAY_CHANNEL"]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
channel.send(b"READY=1")
channel.send(b"STOPPING=1")
time.sleep(0.3)
channel.send(b"EMPTY=1")
"""
TORN = """
import os, socket
channel = socket.socket(fileno=int(os.environ["ZONERELAY_CHANNEL"]))
channel.send(b"READY=1")
channel.send(b'METRICS="rest of a list"}]')
"""


def launch_of(program: str) -> Launch:
    def launch(index: int, drains_spool: bool) -> tuple[Sequence[str], Mapping[str, str], Sequence[int]]:
        return [sys.executable, "-S", "-c", EMPTIES if drains_spool else program], {}, ()

    return launch


def workers_of(program: str) -> Workers:
    return Workers(
        launch=launch_of(program),
        timeouts=WorkerTimeouts(start=20.0, silence=20.0, stop=20.0),
        log=EventLog(),
        totals=MetricTotals(),
        now=SystemClock().monotonic,
    )


@asynccontextmanager
async def supervised(program: str = STAYS) -> AsyncIterator[Workers]:
    relay = workers_of(program)
    running = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        relay.stop()
        await running


def phase(relay: Workers, index: int) -> WorkerPhase:
    return relay.members[index].policy.phase


def runs(relay: Workers, workers: int) -> bool:
    return [each.policy.phase for each in relay.members.values() if not each.drains_spool] == [
        WorkerPhase.RUNNING
    ] * workers


async def test_one_that_is_wanted_again_before_it_has_stopped_is_started_again() -> None:
    async with supervised() as relay:
        relay.employ(2)
        await until(lambda: runs(relay, 2))
        before = relay.members[1].policy.starts
        relay.employ(1)
        relay.employ(2)
        await until(lambda: runs(relay, 2) and relay.members[1].policy.starts > before)


async def test_an_heir_that_has_just_emptied_its_spool_is_a_worker_again_when_one_is_wanted() -> None:
    async with supervised() as relay:
        relay.employ(1, draining=[1])
        await until(lambda: phase(relay, 1) is WorkerPhase.STOPPING)
        relay.employ(2)
        await until(lambda: runs(relay, 2))
        await asyncio.sleep(0.1)
        assert runs(relay, 2)


async def test_one_that_is_wanted_again_in_the_moment_of_its_end_is_counted() -> None:
    """Its metrics were ignored, because it had as many starts as its predecessor or fewer."""
    relay = workers_of(STAYS)
    relay.employ(2)
    for drains in (False, True, False):
        relay.employ(1 if drains else 2, draining=[1] if drains else [])
        policy = relay.members[1].policy
        policy.started(0.0)
        family = Family("zonerelay_x", "counter", "X.", (("zonerelay_x_total", (), 5.0),))
        relay.totals.take(1, policy.starts, (family,))
        relay.totals.bury(1, policy.starts)
        policy.ended(1.0, finished=drains)
    (total,) = relay.totals.families()
    assert total.samples[0][2] == 15.0


async def test_one_whose_last_metrics_have_lost_a_packet_is_started_again() -> None:
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    async with supervised(TORN) as relay:
        relay.employ(1)
        await until(lambda: relay.members[0].policy.starts > 1)
    assert errors == []


async def test_an_heir_with_an_empty_spool_is_over() -> None:
    async with supervised() as relay:
        relay.employ(1, draining=[1])
        await until(lambda: relay.members.keys() == {0})


async def test_one_that_is_being_started_hears_of_a_new_configuration_when_it_is_ready() -> None:
    async with supervised(HEARS) as relay:
        relay.employ(1)
        await until(lambda: relay.members[0].child is not None and relay.members[0].child.pid > 0)
        relay.edition += 1
        await until(lambda: relay.members[0].last_words == "told")
        assert relay.members[0].edition == relay.edition


def test_the_copies_of_the_configuration_are_written_again_when_somebody_removes_them(tmp_path: Path) -> None:
    launcher = Launcher(0, RelaySockets(NOTHING), {}, Settings(spool=SpoolSettings(path=tmp_path / "spool")))
    launcher.begin(b"# one")
    launcher.put_in_force(b"# two", Settings())
    for each in tmp_path.iterdir():
        each.unlink()
    launcher(0, drains_spool=False)
    assert (tmp_path / "at-start.toml").read_text() == "# one"
    assert (tmp_path / "in-force.toml").read_text() == "# two"


def test_what_cannot_be_written_is_not_in_force(tmp_path: Path) -> None:
    launcher = Launcher(0, RelaySockets(NOTHING), {}, Settings(spool=SpoolSettings(path=tmp_path / "spool")))
    launcher.begin(b"# one")
    (tmp_path / "in-force.toml").unlink()
    (tmp_path / "in-force.toml").mkdir()
    with pytest.raises(OSError, match="in-force"):
        launcher.put_in_force(b"# two", Settings())
    assert launcher.in_force() == b"# one"


def test_a_failed_write_says_which_copy(tmp_path: Path) -> None:
    launcher = Launcher(0, RelaySockets(NOTHING), {}, Settings(spool=SpoolSettings(path=tmp_path / "spool")))
    (tmp_path / "at-start.toml").symlink_to("/proc/at-start.toml")
    with pytest.raises(OSError, match=r"at-start\.toml"):
        launcher.begin(b"# one")


# ---- one relay for one spool -------------------------------------------------------------------------


_HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_who_has_the_spool_is_named_to_the_second(tmp_path: Path) -> None:
    settings = Settings(spool=SpoolSettings(path=tmp_path / "spool"))
    command = [sys.executable, "-S", "-c", _HOLDS, str(tmp_path / lock.LOCK_NAME)]
    waits: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(StartError, match=rf"another relay.*is locked by process {holder.pid}\. Stop it"):
            lock.take(settings, waiting=waits.append)
        assert waits == [str(holder.pid)]
        holder.communicate()
    os.close(lock.take(settings))


def test_who_waits_for_the_spool_hears_of_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_ANSWER_TIMEOUT", 0.1)
    settings = Settings(spool=SpoolSettings(path=tmp_path / "spool"))
    held = lock.take(settings)
    with socket.socket(socket.AF_UNIX) as another:

        def waiting(_: str) -> None:
            another.bind(str(control_socket_path(settings)))
            another.listen()

        with pytest.raises(StartError, match="another relay is listening"):
            lock.take(settings, patience=20.0, waiting=waiting)
    os.close(held)
