"""Which host gets the mail, what it means when none does, and when a dead one comes back."""

import asyncio
import socket
from collections import Counter
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed, says
from tests.support.mail import ZONE, Names, make_batch, make_message, route_to
from tests.support.ports import free_ports
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings, ZoneSettings
from zonerelay.delivery.batch.batch_state import without_auth_bounces
from zonerelay.delivery.connection.session_limits import FIRST_PAUSE
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.destinations.route import MxHost, Route
from zonerelay.smtp.client.reputation import class_of

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED


@pytest.fixture
def dead_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


async def test_next_host_is_tried_when_one_refuses_the_connection(bed: Bed, dead_port: int) -> None:
    [outcome] = await bed.send(dead_port, (await bed.sink()).port)
    assert outcome.verdict is D


@pytest.mark.parametrize(
    ("manners", "replies"),
    [
        ({"greeting": "554 5.3.2 no mail here"}, {}),
        ({"greeting": "421 4.3.2 busy"}, {}),
        ({"greeting": "450 later"}, {}),
        ({"greeting": "not SMTP at all"}, {}),
        ({"greeting": "999 what"}, {}),
        ({}, {"EHLO": "421 4.3.2 bye"}),
        ({}, {"EHLO": "451 4.3.0 later"}),
        ({}, {"EHLO": "502 what", "HELO": "502 what"}),
        ({}, {"MAIL": "421 4.3.2 closing"}),
    ],
)
async def test_next_host_after_a_refusal(bed: Bed, manners: dict[str, str], replies: dict[str, str]) -> None:
    bad, good = await bed.sink(Manners(**manners), script=says(**replies)), await bed.sink()  # type: ignore[arg-type]  # a greeting
    courier = bed.courier(settings=DeliverySettings(greeting_timeout=0.7, quit_timeout=0.5))
    assert [each.verdict for each in await bed.send(bad.port, good.port, courier=courier)] == [D]
    assert good.messages
    [outcome] = await bed.send(bad.port, courier=courier)
    assert (outcome.verdict, outcome.scope) == (F, Scope.HOST)
    assert (outcome.reply.code, outcome.local) == ((421, False) if "MAIL" in replies else (451, True))
    assert "HELO" not in replies or bad.commands[:2] == ["EHLO relay.example.org", "HELO relay.example.org"]


async def test_refusal_at_mail_is_not_taken_to_the_next_host(bed: Bed) -> None:
    first, second = await bed.sink(script=says(MAIL="550 5.7.1 not you")), await bed.sink()
    [outcome] = await bed.send(first.port, second.port)
    assert (outcome.verdict, outcome.scope) == (B, Scope.MESSAGE)
    assert second.connections == 0


async def test_no_host_at_all_is_trouble_of_the_hosts(bed: Bed, dead_port: int) -> None:
    [outcome] = await bed.send(dead_port)
    assert (outcome.verdict, outcome.scope, outcome.reply.status) == (F, Scope.HOST, "4.4.1")
    assert (outcome.local, outcome.counts) == (True, True)
    assert outcome.peer == f"127.0.0.1:{dead_port}"
    assert "refused" in outcome.reply.text


async def test_equal_preferences_are_shuffled_and_lower_ones_come_first(bed: Bed) -> None:
    one, two, backup = await bed.sink(), await bed.sink(), await bed.sink()
    courier = bed.courier()
    route = route_to(one.port, two.port, backup.port, preferences=(10, 10, 20))
    zone = replace(ZONE, max_messages_per_connection=1)
    for _ in range(30):
        await courier.deliver(make_batch(make_message(), route, zone))
    assert min(one.connections, two.connections) >= 5
    assert backup.connections == 0


async def test_no_more_than_so_many_addresses_are_tried(bed: Bed) -> None:
    sinks = [await bed.sink(Manners(greeting="554 no")) for _ in range(5)]
    courier = bed.courier(settings=DeliverySettings(max_hosts_per_attempt=3, quit_timeout=0.5))
    await bed.send(*(sink.port for sink in sinks), courier=courier)
    assert [sink.connections for sink in sinks] == [1, 1, 1, 0, 0]


async def test_every_address_of_a_host_is_tried(bed: Bed) -> None:
    sink = await bed.sink()
    courier = bed.courier(names=Names({"mx.example.com": ("127.9.9.9", "127.0.0.1")}))
    route = route_to(sink.port, host="mx.example.com", literal=False)
    [outcome] = await courier.deliver(make_batch(make_message(), route))
    assert (outcome.verdict, outcome.peer) == (D, f"127.0.0.1:{sink.port}")


async def test_host_that_dns_does_not_know_is_passed_over(bed: Bed) -> None:
    sink = await bed.sink()
    hosts = (MxHost("gone.example.com", 25, 5), MxHost("127.0.0.1", sink.port, 10, literal=True))
    courier = bed.courier()
    found = Route("default", "example.com", hosts, 1e12)
    assert (await courier.deliver(make_batch(make_message(), found)))[0].verdict is D
    lost = Route("default", "example.com", hosts[:1], 1e12)
    [outcome] = await courier.deliver(make_batch(make_message(), lost))
    assert (outcome.verdict, outcome.scope, outcome.reply.status) == (F, Scope.HOST, "4.4.3")
    assert outcome.counts is False
    assert "gone.example.com" in outcome.reply.text


async def test_dns_failures_use_up_tries(bed: Bed) -> None:
    names = Names()
    hosts = tuple(MxHost(f"mx{number}.example.com", 25, number) for number in range(20))
    courier = bed.courier(names=names)
    await courier.deliver(make_batch(make_message(), Route("default", "example.com", hosts, 1e12)))
    assert len(names.asked) == 5


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", "169.254.169.254"])
async def test_mx_that_points_into_the_private_network_is_not_connected_to(bed: Bed, ip: str) -> None:
    sink = await bed.sink()
    courier = bed.courier(names=Names({"mx.example.com": (ip,)}))
    batch = make_batch(
        make_message(), route_to(sink.port, host="mx.example.com", literal=False), ZoneSettings()
    )
    [outcome] = await courier.deliver(batch)
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
    assert "allow" in outcome.reply.text
    assert sink.connections == 0
    assert courier.pool.open_connections("default") == 0


async def test_next_hop_named_by_the_operator_may_be_private(bed: Bed) -> None:
    sink = await bed.sink()
    zone = ZoneSettings(next_hop=f"127.0.0.1:{sink.port}")
    [outcome] = await bed.send(sink.port, zone=zone)
    assert outcome.verdict is D


async def test_ipv6_peer(bed: Bed) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"554 no\r\n")
        writer.close()

    server = await asyncio.start_server(greet, "::1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(port, host="::1")))
    assert outcome.peer == f"[::1]:{port}"
    assert "554" in outcome.reply.text


async def test_route_without_hosts_is_a_deferral(bed: Bed) -> None:
    [outcome] = await bed.courier().deliver(make_batch(make_message(), Route("default", "x", (), 1e12)))
    assert (outcome.verdict, outcome.scope) == (F, Scope.LOCAL)


# ---- several next hops ------------------------------------------------------------------------------


ONE_EACH = replace(ZONE, next_hop="[a], [b]", max_messages_per_connection=1)
SHARED = replace(ONE_EACH, next_hop_share=True)


def arrived(sink: Sink) -> int:
    return len(sink.messages)


async def test_the_first_next_hop_takes_everything_while_it_can(bed: Bed) -> None:
    first, second = await bed.sink(), await bed.sink()
    courier = bed.courier()
    for _ in range(5):
        [outcome] = await bed.send(first.port, second.port, courier=courier, zone=ONE_EACH)
        assert outcome.verdict is D
    assert (arrived(first), arrived(second)) == (5, 0)


async def test_a_dead_next_hop_is_not_waited_for_again_and_comes_back_by_itself(bed: Bed) -> None:
    (dead,) = free_ports(1)
    second, clock = await bed.sink(), ManualClock()
    courier = bed.courier(clock=clock)
    route = route_to(dead, second.port)
    for _ in range(3):
        assert (await courier.deliver(make_batch(make_message(), route, ONE_EACH)))[0].verdict is D
    assert arrived(second) == 3
    first = Sink(port=dead)
    await first.start()
    try:
        assert (await courier.deliver(make_batch(make_message(), route, ONE_EACH)))[0].verdict is D
        assert (arrived(first), arrived(second)) == (0, 4)  # not before its time is over
        clock.advance(FIRST_PAUSE)
        for _ in range(2):
            assert (await courier.deliver(make_batch(make_message(), route, ONE_EACH)))[0].verdict is D
        assert (arrived(first), arrived(second)) == (2, 4)
    finally:
        await first.close()


async def test_while_one_batch_waits_for_a_dead_host_the_others_go_to_the_next(bed: Bed) -> None:
    """The first one finds out; the second, begun later, does not wait with it."""
    greeted = asyncio.Event()
    release = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeted.set()
        await release.wait()

    tarpit = await bed.peer(silent)
    (dead,) = free_ports(1)
    second, clock = await bed.sink(), ManualClock()
    courier = bed.courier(clock=clock)
    assert (await bed.send(dead, second.port, courier=courier, zone=ONE_EACH))[0].verdict is D
    clock.advance(FIRST_PAUSE)
    forwarded = route_to(tarpit, second.port)
    probe = asyncio.create_task(courier.deliver(make_batch(make_message(), forwarded, ONE_EACH)))
    await greeted.wait()
    assert not probe.done()
    release.set()
    assert (await probe)[0].verdict is D
    # It hung up without a greeting, so it is known to be dead now.
    greeted.clear()
    assert (await courier.deliver(make_batch(make_message(), forwarded, ONE_EACH)))[0].verdict is D
    assert not greeted.is_set()


async def test_with_every_host_dead_all_are_tried(bed: Bed) -> None:
    ports = free_ports(2)
    courier = bed.courier()
    for _ in range(3):
        [outcome] = await bed.send(*ports, courier=courier, zone=ONE_EACH)
        assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, True)
        assert outcome.peer == f"127.0.0.1:{ports[1]}"  # the last one tried, as without any memory


@pytest.mark.parametrize(
    ("greeting", "asked"),
    [
        ("421 4.3.2 too busy", 3),  # busy is not dead
        ("554 5.3.2 no mail here", 1),  # it refuses us: tried last from then on
    ],
)
async def test_a_greeting_decides_whether_a_host_is_asked_again(bed: Bed, greeting: str, asked: int) -> None:
    first, second = await bed.sink(Manners(greeting=greeting)), await bed.sink()
    courier = bed.courier()
    for _ in range(3):
        route = route_to(first.port, second.port)
        assert (await courier.deliver(make_batch(make_message(), route, ONE_EACH)))[0].verdict is D
    assert first.connections == asked


async def test_next_hops_that_share_get_equal_parts_also_on_connections_that_are_kept(bed: Bed) -> None:
    first, second = await bed.sink(), await bed.sink()
    courier = bed.courier()
    kept = replace(SHARED, max_messages_per_connection=1000)
    route = route_to(first.port, second.port, preferences=(0, 0))
    for _ in range(60):
        assert (await courier.deliver(make_batch(make_message(), route, kept)))[0].verdict is D
    counts = Counter(first=arrived(first), second=arrived(second))
    assert sum(counts.values()) == 60
    assert min(counts.values()) >= 18, counts
    assert (first.connections, second.connections) == (1, 1)


async def test_of_next_hops_that_share_a_dead_one_leaves_all_to_the_other(bed: Bed) -> None:
    (dead,) = free_ports(1)
    second = await bed.sink()
    courier = bed.courier()
    route = route_to(dead, second.port, preferences=(0, 0))
    for _ in range(20):
        assert (await courier.deliver(make_batch(make_message(), route, SHARED)))[0].verdict is D
    assert arrived(second) == 20


MICROSOFT = "550 5.7.30 Basic authentication is not supported for Client Submission."


@pytest.mark.parametrize(
    ("replies", "words"),
    [
        ({"MAIL": "530 5.7.0 Authentication required"}, ["zone default is not configured"]),
        ({"RCPT": "530 5.7.0 Must issue a STARTTLS command first"}, ["zone default is not configured"]),
        *(({verb: MICROSOFT}, [MICROSOFT, "use XOAUTH2 (token_url"]) for verb in ("MAIL", "RCPT", "DATA")),
    ],
)
async def test_another_login_bounces_nothing(bed: Bed, replies: dict[str, str], words: list[str]) -> None:
    sink = await bed.sink(script=says(**replies))
    outcomes = await bed.send(sink.port, zone=ONE_EACH, recipients=("a@example.com", "b@example.com"))
    assert {(each.verdict, each.scope, each.counts) for each in outcomes} == {(F, Scope.HOST, False)}
    assert [each for each in words if each not in outcomes[0].reply.text] == []
    assert class_of(outcomes[0].reply, local=True) == "log-in"


async def test_the_same_code_for_mail_that_demands_tls_of_every_hop_is_about_the_mail() -> None:
    """RFC 8689 5: no host behind this one speaks REQUIRETLS."""
    refused = Outcome(Verdict.BOUNCED, Reply(550, "7.30", "REQUIRETLS support required"), scope=Scope.MESSAGE)
    assert without_auth_bounces([refused, None], "default", require_tls=True) == [refused, None]


async def test_an_mx_host_that_wants_a_login_refuses_the_mail(bed: Bed) -> None:
    sink = await bed.sink(script=says(MAIL="530 5.7.0 no"))
    assert [each.verdict for each in await bed.send(sink.port)] == [B]
