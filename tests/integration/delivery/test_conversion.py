"""Mail that a host cannot take as it is goes in seven bits, signed as it is sent, or waits for an hour."""

from __future__ import annotations

import email
import email.policy
from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, Bodies, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import BodyConversion
from zonerelay.delivery.batch.batch_state import PATIENCE
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Verdict

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED
TEXT = "From: Jörg <j@example.org>\r\nSubject: Grüße\r\n\r\nGrüße\r\n".encode()
LONG = TEXT + "Grüße und mehr\r\n".encode() * 20_000
SIGNED = b"DKIM-Signature: v=1; d=example.org; b=x\r\n" + TEXT
NO_8BIT = Manners(eight_bit_mime=False)
NO_UTF8 = Manners(smtputf8=False)
NEITHER = Manners(smtputf8=False, eight_bit_mime=False)
HELO_ONLY = Manners(esmtp=False)


def declared(octets: bytes, **more: object) -> Message:
    message = make_message(octets, eight_bit=True, smtputf8=True, **more)  # type: ignore[arg-type]
    long_lines = any(len(line) > 998 for line in octets.split(b"\r\n"))
    return structs.replace(message, headers=(("Subject", "Grüße"),), long_lines=long_lines)


@pytest.mark.parametrize("octets", [TEXT, LONG])
@pytest.mark.parametrize("manners", [NO_8BIT, NO_UTF8, NEITHER, HELO_ONLY, replace(NEITHER, chunking=True)])
async def test_a_host_that_takes_less_gets_the_same_in_seven_bits(
    bed: Bed, manners: Manners, octets: bytes
) -> None:
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
        (TEXT, BodyConversion.UNSIGNED, D),
        (TEXT, BodyConversion.NEVER, B),
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
    message = declared(TEXT, recipients=["a@example.com", "ü@example.com"])
    outcomes = await bed.courier(Bodies(TEXT)).deliver(make_batch(message, route_to(sink.port)))
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
    [outcome] = await bed.courier(clock=clock).deliver(make_batch(make_message(), route_to(sink.port)))
    assert outcome.verdict is D


async def test_a_host_that_has_taken_mail_is_believed_at_once(bed: Bed) -> None:
    sink = await bed.sink(NEITHER)
    clock = ManualClock()
    plain = b"Subject: x\r\n\r\n" + b"x" * (len(SIGNED) - 14)
    bodies = Bodies(plain)
    courier = bed.courier(bodies, clock=clock)
    [outcome] = await courier.deliver(make_batch(make_message(plain), route_to(sink.port)))
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
    many = TEXT.replace(b"\r\n\r\n", b"\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n", 1)
    bodies = Bodies(many.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + b"--b\r\n\r\n" * 30_000)
    batch = make_batch(declared(bodies.body), route_to(sink.port))
    [outcome] = await bed.courier(bodies).deliver(batch)
    assert outcome.verdict is B
    assert bodies.open_now == 0


@pytest.mark.parametrize("manners", [Manners(), Manners(chunking=True)])
async def test_lines_that_are_too_long_go_to_no_host(bed: Bed, manners: Manners) -> None:
    ids = " ".join(f"<{number}@example.org>" for number in range(100))
    octets = TEXT.replace(b"Subject", f"References: {ids}\r\nSubject".encode()) + b"x" * 5000 + b"\r\n"
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
    octets = (SIGNED if change == "signed" else TEXT) + b"x" * 5000 + b"\r\n"
    sink = await bed.sink()
    message = declared(octets, sender="j@example.org")
    origin = structs.replace(message.envelope.origin, stranger=change == "stranger")
    message = structs.replace(message, envelope=structs.replace(message.envelope, origin=origin))
    zone = replace(ZONE, convert=BodyConversion.NEVER) if change == "never" else ZONE
    [outcome] = await bed.courier(Bodies(octets)).deliver(make_batch(message, route_to(sink.port), zone))
    assert outcome.verdict is D
    assert sink.messages[0].body == octets
