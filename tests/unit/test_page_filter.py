"""The filter of the operators' page: what can be typed, and the command line that it stands for."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from zonerelay.admin.page.acts import change_of
from zonerelay.admin.page.command import command_of
from zonerelay.admin.page.filter_text import FilterTextError, parse, term
from zonerelay.cli import arguments
from zonerelay.cli.arguments import parse as parse_arguments
from zonerelay.cli.arguments import request_of
from zonerelay.config.units import parse_duration
from zonerelay.model.delivery import DeliveryState
from zonerelay.model.queue_name import Priority
from zonerelay.operations.requests import (
    ChangeVerb,
    Filter,
    HistoryFind,
    Hold,
    QueueCat,
    QueueList,
    QueueShow,
    Request,
    Resume,
    Selectors,
    Suspend,
    Tail,
    Undo,
)

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
    changes: tuple[ChangeVerb, ...] = ("hold", "reroute") if wanted.message_id is None else ("hold",)
    commands: dict[str, str] = {
        verb: command_of(change_of(verb, wanted, target="elsewhere"), "--yes") for verb in changes
    }
    if wanted.message_id is None:
        commands["list"] = command_of(QueueList(filter=wanted))
    for verb, command in commands.items():
        words = shlex.split(command)
        given = parse_arguments(words[1:])
        assert given.verb == verb
        request = request_of(given, Hold)
        named = {"message_id": request.message_ids[0]} if request.message_ids else {}
        assert msgspec.structs.replace(request.filter, **named) == wanted, words
        assert request.everything == (verb != "list" and wanted == Filter())


NOW = 1_795_000_000.0
MADE: tuple[Request, ...] = (
    Undo(undoes="a1b2c3d4", reason="a slip"),
    Resume(id="a1b2c3d4"),
    Suspend(
        about=Selectors(domain="x.example", zone="bulk"), seconds=7200.0, refuse=True, reason="they move"
    ),
    Suspend(about=Selectors(everything=True), stop_clock=True, reason="all"),
    QueueCat(message_id=ID, as_sent=True),
    QueueShow(message_id=ID),
    Tail(address="a@x.example", event="deferred,bounced", zone="bulk"),
    HistoryFind(about="<a b@x.example>", outcome="bounced", reply="-4.7.28 later", since=NOW - 5400.0),
)


@pytest.mark.parametrize("request_", MADE, ids=range(len(MADE)))
def test_a_request_is_written_as_the_command_that_makes_it(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
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
