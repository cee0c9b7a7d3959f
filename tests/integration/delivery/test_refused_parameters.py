"""A host that offers an extension and refuses its parameters gets the mail without them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.support.mail import TEXT, Bodies, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.connection.session_limits import REMEMBER_FOR
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import BodyType, Message, Notify, Ret
from zonerelay.model.outcome import Outcome, Verdict
from zonerelay.routing.destinations.route import Batch

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


async def send(courier: SmtpCourier, batch: Batch) -> list[Outcome]:
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
        [outcome] = await send(courier, batch_of(sink.port))
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
    outcomes = await send(bed.courier(), batch_of(sink.port, "ann", "bob", "reject-550"))
    assert [each.verdict for each in outcomes] == [Verdict.DELIVERED, Verdict.DELIVERED, Verdict.BOUNCED]
    assert [each.recipients for each in sink.messages] == [("ann@example.com",), ("bob@example.com",)]
    assert len(seen) == 1
    assert [each.dsn_passed for each in outcomes[:2]] == [True, False]


@pytest.mark.parametrize("verb", ["MAIL", "RCPT"])
async def test_a_refusal_without_parameters_is_final(bed: Bed, verb: str) -> None:
    sink = await bed.sink(EVERYTHING, script=lambda said, _: "501 5.5.4 never" if said == verb else None)
    courier = bed.courier()
    [outcome] = await send(courier, batch_of(sink.port))
    assert (outcome.verdict, outcome.reply.code) == (Verdict.BOUNCED, 501)
    assert courier.learned(f"127.0.0.1:{sink.port}") == ()


@pytest.mark.parametrize("reply", ["501 5.1.3 bad address", "550 5.1.1 unknown", "550 5.7.1 no", "552 full"])
async def test_a_refusal_about_something_else_is_not_asked_about(bed: Bed, reply: str) -> None:
    sink = await bed.sink(EVERYTHING, script=Refuses("RCPT", reply))
    [outcome] = await send(bed.courier(), batch_of(sink.port))
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
    [outcome] = await send(courier, batch)
    assert outcome.verdict is Verdict.DELIVERED, outcome.reply
    last = [each for each in sink.commands if each.startswith("MAIL")][-1]
    assert parameter in last
    assert "SIZE=" not in last
