"""Workers are killed in the middle of hold, undo, reroute: no mail is lost or doubled, undo is exact."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from tests.support.crew import client_of, relay_of, run, status, until_running
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from zonerelay.operations import requests
from zonerelay.operations.answers import ActRow, ChangeResult, DeliveryRow
from zonerelay.operations.errors import ControlError

MESSAGES, RECIPIENTS = 8, 300
Queue = dict[tuple[str, str], tuple[str, str, float]]


def test_killed_in_the_middle_of_acts(tmp_path: Path, sink: Sink) -> None:
    tables = {"retry": {"schedule": ["1h"], "suspend_min": "1h", "suspend_max": "1h"}}
    relay = relay_of(tmp_path, free_port(), tables=tables)
    with relay.config.open("a") as config:
        config.write(f'\n[[zone]]\nname = "other"\ntls = "none"\nnext_hop = "{LOOPBACK}:{sink.port}"\n')
    with relay:
        _fill_queue(relay)
        _kill_and_undo(relay)
        _kill_and_undo_reroute(relay)
        relay.wait_until_empty()
    arrived = Counter(recipient for message in sink.messages for recipient in message.recipients)
    assert len(arrived) == MESSAGES * RECIPIENTS
    assert set(arrived.values()) == {1}


@pytest.mark.parametrize("backend", ["leveldb", "disk"])
def test_dropped_mail_survives_a_restart_and_its_undo_sends(tmp_path: Path, sink: Sink, backend: str) -> None:
    relay = RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", spool={"backend": backend})

    with relay:
        run(relay, "suspend", "--all", "--reason", "test")
        relay.send("bob@example.com")
        changed = json.loads(run(relay, "queue", "drop", "--all", "--yes", "--json").stdout)
        assert json.loads(run(relay, "queue", "count", "--json").stdout)["matched"] == 0
        relay.terminate()
    checked = run(relay, "spool", "check")
    assert checked.returncode == 0, checked
    with relay:
        assert run(relay, "undo", changed["act"]).returncode == 0
        run(relay, "resume", "--all")
        relay.wait_until_empty()
    assert [message.recipients for message in sink.messages] == [("bob@example.com",)]


def _fill_queue(relay: RelayProcess) -> None:
    for number in range(MESSAGES):
        relay.send(*(f"u{number}-{each}@d{each % 3}.example" for each in range(RECIPIENTS)))

    def waits() -> bool:
        return sum(zone.deferred for zone in status(relay).zones) == MESSAGES * RECIPIENTS

    relay.wait_for(waits, what="all mail deferred")
    # Nothing is attempted from here on. What the scheduler has in hand is told again.
    at = time.time() + 4 * 3600

    def is_later() -> bool:
        client_of(relay).ask(requests.Retry(everything=True, at=at), ChangeResult)
        time.sleep(1.0)  # outcomes that are under way are written
        return all(due >= at - 1 for _, _, due in _queue(relay).values())

    relay.wait_for(is_later, what="nothing is attempted")


def _kill_and_undo(relay: RelayProcess) -> None:
    held = run(relay, "queue", "hold", "--domain", "d0.example", "--yes", "--reason", "before")
    assert "zonerelay undo" in held.stderr
    before = _queue(relay)
    assert Counter(state for state, _, _ in before.values())["held"] == MESSAGES * RECIPIENTS // 3
    _killed(relay, requests.Hold(everything=True, reason="peer is down"))
    assert before.keys() == _queue(relay).keys()
    _undo(relay, _last(relay).act)
    assert _queue(relay) == before
    act = _change(relay, "hold")
    assert set(Counter(state for state, _, _ in _queue(relay).values())) == {"held"}
    _killed(relay, requests.Undo(undoes=act))
    _undo(relay, act)
    assert _queue(relay) == before
    table = run(relay, "acts").stdout
    assert "peer is down" in table
    # By the one that was killed, where a worker had done its part of it, or by the last one.
    assert re.search(rf"^{act} .* by [0-9a-f]{{8}} ", table, re.MULTILINE), table
    again = run(relay, "undo", act)
    assert again.returncode == 0
    assert "already undone" in again.stderr


def _kill_and_undo_reroute(relay: RelayProcess) -> None:
    _change(relay, "hold")
    before = _queue(relay)
    _killed(relay, requests.Reroute(everything=True, to_zone="other"))
    assert before.keys() == _queue(relay).keys()
    _undo(relay, _last(relay).act)
    assert _queue(relay) == before
    whole = run(relay, "undo", _change(relay, "reroute", to_zone="other"))
    assert f"{MESSAGES * RECIPIENTS:,} deliveries were restored" in whole.stdout
    _change(relay, "reroute", to_zone="other")
    assert {zone for _, zone, _ in _queue(relay).values()} == {"other"}
    _change(relay, "release")


def _killed(relay: RelayProcess, request: requests.Request) -> None:
    """Both workers are killed while they do it, soon after one of them has noted its first deliveries."""
    pids = [each.pid for each in status(relay).workers]
    logs = relay.directory / "acts"
    before = set(logs.glob("*/*.log"))

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(_ask, relay, request)
        while not set(logs.glob("*/*.log")) - before:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.03))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        asking.result()
    relay.wait_for(lambda: not set(pids) & {each.pid for each in status(relay).workers}, what="other workers")
    until_running(relay)
    relay.wait_for(lambda: status(relay).counted, what="all counted")


def _ask(relay: RelayProcess, request: requests.Request) -> None:
    with contextlib.suppress(ControlError):
        list(client_of(relay).stream(request))


def _queue(relay: RelayProcess) -> Queue:
    rows = [
        row for row in client_of(relay).stream(requests.QueueList(limit=0)) if isinstance(row, DeliveryRow)
    ]
    found = {(row.message_id, row.recipient): (row.state, row.zone, row.next_attempt) for row in rows}
    assert len(found) == len(rows) == MESSAGES * RECIPIENTS
    return found


def _change(relay: RelayProcess, verb: requests.ChangeVerb, to_zone: str = "") -> str:
    more = {"to_zone": to_zone} if to_zone else {}
    request = msgspec.convert({"everything": True, **more}, requests.CHANGES[verb])
    changed = client_of(relay).ask(request, ChangeResult)
    assert changed.busy == 0
    return changed.act


def _undo(relay: RelayProcess, act: str) -> None:
    ran = run(relay, "undo", act)
    assert ran.returncode == 0, ran.stderr
    assert f"before change {act}." in ran.stdout
    assert "left the queue" not in ran.stderr


def _last(relay: RelayProcess) -> ActRow:
    return next(each for each in client_of(relay).stream(requests.Acts(limit=1)) if isinstance(each, ActRow))
