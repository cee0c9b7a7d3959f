"""From which address mail goes out, as the receivers see it: on 127.0.0.0/8, all ours, and on ::1."""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest
from msgspec import structs

from tests.integration.delivery.conftest import Bed
from tests.support import mail
from tests.support.guard import BLOCKED, Guard
from tests.support.mail import Names, route_to
from tests.support.receivers.conversation import Receiver
from tests.support.receivers.nature import Nature
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import SourceSettings, ZoneSettings
from zonerelay.delivery import source as source_ways
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Message, MessageId
from zonerelay.model.reply import Outcome, Scope, Verdict
from zonerelay.routing.destinations.route import MxHost, Route

D, F, B = Verdict.DELIVERED, Verdict.DEFERRED, Verdict.BOUNCED


def source(name: str, *address: str, weight: int = 1) -> SourceSettings:
    return SourceSettings(name=name, address=address, ehlo_name=f"{name}.example.org", weight=weight)


TWO = source("two", "127.0.0.2")
THREE = source("three", "127.0.0.3")
SIX = source("six", "::1")
BOTH = source("both", "127.0.0.4", "::1")


def message(number: int, *, sender: str = "sender@example.org") -> Message:
    made = mail.make_message(sender=sender)
    return structs.replace(made, envelope=structs.replace(made.envelope, id=MessageId(f"{number:016x}")))


@dataclass
class Office:
    """A courier with sources, and the number of a message whose turn is each one's."""

    sources: tuple[SourceSettings, ...]
    zone: ZoneSettings
    clock: ManualClock = field(default_factory=ManualClock)
    told: mail.Reported = field(default_factory=mail.Reported)
    names: Names = field(default_factory=Names)

    def __post_init__(self) -> None:
        self.selection = mail.make_sources(self.clock, self.sources, self.told)
        self.courier = mail.make_courier(clock=self.clock, sources=self.selection, names=self.names)

    async def send(self, route: Route, number: int = 0, **zone: object) -> Outcome:
        chosen = replace(self.zone, **zone)  # type: ignore[arg-type]  # fields of ZoneSettings
        [outcome] = await self.courier.deliver(mail.make_batch(message(number), route, chosen))
        return outcome

    def number_of(self, name: str, route: Route) -> int:
        """Of a message that goes out from this source while none is passed over."""
        fresh = mail.make_sources(ManualClock(), self.sources)
        for number in range(1000):
            key = fresh.choose(self.zone, route, message(number))
            if key is not None and key.source is not None and key.source.name == name:
                return number
        raise AssertionError(f"no message for {name}")


class Town(Bed):
    """Receivers, some of which refuse addresses, and offices that send from sources."""

    def __init__(self) -> None:
        super().__init__()
        self.guards: list[Guard] = []

    async def guard(
        self,
        *refuses: str,
        reply: str = f"554 5.7.1 {BLOCKED}",
        verb: str = "RCPT",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> Guard:
        guard = Guard(refuses, reply, verb)
        await guard.start(host, port)
        self.guards.append(guard)
        return guard

    def office(self, *sources: SourceSettings, names: Names | None = None, **zone: object) -> Office:
        settings = replace(mail.ZONE, sources=tuple(each.name for each in sources), **zone)  # type: ignore[arg-type]  # fields
        opened = Office(sources, settings, names=names or Names())
        self.couriers.append(opened.courier)
        return opened


@pytest.fixture
async def town() -> AsyncIterator[Town]:
    town = Town()
    yield town
    await town.close()
    for guard in town.guards:
        await guard.close()


def clients(sink: Sink) -> list[str]:
    return [each.peer.rpartition(":")[0] for each in sink.messages]


def hellos(sink: Sink) -> list[str]:
    return [command.partition(" ")[2] for command in sink.commands if command.startswith("EHLO")]


# Whose address


async def test_the_name_is_the_sources_or_the_zones_or_the_relays(town: Town) -> None:
    sink = await town.sink()
    here = town.office(replace(TWO, ehlo_name=""))
    await here.send(route_to(sink.port), ehlo_name="zone.example.org")
    await here.send(route_to(sink.port), ehlo_name="")
    assert hellos(sink) == ["zone.example.org", "relay.example.org"]


async def test_mail_is_shared_by_weight_and_each_message_keeps_its_source(town: Town) -> None:
    sink = await town.sink()
    here = town.office(replace(TWO, weight=3), THREE)
    for _ in range(2):
        for number in range(40):
            assert (await here.send(route_to(sink.port), number)).verdict is D
    assert clients(sink)[:40] == clients(sink)[40:]
    shared = Counter(clients(sink))
    assert shared["127.0.0.2"] > shared["127.0.0.3"] > 0
    # Idle connections are used again, each for its own source's mail.
    assert sink.connections == 2
    assert dict(zip(hellos(sink), dict.fromkeys(clients(sink)), strict=True)) == {
        "two.example.org": "127.0.0.2",
        "three.example.org": "127.0.0.3",
    }


async def test_connections_are_limited_over_all_sources_and_an_idle_one_makes_room(town: Town) -> None:
    sink = await town.sink()
    here = town.office(TWO, THREE, max_connections_per_destination=1)
    route = route_to(sink.port)
    first, second = here.number_of("two", route), here.number_of("three", route)
    for number in (first, second, first):
        assert (await here.send(route, number)).verdict is D
    assert clients(sink) == ["127.0.0.2", "127.0.0.3", "127.0.0.2"]
    assert (sink.connections, sink.open_peak) == (3, 1)


# Refusals


@pytest.mark.parametrize("verb", ["MAIL", "RCPT", "DATA", "dot"])
async def test_a_refusal_of_our_address_is_retried_from_elsewhere_later(town: Town, verb: str) -> None:
    guard = await town.guard("127.0.0.2", verb=verb)
    here = town.office(TWO, THREE, source_penalty=3600.0, connection_idle_timeout=60.0)
    route = route_to(guard.port)
    number = here.number_of("two", route)
    refused = await here.send(route, number)
    assert (refused.verdict, refused.reply.code, refused.reply.detail) == (F, 454, "7.1")
    assert refused.reply.text == f"{BLOCKED}; will be retried from another source"
    assert (refused.counts, refused.local) == (True, False)
    assert (await here.send(route, number)).verdict is D
    assert guard.seen == ["127.0.0.2", "127.0.0.3"]
    assert here.told.events == [("refused", "two")]
    here.clock.advance(3601.0)
    async with asyncio.timeout(5):  # the idle connection from elsewhere is not waited for
        assert (await here.send(route, number)).reply == refused.reply
    assert guard.seen[-1] == "127.0.0.2"


@pytest.mark.parametrize(
    "reply", [f"554 5.7.1 {BLOCKED}", "421 4.7.0 [TSS04] Messages from 127.0.0.2 deferred"]
)
@pytest.mark.parametrize("verb", ["greeting", "EHLO"])
async def test_a_greeting_that_refuses_an_address_suspends_nothing(town: Town, verb: str, reply: str) -> None:
    guard = await town.guard("127.0.0.2", "127.0.0.3", verb=verb, reply=reply)
    here = town.office(TWO, THREE)
    route = route_to(guard.port)
    number = here.number_of("two", route)
    first = await here.send(route, number)
    assert (first.verdict, first.scope, first.counts) == (F, Scope.MESSAGE, True)
    # Nobody is left after this one: it is the destination's trouble.
    second = await here.send(route, number)
    assert (second.verdict, second.scope) == (F, Scope.HOST)
    assert dict.fromkeys(guard.connected) == dict.fromkeys(("127.0.0.2", "127.0.0.3"))


async def test_another_host_in_trouble_does_not_hide_that_our_address_was_refused(town: Town) -> None:
    guard = await town.guard("127.0.0.2", verb="greeting")
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        route = route_to(guard.port, dead.getsockname()[1])
        here = town.office(TWO, THREE)
        outcome = await here.send(route, here.number_of("two", route))
    assert (outcome.verdict, outcome.scope) == (F, Scope.MESSAGE)
    assert "connecting to" in outcome.reply.text


async def test_a_host_that_refuses_our_address_is_not_taken_for_dead(town: Town) -> None:
    guard, backup = await town.guard("127.0.0.2", verb="greeting"), await town.sink()
    here = town.office(TWO, THREE)
    route = route_to(guard.port, backup.port)
    for name in ("two", "three"):
        assert (await here.send(route, here.number_of(name, route))).verdict is D
    assert guard.connected == ["127.0.0.2", "127.0.0.3"]
    assert clients(backup) == ["127.0.0.2"]


async def test_when_no_source_is_left_it_is_what_the_peer_said(town: Town) -> None:
    guard = await town.guard("127.0.0.2", "127.0.0.3")
    here = town.office(TWO, THREE)
    route = route_to(guard.port)
    number = here.number_of("two", route)
    assert (await here.send(route, number)).verdict is F
    last = await here.send(route, number)
    assert (last.verdict, str(last.reply)) == (B, f"554 5.7.1 {BLOCKED}")


# Families


def hosts_at(name: str, port: int) -> Route:
    return Route("default", "example.com", (MxHost(name, port),), expires=1e12)


V4, V6, DUAL = "four.test", "six.test", "dual.test"
NAMES = {V4: ("127.0.0.1",), V6: ("::1",), DUAL: ("::1", "127.0.0.1")}


async def test_a_host_is_reached_over_the_family_that_the_source_has(town: Town) -> None:
    four = await town.sink()
    six = await town.sink(host="::1", port=four.port)
    for each, reached in ((TWO, four), (SIX, six), (BOTH, six)):
        here = town.office(each, names=Names(NAMES))
        before = len(reached.messages)
        assert (await here.send(hosts_at(DUAL, four.port))).verdict is D
        assert len(reached.messages) == before + 1
    assert clients(four) == ["127.0.0.2"]
    assert clients(six) == ["::1", "::1"]


async def test_a_source_without_the_hosts_family_is_none_that_is_left(town: Town) -> None:
    guard = await town.guard("127.0.0.2")
    here = town.office(SIX, TWO, names=Names(NAMES))
    route = hosts_at(V4, guard.port)
    number = here.number_of("six", route)
    outcome = await here.send(route, number)
    assert (outcome.verdict, guard.seen) == (B, ["127.0.0.2"])


async def test_hosts_that_no_source_reaches_are_the_hosts_trouble_in_words(town: Town) -> None:
    here = town.office(TWO, THREE, names=Names(NAMES))
    outcome = await here.send(hosts_at(V6, 25))
    assert (outcome.verdict, outcome.scope, outcome.counts) == (F, Scope.HOST, False)
    assert "has no address in the address family of" in outcome.reply.text


@pytest.mark.parametrize("trouble", ["nobody listens", "no PTR in the greeting", "unreachable"])
async def test_ipv6_trouble_falls_back_to_ipv4_in_the_same_attempt(town: Town, trouble: str) -> None:
    four = await town.sink()
    six = "fe80::1" if trouble == "unreachable" else "::1"
    if trouble.startswith("no PTR"):
        greeting = "554 5.7.25 [::1] The IP address sending this message does not have a PTR record setup"
        await town.sink(Manners(greeting=greeting), host="::1", port=four.port)
    names = Names({DUAL: (six, "127.0.0.1")})
    sources = (BOTH,) if trouble != "unreachable" else ()
    here = town.office(*sources, names=names)
    assert (await here.send(hosts_at(DUAL, four.port))).verdict is D
    assert clients(four) == (["127.0.0.4"] if sources else ["127.0.0.1"])
    if trouble.startswith("no PTR"):
        # Remembered, so that the next message does not try it again.
        assert here.told.events == [("refused", "both")]
        assert [each.ipv6 for each in here.selection.penalties()] == [True]


async def test_a_refusal_over_ipv6_alone_goes_over_ipv4_the_next_time(town: Town) -> None:
    reply = "550 5.7.25 [::1] The IP address sending this message does not have a PTR record setup"
    six = await town.guard("::1", reply=reply, host="::1")
    four = await town.guard(host="127.0.0.1", port=six.port)
    here = town.office(BOTH, names=Names(NAMES))
    first = await here.send(hosts_at(DUAL, six.port))
    assert (first.verdict, first.reply.code) == (F, 450)
    # The idle connection over IPv6 is not used for it either.
    assert (await here.send(hosts_at(DUAL, six.port))).verdict is D
    assert (six.seen, four.seen) == (["::1"], ["127.0.0.4"])


# Addresses that are not here


def on_this_machine(*gone: str) -> Callable[[object], bool]:
    """The system's answer at the start, when an address was still there."""
    return lambda address: str(address) not in gone


async def test_an_address_that_cannot_be_bound_is_left(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_ways, "is_address_of_this_machine", on_this_machine())
    sink = await town.sink()
    lost = source("lost", "198.51.100.1")
    here = town.office(lost, THREE)
    route = route_to(sink.port)
    number = here.number_of("lost", route)
    for _ in range(2):
        assert (await here.send(route, number)).verdict is D
    assert clients(sink) == ["127.0.0.3", "127.0.0.3"]
    assert here.told.events == [("absent", "lost", "198.51.100.1")]


async def test_when_no_source_can_be_bound_mail_waits_and_no_other_address_is_used(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_ways, "is_address_of_this_machine", on_this_machine())
    sink = await town.sink()
    here = town.office(source("lost", "198.51.100.1"), source("gone", "198.51.100.2"))
    first = await here.send(route_to(sink.port))
    assert (first.verdict, first.scope, first.counts, first.local) == (F, Scope.LOCAL, False, True)
    assert "198.51.100." in first.reply.text
    again = await here.send(route_to(sink.port))
    assert (again.verdict, again.scope, again.counts) == (F, Scope.LOCAL, False)
    assert again.reply.text == "no source of zone default can be used now"
    assert sink.connections == 0


async def test_ipv6_that_cannot_be_bound_falls_back(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_ways, "is_address_of_this_machine", on_this_machine())
    four = await town.sink()
    here = town.office(source("half", "127.0.0.5", "2001:db8::1"), names=Names(NAMES))
    assert (await here.send(hosts_at(DUAL, four.port))).verdict is D
    assert clients(four) == ["127.0.0.5"]
    assert here.told.events == [("absent", "half", "2001:db8::1")]
    assert (await here.send(hosts_at(DUAL, four.port))).verdict is D


async def test_an_address_that_comes_back_is_used_again(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_ways, "is_address_of_this_machine", on_this_machine("127.0.0.2"))
    sink = await town.sink()
    here = town.office(TWO)
    assert (await here.send(route_to(sink.port))).verdict is F
    here.clock.advance(61.0)
    assert (await here.send(route_to(sink.port))).verdict is D
    assert here.told.events == [("absent", "two", "127.0.0.2"), ("back", "two", "127.0.0.2")]


async def test_an_idle_connection_of_one_source_makes_room_where_a_host_takes_one_in_all(town: Town) -> None:
    """From two: 250, and the connection is kept. From three, S: 421 4.7.0 too many connections from you."""
    receiver = await town.start(Receiver("here", Nature(most_connections=1)))
    one = town.office(TWO, THREE)
    route = route_to(receiver.port)
    for name in ("two", "three", "two"):
        outcome = await one.send(route, one.number_of(name, route))
        assert outcome.verdict is D, outcome
    assert receiver.journal.counts["connections refused"] == 2
    assert [each.client for each in receiver.journal.arrivals] == ["127.0.0.2", "127.0.0.3", "127.0.0.2"]
    # Where nothing of ours is open the refusal is believed.
    async with asyncio.timeout(5):
        one.courier.pool.close_idle()
        while receiver.here.tally.open:
            await asyncio.sleep(0.01)
        _reader, writer = await asyncio.open_connection(receiver.host, receiver.port)
        while not receiver.here.tally.open:
            await asyncio.sleep(0.01)
    outcome = await one.send(route, one.number_of("two", route))
    assert (outcome.verdict, outcome.scope) == (F, Scope.HOST)
    assert receiver.journal.counts["connections refused"] == 3
    writer.close()
