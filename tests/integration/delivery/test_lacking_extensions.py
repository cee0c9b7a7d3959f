"""Hosts without 8BITMIME or SMTPUTF8: who is asked instead, what is converted, and what is returned."""

import email
import email.policy
from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, Bodies, Names, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import BodyConversion, DeliverySettings
from zonerelay.delivery.batch.batch_state import PATIENCE
from zonerelay.delivery.batch.courier import MAX_LACKING
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import BodyType, Message
from zonerelay.model.reply import Scope, Verdict
from zonerelay.routing.destinations.route import Batch, Route

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED
TEXT = "Subject: x\r\n\r\nü\r\n".encode()
BUSY = Manners(greeting="421 busy")
NO_8BIT = Manners(eight_bit_mime=False)
NO_UTF8 = Manners(smtputf8=False)
HELO_ONLY = Manners(esmtp=False)


def unconverted(message: Message, route: Route) -> Batch:
    """A batch of a zone that converts nothing."""
    return make_batch(message, route, replace(ZONE, convert=BodyConversion.NEVER))


async def test_eight_bit_content_is_declared_and_arrives_as_it_is(bed: Bed) -> None:
    bodies, sink = Bodies(TEXT), await bed.sink()
    [outcome] = await bed.courier(bodies).deliver(
        unconverted(make_message(TEXT, eight_bit=True), route_to(sink.port))
    )
    assert outcome.verdict is D
    assert "BODY=8BITMIME" in sink.messages[0].parameters
    assert sink.messages[0].body == TEXT


@pytest.mark.parametrize("manners", [NO_8BIT, HELO_ONLY, replace(NO_8BIT, pipelining=False)])
async def test_eight_bit_content_goes_to_who_takes_it_and_else_back(bed: Bed, manners: Manners) -> None:
    plain, capable = await bed.sink(manners), await bed.sink()
    courier = bed.courier(Bodies(TEXT))
    message = make_message(TEXT, eight_bit=True, recipients=["a@example.com", "b@example.com"])
    both = await courier.deliver(unconverted(message, route_to(plain.port, capable.port)))
    assert [outcome.verdict for outcome in both] == [D, D]
    assert capable.messages[0].body == TEXT
    neither = await courier.deliver(unconverted(message, route_to(plain.port)))
    assert [(o.verdict, o.reply.code, o.reply.status) for o in neither] == [(B, 550, "5.6.3")] * 2
    assert all(outcome.local and outcome.host for outcome in neither)
    assert not any(command.startswith("MAIL") for command in plain.commands)


async def test_what_is_only_declared_is_taken_everywhere(bed: Bed) -> None:
    sink = await bed.sink(HELO_ONLY)
    ascii_text = b"Subject: x\r\n\r\nx\r\n"
    message = make_message(ascii_text, declared=BodyType.EIGHT_BIT, smtputf8=True)
    [outcome] = await bed.courier(Bodies(ascii_text)).deliver(unconverted(message, route_to(sink.port)))
    assert outcome.verdict is D
    assert sink.messages[0].parameters == ""


async def test_non_ascii_address_goes_only_where_smtputf8_is_offered(bed: Bed) -> None:
    plain, capable = await bed.sink(NO_UTF8), await bed.sink()
    courier = bed.courier()
    message = make_message(recipients=["a@example.com", "ü@example.com"])
    both = await courier.deliver(unconverted(message, route_to(plain.port, capable.port)))
    assert [outcome.verdict for outcome in both] == [D, D]
    assert plain.messages[0].recipients == ("a@example.com",)
    assert capable.messages[0].recipients == ("ü@example.com",)
    assert "SMTPUTF8" in capable.messages[0].parameters
    neither = await courier.deliver(unconverted(message, route_to(plain.port)))
    assert [outcome.verdict for outcome in neither] == [D, B]
    assert neither[1].reply.status == "5.6.7"


HEADERS = [
    (True, (("Subject", "ü"),), B, "UTF-8 in the header of a message that was declared so"),
    (True, (("Sübject", "u"),), B, "in a name"),
    (True, (("Subject", "u"),), D, "declared, and not used"),
    (False, (("Subject", "\ufffd"),), D, "octets that nobody declared are 8-bit content"),
]


@pytest.mark.parametrize(
    ("declared", "headers", "verdict", "reason"), HEADERS, ids=[row[3] for row in HEADERS]
)
async def test_utf8_in_the_header_needs_smtputf8_too(
    bed: Bed, declared: bool, headers: tuple[tuple[str, str], ...], verdict: Verdict, reason: str
) -> None:
    plain, capable = await bed.sink(NO_UTF8), await bed.sink()
    courier = bed.courier(Bodies(TEXT))
    message = structs.replace(make_message(TEXT, eight_bit=True, smtputf8=declared), headers=headers)
    [outcome] = await courier.deliver(unconverted(message, route_to(plain.port)))
    assert outcome.verdict is verdict, reason
    if verdict is B:
        assert outcome.reply.status == "5.6.7"
        [outcome] = await courier.deliver(unconverted(message, route_to(plain.port, capable.port)))
        assert outcome.verdict is D
        assert "SMTPUTF8" in capable.messages[0].parameters


async def test_each_recipient_is_told_what_was_missing(bed: Bed) -> None:
    sink = await bed.sink(Manners(smtputf8=False, eight_bit_mime=False))
    message = make_message(TEXT, eight_bit=True, recipients=["a@example.com", "ü@example.com"])
    outcomes = await bed.courier(Bodies(TEXT)).deliver(unconverted(message, route_to(sink.port)))
    assert [outcome.reply.status for outcome in outcomes] == ["5.6.3", "5.6.7"]


@pytest.mark.parametrize("lacking", [NO_UTF8, NO_8BIT])
async def test_nobody_is_given_up_while_a_host_could_not_be_asked(bed: Bed, lacking: Manners) -> None:
    plain, down = await bed.sink(lacking), await bed.sink(BUSY)
    message = make_message(TEXT, sender="ü@example.org", eight_bit=True)
    for ports in ((plain.port, down.port), (down.port, plain.port)):
        [outcome] = await bed.courier(Bodies(TEXT)).deliver(unconverted(message, route_to(*ports)))
        assert outcome.verdict is F
    named = route_to(25, host="mx.example.com", preferences=[7], literal=False).hosts
    route = route_to(plain.port)
    route = structs.replace(route, hosts=(*route.hosts, *named))
    [outcome] = await bed.courier(Bodies(TEXT), names=Names()).deliver(unconverted(message, route))
    assert outcome.verdict is F, "a host whose name cannot be looked up might take it"


async def test_hosts_that_lack_it_do_not_use_up_the_hosts_of_an_attempt(bed: Bed) -> None:
    plain, capable = await bed.sink(NO_8BIT), await bed.sink()
    courier = bed.courier(Bodies(TEXT), settings=DeliverySettings(max_hosts_per_attempt=1))
    message = make_message(TEXT, eight_bit=True)
    [outcome] = await courier.deliver(unconverted(message, route_to(plain.port, plain.port, capable.port)))
    assert outcome.verdict is D


async def test_nobody_is_given_up_while_there_are_hosts_that_an_attempt_does_not_come_to(bed: Bed) -> None:
    plain, busy, capable = await bed.sink(NO_8BIT), await bed.sink(BUSY), await bed.sink()
    courier = bed.courier(Bodies(TEXT), settings=DeliverySettings(max_hosts_per_attempt=1))
    message = make_message(TEXT, eight_bit=True)
    route = route_to(*[plain.port] * (MAX_LACKING + 1), capable.port)
    [outcome] = await courier.deliver(unconverted(message, route))
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.MESSAGE, True)
    [outcome] = await courier.deliver(unconverted(message, route_to(busy.port, capable.port)))
    assert (outcome.verdict, outcome.reply.code) == (F, 451), "what the host said itself stands"


class OnlyTheFirst:
    """A rate's turns: the next one is too far away."""

    def __init__(self) -> None:
        self.taken = 0

    async def take(self) -> bool:
        self.taken += 1
        return self.taken == 1


async def test_nobody_is_given_up_while_a_host_waits_for_its_turn(bed: Bed) -> None:
    plain, capable = await bed.sink(NO_UTF8), await bed.sink()
    message = make_message(recipients=["a@example.com", "ü@example.com"])
    batch = structs.replace(
        unconverted(message, route_to(plain.port, capable.port)), take_turn=OnlyTheFirst().take
    )
    outcomes = await bed.courier().deliver(batch)
    assert [outcome.verdict for outcome in outcomes] == [D, F]
    assert not outcomes[1].counts
    assert "rate limit" in outcomes[1].reply.text


# ---- what is converted to seven bits ----------------------------------------------------------------


HEADED = "From: Jörg <j@example.org>\r\nSubject: Grüße\r\n\r\nGrüße\r\n".encode()
LONG = HEADED + "Grüße und mehr\r\n".encode() * 20_000
SIGNED = b"DKIM-Signature: v=1; d=example.org; b=x\r\n" + HEADED
NEITHER = Manners(smtputf8=False, eight_bit_mime=False)


def declared(octets: bytes, **more: object) -> Message:
    message = make_message(octets, eight_bit=True, smtputf8=True, **more)  # type: ignore[arg-type]
    long_lines = any(len(line) > 998 for line in octets.split(b"\r\n"))
    return structs.replace(message, headers=(("Subject", "Grüße"),), long_lines=long_lines)


@pytest.mark.parametrize("octets", [HEADED, LONG])
@pytest.mark.parametrize("manners", [NO_8BIT, NO_UTF8, NEITHER, HELO_ONLY, replace(NEITHER, chunking=True)])
async def test_a_host_that_takes_less_gets_seven_bits(bed: Bed, manners: Manners, octets: bytes) -> None:
    sink = await bed.sink(manners)
    courier = bed.courier(Bodies(octets))
    for _ in range(2):
        batch = make_batch(declared(octets), route_to(sink.port))
        [outcome] = await courier.deliver(batch)
        assert outcome.verdict is D, outcome.reply
    got = sink.messages[-1]
    assert got.body.isascii()
    assert "BODY" not in got.parameters
    assert "SMTPUTF8" not in got.parameters
    assert "SIZE" not in got.parameters or f"SIZE={len(got.body)}" in got.parameters
    message = email.message_from_bytes(got.body, policy=email.policy.default)
    assert (message["Subject"], str(message["From"])) == ("Grüße", "Jörg <j@example.org>")
    assert message.get_payload(decode=True) == octets.partition(b"\r\n\r\n")[2]
    assert sink.connections == 1


@pytest.mark.parametrize(
    ("octets", "convert", "verdict"),
    [
        (HEADED, BodyConversion.UNSIGNED, D),
        (HEADED, BodyConversion.NEVER, B),
        (SIGNED, BodyConversion.UNSIGNED, B),
        (SIGNED, BodyConversion.ALWAYS, D),
    ],
)
async def test_the_zone_decides_about_signed_mail(
    bed: Bed, octets: bytes, convert: BodyConversion, verdict: Verdict
) -> None:
    sink = await bed.sink(NEITHER)
    courier = bed.courier(Bodies(octets))
    batch = make_batch(declared(octets), route_to(sink.port), replace(ZONE, convert=convert))
    [outcome] = await courier.deliver(batch)
    assert outcome.verdict is verdict


async def test_a_host_that_takes_everything_gets_what_was_sent(bed: Bed) -> None:
    plain, capable = await bed.sink(NEITHER), await bed.sink()
    courier = bed.courier(Bodies(SIGNED))
    [outcome] = await courier.deliver(make_batch(declared(SIGNED), route_to(plain.port, capable.port)))
    assert outcome.verdict is D
    assert capable.messages[0].body == SIGNED


async def test_an_address_beyond_ascii_is_not_converted_but_others_of_the_message_are(bed: Bed) -> None:
    sink = await bed.sink(NEITHER)
    message = declared(HEADED, recipients=["a@example.com", "ü@example.com"])
    outcomes = await bed.courier(Bodies(HEADED)).deliver(make_batch(message, route_to(sink.port)))
    assert [each.verdict for each in outcomes] == [D, B]
    assert outcomes[1].reply.status == "5.6.7"
    assert sink.messages[0].recipients == ("a@example.com",)


async def test_what_cannot_be_converted_waits_an_hour_for_a_host_that_has_taken_no_mail(bed: Bed) -> None:
    sink = await bed.sink(NEITHER)
    clock = ManualClock()
    courier = bed.courier(Bodies(SIGNED), clock=clock)
    message = declared(SIGNED)
    message = structs.replace(message, envelope=structs.replace(message.envelope, created=clock.now()))
    batch = make_batch(message, route_to(sink.port))
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.reply.code, outcome.reply.status) == (F, 451, "4.6.7")
    clock.advance(PATIENCE + 1)
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.reply.status) == (B, "5.6.7")
    young = structs.replace(message, envelope=structs.replace(message.envelope, created=clock.now()))
    [outcome] = await courier.deliver(make_batch(young, route_to(sink.port)))
    assert outcome.verdict is F
    [outcome] = await bed.send(sink.port, courier=bed.courier(clock=clock))
    assert outcome.verdict is D


async def test_a_host_that_has_taken_mail_is_believed_at_once(bed: Bed) -> None:
    sink = await bed.sink(NEITHER)
    clock = ManualClock()
    plain = b"Subject: x\r\n\r\n" + b"x" * (len(SIGNED) - 14)
    bodies = Bodies(plain)
    courier = bed.courier(bodies, clock=clock)
    [outcome] = await bed.send(sink.port, courier=courier, body=plain)
    assert outcome.verdict is D
    bodies.body = SIGNED
    message = declared(SIGNED)
    message = structs.replace(message, envelope=structs.replace(message.envelope, created=clock.now()))
    [outcome] = await courier.deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.reply.status) == (B, "5.6.7")


async def test_readers_are_closed_whatever_happens(bed: Bed) -> None:
    sink = await bed.sink(NEITHER)
    bodies = Bodies(LONG, fails_after=2)
    [outcome] = await bed.courier(bodies).deliver(make_batch(declared(LONG), route_to(sink.port)))
    assert outcome.verdict is F
    assert bodies.open_now == 0
    many = HEADED.replace(b"\r\n\r\n", b"\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n", 1)
    bodies = Bodies(many.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + b"--b\r\n\r\n" * 30_000)
    batch = make_batch(declared(bodies.body), route_to(sink.port))
    [outcome] = await bed.courier(bodies).deliver(batch)
    assert outcome.verdict is B
    assert bodies.open_now == 0


@pytest.mark.parametrize("manners", [Manners(), Manners(chunking=True)])
async def test_lines_that_are_too_long_go_to_no_host(bed: Bed, manners: Manners) -> None:
    ids = " ".join(f"<{number}@example.org>" for number in range(100))
    octets = HEADED.replace(b"Subject", f"References: {ids}\r\nSubject".encode()) + b"x" * 5000 + b"\r\n"
    sink = await bed.sink(manners)
    message = declared(octets)
    [outcome] = await bed.courier(Bodies(octets)).deliver(make_batch(message, route_to(sink.port)))
    assert outcome.verdict is D
    got = sink.messages[0]
    assert max(map(len, got.body.split(b"\r\n"))) <= 998
    assert f"SIZE={len(got.body)}" in got.parameters or not manners.size
    read = email.message_from_bytes(got.body, policy=email.policy.default)
    assert read["References"].split() == ids.split()
    assert read.get_payload(decode=True) == octets.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("change", ["stranger", "signed", "never"])
async def test_long_lines_of_others_stay(bed: Bed, change: str) -> None:
    octets = (SIGNED if change == "signed" else HEADED) + b"x" * 5000 + b"\r\n"
    sink = await bed.sink()
    message = declared(octets, sender="j@example.org")
    origin = structs.replace(message.envelope.origin, stranger=change == "stranger")
    message = structs.replace(message, envelope=structs.replace(message.envelope, origin=origin))
    zone = replace(ZONE, convert=BodyConversion.NEVER) if change == "never" else ZONE
    [outcome] = await bed.courier(Bodies(octets)).deliver(make_batch(message, route_to(sink.port), zone))
    assert outcome.verdict is D
    assert sink.messages[0].body == octets
