"""The filter of the operators' page: what can be typed, and the command line that it stands for."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from zonerelay.admin.page.filter_text import FilterTextError, command, parse, term
from zonerelay.cli.arguments import parse as parse_arguments
from zonerelay.cli.arguments import request_of
from zonerelay.model.delivery import DeliveryState
from zonerelay.model.queue_name import Priority
from zonerelay.operations.requests import Filter, Hold

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
    verbs = ["list", "hold", "reroute"] if wanted.message_id is None else ["hold"]
    for verb in verbs:
        words = shlex.split(command(verb, wanted, target="elsewhere"))
        arguments = parse_arguments(words[1:])
        assert arguments.verb == verb
        request = request_of(arguments, Hold)
        named = {"message_id": request.message_ids[0]} if request.message_ids else {}
        assert msgspec.structs.replace(request.filter, **named) == wanted, words
        assert request.everything == (verb != "list" and wanted == Filter())


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_a_mistake_is_told_in_words(text: str) -> None:
    with pytest.raises(FilterTextError, match=WRONG[text]):
        parse(text)


@pytest.mark.parametrize("value", ["plain", 'a "quoted" \\ text', "", "two words"])
def test_a_term_of_a_link_is_read_back(value: str) -> None:
    assert parse(term("reply", value)).reply_text == value
