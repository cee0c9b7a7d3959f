"""Which host gets the mail, and what it means when none does."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, Names, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings, ZoneSettings
from zonerelay.model.outcome import Scope, Verdict
from zonerelay.routing.destinations.route import MxHost, Route

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
