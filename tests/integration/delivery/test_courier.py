"""The courier against a real server on loopback: what is sent, and what becomes of each recipient."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed, talk
from tests.support.mail import TEXT, ZONE, Bodies, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.sandbox.behaviours import ADDRESSES

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED


async def deliver(
    bed: Bed, port: int, *locals_: str, bodies: Bodies | None = None, settings: DeliverySettings | None = None
) -> list[Outcome]:
    bodies = bodies or Bodies()
    message = make_message(bodies.body, recipients=[f"{local}@example.com" for local in locals_])
    courier = bed.courier(bodies, settings=settings)
    outcomes = await courier.deliver(make_batch(message, route_to(port)))
    assert bodies.open_now == 0
    return list(outcomes)


async def test_message_arrives_as_it_is_stored(bed: Bed) -> None:
    sink = await bed.sink()
    [outcome] = await deliver(bed, sink.port, "anybody")
    assert outcome == Outcome(
        D, Reply(250, "0.0", "message accepted"), host="127.0.0.1", peer=f"127.0.0.1:{sink.port}"
    )
    [received] = sink.messages
    assert received.body == TEXT
    assert received.mail_from == "sender@example.org"
    assert received.recipients == ("anybody@example.com",)


@pytest.mark.parametrize(
    "manners",
    [
        Manners(),
        Manners(pipelining=False),
        Manners(esmtp=False),
        Manners(multi_line=True),
        Manners(enhanced=False),
        Manners(byte_by_byte=True),
        Manners(pipelining=False, multi_line=True, byte_by_byte=True, enhanced=False),
    ],
)
async def test_every_kind_of_server_is_understood(bed: Bed, manners: Manners) -> None:
    sink = await bed.sink(manners)
    courier = bed.courier()
    names = ["a", "reject-550", "b", "defer-450", "reject-553"]
    message = make_message(recipients=[f"{name}@example.com" for name in names])
    for _ in range(2):
        outcomes = await courier.deliver(make_batch(message, route_to(sink.port)))
        assert [outcome.verdict for outcome in outcomes] == [D, B, D, F, B]
        assert [outcome.reply.code for outcome in outcomes] == [250, 550, 250, 450, 553]
    assert [received.recipients for received in sink.messages] == [("a@example.com", "b@example.com")] * 2
    assert sink.connections == 1


# (local parts, outcome, scope, code, in doubt, is the connection kept)
BEHAVIOURS = [
    ("reply-452-4.2.2", F, Scope.RECIPIENT, 452, False, True),
    ("reply-552-5.2.2", B, Scope.RECIPIENT, 552, False, True),
    ("reply-552", B, Scope.RECIPIENT, 552, False, True),
    ("permerror", B, Scope.RECIPIENT, 550, False, True),
    ("temperror", F, Scope.RECIPIENT, 451, False, True),
    ("greylist", F, Scope.RECIPIENT, 451, False, True),
    ("datacmd-451", F, Scope.MESSAGE, 451, False, True),
    ("datacmd-554", B, Scope.MESSAGE, 554, False, True),
    ("data-554", B, Scope.MESSAGE, 554, False, True),
    ("data-451", F, Scope.MESSAGE, 451, False, True),
    ("early-552", B, Scope.MESSAGE, 552, False, False),
    ("reply-421", F, Scope.MESSAGE, 421, False, False),
    ("close", F, Scope.MESSAGE, 451, False, False),
    # A short message is in the kernel, final dot and all, before its sender can know.
    ("close-before-dot", F, Scope.MESSAGE, 451, True, False),
    ("close-after-dot", F, Scope.MESSAGE, 451, True, False),
]


@pytest.mark.parametrize("pipelining", [True, False])
@pytest.mark.parametrize(("local", "verdict", "scope", "code", "in_doubt", "kept"), BEHAVIOURS)
async def test_failure_asked_for_by_address(
    bed: Bed,
    local: str,
    verdict: Verdict,
    scope: Scope,
    code: int,
    in_doubt: bool,
    kept: bool,
    pipelining: bool,
) -> None:
    sink = await bed.sink(Manners(pipelining=pipelining))
    bodies = Bodies(b"x" * 70 + b"\r\n")
    courier = bed.courier(bodies)
    message = make_message(bodies.body, recipients=[f"{local}@example.com"])
    [outcome] = await courier.deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.scope, outcome.reply.code) == (verdict, scope, code)
    assert outcome.in_doubt is in_doubt
    assert outcome.counts
    assert sink.messages == []
    await asyncio.sleep(0.01)
    assert courier.pool.open_connections("default") == (1 if kept else 0)


async def test_body_cut_by_a_lost_connection_is_not_in_doubt(bed: Bed) -> None:
    sink = await bed.sink()
    bodies = Bodies(b"x" * 998 + b"\r\n" * 4_000_000)
    [outcome] = await deliver(bed, sink.port, "close-before-dot", bodies=bodies)
    assert (outcome.verdict, outcome.in_doubt) == (F, False)
    assert "the message body" in outcome.reply.text


async def test_refusal_in_the_middle_of_a_long_body_is_heard(bed: Bed) -> None:
    async def refuse_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await reader.readexactly(1000)
        writer.write(b"552 5.3.4 too big\r\n")
        while await reader.read(1 << 20):
            pass

    sink = await bed.sink()
    bodies = Bodies(b"x" * 998 + b"\r\n" * 8_000_000)
    courier = bed.courier(bodies)
    port = await bed.peer(refuse_early)
    [outcome] = await bed.send(port, sink.port, courier=courier, body=bodies.body)
    assert outcome.reply == Reply(552, "3.4", "too big")
    assert outcome.verdict is B
    await asyncio.sleep(0.05)
    assert courier.pool.open_connections("default") == 0
    assert sink.connections == 0


async def test_silent_peer_is_given_up_by_its_phase(bed: Bed) -> None:
    sink = await bed.sink()
    settings = DeliverySettings(rcpt_timeout=0.1)
    [outcome] = await deliver(bed, sink.port, "timeout", settings=settings)
    assert (outcome.verdict, outcome.reply.detail, outcome.in_doubt) == (F, "4.2", False)
    assert "RCPT" in outcome.reply.text


async def test_silence_after_the_final_dot_is_in_doubt(bed: Bed) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await reader.read()

    port = await bed.peer(swallow)
    settings = DeliverySettings(final_dot_timeout=0.1)
    [outcome] = await deliver(bed, port, "a", settings=settings)
    assert (outcome.verdict, outcome.in_doubt, outcome.counts) == (F, True, True)


@pytest.mark.parametrize("too_many", ["452 4.5.3 too many", "552 too many", "452 too many"])
async def test_too_many_recipients_go_on_in_a_next_transaction_at_once(bed: Bed, too_many: str) -> None:
    sink = await bed.sink(Manners(max_recipients=2, too_many=too_many))
    outcomes = await deliver(bed, sink.port, "a", "b", "reject-550", "c", "d", "e")
    assert [outcome.verdict for outcome in outcomes] == [D, D, B, D, D, D]
    assert [len(received.recipients) for received in sink.messages] == [2, 2, 1]
    assert sink.connections == 1


async def test_long_body_is_read_again_for_a_next_transaction(bed: Bed) -> None:
    sink = await bed.sink(Manners(max_recipients=1))
    bodies = Bodies(b".line\r\n" * 30_000)
    outcomes = await deliver(bed, sink.port, "a", "b", bodies=bodies)
    assert [outcome.verdict for outcome in outcomes] == [D, D]
    assert [received.body == bodies.body for received in sink.messages] == [True, True]
    assert bodies.reads == 2


async def test_message_beyond_the_announced_size_is_not_sent(bed: Bed) -> None:
    sink = await bed.sink(Manners(size=10))
    [outcome] = await deliver(bed, sink.port, "a")
    assert (outcome.verdict, outcome.reply.code, outcome.reply.status) == (B, 552, "5.3.4")
    assert outcome.local
    assert not any(command.startswith("MAIL") for command in sink.commands)


@pytest.mark.parametrize(
    ("garbage", "detail"),
    [
        (b"hello\r\n" * 200, "5.0"),
        (b"250-" + b"x" * 70_000, "5.0"),
        (b"999 what\r\n" * 200, "5.0"),
        (b"\xff\xfe\r\n", "4.2"),  # and then nothing
    ],
    ids=["lines", "long", "codes", "silent"],
)
async def test_peer_that_talks_nonsense_is_a_deferral(bed: Bed, garbage: bytes, detail: str) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer, b"250 x\r\n", b"250 ok\r\n" + garbage)
        await reader.read()

    port = await bed.peer(babble)
    settings = DeliverySettings(rcpt_timeout=1.0, quit_timeout=0.2) if detail == "4.2" else None
    [outcome] = await deliver(bed, port, "a", settings=settings)
    assert (outcome.verdict, outcome.scope, outcome.reply.detail) == (F, Scope.MESSAGE, detail)


SIZES = [0, 1, 2, 65534, 65535, 65536, 65537, 131072, 200_001]
BODIES = [(b".\r\n..a\r\n\r\n.b." * (size // 13 + 1))[:size].rstrip(b"\r") + b"\r\n" for size in SIZES]


@pytest.mark.parametrize("body", [b"", *BODIES], ids=len)
async def test_body_of_any_length_is_byte_exact(bed: Bed, body: bytes) -> None:
    sink = await bed.sink()
    [outcome] = await deliver(bed, sink.port, "a", bodies=Bodies(body))
    assert outcome.verdict is D
    assert sink.messages[0].body == body


@pytest.mark.parametrize("fails_after", [0, 1, 3])
async def test_message_that_cannot_be_read_to_its_end_is_not_completed(bed: Bed, fails_after: int) -> None:
    sink = await bed.sink()
    bodies = Bodies(b"x" * 78 + b"\r\n" * 300_000, fails_after=fails_after)
    [outcome] = await deliver(bed, sink.port, "a", bodies=bodies)
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.LOCAL, False)
    assert outcome.in_doubt is False
    await asyncio.sleep(0.05)
    assert sink.messages == []
    assert sink.connections == (1 if fails_after else 0)


@pytest.mark.parametrize("difference", [-1, 1, 70_000])
async def test_body_that_is_not_as_long_as_the_message_is_not_completed(bed: Bed, difference: int) -> None:
    sink = await bed.sink()
    bodies = Bodies(b"x\r\n" * 50_000)
    message = make_message(bodies.body, size=len(bodies.body) + difference)
    [outcome] = await bed.courier(bodies).deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.scope) == (F, Scope.LOCAL)
    await asyncio.sleep(0.05)
    assert sink.messages == []


async def test_unknown_trouble_is_a_deferral_and_is_reported(bed: Bed) -> None:
    sink = await bed.sink()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    message = make_message(recipients=["a\r\n@example.com"])
    courier = bed.courier()
    [outcome] = await courier.deliver(make_batch(message, route_to(sink.port)))
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.LOCAL, False)
    assert isinstance(faults[0], ValueError)
    await asyncio.sleep(0.02)
    assert courier.pool.open_connections("default") == 0


async def test_ehlo_name_is_the_zones_or_the_relays(bed: Bed) -> None:
    sink = await bed.sink()
    zone = replace(ZONE, ehlo_name="out.example.org")
    await bed.send(sink.port)
    await bed.send(sink.port, zone=zone)
    greetings = [command for command in sink.commands if command.startswith("EHLO")]
    assert greetings == ["EHLO relay.example.org", "EHLO out.example.org"]


def test_addresses_shown_to_people_are_all_tested() -> None:
    tested = {local for local, *_ in BEHAVIOURS} | {"slow-2s", "timeout", "anything-else"}
    tested |= {"reject-550", "defer-451"}
    assert {local for local, _ in ADDRESSES} <= tested
