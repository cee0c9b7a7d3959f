"""Which host gets the mail, what it means when none does, and when a dead one comes back."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, Names, make_batch, make_message, route_to
from tests.support.ports import free_ports
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings, ZoneSettings
from zonerelay.delivery.batch.batch_state import without_auth_bounces
from zonerelay.delivery.connection.session_limits import FIRST_PAUSE
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.route import MxHost, Route
from zonerelay.smtp.client.reputation import class_of

D, F = Verdict.DELIVERED, Verdict.DEFERRED


@pytest.fixture
def dead_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


async def test_next_host_is_tried_when_one_refuses_the_connection(bed: Bed, dead_port: int) -> None:
    sink = await bed.sink()
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(dead_port, sink.port)))
    assert outcome.verdict is D


@pytest.mark.parametrize(
    "manners",
    [
        Manners(greeting="554 5.3.2 no mail here"),
        Manners(greeting="421 4.3.2 busy"),
        Manners(greeting="450 later"),
        Manners(greeting="not SMTP at all"),
        Manners(greeting="999 what"),
    ],
)
async def test_next_host_is_tried_when_one_greets_badly(bed: Bed, manners: Manners) -> None:
    bad, good = await bed.sink(manners), await bed.sink()
    courier = bed.courier(settings=DeliverySettings(greeting_timeout=0.7, quit_timeout=0.5))
    assert (await courier.deliver(make_batch(make_message(), route_to(bad.port, good.port))))[0].verdict is D
    [outcome] = await courier.deliver(make_batch(make_message(), route_to(bad.port)))
    assert (outcome.verdict, outcome.scope, outcome.reply.is_transient) == (F, Scope.HOST, True)


@pytest.mark.parametrize("reply", ["421 4.3.2 bye", "451 4.3.0 later"])
async def test_next_host_is_tried_when_one_refuses_ehlo(bed: Bed, reply: str) -> None:
    bad = await bed.sink(script=lambda verb, _: reply if verb == "EHLO" else None)
    good = await bed.sink()
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(bad.port, good.port)))
    assert outcome.verdict is D
    assert good.messages


async def test_server_that_knows_neither_ehlo_nor_helo_is_passed_over(bed: Bed) -> None:
    bad = await bed.sink(script=lambda verb, _: "502 what" if verb in ("EHLO", "HELO") else None)
    good = await bed.sink()
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(bad.port, good.port)))
    assert outcome.verdict is D
    assert bad.commands == ["EHLO relay.example.org", "HELO relay.example.org"]


async def test_421_at_mail_tries_the_next_host(bed: Bed) -> None:
    bad = await bed.sink(script=lambda verb, _: "421 4.3.2 closing" if verb == "MAIL" else None)
    good = await bed.sink()
    courier = bed.courier()
    assert (await courier.deliver(make_batch(make_message(), route_to(bad.port, good.port))))[0].verdict is D
    [outcome] = await courier.deliver(make_batch(make_message(), route_to(bad.port)))
    assert (outcome.scope, outcome.reply.code, outcome.local) == (Scope.HOST, 421, False)


async def test_refusal_at_mail_is_not_taken_to_the_next_host(bed: Bed) -> None:
    first = await bed.sink(script=lambda verb, _: "550 5.7.1 not you" if verb == "MAIL" else None)
    second = await bed.sink()
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(first.port, second.port)))
    assert (outcome.verdict, outcome.scope) == (Verdict.BOUNCED, Scope.MESSAGE)
    assert second.connections == 0


async def test_no_host_at_all_is_trouble_of_the_hosts(bed: Bed, dead_port: int) -> None:
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(dead_port)))
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
    await courier.deliver(make_batch(make_message(), route_to(*(sink.port for sink in sinks))))
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
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(sink.port), zone))
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
        [outcome] = await courier.deliver(
            make_batch(make_message(), route_to(first.port, second.port), ONE_EACH)
        )
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
    assert (await courier.deliver(make_batch(make_message(), route_to(dead, second.port), ONE_EACH)))[
        0
    ].verdict is D
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
        [outcome] = await courier.deliver(make_batch(make_message(), route_to(*ports), ONE_EACH))
        assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, True)
        assert outcome.peer == f"127.0.0.1:{ports[1]}"  # the last one tried, as without any memory


@pytest.mark.parametrize(
    ("greeting", "asked"),
    [
        ("421 4.3.2 too busy", 3),  # busy is not dead
        ("554 5.3.2 no mail here", 1),  # it refuses us: tried last from then on
    ],
)
async def test_what_a_greeting_says_decides_whether_a_host_is_asked_again(
    bed: Bed, greeting: str, asked: int
) -> None:
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


async def test_a_next_hop_that_wants_a_login_nobody_configured_bounces_nothing(bed: Bed) -> None:
    for script in (
        lambda verb, _: "530 5.7.0 Authentication required" if verb == "MAIL" else None,
        lambda verb, _: "530 5.7.0 Must issue a STARTTLS command first" if verb == "RCPT" else None,
    ):
        sink = await bed.sink(script=script)
        courier = bed.courier()
        message = make_message(recipients=("a@example.com", "b@example.com"))
        outcomes = await courier.deliver(make_batch(message, route_to(sink.port), ONE_EACH))
        assert {(each.verdict, each.scope, each.counts) for each in outcomes} == {(F, Scope.HOST, False)}
        assert outcomes[0].reply.status == "4.7.0"
        assert "zone default is not configured" in outcomes[0].reply.text


MICROSOFT = "550 5.7.30 Basic authentication is not supported for Client Submission."


async def test_a_next_hop_that_takes_no_passwords_any_more_bounces_nothing(bed: Bed) -> None:
    for script in (
        lambda verb, _: MICROSOFT if verb == "MAIL" else None,
        lambda verb, _: MICROSOFT if verb == "RCPT" else None,
        lambda verb, _: MICROSOFT if verb == "DATA" else None,
    ):
        sink = await bed.sink(script=script)
        message = make_message(recipients=("a@example.com", "b@example.com"))
        outcomes = await bed.courier().deliver(make_batch(message, route_to(sink.port), ONE_EACH))
        assert {(each.verdict, each.scope, each.counts) for each in outcomes} == {(F, Scope.HOST, False)}
        assert MICROSOFT in outcomes[0].reply.text
        assert "use XOAUTH2 (token_url" in outcomes[0].reply.text
        assert class_of(outcomes[0].reply, local=True) == "log-in"


async def test_the_same_code_for_mail_that_demands_tls_of_every_hop_is_about_the_mail() -> None:
    """RFC 8689 5: no host behind this one speaks REQUIRETLS."""
    refused = Outcome(Verdict.BOUNCED, Reply(550, "7.30", "REQUIRETLS support required"), scope=Scope.MESSAGE)
    assert without_auth_bounces([refused, None], "default", require_tls=True) == [refused, None]


async def test_an_mx_host_that_wants_a_login_refuses_the_mail(bed: Bed) -> None:
    sink = await bed.sink(script=lambda verb, _: "530 5.7.0 no" if verb == "MAIL" else None)
    [outcome] = await bed.courier().deliver(make_batch(make_message(), route_to(sink.port)))
    assert outcome.verdict is Verdict.BOUNCED
