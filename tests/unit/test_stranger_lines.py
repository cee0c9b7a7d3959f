"""The lines about clients that are refused again and again."""

from __future__ import annotations

import pytest

from tests.support.inbound import EventLog, events_into
from tests.support.waiting import until
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Origin
from zonerelay.model.reply import Reply
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs import logs as strangers
from zonerelay.telemetry.logs.logs import ALL_IN_FULL, IN_FULL, MAX_CLIENTS, TOLD

DENIED = Reply(550, "7.1", "Relaying denied")


@pytest.fixture
def log() -> EventLog:
    return EventLog()


@pytest.fixture
def events(log: EventLog) -> Events:
    return events_into(log, ManualClock())


def refuse(events: Events, client: str, times: int, reason: str = "relay", *, stranger: bool = True) -> None:
    for _ in range(times):
        events.refused(Origin(client_address=client, stranger=stranger), "RCPT", DENIED, reason)


def test_the_first_refusals_of_a_client_have_their_lines_and_the_others_are_counted(
    events: Events, log: EventLog
) -> None:
    refuse(events, "192.0.2.1", 1000)
    refuse(events, "192.0.2.1", 5, "syntax")
    for _ in range(7):
        events.login("wrong", "192.0.2.1", user="app")
    refuse(events, "192.0.2.2", 1)
    assert len(log.named("refused")) == IN_FULL + 1
    assert not log.named("refused-more")
    events.close()
    [told] = log.named("refused-more")
    assert told == {
        "client": "192.0.2.1",
        "count": 1000 + 5 + 7 - IN_FULL,
        "reasons": f"relay {1000 - IN_FULL}, login-wrong 7, syntax 5",
    }
    refuse(events, "192.0.2.1", 3)  # another interval
    assert len(log.named("refused")) == IN_FULL + 1 + 3
    assert events.metrics.refused._numbers["relay",] == 1004


def test_log_ins_that_succeed_always_have_their_line(events: Events, log: EventLog) -> None:
    for _ in range(100):
        events.login("ok", "192.0.2.1", user="app")
    assert len(log.named("logged-in")) == 100


def test_many_refusals_have_so_many_lines_together_and_leave_those_of_known_clients_alone(
    events: Events, log: EventLog
) -> None:
    for number in range(MAX_CLIENTS - 1):
        refuse(events, f"10.0.{number // 250}.{number % 250}", 2)
    refuse(events, "192.0.2.9", IN_FULL, stranger=False)
    for number in range(5000):
        refuse(events, f"2001:db8::{number:x}", 1)
    assert len(log.named("refused")) == ALL_IN_FULL + IN_FULL
    events.close()
    told = log.named("refused-more")
    assert len(told) == TOLD + 1
    assert sum(fields["count"] for fields in told) == 2 * (MAX_CLIENTS - 1) + 5000 - ALL_IN_FULL
    assert told[-1]["client"] == "others"


async def test_an_interval_ends_by_itself(
    events: Events, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strangers, "INTERVAL", 0.02)
    refuse(events, "192.0.2.1", IN_FULL + 1)
    await until(lambda: log.named("refused-more"), seconds=10)
    assert log.named("refused-more") == [{"client": "192.0.2.1", "count": 1, "reasons": "relay 1"}]
