"""BDAT against servers that offer CHUNKING, and some that should not: what is sent, what becomes of it."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import StartCourier, StartPeer, StartSink
from tests.support.mail import TEXT, ZONE, Bodies, make_batch, make_message, route_to
from zonerelay.config.settings import DeliverySettings, InDoubt, ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.batch.transaction_io import MAX_UNANSWERED_CHUNKS
from zonerelay.model.clock import ManualClock
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.sandbox.conversation import Manners
from zonerelay.store.contract import CHUNK_SIZE

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED
CHUNKING = Manners(chunking=True)


async def send(
    courier: SmtpCourier, port: int, *locals_: str, body: bytes = TEXT, zone: ZoneSettings = ZONE
) -> list[Outcome]:
    message = make_message(body, recipients=[f"{local}@example.com" for local in locals_ or ("anybody",)])
    return list(await courier.deliver(make_batch(message, route_to(port), zone)))


def bdats(commands: list[str]) -> list[str]:
    return [each for each in commands if each.startswith(("BDAT", "DATA", "RSET"))]


async def test_first_message_of_a_connection_feels_its_way_and_the_next_is_one_chunk(
    start_sink: StartSink, start_courier: StartCourier
) -> None:
    sink = await start_sink(CHUNKING)
    courier = start_courier()
    for _ in range(3):
        [outcome] = await send(courier, sink.port)
        assert outcome.verdict is D
    whole, rest = f"BDAT {len(TEXT)} LAST", f"BDAT {len(TEXT) - 1} LAST"
    assert bdats(sink.commands) == ["BDAT 1", rest, whole, whole]
    assert [each.body for each in sink.messages] == [TEXT] * 3
    assert [each.chunks for each in sink.messages] == [2, 1, 1]
    assert sink.connections == 1


@pytest.mark.parametrize(
    ("zone", "manners", "expected"),
    [
        (replace(ZONE, chunking=False), CHUNKING, ["DATA", "DATA"]),
        (ZONE, Manners(), ["DATA", "DATA"]),
        (ZONE, Manners(chunking=True, pipelining=False), ["BDAT 1", "LAST", "BDAT 1", "LAST"]),
        (replace(ZONE, in_doubt=InDoubt.HOLD), CHUNKING, ["BDAT 1", "LAST", "BDAT 1", "LAST"]),
        (replace(ZONE, in_doubt=InDoubt.BOUNCE), CHUNKING, ["BDAT 1", "LAST", "BDAT 1", "LAST"]),
    ],
)
async def test_bdat_only_where_offered_and_at_once_only_where_it_harms_nobody(
    start_sink: StartSink,
    start_courier: StartCourier,
    zone: ZoneSettings,
    manners: Manners,
    expected: list[str],
) -> None:
    sink = await start_sink(manners)
    courier = start_courier()
    for _ in range(2):
        [outcome] = await send(courier, sink.port, zone=zone)
        assert outcome.verdict is D
    said = ["LAST" if each.endswith("LAST") else each for each in bdats(sink.commands)]
    assert said == expected
    assert [each.body for each in sink.messages] == [TEXT] * 2


async def test_a_connection_that_was_idle_is_not_trusted_with_everything_at_once(
    start_sink: StartSink, start_courier: StartCourier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zonerelay.delivery.batch.chunking.LATELY", 0.0)
    sink = await start_sink(CHUNKING)
    courier = start_courier()
    for _ in range(2):
        await send(courier, sink.port)
    assert bdats(sink.commands)[2] == "BDAT 1"
    await sink.drop_connections()
    [outcome] = await send(courier, sink.port)
    assert outcome.verdict is D
    assert len(sink.messages) == 3


# (local part, outcome, scope, code, in doubt, is the connection kept): the second message of a connection
# goes at once.
BEHAVIOURS = [
    ("permerror", B, Scope.RECIPIENT, 550, False, True),
    ("temperror", F, Scope.RECIPIENT, 451, False, True),
    ("datacmd-451", F, Scope.MESSAGE, 451, False, True),
    ("datacmd-554", B, Scope.MESSAGE, 554, False, True),
    ("data-554", B, Scope.MESSAGE, 554, False, True),
    ("data-451", F, Scope.MESSAGE, 451, False, True),
    ("reply-421", F, Scope.MESSAGE, 421, False, False),
    ("close", F, Scope.MESSAGE, 451, None, False),
    ("close-before-dot", F, Scope.MESSAGE, 451, None, False),
    ("close-after-dot", F, Scope.MESSAGE, 451, True, False),
]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("local", "verdict", "scope", "code", "in_doubt", "kept"), BEHAVIOURS)
async def test_failure_asked_for_by_address(
    start_sink: StartSink,
    start_courier: StartCourier,
    local: str,
    verdict: Verdict,
    scope: Scope,
    code: int,
    in_doubt: bool | None,
    kept: bool,
    at_once: bool,
) -> None:
    sink = await start_sink(CHUNKING)
    courier = start_courier()
    if at_once:
        await send(courier, sink.port)
    [outcome] = await send(courier, sink.port, local)
    assert (outcome.verdict, outcome.scope, outcome.reply.code) == (verdict, scope, code)
    # Lost at RCPT: nothing is certain any more if the message was complete by then.
    assert outcome.in_doubt is (at_once if in_doubt is None else in_doubt)
    assert len(sink.messages) == at_once
    await asyncio.sleep(0.01)
    assert courier.open_connections("default") == (1 if kept else 0)
    if kept:
        [outcome] = await send(courier, sink.port, "next")
        assert outcome.verdict is D
        assert sink.messages[-1].recipients == ("next@example.com",)
        assert sink.connections == (2 if at_once else 1)  # a connection that has delivered: asked once more


@pytest.mark.parametrize("pipelining", [True, False])
async def test_each_recipient_has_its_own_answer(
    start_sink: StartSink, start_courier: StartCourier, pipelining: bool
) -> None:
    sink = await start_sink(replace(CHUNKING, pipelining=pipelining))
    courier = start_courier()
    for _ in range(2):
        outcomes = await send(courier, sink.port, "a", "reject-550", "b", "defer-450")
        assert [each.reply.code for each in outcomes] == [250, 550, 250, 450]
        outcomes = await send(courier, sink.port, "reject-550", "defer-450")
        assert [each.reply.code for each in outcomes] == [550, 450]
    assert [each.recipients for each in sink.messages] == [("a@example.com", "b@example.com")] * 2
    assert sink.connections == 2  # when all were refused, they were asked once more


SMUGGLED = b"Subject: x\r\n\r\n.\r\nMAIL FROM:<evil@x>\r\nRCPT TO:<victim@x>\r\nDATA\r\n\r\n.\r\n"


@pytest.mark.parametrize("recipients", [1, 2])
async def test_a_server_that_offers_chunking_and_does_not_know_bdat_gets_data_and_runs_no_body(
    start_peer: StartPeer, start_courier: StartCourier, recipients: int
) -> None:
    """It reads the octets as commands, as an old proxy that passes EHLO on would."""
    lines: list[bytes] = []
    messages: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        while line := await reader.readline():
            lines.append(line)
            if line.startswith(b"EHLO"):
                writer.write(b"250-x\r\n250-CHUNKING\r\n250 PIPELINING\r\n")
            elif line.startswith((b"MAIL", b"RCPT", b"RSET")):
                writer.write(b"250 ok\r\n")
            elif line == b"DATA\r\n":
                writer.write(b"354 go\r\n")
                messages.append(await reader.readuntil(b"\r\n.\r\n"))
                writer.write(b"250 taken\r\n")
            else:
                writer.write(b"500 what\r\n")

    port = await start_peer(proxy)
    bodies, clock = Bodies(SMUGGLED), ManualClock()
    courier = start_courier(bodies, clock=clock)
    names = [f"r{number}" for number in range(recipients)]
    for _ in range(2):
        outcomes = await send(courier, port, *names, body=SMUGGLED)
        assert {each.verdict for each in outcomes} == {D}
    assert not any(b"evil" in line for line in lines)
    assert [line for line in lines if line.startswith(b"BDAT")] == [b"BDAT 1\r\n"]
    assert lines.count(b"SRSET\r\n") == lines.count(b"RSET\r\n") == 1
    assert [line for line in lines if line.startswith(b"EHLO")] == [b"EHLO relay.example.org\r\n"]
    assert messages == [SMUGGLED.replace(b"\r\n.", b"\r\n..") + b".\r\n"] * 2
    # Another connection to the same host goes to DATA at once, until the host is forgotten.
    courier.close_idle()
    await send(courier, port, body=SMUGGLED)
    assert sum(line.startswith(b"BDAT") for line in lines) == 1
    courier.close_idle()
    clock.advance(25 * 3600)
    await send(courier, port, body=SMUGGLED)
    assert sum(line.startswith(b"BDAT") for line in lines) == 2


async def test_a_server_that_stops_to_know_bdat_gets_data(
    start_sink: StartSink, start_courier: StartCourier
) -> None:
    sink = await start_sink(CHUNKING)
    # The script answers without reading the octet, so the next command begins with it.
    sink.script = lambda verb, argument: "502 5.5.1 not implemented" if verb == "BDAT" else None
    [outcome] = await send(start_courier(), sink.port)
    assert outcome.verdict is D
    assert bdats(sink.commands) == ["BDAT 1", "RSET", "DATA"]
    assert sink.connections == 1


@pytest.mark.parametrize("size", [CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 5 * CHUNK_SIZE + 7])
@pytest.mark.parametrize("piece_size", [CHUNK_SIZE, 1000])
async def test_bodies_of_any_size_arrive_unchanged(
    start_sink: StartSink, start_courier: StartCourier, size: int, piece_size: int
) -> None:
    sink = await start_sink(CHUNKING)
    body = (b".line\r\n..\r\n.\r\n\r\n" * size)[: size - 2] + b"\r\n"
    body = body.replace(b"\r\r\n", b"x\r\n")
    bodies = Bodies(body, piece_size=piece_size)
    courier = start_courier(bodies)
    for _ in range(2):
        [outcome] = await send(courier, sink.port, body=body)
        assert outcome.verdict is D
    assert [each.sha256 for each in sink.messages] == [hashlib.sha256(body).hexdigest()] * 2
    assert sink.connections == 1


async def test_a_body_without_a_last_line_end_gets_one(
    start_sink: StartSink, start_courier: StartCourier
) -> None:
    sink = await start_sink(CHUNKING)
    for body, sent in ((b"a\r\nb", b"a\r\nb\r\n"), (b"x", b"x\r\n"), (b"a\nb\rc", b"a\r\nb c\r\n")):
        courier = start_courier(Bodies(body))
        for _ in range(2):
            await send(courier, sink.port, body=body)
            assert sink.messages[-1].body == sent
            assert sink.messages[-1].chunks > 0


async def test_a_body_that_begins_with_a_line_end_goes_with_data(
    start_sink: StartSink, start_courier: StartCourier
) -> None:
    sink = await start_sink(CHUNKING)
    body = b"\r\nno header\r\n"
    await send(start_courier(Bodies(body)), sink.port, body=body)
    assert sink.messages[0].body == body
    assert sink.messages[0].chunks == 0


async def test_refused_in_the_middle_the_rest_is_not_sent_and_the_connection_stays(
    start_sink: StartSink, start_courier: StartCourier
) -> None:
    sink = await start_sink(CHUNKING)
    body = b"x" * 62 + b"\r\n"
    bodies = Bodies(body * 1024 * 400)
    courier = start_courier(bodies)
    [outcome] = await send(courier, sink.port, "early-552", body=bodies.body)
    assert (outcome.verdict, outcome.reply.code, outcome.in_doubt) == (B, 552, False)
    assert not any(each.endswith("LAST") for each in sink.commands)
    assert len(bdats(sink.commands)) < 100
    [outcome] = await send(courier, sink.port, body=bodies.body)
    assert outcome.verdict is D
    assert sink.connections == 1


async def test_a_body_that_cannot_be_read_is_never_completed(
    start_sink: StartSink, start_courier: StartCourier
) -> None:
    sink = await start_sink(CHUNKING)
    body = b"x" * (3 * CHUNK_SIZE)
    bodies = Bodies(body, fails_after=2)
    [outcome] = await send(start_courier(bodies), sink.port, body=body)
    assert (outcome.verdict, outcome.scope, outcome.in_doubt) == (F, Scope.LOCAL, False)
    assert sink.messages == []
    assert bodies.open_now == 0
    assert not any(each.endswith("LAST") for each in sink.commands)


def chunk_taker(answer: Callable[[int, bool], Awaitable[bytes]]) -> Callable[..., Awaitable[None]]:
    """A server that asks `answer` for the reply to each chunk, by number."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 x\r\n")
        number = 0
        while line := await reader.readline():
            if line.startswith(b"EHLO"):
                writer.write(b"250-x\r\n250-CHUNKING\r\n250 PIPELINING\r\n")
            elif line.startswith(b"BDAT"):
                await reader.readexactly(int(line.split()[1]))
                writer.write(await answer(number, b"LAST" in line))
                number += 1
            else:
                writer.write(b"250 ok\r\n")

    return serve


class Counted(Bodies):
    pieces_read = 0

    async def read(self, message_id: MessageId) -> AsyncIterator[bytes]:
        async for piece in super().read(message_id):
            self.pieces_read += 1
            yield piece


async def test_only_so_many_chunks_go_unanswered(start_peer: StartPeer, start_courier: StartCourier) -> None:
    received: list[int] = []

    async def answer(number: int, last: bool) -> bytes:
        received.append(number)
        return b"250 first\r\n" if number == 0 else b""  # the others never

    bodies = Bodies(b"x\r\n" * 100_000, piece_size=3000)
    settings = DeliverySettings(block_timeout=0.3, quit_timeout=0.2)
    courier = start_courier(bodies, settings=settings)
    [outcome] = await send(courier, await start_peer(chunk_taker(answer)), body=bodies.body)
    assert (outcome.verdict, outcome.in_doubt) == (F, False)
    assert "timed out" in outcome.reply.text
    assert len(received) == 1 + MAX_UNANSWERED_CHUNKS


async def test_a_slow_server_bounds_what_is_read(start_peer: StartPeer, start_courier: StartCourier) -> None:
    async def answer(number: int, last: bool) -> bytes:
        if number > 1:
            await asyncio.sleep(60)
        return b"250 ok\r\n"

    whole = (b"x" * 62 + b"\r\n") * 1024 * 1024
    bodies = Counted(whole, piece_size=1024 * 1024)
    courier = start_courier(bodies, settings=DeliverySettings(block_timeout=0.3, quit_timeout=0.2))
    [outcome] = await send(courier, await start_peer(chunk_taker(answer)), body=whole)
    assert (outcome.verdict, outcome.in_doubt) == (F, False)
    # Three were taken, the kernels' buffers took some, and the last filled ours; the others wait unread.
    assert bodies.pieces_read < MAX_UNANSWERED_CHUNKS - 2


@pytest.mark.parametrize(("closes_at", "in_doubt"), [("middle", False), ("last", True)])
async def test_in_doubt_begins_with_the_last_octet(
    start_peer: StartPeer, start_courier: StartCourier, closes_at: str, in_doubt: bool
) -> None:
    async def answer(number: int, last: bool) -> bytes:
        if last or (closes_at == "middle" and number == 40):
            raise EOFError
        return b"250 ok\r\n"

    bodies = Bodies(b"x" * 62 + b"\r\n")
    bodies.body *= 1024 * 200
    courier = start_courier(bodies)
    [outcome] = await send(courier, await start_peer(chunk_taker(answer)), body=bodies.body)
    assert (outcome.verdict, outcome.in_doubt) == (F, in_doubt)


@pytest.mark.parametrize("size", [40, 40 * CHUNK_SIZE])
async def test_a_message_may_be_cancelled_at_any_time(
    start_peer: StartPeer, start_courier: StartCourier, size: int
) -> None:
    async def answer(number: int, last: bool) -> bytes:
        if number:
            await asyncio.sleep(60)
        return b"250 ok\r\n"

    bodies = Bodies(b"x" * size + b"\r\n")
    courier = start_courier(bodies)
    task = asyncio.ensure_future(send(courier, await start_peer(chunk_taker(answer)), body=bodies.body))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bodies.open_now == 0
    await asyncio.sleep(0.01)
    assert courier.open_connections("default") == 0


async def test_replies_in_two_packets_are_not_held_back(
    start_peer: StartPeer, start_courier: StartCourier
) -> None:
    """Postfix answers the commands in a packet of their own, before it reads the chunk, with Nagle on."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        await chunk_taker(answer)(reader, writer)

    async def answer(number: int, last: bool) -> bytes:
        await asyncio.sleep(0.002)
        return b"250 ok\r\n"

    courier, port, times = start_courier(), await start_peer(serve), []
    for _ in range(15):
        began = time.monotonic()
        [outcome] = await send(courier, port)
        times.append(time.monotonic() - began)
        assert outcome.verdict is D
    assert statistics.median(times) < 0.035
