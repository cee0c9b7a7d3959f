"""The operators' page: its filter and the command line that it stands for, its sessions, the state."""

import io
import re
import shlex
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tests.support.fake_relay import status_of
from tests.support.queueing import route_to
from zonerelay.admin.page.acts import change_of
from zonerelay.admin.page.command import command_of
from zonerelay.admin.page.filter_text import FilterTextError, parse, term
from zonerelay.admin.page.visitor import IDLE, LONGEST, MAX_SESSIONS, Sessions
from zonerelay.cli import arguments
from zonerelay.cli.arguments import parse as parse_arguments
from zonerelay.cli.arguments import request_of
from zonerelay.cli.operate import status as page
from zonerelay.cli.terminal import output
from zonerelay.config.credentials.identities import Token
from zonerelay.config.settings import RetrySettings
from zonerelay.config.units import parse_duration
from zonerelay.model.delivery import DeliveryState
from zonerelay.model.envelope import Priority
from zonerelay.model.reply import Reply
from zonerelay.operations import requests
from zonerelay.operations.answers import DestinationStatus, ZoneStatus
from zonerelay.operations.requests import Filter
from zonerelay.queue.destination.destinations import Destination, Site
from zonerelay.smtp.client.reputation import class_of

ID = "1a214de881600000"

TYPED = {
    "": Filter(),
    "from:@x.example": Filter(sender="*@x.example"),
    "from:<> to:bob@y.example": Filter(sender="<>", recipient="bob@y.example"),
    "to:@y.example": Filter(domain="y.example"),
    'reply:"4.7.28 try \\"later\\"" age:>1h age:<2d': Filter(
        reply_text='4.7.28 try "later"', min_age=3600.0, max_age=172800.0
    ),
    "zone:bulk state:held priority:high": Filter(
        zone="bulk", state=DeliveryState.HELD, priority=Priority.HIGH
    ),
    ID: Filter(message_id=ID),
    f"id:{ID}": Filter(message_id=ID),
    'from:"--all;rm -rf / `x`"': Filter(sender="--all;rm -rf / `x`"),
    "from:--all": Filter(sender="--all"),
}
WRONG = {
    "bob": "specify a field, for example to:bob",
    "state:gone": "must be one of ready, active, deferred, held, suspended, dropped",
    "age:1h": "use age:>1h for older",
    "age:>soon": "duration",
    "who:bob": "not a filter keyword",
    "zone:a zone:b": "given twice",
    "id:nonsense": "is not a message id",
    "x" * 1001: "at most 1000",
}


@pytest.mark.parametrize("text", TYPED, ids=range(len(TYPED)))
def test_what_is_typed_is_a_filter_and_a_command(text: str) -> None:
    wanted = parse(text)
    assert wanted == TYPED[text]
    changes: tuple[requests.ChangeVerb, ...] = ("hold", "reroute") if wanted.message_id is None else ("hold",)
    commands: dict[str, str] = {
        verb: command_of(change_of(verb, wanted, target="elsewhere"), "--yes") for verb in changes
    }
    if wanted.message_id is None:
        commands["list"] = command_of(requests.QueueList(filter=wanted))
    for verb, command in commands.items():
        words = shlex.split(command)
        given = parse_arguments(words[1:])
        assert given.verb == verb
        request = request_of(given, requests.Hold)
        named = {"message_id": request.message_ids[0]} if request.message_ids else {}
        assert msgspec.structs.replace(request.filter, **named) == wanted, words
        assert request.everything == (verb != "list" and wanted == Filter())


NOW = 1_795_000_000.0
MADE: tuple[requests.Request, ...] = (
    requests.Undo(undoes="a1b2c3d4", reason="a slip"),
    requests.Resume(id="a1b2c3d4"),
    requests.Suspend(
        about=requests.Selectors(domain="x.example", zone="bulk"),
        seconds=7200.0,
        refuse=True,
        reason="they move",
    ),
    requests.Suspend(about=requests.Selectors(everything=True), stop_clock=True, reason="all"),
    requests.QueueCat(message_id=ID, as_sent=True),
    requests.QueueShow(message_id=ID),
    requests.Tail(address="a@x.example", event="deferred,bounced", zone="bulk"),
    requests.HistoryFind(
        about="<a b@x.example>", outcome="bounced", reply="-4.7.28 later", since=NOW - 5400.0
    ),
)


@pytest.mark.parametrize("request_", MADE, ids=range(len(MADE)))
def test_a_request_reads_as_its_command(request_: requests.Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arguments._BY_UNIT, "AGO", lambda text: NOW - parse_duration(text))
    words = shlex.split(command_of(request_, now=NOW))
    assert words.pop(0) == "zonerelay"
    assert request_of(parse_arguments(words), type(request_)) == request_, words


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_mistake_is_told_in_words(text: str) -> None:
    with pytest.raises(FilterTextError, match=WRONG[text]):
        parse(text)


@pytest.mark.parametrize("value", ["plain", 'a "quoted" \\ text', "", "two words"])
def test_a_term_of_a_link_is_read_back(value: str) -> None:
    assert parse(term("reply", value)).reply_text == value


# Sessions of the page


TOKEN = Token(name="alice", scope="operate", sha256="", created=0.0)


class Clock:
    now = 1000.0


def test_a_session_ends() -> None:
    clock, valid = Clock(), [True]
    sessions = Sessions(lambda: clock.now, lambda _: valid[0])
    secret = sessions.begin(TOKEN, "192.0.2.1")
    while clock.now < 1000.0 + LONGEST - IDLE / 2:
        clock.now += IDLE / 2
        assert sessions.find(secret, by_itself=False) is not None
    clock.now += IDLE / 2
    assert sessions.find(secret, by_itself=False) is None, "twelve hours after the log-in"
    secret = sessions.begin(TOKEN, "192.0.2.1")
    clock.now += IDLE / 2
    assert sessions.find(secret, by_itself=True) is not None
    clock.now += IDLE / 2
    assert sessions.find(secret, by_itself=True) is None, "a page that refreshes itself keeps none alive"
    secret = sessions.begin(TOKEN, "192.0.2.1")
    valid[0] = False
    assert sessions.find(secret, by_itself=False) is None, "its token was removed"


def test_a_token_that_logs_in_again_and_again_ends_no_session_of_another() -> None:
    clock = Clock()
    sessions = Sessions(lambda: clock.now, lambda _: True)
    first = sessions.begin(TOKEN, "192.0.2.1")
    for _ in range(2 * MAX_SESSIONS):
        clock.now += 1
        sessions.begin(Token(name="bob", scope="read", sha256="", created=0.0), "192.0.2.2")
    assert sessions.find(first, by_itself=True) is not None
    assert len(sessions.open()) == MAX_SESSIONS


def test_there_are_few_and_none_is_found_by_another_secret() -> None:
    clock = Clock()
    sessions = Sessions(lambda: clock.now, lambda _: True)
    first = sessions.begin(TOKEN, "192.0.2.1")
    clock.now += 1
    second = sessions.begin(TOKEN, "192.0.2.1")
    for _ in range(MAX_SESSIONS - 1):
        sessions.begin(TOKEN, "192.0.2.2")
    assert len(sessions.open()) == MAX_SESSIONS
    assert sessions.find(first, by_itself=False) is None
    assert sessions.find(second, by_itself=False) is not None
    assert sessions.find(f"{second}x", by_itself=False) is None


# The page of the state


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
    for part in page._parts(FOUND, Path("none.toml"), is_all=False):
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
