"""What a peer says with LIMITS (RFC 9422) is obeyed: in several transactions, on several connections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, make_batch, make_message, route_to
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.model.outcome import Outcome, Verdict

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED
SEVEN = [f"r{number}@example.com" for number in range(7)]
THREE_DOMAINS = ["a@one.example", "b@TWO.example", "c@one.example", "d@three.example", "e@two.example"]


async def send(
    courier: SmtpCourier, port: int, recipients: list[str], zone: ZoneSettings = ZONE
) -> list[Outcome]:
    batch = make_batch(make_message(recipients=recipients), route_to(port), replace(zone))
    return list(await courier.deliver(batch))


def taken(sink: Sink) -> list[list[str]]:
    return [[each.partition("@")[0] for each in message.recipients] for message in sink.messages]


@pytest.mark.parametrize("chunking", [False, True])
@pytest.mark.parametrize(
    ("limits", "batches", "connections"),
    [
        ("", [7], 1),
        ("RCPTMAX=7", [7], 1),
        ("RCPTMAX=3", [3, 3, 1], 1),
        ("RCPTMAX=1", [1] * 7, 1),
        ("RCPTMAX=3 MAILMAX=1", [3, 3, 1], 3),
        ("RCPTMAX=2 MAILMAX=3", [2, 2, 2, 1], 2),
        ("MAILMAX=1", [7], 1),
        ("RCPTMAX=0", [7], 1),
        ("RCPTMAX=-1 MAILMAX=0 RCPTDOMAINMAX=0", [7], 1),
        ("RCPTMAX=99999999999", [7], 1),
        ("RCPTMAX=many", [7], 1),
        ("RCPTMAX=3 RCPTMAX=5", [3, 3, 1], 1),
    ],
)
async def test_recipients_and_transactions(
    bed: Bed, limits: str, batches: list[int], connections: int, chunking: bool
) -> None:
    sink = await bed.sink(Manners(limits=limits, chunking=chunking))
    outcomes = await send(bed.courier(), sink.port, SEVEN)
    assert [each.verdict for each in outcomes] == [D] * 7
    assert [len(each) for each in taken(sink)] == batches
    assert [each for batch in taken(sink) for each in batch] == [each.partition("@")[0] for each in SEVEN]
    assert sink.connections == connections


async def test_mailmax_ends_the_connection_between_messages(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="MAILMAX=2", messages_per_connection=2))
    courier = bed.courier()
    for _ in range(5):
        [outcome] = await send(courier, sink.port, SEVEN[:1])
        assert outcome.verdict is D
    assert sink.connections == 3
    assert sink.commands.count("QUIT") == 2


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ("RCPTDOMAINMAX=1", [["a", "c"], ["b", "e"], ["d"]]),
        ("RCPTDOMAINMAX=2", [["a", "b", "c", "e"], ["d"]]),
        ("RCPTDOMAINMAX=3", [["a", "b", "c", "d", "e"]]),
        ("RCPTDOMAINMAX=2 RCPTMAX=2", [["a", "b"], ["c", "e"], ["d"]]),
        ("RCPTDOMAINMAX=1 RCPTMAX=1 MAILMAX=1", [["a"], ["b"], ["c"], ["d"], ["e"]]),
    ],
)
async def test_domains_of_one_connection(bed: Bed, limits: str, batches: list[list[str]]) -> None:
    sink = await bed.sink(Manners(limits=limits))
    outcomes = await send(bed.courier(), sink.port, THREE_DOMAINS)
    assert [each.verdict for each in outcomes] == [D] * 5
    assert taken(sink) == batches


APART = [["a", "c"], ["b", "e"], ["d"]]
TOGETHER = [["a", "b", "c", "d", "e"]]


@pytest.mark.parametrize("chunking", [False, True])
@pytest.mark.parametrize(
    ("next_hop", "mix", "limits", "transactions", "connections"),
    [
        ("", None, "", APART, 1),
        ("", None, "RCPTMAX=9 MAILMAX=9", APART, 1),
        ("", None, "MAILMAX=1", APART, 3),
        ("", None, "RCPTDOMAINMAX=1", APART, 3),
        ("", None, "RCPTDOMAINMAX=2", [["a", "b", "c", "e"], ["d"]], 2),
        ("", True, "", TOGETHER, 1),
        ("", False, "RCPTDOMAINMAX=3", APART, 1),
        ("", False, "RCPTDOMAINMAX=2", APART, 2),
        ("hop", None, "", TOGETHER, 1),
        ("hop", None, "RCPTDOMAINMAX=1", APART, 3),
        ("hop", False, "", APART, 1),
    ],
)
async def test_a_transaction_has_one_domain_unless_the_zone_or_the_host_says_that_they_mix(
    bed: Bed,
    next_hop: str,
    mix: bool | None,
    limits: str,
    transactions: list[list[str]],
    connections: int,
    chunking: bool,
) -> None:
    """Of several domains Google takes the first, and answers 451 4.3.0 for the others."""
    sink = await bed.sink(Manners(limits=limits, chunking=chunking))
    zone = replace(ZONE, next_hop=next_hop, mix_domains=mix)
    outcomes = await send(bed.courier(), sink.port, THREE_DOMAINS, zone)
    assert [each.verdict for each in outcomes] == [D] * 5
    assert taken(sink) == transactions
    assert sink.connections == connections


async def test_a_connection_whose_domains_are_used_up_serves_others_no_more(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTDOMAINMAX=1"))
    courier = bed.courier()
    for recipient in ("a@one.example", "b@two.example", "c@two.example"):
        [outcome] = await send(courier, sink.port, [recipient])
        assert outcome.verdict is D
    assert sink.connections == 2


async def test_what_some_are_refused_the_others_are_asked_all_the_same(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTMAX=2"))
    recipients = [
        "data-554@x.example",
        "a@x.example",
        "reject-550@x.example",
        "defer-451@x.example",
        "b@x.example",
    ]
    outcomes = await send(bed.courier(), sink.port, recipients)
    assert [each.reply.code for each in outcomes] == [554, 554, 550, 451, 250]
    assert sink.connections == 1


async def test_whoever_was_not_asked_before_the_connection_broke_is_deferred_without_an_attempt(
    bed: Bed,
) -> None:
    sink = await bed.sink(Manners(limits="RCPTMAX=1"))
    outcomes = await send(bed.courier(), sink.port, ["a@x.example", "close@x.example", "b@x.example"])
    assert [each.verdict for each in outcomes] == [D, F, F]
    assert [each.counts for each in outcomes] == [True, True, False]
    assert not any(each.in_doubt for each in outcomes)


async def test_a_server_that_takes_fewer_than_it_says_is_obeyed_too(bed: Bed) -> None:
    sink = await bed.sink(Manners(limits="RCPTMAX=4", max_recipients=3))
    outcomes = await send(bed.courier(), sink.port, SEVEN)
    assert [each.verdict for each in outcomes] == [D] * 7
    assert [len(each) for each in taken(sink)] == [3, 3, 1]
