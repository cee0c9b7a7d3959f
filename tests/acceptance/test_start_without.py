"""A relay starts without what is not mail: with each such part broken it takes a message and delivers it, and
`status`, or the log where nothing can be asked, names what is wrong.
"""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.crew import relay_of, run
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayFailed, RelayProcess
from tests.support.sink import Sink
from tests.support.toml import Table
from zonerelay.capture.store import FILE as CAPTURED_FILE
from zonerelay.config.credentials.identities import FILE_NAME

WITHOUT_HTTP = (0, 200, 404)


def deliver(relay: RelayProcess) -> None:
    before = len(relay.events("delivered"))
    relay.send("ann@example.com")
    relay.wait_for(lambda: len(relay.events("delivered")) > before, what="delivered")


def problems(relay: RelayProcess) -> str:
    ran = run(relay, "status", "--json")
    assert ran.returncode == 0, ran.stderr
    return "\n".join(json.loads(ran.stdout)["problems"])


def directory(path: Path) -> None:
    path.mkdir(parents=True)


def plain_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("this is not what it should be")
    path.chmod(0o600)


@dataclass(frozen=True)
class Fault:
    """`breaks` is called in the relay's directory before it starts. `named` is in `status`, or in the log
    when it is empty; both may be where the part is opened with its first use.
    """

    breaks: Callable[[Path], object] = lambda home: None
    tables: Callable[[Path], dict[str, Table | list[Table]]] = lambda home: {}
    named: str = ""
    logged: str = ""


FAULTS: dict[str, Fault] = {
    "admin address of another machine": Fault(
        tables=lambda home: {"admin": {"address": "192.0.2.1:8025"}}, named="192.0.2.1:8025"
    ),
    "admin certificate missing": Fault(
        tables=lambda home: {
            "admin": {"address": f"{LOOPBACK}:{free_port()}", "certificate": str(home / "none.pem")}
        },
        named="none.pem",
    ),
    "control socket in no directory": Fault(
        tables=lambda home: {"admin": {"address": "", "socket": str(home / "none" / "control.sock")}},
        logged="control socket",
    ),
    "control socket below a file": Fault(
        breaks=lambda home: plain_file(home / "file"),
        tables=lambda home: {"admin": {"address": "", "socket": str(home / "file" / "control.sock")}},
        logged="control.sock",
    ),
    "a file where the control socket belongs": Fault(
        breaks=lambda home: plain_file(home / "control.sock"), logged="control.sock"
    ),
    "history is a file": Fault(breaks=lambda home: plain_file(home / "history"), named="history"),
    "history damaged": Fault(breaks=lambda home: plain_file(home / "history" / "00.db")),
    "history off and a file": Fault(
        breaks=lambda home: plain_file(home / "history"), tables=lambda home: {"history": {"enabled": False}}
    ),
    "captured mail damaged": Fault(breaks=lambda home: plain_file(home / "captured" / CAPTURED_FILE)),
    "captured mail is a file": Fault(breaks=lambda home: plain_file(home / "captured")),
    "tokens damaged": Fault(breaks=lambda home: plain_file(home / FILE_NAME)),
    "tokens are a directory": Fault(breaks=lambda home: directory(home / FILE_NAME)),
    "token file missing": Fault(
        tables=lambda home: {
            "admin": {"address": f"{LOOPBACK}:{free_port()}", "token_file": str(home / "none")}
        }
    ),
    "changes are a file": Fault(breaks=lambda home: plain_file(home / "acts")),
    "changes damaged": Fault(breaks=lambda home: plain_file(home / "acts" / "0123abcd.json")),
    "key of pseudonyms damaged": Fault(
        breaks=lambda home: plain_file(home / "redact.key"), named="redact.key"
    ),
    "key of pseudonyms is a directory": Fault(
        breaks=lambda home: directory(home / "redact.key"), named="redact.key"
    ),
    "key of pseudonyms in no directory": Fault(
        tables=lambda home: {"log": {"redact_key_file": str(home / "none" / "key")}}, named="none/key"
    ),
    "key for the history alone damaged": Fault(
        breaks=lambda home: plain_file(home / "redact.key"),
        tables=lambda home: {"log": {"redact": False}},
        named="redact.key",
    ),
    "secret of a webhook missing": Fault(
        tables=lambda home: {
            "webhook": [{"name": "shop", "url": "https://hooks.example/x", "secret": str(home / "none")}]
        },
        named="none",
    ),
    "MTA-STS policies are a file": Fault(breaks=lambda home: plain_file(home / "mta-sts")),
    "MTA-STS policies damaged": Fault(breaks=lambda home: plain_file(home / "mta-sts" / "example.com.json")),
    "the report's note is a directory": Fault(
        breaks=lambda home: directory(home / "report.sent"),
        tables=lambda home: {"report": {"to": ["ann@example.org"]}},
        logged="report",
    ),
    "the drop directory is a file": Fault(
        breaks=lambda home: plain_file(home / "drop" / "new"),
        tables=lambda home: {"sendmail": {"drop": str(home / "drop")}},
        named="drop/new",
    ),
    "quotas damaged": Fault(breaks=lambda home: plain_file(home / "usage" / "usage.db")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_mail_moves_without(name: str, sink: Sink, tmp_path: Path) -> None:
    fault, home = FAULTS[name], tmp_path / "relay"
    relay = RelayProcess(home, next_hop=f"{LOOPBACK}:{sink.port}", tables=fault.tables(home))
    fault.breaks(home)
    try:
        relay.start(statuses=WITHOUT_HTTP)
        deliver(relay)
        if fault.named:
            relay.wait_for(lambda: fault.named in problems(relay), what="problem")
        if fault.logged:
            relay.wait_for(lambda: fault.logged in json.dumps(relay.events("trouble")), what="trouble")
        assert relay.terminate() == 0
        assert len(sink.messages) == 1
    finally:
        relay.kill()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_address_of_http_is_taken_when_it_is_free(workers: int, sink: Sink, tmp_path: Path) -> None:
    relay = relay_of(tmp_path / "relay", sink.port, workers=workers)
    try:
        with socket.create_server((LOOPBACK, relay.admin_port)):
            relay.start(statuses=WITHOUT_HTTP)
            deliver(relay)
            relay.wait_for(
                lambda: f"cannot listen on {LOOPBACK}:{relay.admin_port}" in problems(relay), what="problem"
            )
        relay.wait_for(lambda: relay.http("/readyz")[0] == 200, what="HTTP")
        relay.wait_for(lambda: bool(relay.events("restored")), what="restored")
        assert [each["part"] for each in relay.events("restored")] == ["admin-http"]
        assert "cannot listen" not in problems(relay)
        assert len([each for each in relay.events("trouble") if each["where"] == "admin-http"]) == 1
        assert relay.terminate() == 0
    finally:
        relay.kill()


def test_commands_are_answered_when_the_directory_is_there(sink: Sink, tmp_path: Path) -> None:
    home = tmp_path / "relay"
    where = home / "run" / "control.sock"
    tables: dict[str, Table] = {"admin": {"address": "", "socket": str(where)}}
    relay = RelayProcess(home, next_hop=f"{LOOPBACK}:{sink.port}", tables=tables)
    try:
        relay.start(statuses=WITHOUT_HTTP)
        deliver(relay)
        where.parent.mkdir()
        relay.wait_for(where.exists, what="control socket")
        assert problems(relay) == ""
        assert relay.terminate() == 0
        assert not where.exists()
    finally:
        relay.kill()


def test_a_listeners_port_that_is_taken_is_an_error(tmp_path: Path) -> None:
    relay = RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:9")
    with (
        socket.create_server((LOOPBACK, relay.smtp_port)),
        pytest.raises(RelayFailed, match=r"exited with 1 while starting[\s\S]*in use"),
    ):
        relay.start(statuses=WITHOUT_HTTP)


def test_commands_find_a_relay_whose_file_has_changed(sink: Sink, tmp_path: Path) -> None:
    """Where the file names another place since, the process itself says where it listens."""
    relay = RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{sink.port}")
    try:
        relay.start()
        before = relay.config.read_text()
        for text in (
            before.replace(str(relay.spool), str(tmp_path / "elsewhere" / "spool")),
            before.replace("[spool]", "[spol]"),
            before.replace(f'path = "{relay.spool}"', "path = 5"),
            before.replace("[spool]", "[spool"),
            "",
            "\0",
        ):
            relay.config.write_text(text)
            for words in (("status",), ("queue", "list"), ("suspend", "--zone", "default", "--reason", "x")):
                ran = run(relay, *words)
                assert ran.returncode == 0, (text, ran.stderr)
            assert run(relay, "status", "--socket", str(tmp_path / "none.sock")).returncode == 1
        assert relay.terminate() == 0
        assert run(relay, "status").returncode == 2
    finally:
        relay.kill()


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-", "<&- >&- 2>&-"])
def test_mail_moves_without_a_log(streams: str, sink: Sink, tmp_path: Path) -> None:
    launcher = ("sh", "-c", f'exec "$@" {streams}', "sh")
    relay = RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{sink.port}", launcher=launcher)

    try:
        relay.start()
        relay.send("ann@example.com")
        relay.wait_until_empty()
        assert relay.terminate() == 0
        assert len(sink.messages) == 1
    finally:
        relay.kill()
