"""`zonerelay spool is-empty` says that a spool may be removed, and means it."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.command import Ran, Shell
from tests.support.ports import wait_until
from tests.support.process import RelayProcess


def _drops(zonerelay: Shell, relay: RelayProcess, *options: str) -> bool:
    return zonerelay(relay, "queue", "drop", *options, "--yes").status == 0


def test_a_spool_is_empty_when_its_relay_stopped_without_mail(tmp_path: Path, zonerelay: Shell) -> None:
    with RelayProcess(tmp_path, next_hop="127.0.0.1:1", top={"workers": 2}) as relay:
        for _ in range(24):  # the kernel gives each worker some: of 8, one took all once in 256 runs
            relay.send("c@d.example", message=b"Subject: x\r\n\r\n" + b"x" * 100_000)
        assert zonerelay(relay, "spool", "is-empty").status == 2
        assert relay.terminate() == 0
        left = zonerelay(relay, "spool", "is-empty")
        queued = f"zonerelay: not empty: mail is queued in the zones default of {relay.spool}/01\n"
        assert (left.status, left.err) == (1, queued)
        relay.start()
        relay.send("dropped@d.example")
        # Mail that is being attempted is left alone: "try again".
        for options in (("--recipient", "dropped@d.example"), ("--purge", "--recipient", "c@d.example")):
            assert wait_until(partial(_drops, zonerelay, relay, *options), timeout=20)
        assert "dropped@d.example" in zonerelay(relay, "queue", "list", "--state", "dropped", "--json").out
        assert relay.terminate() == 0
        assert "dropped mail is kept for a day" in zonerelay(relay, "spool", "is-empty").err
        relay.start()
        assert zonerelay(relay, "queue", "drop", "--purge", "--state", "dropped", "--yes").status == 0
        assert relay.terminate() == 0
        assert zonerelay(relay, "spool", "is-empty") == Ran(0, f"{relay.spool}\n", "")
        (relay.spool / "mine").write_text("x")
        said = zonerelay(relay, "spool", "is-empty")
        assert said.status == 1
        assert "mine" in said.err


@pytest.mark.parametrize("backend", ["redis", "memory"])
def test_a_queue_elsewhere_is_not_proved_empty(backend: str, tmp_path: Path, zonerelay: Shell) -> None:
    relay = RelayProcess(tmp_path, spool={"backend": backend})
    said = zonerelay(relay, "spool", "is-empty")
    assert said.status == 1
    assert "only leveldb and disk spools" in said.err
