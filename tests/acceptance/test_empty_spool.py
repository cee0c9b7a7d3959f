"""`zonerelay spool is-empty` says that a spool may be removed, and means it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.process import PROGRAM, RelayProcess


def command(relay: RelayProcess, *words: str) -> tuple[int, str]:
    line = [str(PROGRAM), *words, "--config", str(relay.config)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout or done.stderr


def test_a_spool_is_empty_when_the_relay_is_stopped_and_its_mail_has_left(tmp_path: Path) -> None:
    with RelayProcess(tmp_path, next_hop="127.0.0.1:1", top={"workers": 2}) as relay:
        for _ in range(8):  # both workers take some
            relay.send("c@d.example", message=b"Subject: x\r\n\r\n" + b"x" * 100_000)
        assert command(relay, "spool", "is-empty")[0] == 2
        assert relay.terminate() == 0
        left = command(relay, "spool", "is-empty")
        assert left == (
            1,
            f"zonerelay: not empty: mail is queued in the zones default of {relay.spool}/01\n",
        )
        relay.start()
        relay.send("dropped@d.example")
        assert command(relay, "queue", "drop", "--recipient", "dropped@d.example", "--yes")[0] == 0
        assert command(relay, "queue", "drop", "--purge", "--recipient", "c@d.example", "--yes")[0] == 0
        assert "dropped@d.example" in command(relay, "queue", "list", "--state", "dropped", "--json")[1]
        assert relay.terminate() == 0
        assert "dropped mail is kept for a day" in command(relay, "spool", "is-empty")[1]
        relay.start()
        assert command(relay, "queue", "drop", "--purge", "--state", "dropped", "--yes")[0] == 0
        assert relay.terminate() == 0
        assert command(relay, "spool", "is-empty") == (0, f"{relay.spool}\n")
        (relay.spool / "mine").write_text("x")
        status, said = command(relay, "spool", "is-empty")
        assert status == 1
        assert "mine" in said


@pytest.mark.parametrize("backend", ["redis", "memory"])
def test_a_queue_that_is_no_directory_of_this_machine_is_not_proved_empty(
    backend: str, tmp_path: Path
) -> None:
    relay = RelayProcess(tmp_path, spool={"backend": backend})
    status, said = command(relay, "spool", "is-empty")
    assert status == 1
    assert "only leveldb and disk spools" in said
