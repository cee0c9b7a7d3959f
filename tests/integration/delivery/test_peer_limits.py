"""What a peer says with LIMITS (RFC 9422) is obeyed; one that refuses what it offers gets mail without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.support.mail import TEXT, ZONE, Bodies, make_batch, make_message, route_to
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.connection.session_limits import REMEMBER_FOR
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import BodyType, Message, Notify, Ret
from zonerelay.model.outcome import Outcome, Verdict
from zonerelay.routing.destinations.route import Batch

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
        ("", None, "RCPTDOMAINMAX=3", TOGETHER, 1),
        ("", None, "RCPTDOMAINMAX=2 RCPTMAX=2", [["a", "b"], ["c", "e"], ["d"]], 2),
        ("", None, "RCPTDOMAINMAX=1 RCPTMAX=1 MAILMAX=1", [["a"], ["b"], ["c"], ["d"], ["e"]], 5),
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


# ---- parameters of an extension that a host offers and refuses ------------------------------------


EVERYTHING = Manners(dsn=True, smtputf8=True, eight_bit_mime=True, size=10_000_000)
PARAMETERS = ("SIZE=", "BODY=", "SMTPUTF8", "RET=", "ENVID=", "NOTIFY=", "ORCPT=")


class Refuses:
    """A script that answers MAIL or RCPT with parameters as `reply` says, and what follows in its wake."""

    def __init__(self, verb: str, reply: str, parameter: str = "") -> None:
        self._verb, self._reply, self._parameter = verb, reply, parameter
        self._refused = False

    def __call__(self, verb: str, argument: str) -> str | None:
        if verb in ("EHLO", "RSET", "MAIL"):
            self._refused = False
        _, _, parameters = argument.partition("> ")
        if verb == self._verb and parameters and self._parameter in parameters:
            self._refused = verb == "MAIL"
            return self._reply
        return "503 5.5.1 MAIL first" if self._refused and verb in ("RCPT", "DATA", "BDAT") else None


def batch_of(port: int, *locals_: str, message: Message | None = None) -> Batch:
    names = [f"{local}@example.com" for local in locals_ or ("ann",)]
    message = message or make_message(recipients=names, declared=BodyType.EIGHT_BIT, smtputf8=True)
    envelope = structs.replace(message.envelope, ret=Ret.HDRS, envid="order-1")
    batch = make_batch(structs.replace(message, envelope=envelope), route_to(port))
    deliveries = [structs.replace(each, notify=Notify.FAILURE) for each in batch.deliveries]
    return structs.replace(batch, deliveries=tuple(deliveries))


async def bring(courier: SmtpCourier, batch: Batch) -> list[Outcome]:
    return list(await courier.deliver(batch))


@pytest.mark.parametrize("pipelining", [True, False])
@pytest.mark.parametrize("chunking", [True, False])
@pytest.mark.parametrize("verb", ["MAIL", "RCPT"])
@pytest.mark.parametrize(
    "reply",
    ["555 5.5.4 Unsupported option", "501 Syntax error", "504 5.5.4 no", "550 5.5.4 no", "451 4.5.4 what"],
)
async def test_mail_goes_without_them_and_the_host_is_remembered(
    bed: Bed, verb: str, reply: str, chunking: bool, pipelining: bool
) -> None:
    sink = await bed.sink(
        replace(EVERYTHING, chunking=chunking, pipelining=pipelining), script=Refuses(verb, reply)
    )
    clock = ManualClock()
    courier = bed.courier(clock=clock)
    for count, asked in ((1, 2), (2, 3)):
        [outcome] = await bring(courier, batch_of(sink.port))
        assert (outcome.verdict, outcome.dsn_passed) == (Verdict.DELIVERED, False), outcome.reply
        assert len(sink.messages) == count
        assert len([each for each in sink.commands if each.startswith("MAIL")]) == asked
    assert sink.connections == 1
    assert not [each for each in sink.commands[-4:] if any(name in each for name in PARAMETERS)]
    assert any("few parameters" in line for line in courier.learned(f"127.0.0.1:{sink.port}"))
    clock.advance(REMEMBER_FOR + 1)
    assert courier.learned(f"127.0.0.1:{sink.port}") == ()


async def test_only_the_recipients_that_were_refused_are_asked_again(bed: Bed) -> None:
    seen: list[str] = []

    def script(verb: str, argument: str) -> str | None:
        if verb == "RCPT" and "bob@" in argument and "NOTIFY" in argument:
            seen.append(argument)
            return "555 5.5.4 not for this one"
        return None

    sink = await bed.sink(EVERYTHING, script=script)
    outcomes = await bring(bed.courier(), batch_of(sink.port, "ann", "bob", "reject-550"))
    assert [each.verdict for each in outcomes] == [Verdict.DELIVERED, Verdict.DELIVERED, Verdict.BOUNCED]
    assert [each.recipients for each in sink.messages] == [("ann@example.com",), ("bob@example.com",)]
    assert len(seen) == 1
    assert [each.dsn_passed for each in outcomes[:2]] == [True, False]


@pytest.mark.parametrize("verb", ["MAIL", "RCPT"])
async def test_a_refusal_without_parameters_is_final(bed: Bed, verb: str) -> None:
    sink = await bed.sink(EVERYTHING, script=lambda said, _: "501 5.5.4 never" if said == verb else None)
    courier = bed.courier()
    [outcome] = await bring(courier, batch_of(sink.port))
    assert (outcome.verdict, outcome.reply.code) == (Verdict.BOUNCED, 501)
    assert courier.learned(f"127.0.0.1:{sink.port}") == ()


@pytest.mark.parametrize("reply", ["501 5.1.3 bad address", "550 5.1.1 unknown", "550 5.7.1 no", "552 full"])
async def test_a_refusal_about_something_else_is_not_asked_about(bed: Bed, reply: str) -> None:
    sink = await bed.sink(EVERYTHING, script=Refuses("RCPT", reply))
    [outcome] = await bring(bed.courier(), batch_of(sink.port))
    assert outcome.verdict is not Verdict.DELIVERED
    assert len([each for each in sink.commands if each.startswith("RCPT")]) == 1


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        (make_message(TEXT.replace(b"e", b"\xe9"), eight_bit=True), "BODY=8BITMIME"),
        (make_message(recipients=["jörg@example.com"], smtputf8=True), "SMTPUTF8"),
    ],
)
async def test_what_the_message_needs_is_said_again(bed: Bed, message: Message, parameter: str) -> None:
    sink = await bed.sink(EVERYTHING, script=Refuses("MAIL", "555 5.5.4 what is SIZE", "SIZE="))
    bodies = Bodies(TEXT.replace(b"e", b"\xe9")) if message.eight_bit else None
    courier = bed.courier(bodies)
    batch = make_batch(message, route_to(sink.port))
    [outcome] = await bring(courier, batch)
    assert outcome.verdict is Verdict.DELIVERED, outcome.reply
    last = [each for each in sink.commands if each.startswith("MAIL")][-1]
    assert parameter in last
    assert "SIZE=" not in last
