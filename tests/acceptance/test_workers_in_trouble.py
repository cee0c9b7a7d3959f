"""Several workers as real processes when something goes wrong with all of them, or with their supervisor."""

import contextlib
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.crew import client_of, edit, pid_of, processes, relay_of, run, status, until_running
from tests.support.process import PROGRAM, RelayProcess
from tests.support.regulars import Regulars
from tests.support.sink import Sink
from tests.support.sink_conversation import Received
from tests.support.submit import Submitter, tokens
from tests.support.toml import Table
from tests.support.waiting import until
from zonerelay.model.delivery import DeliveryState
from zonerelay.operations.answers import ChangeResult, DeliveryRow, EndFrame, MessageDetail, ZoneStatus
from zonerelay.operations.errors import NotFoundError
from zonerelay.operations.requests import CHANGES, ChangeVerb, Filter, QueueList, QueueShow

PATIENT = "30s"
"""Nobody is taken for hung, and nothing is cut off, because the machine is busy."""

_MORTAL = """
import os, threading
from zonerelay.inbound.policy import Policy

class Mortal(Policy):
    def __init__(self, context):
        super().__init__(context)
        end = threading.Timer(0.4, os._exit, (70,))
        end.daemon = True
        end.start()

    def connect(self, event):
        return None
"""


def test_a_configuration_that_workers_die_of_reaches_one_of_them_only(tmp_path: Path, sink: Sink) -> None:
    (tmp_path / "mortal.py").write_text(_MORTAL)
    environment = {"PYTHONPATH": str(tmp_path)}
    with relay_of(
        tmp_path, sink.port, worker_timeout=PATIENT, environment=environment, listener={"max_errors": 19}
    ) as relay:
        clients = Regulars(relay.smtp_port, pause=0.02)
        second = pid_of(relay, 1)
        good = relay.config.read_text()
        with clients.at_work(4):
            edit(relay, "max_errors = 19", 'policy = "mortal:Mortal"')
            _is_refused(relay, 1)  # as it runs
            edit(relay, '"relay.test"', '"other.test"')
            _is_refused(relay, 2)  # with new processes
            relay.config.write_text(good)
            _reload(relay, "reloaded", 1)
        told = status(relay)
        assert (told.hostname, told.problems) == ("relay.test", ())
        assert pid_of(relay, 1) == second, "nobody has touched it"
        deaths = [each for each in relay.events("worker-ended") if each["level"] == "error"]
        assert [(each["worker"], each["why"]) for each in deaths] == [(0, "exited with status 70")] * 2
        assert all(each["restart_in"] > 0.4 for each in deaths), "no storm of restarts"
        relay.wait_until_empty()
        assert relay.terminate() == 0
    assert clients.acknowledged <= tokens(sink.messages).keys()
    assert not [text for text in clients.complaints if "Refused" in text]


def _is_refused(relay: RelayProcess, times: int) -> None:
    _reload(relay, "reload-refused", times)
    (problem,) = [each for each in status(relay).problems if "stays active" in each]
    assert problem.endswith("exited with status 70")
    until_running(relay)


def _reload(relay: RelayProcess, outcome: str, times: int) -> None:
    """Told by the supervisor, not by a worker."""

    def told() -> int:
        return sum("worker" not in event for event in relay.events(outcome))

    relay.signal(signal.SIGHUP)
    relay.wait_for(lambda: told() == times, what=f"{outcome}, {times} times")


def _change(relay: RelayProcess, verb: ChangeVerb, chosen: Filter) -> int:
    found = client_of(relay).ask(CHANGES[verb](filter=chosen), ChangeResult)
    assert (found.matched, found.busy) == (found.changed, 0)
    return found.changed


def _rows(relay: RelayProcess, chosen: Filter, *, limit: int = 0) -> tuple[list[DeliveryRow], EndFrame]:
    *frames, end = client_of(relay).stream(QueueList(filter=chosen, limit=limit))
    assert isinstance(end, EndFrame)
    return [each for each in frames if isinstance(each, DeliveryRow)], end


def _zone(relay: RelayProcess) -> ZoneStatus:
    (zone,) = status(relay).zones
    return zone


def test_the_queue_of_three_workers_is_one_for_every_verb(tmp_path: Path) -> None:
    """Nothing of it is due again while the test runs: what is being tried is left alone by every verb."""
    schedule: dict[str, Table] = {"retry": {"schedule": ["1h"], "suspend_min": "1h", "suspend_max": "1h"}}
    recipients = [f"u{number}@d{number % 5}.example" for number in range(30)]
    with relay_of(tmp_path, 1, workers=3, worker_timeout=PATIENT, tables=schedule) as relay:
        clients = [Submitter(relay.smtp_port, prefix=f"c{n}", size=300, recipients=recipients) for n in "abc"]
        # The kernel deals connections out by their ports: of twelve, one of three workers may have none.
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda client: client.send(10, 150), clients))
        ids = sorted(each for client in clients for each in client.ids.values())
        assert len(ids) == 450
        assert {each[-2:] for each in ids} == {"00", "01", "02"}
        relay.wait_for(lambda: _zone(relay).deferred == 450, what="all deferred")
        _look(relay, ids)
        _operate(relay)
        assert relay.events("trouble") == []


def _look(relay: RelayProcess, ids: list[str]) -> None:
    rows, end = _rows(relay, Filter())
    assert [row.message_id for row in rows] == ids, "each once, the oldest first"
    assert (end.count, end.more, end.missing) == (450, False, ())
    rows, end = _rows(relay, Filter(), limit=7)
    assert ([row.message_id for row in rows], end.more) == (ids[:7], True)
    rows, _ = _rows(relay, Filter(domain="d3.example"))
    assert Counter(row.domain for row in rows) == {"d3.example": 90}
    for worker in ("00", "01", "02"):
        last = [each for each in ids if each.endswith(worker)][-1]
        assert client_of(relay).ask(QueueShow(message_id=last), MessageDetail).message_id == last
    with pytest.raises(NotFoundError):
        client_of(relay).ask(QueueShow(message_id="0000000000000001"), MessageDetail)


def _operate(relay: RelayProcess) -> None:
    three, four = Filter(domain="d3.example"), Filter(domain="d4.example")
    assert _change(relay, "hold", three) == 90
    assert (_zone(relay).held, _zone(relay).deferred) == (90, 360)
    assert {row.domain for row in _rows(relay, Filter(state=DeliveryState.HELD))[0]} == {"d3.example"}
    assert _change(relay, "drop", Filter(state=DeliveryState.HELD, recipient="u3@*")) == 15
    assert _change(relay, "release", three) == 75
    assert _zone(relay).held == 0
    assert _change(relay, "drop", four) == 90
    assert len(_rows(relay, Filter())[0]) == 345
    first = Filter(recipient="u0@*")
    before = {row.message_id: row.next_attempt for row in _rows(relay, first)[0]}
    # Mail of an unreachable host that was not attempted itself is due already: nothing of it changes.
    found = client_of(relay).ask(CHANGES["retry"](filter=first), ChangeResult)
    assert (found.matched, found.busy) == (15, 0)

    def put_off() -> bool:
        after = {row.message_id: row.next_attempt for row in _rows(relay, first)[0]}
        return all(after[each] and after[each] != at for each, at in before.items())

    relay.wait_for(put_off, what="attempts")


@pytest.mark.alone  # a receiver that comes too late itself sees turns that are too close
def test_limits_hold_when_the_supervisor_is_killed_and_started_again(tmp_path: Path, sink: Sink) -> None:
    turns: list[float] = []
    sink.script = lambda verb, _: turns.append(time.monotonic()) if verb == "MAIL" else None
    limits = {"max_connections_per_destination": 1, "max_rate_per_destination": "5/1s"}
    with relay_of(tmp_path, sink.port, workers=3, worker_timeout=PATIENT, zone=limits) as relay:
        client = Submitter(relay.smtp_port, prefix="limited")
        client.send(6, 24)
        sink.until(6, timeout=30)
        left = len(client.acknowledged) - len(sink.messages)
        relay.kill()
        relay.start()
        assert len(processes(relay)) == 4, "none of the former ones is left"
        assert len(relay.events("supervisor-gone")) == 3
        relay.wait_until_empty()
        assert relay.terminate() == 0
    assert left > 6, "there was something to lose"
    assert len(client.acknowledged) == 24
    assert client.acknowledged <= tokens(sink.messages).keys()
    assert sink.open_peak == 1
    assert min(later - first for first, later in zip(turns, turns[5:], strict=False)) >= 1.0


class _Gated(Sink):
    """Takes the whole message, and says so only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False

    async def accept(self, message: Received) -> None:
        await until(lambda: self.is_open, seconds=60)
        await super().accept(message)


@pytest.fixture
def gated() -> Iterator[_Gated]:
    with _Gated() as gated:
        yield gated


def test_a_supervisor_waits_for_one_that_stops_not_for_one_that_runs(tmp_path: Path, gated: _Gated) -> None:
    with relay_of(tmp_path, gated.port, worker_timeout=PATIENT, shutdown_timeout=PATIENT) as relay:
        client = Submitter(relay.smtp_port, prefix="slow")
        client.send(2, 2)
        relay.wait_for(lambda: _zone(relay).active == 2, what="two deliveries in flight")
        refused = run(relay, "serve")
        assert refused.returncode == 1
        assert "another relay is listening" in refused.stderr
        relay.signal(signal.SIGTERM)
        relay.wait_for(lambda: status(relay).state == "draining", what="draining")
        log = tmp_path / "second.log"
        with log.open("wb") as stderr:
            command = (str(PROGRAM), "serve", "--config", str(relay.config))
            second = subprocess.Popen(command, stderr=stderr)
        try:
            relay.wait_for(lambda: "supervisor-waits" in log.read_text(), what="it waits")
            waits = json.loads(log.read_text().splitlines()[0])
            assert str(relay.pid) in waits["processes"].split(", ")
            gated.is_open = True
            assert relay.wait() == 0
            relay.wait_for(lambda: relay.http("/readyz")[0] == 200, what="the second one")
            relay.wait_until_empty()
            second.terminate()
            assert second.wait(60) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                second.kill()
    assert tokens(gated.messages) == {"slow-1": 1, "slow-2": 1}
