"""A message that demands TLS (RFC 8689) at real hosts, and other mail for the same hosts beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.integration.delivery.test_tls import (
    HOST,
    RIGHT,
    SELF_SIGNED,
    WRONG_NAME,
    showing,
    trusted,  # noqa: F401 - a fixture of every test here
    vouching,
)
from tests.support.mail import (
    ZONE,
    Names,
    TlsResults,
    make_batch,
    make_courier,
    make_message,
    make_sources,
    route_to,
)
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners, Script
from zonerelay.config.settings import SourceSettings, TlsMode, ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.routing.destinations.route import TlsDemand

NAMES = Names({HOST: ("127.0.0.1",)}, secure=[HOST])
CLEAR = Manners()
ANY_TLS = TlsDemand()


async def deliver(
    courier: SmtpCourier,
    *ports: int,
    wish: bool = True,
    demand: TlsDemand | None = ANY_TLS,
    zone: ZoneSettings = ZONE,
) -> Outcome:
    route = structs.replace(route_to(*ports, host=HOST, literal=False), tls=demand)
    [outcome] = await courier.deliver(make_batch(make_message(require_tls=wish), route, zone))
    return outcome


def mail_lines(sink: Sink) -> list[str]:
    return [command for command in sink.commands if command.startswith("MAIL")]


@pytest.mark.parametrize(
    ("manners", "words"),
    [
        (CLEAR, "does not offer STARTTLS"),
        (Manners(broken_tls=True), "failed: "),
        (showing(SELF_SIGNED), "its certificate is self-signed"),
        (showing(WRONG_NAME), "its certificate is for elsewhere"),
    ],
)
@pytest.mark.parametrize("mode", [TlsMode.NONE, TlsMode.OPPORTUNISTIC])
async def test_it_waits_alone_where_other_mail_goes(
    bed: Bed, mode: TlsMode, manners: Manners, words: str
) -> None:
    sink, results = await bed.sink(manners), TlsResults()
    courier = bed.courier(names=NAMES, observe_tls=results)
    zone = replace(ZONE, tls=mode)
    assert (
        await deliver(courier, sink.port, wish=False, demand=None, zone=zone)
    ).verdict is Verdict.DELIVERED
    for _ in range(2):
        outcome = await deliver(courier, sink.port, demand=None, zone=zone)
        assert (outcome.verdict, outcome.scope) == (Verdict.DEFERRED, Scope.MESSAGE)
        assert (outcome.host, outcome.peer) == (HOST, f"127.0.0.1:{sink.port}")
        assert outcome.counts  # an attempt of [retry]
        reply = str(outcome.reply)
        assert reply.startswith("451 4.7.30 ")
        assert words in reply
        assert reply.endswith(" the message requires a valid certificate")
        assert results.seen[-1] == ("verify", "failed")
    connections = sink.connections
    assert (
        await deliver(courier, sink.port, wish=False, demand=None, zone=zone)
    ).verdict is Verdict.DELIVERED
    assert sink.connections == connections  # on the idle connection of the first
    assert len(mail_lines(sink)) == len(sink.messages) == 2


async def test_a_verified_host_takes_it_and_other_mail_has_other_connections(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT))
    courier = bed.courier(names=NAMES)
    for wish, tls, connections in (
        (False, "TLSv1.3", 1),
        (True, "TLSv1.3 verified", 2),
        (False, "TLSv1.3", 2),
        (True, "TLSv1.3 verified", 2),
    ):
        outcome = await deliver(courier, sink.port, wish=wish)
        assert (outcome.verdict, outcome.tls, sink.connections) == (Verdict.DELIVERED, tls, connections)
    narrow = replace(ZONE, max_connections_per_destination=1)  # an idle connection makes room
    for wish in (True, False, True):
        assert (await deliver(courier, sink.port, wish=wish, zone=narrow)).verdict is Verdict.DELIVERED
    assert not any("REQUIRETLS" in line for line in mail_lines(sink))


@pytest.mark.parametrize("demand", [TlsDemand(TlsMode.VERIFY), TlsDemand(TlsMode.VERIFY, because="mta-sts")])
async def test_where_all_mail_is_verified_it_shares_connections_and_failures(
    bed: Bed, demand: TlsDemand
) -> None:
    good, bad = await bed.sink(showing(RIGHT)), await bed.sink(CLEAR)
    courier = bed.courier(names=NAMES)
    for wish in (False, True):
        assert (await deliver(courier, good.port, wish=wish, demand=demand)).verdict is Verdict.DELIVERED
        outcome = await deliver(courier, bad.port, wish=wish, demand=demand)
        assert (outcome.scope, outcome.reply.status) == (Scope.HOST, "4.7.4")
    assert good.connections == 1


async def test_the_second_host_may_do_what_the_first_cannot(bed: Bed) -> None:
    clear, verified = await bed.sink(CLEAR), await bed.sink(showing(RIGHT))
    courier = bed.courier(names=NAMES)
    outcome = await deliver(courier, clear.port, verified.port)
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3 verified")
    assert not clear.messages
    assert (await deliver(courier, clear.port, verified.port, wish=False)).tls == ""
    assert len(clear.messages) == 1


async def test_a_dead_host_behind_one_in_clear_text_does_not_suspend_the_destination(bed: Bed) -> None:
    clear, dead = await bed.sink(CLEAR), await bed.sink()
    await dead.close()
    courier = bed.courier(names=NAMES)
    outcome = await deliver(courier, clear.port, dead.port)
    assert (outcome.scope, outcome.reply.status, outcome.peer) == (
        Scope.MESSAGE,
        "4.7.30",
        f"127.0.0.1:{clear.port}",
    )
    assert (await deliver(courier, dead.port)).scope is Scope.HOST  # which nobody reaches


@pytest.mark.parametrize(
    "zone", [replace(ZONE, sources=("here",)), replace(ZONE, next_hop=f"[{HOST}]", next_hop_share=True)]
)
async def test_it_holds_with_sources_and_with_shared_next_hops(bed: Bed, zone: ZoneSettings) -> None:
    clear, verified = await bed.sink(CLEAR), await bed.sink(showing(RIGHT))
    here = SourceSettings(name="here", address=("127.0.0.1",))
    courier = make_courier(names=NAMES, sources=make_sources(ManualClock(), [here]))
    for wish in (False, True):
        outcome = await deliver(courier, clear.port, wish=wish, zone=zone)
        assert (outcome.reply.status == "4.7.30") is wish
        assert (await deliver(courier, verified.port, wish=wish, zone=zone)).verdict is Verdict.DELIVERED
    assert (len(clear.messages), verified.connections) == (1, 2)
    await courier.pool.close()


async def test_records_of_dane_are_proof_enough(bed: Bed) -> None:
    sink = await bed.sink(showing(SELF_SIGNED))
    names = replace(NAMES, records={f"_{sink.port}._tcp.{HOST}": vouching(SELF_SIGNED)})
    outcome = await deliver(bed.courier(names=names), sink.port, demand=TlsDemand(dane=True))
    assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3 dane")


def offering(*keywords: str) -> Script:
    lines = "\n".join(["250 mx", "PIPELINING", "STARTTLS", *keywords])
    return lambda verb, _: lines if verb == "EHLO" else None


async def test_a_host_that_knows_the_wish_is_told(bed: Bed) -> None:
    sink = await bed.sink(showing(RIGHT), script=offering("REQUIRETLS"))
    courier = bed.courier(names=NAMES)
    for wish in (True, False):
        assert (await deliver(courier, sink.port, wish=wish)).verdict is Verdict.DELIVERED
    assert mail_lines(sink) == [
        "MAIL FROM:<sender@example.org> REQUIRETLS",
        "MAIL FROM:<sender@example.org>",
    ]
