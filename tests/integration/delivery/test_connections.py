"""Connections: reused, closed by either side, limited, and never left behind."""

import asyncio
import gc
import socket
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import TO_THE_BODY, Bed, says, talk
from tests.support.mail import ZONE, Bodies, Names, make_batch, make_message, route_to
from tests.support.peer import Handler
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from tests.support.waiting import until
from zonerelay.config.settings import DeliverySettings, TlsMode
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.model.envelope import MessageId
from zonerelay.model.reply import Scope, Verdict
from zonerelay.routing.destinations.route import Batch

D, F = Verdict.DELIVERED, Verdict.DEFERRED


async def ready(bed: Bed, manners: Manners | None = None, **zone: object) -> tuple[Sink, SmtpCourier, Batch]:
    """A message for a sink, and who brings it."""
    sink = await bed.sink(manners)
    chosen = replace(ZONE, **zone)  # type: ignore[arg-type]  # fields by name
    return sink, bed.courier(), make_batch(make_message(), route_to(sink.port), chosen)


async def test_a_connection_leaves_nothing_for_the_garbage_collector(bed: Bed) -> None:
    """aiosmtplib's client and protocol refer to each other: hundreds of them were looked at in one go."""
    sink = await bed.sink()
    courier = bed.courier()
    gc.collect()
    gc.disable()
    try:
        await bed.send(sink.port, courier=courier)
        left = {type(each).__name__ for each in gc.get_objects()} & {"SMTP", "SMTPProtocol"}
        assert (sink.connections, left) == (1, set())
    finally:
        gc.enable()


async def test_connection_ends_after_its_number_of_messages(bed: Bed) -> None:
    sink, courier, batch = await ready(bed, max_messages_per_connection=2)
    for _ in range(5):
        assert (await courier.deliver(batch))[0].verdict is D
    assert sink.connections == 3
    await until(lambda: sink.commands.count("QUIT") == 2)


async def test_idle_connection_is_closed_on_time_with_quit(bed: Bed) -> None:
    sink, courier, batch = await ready(bed, connection_idle_timeout=0.1)
    await courier.deliver(batch)
    assert courier.pool.open_connections("default") == 1
    await until(lambda: courier.pool.open_connections("default") == 0)
    await until(lambda: sink.commands[-1] == "QUIT")


async def test_a_timer_that_is_all_but_due_harms_nothing(bed: Bed) -> None:
    """With less than a millisecond to go uvloop gives a handle that knows no time."""
    both, faults = asyncio.Barrier(2), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await reader.readuntil(b"\r\n.\r\n")
        await both.wait()  # two answers at once: the second comes while the timer of the first is due
        writer.write(b"250 taken\r\n")
        await reader.read()
        writer.close()

    courier = bed.courier()
    zone = replace(ZONE, connection_idle_timeout=0.0003)
    batch = make_batch(make_message(), route_to(await bed.peer(serve)), zone)
    outcomes = await asyncio.gather(courier.deliver(batch), courier.deliver(batch))
    assert {outcome.verdict for (outcome,) in outcomes} == {D}
    await until(lambda: courier.pool.open_connections("default") == 0)
    assert not faults


async def test_use_postpones_the_idle_timeout(bed: Bed) -> None:
    sink, courier, batch = await ready(bed, connection_idle_timeout=0.3)
    for _ in range(4):
        await courier.deliver(batch)
        await asyncio.sleep(0.12)
    assert sink.connections == 1


async def test_connection_closed_while_idle_is_noticed(bed: Bed) -> None:
    sink, courier, batch = await ready(bed)
    await courier.deliver(batch)
    await sink.drop_connections()
    await until(lambda: courier.pool.open_connections("default") == 0)
    [outcome] = await courier.deliver(batch)
    assert outcome.verdict is D
    assert sink.connections == 2


def one_message_then(end: str) -> Handler:
    """A server that takes one message and then, at the next MAIL, hangs up or resets the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await talk(reader, writer)
        await reader.readuntil(b"\r\n.\r\n")
        writer.write(b"250 taken\r\n")
        await reader.readline()
        if end == "silence":
            await reader.read()

    return serve


@pytest.mark.parametrize("end", ["hang up", "silence"])
async def test_reused_connection_that_fails_at_mail_is_replaced(bed: Bed, end: str) -> None:
    port = await bed.peer(one_message_then(end))
    courier = bed.courier(settings=DeliverySettings(mail_timeout=0.2))
    batch = make_batch(make_message(), route_to(port), replace(ZONE, max_connections=1))
    for _ in range(3):
        assert (await courier.deliver(batch))[0].verdict is D


@pytest.mark.parametrize("chatter", ["421 4.4.2 idle too long\r\n", "250 again\r\n", "2"])
async def test_connection_with_unasked_words_is_not_used_again(bed: Bed, chatter: str) -> None:
    sink, courier, batch = await ready(bed, Manners(chatter=chatter))
    for _ in range(3):
        assert (await courier.deliver(batch))[0].verdict is D
        await until(lambda: courier.pool.open_connections("default") == 0)
    assert sink.connections == 3


async def test_changed_zone_settings_do_not_reuse_old_connections(bed: Bed) -> None:
    sink = await bed.sink()
    courier = bed.courier()
    message, route = make_message(), route_to(sink.port)
    await courier.deliver(make_batch(message, route))
    [outcome] = await courier.deliver(make_batch(message, route, replace(ZONE, tls=TlsMode.REQUIRED)))
    assert outcome.verdict is F
    await courier.deliver(make_batch(message, route, replace(ZONE)))
    assert sink.connections == 3


async def busy(courier: SmtpCourier, sink: Sink, zone_limit: int, destination_limit: int, count: int) -> int:
    """Send slow messages at once; the greatest number of connections that the courier counted."""
    zone = replace(ZONE, max_connections=zone_limit, max_connections_per_destination=destination_limit)
    message = make_message(recipients=["slow-0s@example.com"])
    batch = make_batch(message, route_to(sink.port), zone)
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, courier.pool.open_connections("default"))
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    outcomes = await asyncio.gather(*(courier.deliver(batch) for _ in range(count)))
    watcher.cancel()
    assert [each[0].verdict for each in outcomes] == [D] * count
    return peak


async def test_limits_hold_even_when_too_much_is_asked(bed: Bed) -> None:
    sink = await bed.sink()
    assert await busy(bed.courier(), sink, zone_limit=3, destination_limit=10, count=20) == 3
    assert await busy(bed.courier(), sink, zone_limit=10, destination_limit=2, count=20) == 2
    assert sink.open_peak <= 3 + 2


async def test_idle_connection_makes_room_for_another_destination(bed: Bed) -> None:
    first, second = await bed.sink(), await bed.sink()
    courier = bed.courier()
    zone = replace(ZONE, max_connections=1)
    for sink in (first, second, first):
        [outcome] = await bed.send(sink.port, courier=courier, zone=zone)
        assert outcome.verdict is D
        assert courier.pool.open_connections("default") == 1
    assert (first.connections, second.connections) == (2, 1)
    await until(lambda: first.commands.count("QUIT") == 1)


async def test_waiting_batch_gets_the_connection_that_becomes_idle(bed: Bed) -> None:
    sink = await bed.sink()
    assert await busy(bed.courier(), sink, zone_limit=1, destination_limit=1, count=5) == 1
    assert sink.connections == 1


async def test_close_says_goodbye_to_idle_peers(bed: Bed) -> None:
    sink = await bed.sink()
    courier = bed.courier()
    await bed.send(sink.port, courier=courier)
    await courier.pool.close()
    assert courier.pool.open_connections("default") == 0
    await until(lambda: sink.commands[-1] == "QUIT")


async def test_closing_lets_active_deliveries_finish_and_keeps_nothing(bed: Bed) -> None:
    sink = await bed.sink()
    courier = bed.courier()
    batch = make_batch(make_message(recipients=["slow-1s@example.com"]), route_to(sink.port))
    task = asyncio.create_task(courier.deliver(batch))
    await until(lambda: sink.connections == 1)
    await courier.pool.close()
    assert (await task)[0].verdict is D
    await until(lambda: courier.pool.open_connections("default") == 0)


HANGING: dict[str, tuple[bytes, ...] | None] = {
    "greeting": None,
    "EHLO": (b"",),
    "STARTTLS": (b"250-x\r\n250 STARTTLS\r\n", b"220 go\r\n"),
    "MAIL": (b"250 x\r\n",),
    "body": TO_THE_BODY,
}
"""What a server says before it is silent."""


def hanging(at: str) -> Handler:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (replies := HANGING[at]) is not None:
            await talk(reader, writer, *replies)
        await asyncio.sleep(60)

    return serve


@pytest.mark.parametrize("at", HANGING)
async def test_cancelled_delivery_leaves_no_connection(bed: Bed, at: str) -> None:
    port = await bed.peer(hanging(at))
    bodies = Bodies(b"x\r\n" * 5_000_000)
    courier = bed.courier(bodies)
    task = asyncio.create_task(bed.send(port, courier=courier, body=bodies.body))
    await asyncio.sleep(0.1)
    assert courier.pool.open_connections("default") == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: courier.pool.open_connections("default") == 0)
    assert bodies.open_now == 0


async def test_a_stop_while_the_body_is_closed_loses_no_outcome(bed: Bed) -> None:
    """What some recipients had already got would be sent to them again."""

    class ReadsAhead(Bodies):
        async def read(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
            try:
                async for piece in super().read(message_id):
                    yield piece
            finally:
                closing.set()
                await asyncio.sleep(0.05)

    closing = asyncio.Event()
    sink = await bed.sink(script=says(MAIL="550 no"))
    bodies = ReadsAhead(b"x\r\n" * 100_000)
    task = asyncio.create_task(bed.send(sink.port, courier=bed.courier(bodies), body=bodies.body))
    await closing.wait()
    task.cancel()
    [outcome] = await task
    assert outcome.verdict is Verdict.BOUNCED


@pytest.mark.parametrize("at", HANGING)
async def test_silent_peer_leaves_no_connection(bed: Bed, at: str) -> None:
    port = await bed.peer(hanging(at))
    bodies = Bodies(b"x\r\n" * 5_000_000)
    short = DeliverySettings(
        greeting_timeout=0.1,
        ehlo_timeout=0.1,
        starttls_timeout=0.1,
        mail_timeout=0.1,
        block_timeout=0.1,
        quit_timeout=0.1,
    )
    courier = bed.courier(bodies, settings=short)
    zone = replace(ZONE, tls=TlsMode.REQUIRED) if at == "STARTTLS" else ZONE
    [outcome] = await bed.send(port, courier=courier, zone=zone, body=bodies.body)
    assert (outcome.verdict, outcome.in_doubt) == (F, False)
    assert outcome.scope is (Scope.MESSAGE if at == "body" else Scope.HOST)
    await until(lambda: courier.pool.open_connections("default") == 0)


async def test_cancelled_while_waiting_for_room_takes_no_place(bed: Bed) -> None:
    sink = await bed.sink()
    courier = bed.courier()
    zone = replace(ZONE, max_connections=1)
    slow = make_batch(make_message(recipients=["slow-1s@example.com"]), route_to(sink.port), zone)
    active = asyncio.create_task(courier.deliver(slow))
    await until(lambda: sink.connections == 1)
    waiting = asyncio.create_task(courier.deliver(slow))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await active)[0].verdict is D
    assert courier.pool.open_connections("default") == 1


async def test_dns_answers_are_asked_for_only_when_connecting(bed: Bed) -> None:
    sink = await bed.sink()
    names = Names({"mx.example.com": ("127.0.0.1",)})
    courier = bed.courier(names=names)
    route = route_to(sink.port, host="mx.example.com", literal=False)
    for _ in range(3):
        [outcome] = await courier.deliver(make_batch(make_message(), route))
        assert (outcome.verdict, outcome.host, outcome.peer) == (
            D,
            "mx.example.com",
            f"127.0.0.1:{sink.port}",
        )
    assert names.asked == ["mx.example.com"]


async def test_host_that_does_not_answer_is_given_up_in_time(bed: Bed) -> None:
    courier = bed.courier(settings=DeliverySettings(connect_timeout=0.1))
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for sock in (first, second):  # after these the kernel answers nobody
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        [outcome] = await bed.send(full.getsockname()[1], courier=courier)
    assert (outcome.verdict, outcome.scope, outcome.reply.status) == (F, Scope.HOST, "4.4.1")
    assert "timed out" in outcome.reply.text
    assert courier.pool.open_connections("default") == 0
