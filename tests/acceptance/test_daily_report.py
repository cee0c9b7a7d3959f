"""The daily report of a real relay: what it says of real traffic, and that it comes once."""

import smtplib
import time
from pathlib import Path

import pytest

from tests.acceptance.test_history import RETRY
from tests.support.command import Shell
from tests.support.ports import LOOPBACK, wait_until
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from zonerelay.worker.report import latest


@pytest.mark.parametrize("workers", [1, 2])
def test_what_happened_is_reported_once_and_a_missed_report_at_the_next_start(
    tmp_path: Path, sink: Sink, zonerelay: Shell, workers: int
) -> None:
    due = time.strftime("%H:%M", time.localtime(time.time() + 7200))
    relay = RelayProcess(
        tmp_path,
        next_hop=f"{LOOPBACK}:{sink.port}",
        top={"workers": workers},
        tables={
            **RETRY,
            "report": {"to": ["boss@example.com"], "at": due},
            "history": {"addresses": "clear"},
        },
    )
    note = tmp_path / "report.sent"

    def reports() -> list[bytes]:
        return [each.body for each in sink.messages if b"Subject: Mail of relay.test" in each.body]

    with relay:
        relay.send("bob@example.com", "greylist@example.com", "reject-550@example.com")
        with pytest.raises(smtplib.SMTPSenderRefused):
            relay.send("bob@example.com", sender="a b@")
        relay.wait_until_empty()
        zonerelay.found(relay, "greylist@example.com", "--outcome", "delivered")
        now = zonerelay(relay, "report")
        assert now.status == 0
        order = zonerelay(relay, "suspend", "--zone", "default", "--reason", "they move")
        assert order.status == 0
        relay.send("waits@example.com")
        relay.wait_for(lambda: "suspended" in zonerelay(relay, "queue", "list").out, what="it waits")
        stopped = zonerelay(relay, "report").out
        assert "default                0          0          0          1  " in stopped, stopped
        assert "suspend zone default, by " in stopped, stopped
        assert ", until resumed: they move\n" in stopped, stopped
        assert zonerelay(relay, "resume", "--zone", "default").status == 0
        relay.wait_until_empty()
        assert wait_until(note.exists, timeout=10)
        assert not reports(), "the first one is about the time from the first start on"
        relay.terminate()
    told = now.out
    for line in (
        "           1  messages accepted",
        "           3  recipients accepted",
        "           3  delivered",
        "           1  attempts deferred",
        "           1  bounced",
        "           1  refused",
        "Bounced, by reply",
        "550 5.0.0 as requested by the address",
        "451 4.7.1 greylisted, come back later",
        "           1  app@example.org",
        f"  {LOOPBACK}:{sink.port}",
        "The queue now",
        "  default",
    ):
        assert line in told, (line, told)
    assert max(map(len, told.splitlines())) <= 79 or "no events" in told

    last_due = latest(due, time.time())
    note.write_text(f"{last_due - 3600:.0f}\n")
    with relay:
        assert wait_until(lambda: len(reports()) == 1, timeout=20)
        assert wait_until(lambda: float(note.read_text()) == last_due, timeout=10)
        relay.wait_until_empty()
        relay.terminate()
    (body,) = reports()
    assert b"From: postmaster@relay.test" in body
    assert b"Auto-Submitted: auto-generated" in body
    assert b"messages accepted" in body
    assert b"  default" in body, "the relay has told what waits"
    with relay:
        relay.send("later@example.com")
        relay.wait_until_empty()
    assert len(reports()) == 1
