"""`status` in a narrow terminal and in a wide one; the classes of replies that it shows."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.fake_relay import status_of
from tests.support.queueing import route_to
from zonerelay.cli.operate import status as page
from zonerelay.cli.terminal import output
from zonerelay.config.settings import RetrySettings
from zonerelay.model.reply import Reply
from zonerelay.operations.answers import DestinationStatus, ZoneStatus
from zonerelay.queue.destination.destinations import Destination, Site
from zonerelay.smtp.client.reputation import class_of

NOW = 1_700_000_000.0
LONG = "mail.protection.outlook.example.com"


def destination(name: str, **figures: object) -> DestinationStatus:
    given = {"zone": "default", "destination": name, "hosts": name, "active": 0, "waiting": 0} | figures
    return DestinationStatus(**given)  # type: ignore[arg-type]  # fields by name


FOUND = status_of(
    destination(
        LONG,
        zone="transactional",
        suspended_until=NOW + 240,
        deferred=12_345,
        oldest_seconds=4320.0,
        reply="451 4.4.1 no answer from any of the hosts of this destination, which are two or three",
        reply_class="no answer",
        per_minute=998,
        max_rate="1000/1m",
        max_connections=10,
    ),
    destination("slow.example", active=2, ready=98, per_minute=7, max_connections=20),
    zones=(ZoneStatus(name="default", ready=1, active=2, deferred=3, held=4, oldest_seconds=5.0),),
    history_size=5_000_000,
    history_since=NOW - 86_400,
)


@pytest.mark.parametrize("width", [80, 160])
def test_status_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    written = io.StringIO()
    console = Console(file=written, width=width, highlight=False)
    monkeypatch.setattr(output, "console", lambda: console)
    monkeypatch.setattr(time, "time", lambda: NOW)
    for part in page._parts(FOUND, Path("none.toml"), is_all=False, wide=width >= page.WIDE):
        console.print(part)
    shown = written.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "history    4.8 MB of the last 1d" in re.sub(" {3,}", "    ", shown)
    words = [
        "998/m of 1000/1m", "0/10", "12k", "1h12m", "in 4m", "no answer", "451 4.4.1 no answer",
        "2/20", "7/m",
    ]  # fmt: skip
    assert [word for word in words if word not in shown] == []


@pytest.mark.parametrize(
    ("reply", "local", "expected"),
    [
        ("250 2.0.0 OK", False, "accepted"),
        ("451 4.4.1 cannot connect", True, "no answer"),
        ("451 4.4.3 no address", True, "dns"),
        ("451 4.7.5 TLS with mx.example failed", True, "tls"),
        ("454 4.7.0 mx.example rejected the login", True, "log-in"),
        ("530 5.7.0 Authentication required", False, "log-in"),
        ("451 4.3.0 the message could not be read from the store", True, "own trouble"),
        ("554 5.7.1 Client host [192.0.2.1] blocked using zen.spamhaus.org", False, "reputation"),
        ("450 4.2.0 Greylisted, see http://postgrey.example", False, "greylisted"),
        ("452 4.2.2 The email account is over quota", False, "mailbox full"),
        ("552 5.2.2 mailbox full", False, "mailbox full"),
        ("421 4.7.0 Too many connections", False, "too much"),
        ("451 4.3.0 try later", False, "temporary"),
        ("550 5.1.1 no such user", False, "permanent"),
        ("451 4.3.0 192.0.2.9:25 rejected the session at EHLO: 421 4.7.0 too many", True, "too much"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_reply_has_one_class(reply: str, local: bool, expected: str) -> None:
    code, status, text = reply.split(" ", 2)
    assert class_of(Reply(int(code), status.partition(".")[2], text), local=local) == expected


def test_transactions_of_the_last_minute_are_counted_in_two_figures() -> None:
    route = route_to("default", "mx.example.com")
    destination = Destination(route, Site(route.site), RetrySettings())
    assert destination.per_minute(600.0) == 0
    for second in range(600, 660):
        destination.begins(float(second))
    assert [destination.per_minute(tick) for tick in (659.0, 675.0, 719.0, 780.0, 2000.0)] == [
        60,
        45,
        1,
        0,
        0,
    ]
    destination.begins(690.0)
    assert [destination.per_minute(tick) for tick in (690.0, 719.9)] == [31, 1]
    destination.begins(2000.0)
    assert destination.per_minute(2000.0) == 1
