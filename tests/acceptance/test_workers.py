"""Several workers as real processes: one relay, whatever happens to one of them, or to the supervisor."""

import base64
import fcntl
import os
import signal
import smtplib
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.crew import QUICK, client_of, edit, pid_of, processes, relay_of, run, status, until_running
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import PROGRAM, RelayProcess
from tests.support.regulars import Regulars
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens
from tests.support.toml import Table
from zonerelay.operations.answers import ChangeResult, DeliveryRow, MessageDetail
from zonerelay.operations.requests import CHANGES, ChangeVerb, QueueList, QueueShow


def test_two_workers_are_one_relay_and_one_that_dies_is_restarted(tmp_path: Path, sink: Sink) -> None:
    with relay_of(tmp_path, sink.port) as relay:
        clients = Regulars(relay.smtp_port)
        with clients.at_work():
            time.sleep(1)
            before = relay.metrics()
            os.kill(pid_of(relay, 1), signal.SIGKILL)
            time.sleep(0.3)
            meanwhile = len(clients.acknowledged)
            after = relay.metrics()
            relay.wait_for(lambda: len(relay.events("worker-started")) == 3, what="a start")
            assert len(clients.acknowledged) > meanwhile, "the other one goes on"
            until_running(relay)
        relay.wait_until_empty()
        (ended,) = relay.events("worker-ended")
        assert ended["worker"] == 1
        assert ended["why"] == "killed by SIGKILL"
        workers = {event["id"][-2:] for event in relay.events("accepted")}
        assert workers == {"00", "01"}, "both took mail"
        # Only who was with the dead one has noticed: no connection was refused.
        assert not [text for text in clients.complaints if "Refused" in text]
        assert sum(clients.complaints.values()) <= 6
        for name in ("zonerelay_messages_accepted_total", "zonerelay_delivery_seconds_count"):
            assert 0 < before[name] <= after[name] <= relay.metrics()[name]
        assert relay.metric("zonerelay_worker_restarts_total", worker="1") == 1
        _by_hand(relay)
        _hang(relay)
        relay.wait_until_empty()
        assert relay.terminate() == 0
    assert processes(relay) == []
    assert clients.acknowledged <= tokens(sink.messages).keys()


def _by_hand(relay: RelayProcess) -> None:
    """A worker that somebody starts beside a running relay is refused, and leaves no spool behind."""
    refused = run(relay, "worker", "--index", "7")
    assert refused.returncode == 1
    assert "another relay is listening" in refused.stderr
    assert not (relay.spool / "07").exists()
    assert "leased from the supervisor" in run(relay, "status").stdout


def _hang(relay: RelayProcess) -> None:
    """A worker that is stopped in its tracks is named to who asks, and replaced."""
    hung = pid_of(relay, 0)
    os.kill(hung, signal.SIGSTOP)
    listed = run(relay, "queue", "list")
    assert "worker 0" in listed.stderr
    assert listed.returncode == 1
    client = Submitter(relay.smtp_port, prefix="meanwhile")
    client.send(1, 3)
    assert len(client.acknowledged) == 3
    relay.wait_for(lambda: relay.events("worker-ended")[-1]["pid"] == hung, what="its end")
    why = relay.events("worker-ended")[-1]["why"]
    assert "no heartbeat" in why
    assert "SIGKILL" in why
    until_running(relay)
    assert pid_of(relay, 0) != hung


def test_a_new_configuration_replaces_workers_and_no_client_notices(tmp_path: Path, sink: Sink) -> None:
    with relay_of(tmp_path, sink.port) as relay:
        clients = Regulars(relay.smtp_port)
        old = {pid_of(relay, worker) for worker in (0, 1)}
        with clients.at_work():
            time.sleep(0.5)
            edit(relay, 'hostname = "relay.test"', 'hostname = "other.test"')
            relay.signal(signal.SIGHUP)
            relay.wait_for(lambda: relay.events("reloaded") != [], what="reloaded")
            time.sleep(0.5)
        assert not old & {pid_of(relay, worker) for worker in (0, 1)}
        relay.wait_until_empty()
        assert clients.complaints == Counter()
        arrived = tokens(sink.messages)
        assert clients.acknowledged == arrived.keys()
        assert set(arrived.values()) == {1}, "nothing twice"
        assert "other.test" in status(relay).hostname

        edit(relay, f'"{relay.spool}"', f'"{tmp_path / "elsewhere" / "spool"}"')
        relay.signal(signal.SIGHUP)
        relay.wait_for(lambda: relay.events("reloaded")[-1]["restart_for"] == "spool", what="it")
        edit(relay, "schedule =", "schedul =")
        relay.signal(signal.SIGHUP)
        relay.wait_for(lambda: relay.events("reload-refused") != [], what="refused")
        assert "did you mean schedule" in " ".join(status(relay).problems)
        os.kill(pid_of(relay, 1), signal.SIGKILL)
        relay.wait_for(lambda: relay.events("worker-ended")[-1]["worker"] == 1, what="an end")
        until_running(relay)  # by the configuration that is in force
        assert not (tmp_path / "elsewhere").exists(), "its mail is where it was"


def test_fewer_workers_leave_no_mail_behind_and_more_find_theirs(tmp_path: Path, sink: Sink) -> None:
    with relay_of(tmp_path, 1) as relay:
        clients = Regulars(relay.smtp_port)
        with clients.at_work():
            relay.wait_for(lambda: _takers(relay) == {"00", "01"}, what="mail for both")
        ids = _listed(relay)
        assert len(ids) == len(clients.acknowledged)
        assert ids == sorted(ids), "one list, the oldest first"
        for each in (ids[0], next(one for one in ids if one.endswith("01"))):
            shown = client_of(relay).ask(QueueShow(message_id=each), MessageDetail)
            assert shown.message_id == each
        assert _change(relay, "hold").matched == len(ids)
        while _change(relay, "hold").busy:  # an attempt was under way, and is left alone
            time.sleep(0.1)

        edit(relay, "workers = 2", "workers = 1")
        relay.signal(signal.SIGHUP)
        relay.wait_for(lambda: _states(relay) == ["running", "emptying"], what="an heir")
        assert _listed(relay) == ids
        # The heir's figures come with its next word, on a busy machine a moment after itself.
        held = len(ids)
        relay.wait_for(
            lambda: relay.metric("zonerelay_queue_deliveries", state="held") == held,
            what="figures of the heir",
        )
        relay.signal(signal.SIGHUP)
        relay.wait_for(lambda: _taken_up(relay) == [None, 0, 1], what="a reload by the heir too")
        assert status(relay).problems == ()
        edit(relay, "workers = 1", "workers = 2")
        relay.signal(signal.SIGHUP)
        until_running(relay)

        edit(relay, "workers = 2", "workers = 1")
        edit(relay, f'"{LOOPBACK}:1"', f'"{LOOPBACK}:{sink.port}"')
        assert relay.terminate() == 0
        relay.start()
        assert (relay.spool / "01").is_dir()
        relay.wait_for(lambda: _states(relay) == ["running", "emptying"], what="an heir")
        _change(relay, "release")
        relay.wait_until_empty()
        relay.wait_for(lambda: relay.events("spool-removed") != [], what="an empty spool")
        assert not (relay.spool / "01").exists()
        assert relay.terminate() == 0
    arrived = tokens(sink.messages)
    assert arrived.keys() == clients.acknowledged
    assert set(arrived.values()) == {1}, "nothing twice"


def _takers(relay: RelayProcess) -> set[str]:
    return {event["id"][-2:] for event in relay.events("accepted")}


def _taken_up(relay: RelayProcess) -> list[int | None]:
    """Whoever has said so last."""
    return sorted(
        (e.get("worker") for e in relay.events("reloaded")[-3:]), key=lambda n: (n is not None, n or 0)
    )


def _states(relay: RelayProcess) -> list[str]:
    return [each.state for each in status(relay).workers]


def _listed(relay: RelayProcess) -> list[str]:
    rows = client_of(relay).stream(QueueList(limit=0))
    return [row.message_id for row in rows if isinstance(row, DeliveryRow)]


def _change(relay: RelayProcess, verb: ChangeVerb) -> ChangeResult:
    return client_of(relay).ask(CHANGES[verb](everything=True), ChangeResult)


def test_workers_end_with_a_killed_supervisor_and_the_next_goes_on(tmp_path: Path, sink: Sink) -> None:
    with relay_of(tmp_path, sink.port) as relay:
        client = Submitter(relay.smtp_port, prefix="orphan")
        with ThreadPoolExecutor(1) as thread:
            load = thread.submit(client.send, 8, 100_000)
            time.sleep(0.5)
            relay.kill()
            load.result()
            starts = len(relay.events("starting"))
            starting = thread.submit(relay.start)
            relay.wait_for(lambda: len(relay.events("starting")) > starts, what="its start")
            relay.signal(signal.SIGHUP)
            starting.result()
        assert len(processes(relay)) == 3, "none of the former ones is left"
        assert len(relay.events("supervisor-gone")) == 2
        relay.wait_until_empty()
        assert client.acknowledged <= tokens(sink.messages).keys()


def test_a_file_that_is_edited_while_the_start_waits_counts_at_the_next_reload(
    tmp_path: Path, sink: Sink
) -> None:
    """The workers were started with a file of which the supervisor knew nothing, or the start failed."""
    relay = relay_of(tmp_path, sink.port)
    with ThreadPoolExecutor() as thread, (tmp_path / "supervisor.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        starting = thread.submit(relay.start)
        relay.wait_for(lambda: bool(relay.events("supervisor-waits")), what="that it waits")
        before = relay.config.read_text()
        relay.config.write_text("what is being written")
        fcntl.flock(held, fcntl.LOCK_UN)
        starting.result()
    assert (tmp_path / "in-force.toml").read_text() == before
    assert relay.terminate() == 0


_HANDED = """
import os, socket, sys
handed = socket.create_server(("127.0.0.1", int(sys.argv[1])))
os.dup2(handed.fileno(), 3)
os.set_inheritable(3, True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": "smtp"}
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_all_workers_accept_from_a_socket_of_the_service_manager(tmp_path: Path, sink: Sink) -> None:
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(str(tmp_path / "notify"))
    notify.settimeout(20)
    port = free_port()
    relay = relay_of(
        tmp_path,
        sink.port,
        launcher=[sys.executable, "-c", _HANDED, str(port)],
        environment={"NOTIFY_SOCKET": str(tmp_path / "notify")},
    )
    edit(relay, f'"{LOOPBACK}:{relay.smtp_port}"', f'"{LOOPBACK}:{port}"')
    relay.smtp_port = port
    with relay, notify:
        assert f"listening on {LOOPBACK}:{port}, 2 workers" in notify.recv(4096).decode()
        clients = Regulars(port)
        with clients.at_work():
            relay.wait_for(lambda: _takers(relay) == {"00", "01"}, what="mail for both")
        relay.signal(signal.SIGHUP)
        assert notify.recv(4096).startswith(b"RELOADING=1")
        assert notify.recv(4096).startswith(b"READY=1")
        assert relay.terminate() == 0
        assert notify.recv(4096) == b"STOPPING=1"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_socket_that_belongs_to_no_listener_is_refused(tmp_path: Path, workers: int) -> None:
    """Its clients would wait for ever."""
    config, port = tmp_path / "relay.toml", free_port()
    config.write_text(
        f'workers = {workers}\n[spool]\npath = "{tmp_path}/home/spool"\n[admin]\naddress = ""\n'
        f'[[listener]]\naddress = "127.0.0.1:{free_port()}"\n'
    )
    command = [sys.executable, "-c", _HANDED, str(port), str(PROGRAM), "serve", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert f"sockets without a [[listener]]: 127.0.0.1:{port} (smtp)" in done.stderr


def test_a_client_has_its_guesses_once_and_not_once_at_each_worker(tmp_path: Path, sink: Sink) -> None:
    """With N workers a client had N times as many guesses at passwords."""
    most = 3
    listener = {"auth": "required", "unsafe": ["cleartext-auth"]}
    tables: dict[str, Table] = {
        **QUICK,
        "auth": {"credentials": str(tmp_path / "users"), "max_client_failures": most},
    }
    (tmp_path / "users").touch(mode=0o600)
    relay = relay_of(tmp_path, sink.port, workers=3, listener=listener, tables=tables)
    made = run(relay, "user", "add", "app", "--generate")
    assert made.returncode == 0, made.stderr
    with relay:
        replies = [_guess(relay, f"guess-{each}") for each in range(4 * most)]
    assert Counter(replies) == {535: most, 454: 3 * most}
    assert {event["worker"] for event in relay.events("login-failed")} != {0}, "several workers were asked"


def _guess(relay: RelayProcess, password: str) -> int:
    with smtplib.SMTP(relay.host, relay.smtp_port, timeout=30) as client:
        client.ehlo()
        plain = base64.b64encode(f"\0app\0{password}".encode()).decode()
        return client.docmd("AUTH", f"PLAIN {plain}")[0]
