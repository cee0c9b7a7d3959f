"""Which key a delivery is counted under, in which column of age, and that keys are bounded."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.queueing import DEFERRED, deliveries_of, make_message
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.outcome import Outcome
from zonerelay.model.reply import Reply, same_reply
from zonerelay.queue.operator.operations import BOUNDS, MAX_KEYS, NO_ATTEMPT, SummaryCount, reply_key
from zonerelay.telemetry.logs.redact import Redactor

NOW = 1_000_000.0


def one(outcome: Outcome | None = None) -> Delivery:
    ids = MessageIdSource(ManualClock(), 0, last=None)
    (delivery,) = deliveries_of(make_message(ids, ["a@example.com"], created=NOW))
    return delivery if outcome is None else structs.replace(delivery, last=outcome.attempt(NOW))


@pytest.mark.parametrize(
    ("minutes", "column"), [(-10, 0), (0, 0), (5, 0), (5.1, 1), (80, 4), (1280, 8), (1281, 9), (99_999, 9)]
)
def test_an_age_has_one_column(minutes: float, column: int) -> None:
    tally = SummaryCount(3, NOW)
    tally.count("x", NOW - minutes * 60)
    assert [(at, n) for at, n in enumerate(tally.counts["x"]) if n] == [(column, 3)]


def test_keys_beyond_the_most_are_other() -> None:
    tally = SummaryCount(1, NOW)
    for number in range(MAX_KEYS + 7):
        tally.count(str(number), NOW)
    tally.count("3", NOW)
    assert len(tally.counts) == MAX_KEYS
    assert tally.counts["3"][0] == 2
    assert tally.other == [7] + [0] * len(BOUNDS)


@pytest.mark.parametrize(
    ("one_text", "another"),
    [
        ("greylisted for 300s <a@x.example>", "greylisted for 300s <bob@y.example>"),
        ("[192.0.2.1] is listed at zen.example", "[2001:db8::7] is listed at zen.example"),
        ("mailbox of ann@example.com is full", "mailbox of bob@example.net is full"),
        ("later d9443c01a7336-29 - gsmtp", "later 41be03b00d2f7-b6 - gsmtp"),
    ],
)
def test_replies_that_say_the_same_are_one(one_text: str, another: str) -> None:
    keys = {
        reply_key(one(structs.replace(DEFERRED, reply=Reply(451, "7.1", text))))
        for text in (one_text, another)
    }
    assert len(keys) == 1
    assert keys.pop().startswith("451 4.7.1 ")


@pytest.mark.parametrize(
    "text",
    [
        "<ann@example.com>: user unknown",
        "ann: no such user",
        "user john.doe unknown at person.example",
        "relaying denied (orcpt=rfc822;ann+40example.com)",
        "the account is over quota ann x9-20020a05.88",
    ],
)
def test_a_summary_groups_replies_as_the_report_of_the_history(text: str) -> None:
    delivery = structs.replace(one(), recipient=Mailbox("ann@example.com"))
    reply = Reply(451, "7.1", text)
    attempted = structs.replace(delivery, last=structs.replace(DEFERRED, reply=reply).attempt(NOW))
    keys = {
        same_reply(Redactor(key * 32, enabled=True).about(str(reply), delivery.recipient))
        for key in (b"a", b"b", b"c", b"d")
    }
    assert keys == {reply_key(attempted)}
    assert "ann" not in reply_key(attempted)


def test_other_replies_are_others() -> None:
    texts = ("mailbox full", "no such user", "try again in 5 minutes")
    assert (
        len({reply_key(one(structs.replace(DEFERRED, reply=Reply(451, "7.1", text)))) for text in texts}) == 3
    )
    assert reply_key(one()) == NO_ATTEMPT
