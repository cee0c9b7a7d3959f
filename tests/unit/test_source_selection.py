"""Who sends, who is passed over and for how long, and which addresses of a host can be reached."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.support.mail import Reported, make_message, make_sources, route_to
from zonerelay.config.settings import SourceSettings, SourceUnit, ZoneSettings
from zonerelay.delivery import source as choosing
from zonerelay.delivery.peer import ConnectionKey, SourceFailure, Terms
from zonerelay.delivery.source import ABSENT_FOR, MAX_REMEMBERED, from_elsewhere, in_order, key_of, shares
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import NULL_SENDER, Mailbox, MessageId
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.destinations.route import Route

BLOCKED = Reply(554, "7.1", "Client host [127.0.0.2] blocked using rbl.example")
NO_NAME = Reply(550, "7.25", "no PTR record")
A = SourceSettings(name="a", address=("127.0.0.2",))
B = SourceSettings(name="b", address=("127.0.0.3",))
C = SourceSettings(name="c", address=("127.0.0.4", "::1"))
HERE, THERE = route_to(2525), route_to(2626)
MESSAGE = make_message()


class Stage:
    """Sources of one zone, and a clock."""

    def __init__(self, *sources: SourceSettings, penalty: float = 3600.0) -> None:
        self.clock = ManualClock()
        self.told = Reported()
        self.selection: choosing.SourceSelection = make_sources(self.clock, sources, self.told)
        self.zone = ZoneSettings(sources=tuple(each.name for each in sources), source_penalty=penalty)

    def choose(self, route: Route = HERE, unfit: Collection[str] = ()) -> ConnectionKey | None:
        return self.selection.choose(self.zone, route, MESSAGE, unfit)

    def key(self, route: Route = HERE, unfit: Collection[str] = ()) -> ConnectionKey:
        key = self.choose(route, unfit)
        assert key is not None
        return key

    def name(self, route: Route = HERE, unfit: Collection[str] = ()) -> str:
        source = self.key(route, unfit).source
        assert source is not None
        return source.name

    def refuse(
        self, name: str, reply: Reply = BLOCKED, *, route: Route = HERE, peer: str = "127.0.0.1:25"
    ) -> None:
        source = next(each for each in (A, B, C) if each.name == name)
        key = self.choose(route)
        ipv4_only = key is not None and key.source == source and key.ipv4_only
        assert self.selection.heard(
            Terms(self.zone, route, ConnectionKey(source=source, ipv4_only=ipv4_only)), reply, peer
        )


def test_a_refused_source_makes_way_at_that_destination_until_its_penalty_is_over() -> None:
    stage = Stage(A, B, penalty=3600.0)
    own = stage.name()
    stage.refuse(own)
    assert stage.name() != own
    assert stage.name(THERE) == own
    stage.clock.advance(3599.0)
    assert stage.name() != own
    stage.clock.advance(2.0)
    assert stage.name() == own
    assert stage.selection.penalties() == []


def test_setting_the_clock_neither_lengthens_nor_ends_a_penalty() -> None:
    stage = Stage(A, B)
    own = stage.name()
    stage.refuse(own)
    stage.clock.step(-86_400.0)
    assert stage.name() != own
    [penalty] = stage.selection.penalties()
    assert penalty.until == pytest.approx(stage.clock.now() + 3600.0)
    stage.clock.step(2 * 86_400.0)
    assert stage.name() != own


def test_it_takes_over_whoever_would_without_the_refused_one() -> None:
    stage = Stage(A, B, C)
    own = stage.name()
    stage.refuse(own)
    left = [each for each in (A, B, C) if each.name != own]
    assert stage.name() == Stage(*left).name()


def test_when_all_are_refused_the_oldest_refusal_goes_first() -> None:
    stage = Stage(A, B)
    terms = Terms(stage.zone, HERE)
    stage.refuse("b")
    stage.clock.advance(1.0)
    assert stage.selection.another_left(terms)
    stage.refuse("a")
    assert not stage.selection.another_left(terms)
    assert stage.name() == "b"
    stage.clock.advance(1.0)
    stage.refuse("b")
    assert stage.name() == "a"


def test_a_refusal_is_told_once_and_counted_each_time() -> None:
    stage = Stage(A, B)
    for _ in range(3):
        stage.refuse("a")
    assert stage.told.events == [("refused", "a"), ("refused again", "a"), ("refused again", "a")]
    stage.clock.advance(4000.0)
    stage.refuse("a")
    assert stage.told.events[-1] == ("refused", "a")
    assert stage.selection.penalty_counts() == {"a": 1, "b": 0}


def test_what_is_not_about_our_address_is_not_held_against_it() -> None:
    stage = Stage(A, B)
    terms = Terms(stage.zone, HERE, ConnectionKey(source=A))
    assert not stage.selection.heard(terms, Reply(550, "1.1", "user unknown"), "127.0.0.1:25")
    assert not stage.selection.heard(Terms(stage.zone, HERE), BLOCKED, "127.0.0.1:25")
    assert stage.selection.penalties() == []


def test_reputation_is_lost_with_hosts_whichever_zone_sent_the_mail() -> None:
    stage = Stage(A, B)
    own = stage.name()
    stage.refuse(own)
    stage.zone = replace(stage.zone, name="other")
    assert stage.name(Route("other", "example.com", HERE.hosts, 1e12)) != own


def test_weight_0_takes_nothing_even_when_all_others_are_refused() -> None:
    stage = Stage(A, replace(B, weight=0))
    assert stage.name() == "a"
    stage.refuse("a")
    assert stage.name() == "a"
    assert not stage.selection.another_left(Terms(stage.zone, HERE))
    assert Stage(replace(A, weight=0)).choose() is None


def test_a_sender_keeps_his_source() -> None:
    stage = Stage(A, B, C)
    zone = replace(stage.zone, source_by=SourceUnit.SENDER)
    found = {
        stage.selection.choose(zone, HERE, make_message(sender=sender))
        for sender in ("ann@example.org", "ANN@example.org")
    }
    assert len(found) == 1


# IPv6


def test_a_refusal_over_ipv6_costs_ipv6_alone_where_there_is_ipv4() -> None:
    stage = Stage(C)
    assert stage.choose() == ConnectionKey(source=C)
    stage.refuse("c", NO_NAME, peer="[::1]:25")
    key = stage.key()
    assert key == ConnectionKey(source=C, ipv4_only=True)
    assert key.text != ConnectionKey(source=C).text
    assert stage.selection.reachable(key, ("::1", "127.0.0.9")) == ("127.0.0.9",)
    # The other address of the same source is one that is left.
    assert stage.selection.another_left(Terms(stage.zone, HERE))
    [penalty] = stage.selection.penalties()
    assert penalty.ipv6


def test_a_host_without_ipv4_is_sent_to_over_ipv6_all_the_same_and_then_the_refusal_counts_in_full() -> None:
    stage = Stage(C)
    stage.refuse("c", NO_NAME, peer="[::1]:25")
    key = stage.key()
    assert stage.selection.reachable(key, ("::1",)) == ("::1",)
    stage.refuse("c", NO_NAME, peer="[::1]:25")
    assert not stage.selection.another_left(Terms(stage.zone, HERE))


def test_a_refusal_over_ipv4_costs_the_source() -> None:
    stage = Stage(C, A)
    stage.refuse("c", peer="127.0.0.1:25")
    assert stage.name() == "a"


@pytest.mark.parametrize(
    ("address", "reached"),
    [(("127.0.0.2",), ("127.0.0.9",)), (("::1",), ("::2",)), (("127.0.0.2", "::1"), ("::2", "127.0.0.9"))],
)
def test_only_families_of_the_source_are_reached(address: tuple[str, ...], reached: tuple[str, ...]) -> None:
    stage = Stage(SourceSettings(name="a", address=address))
    key = stage.key()
    assert stage.selection.reachable(key, ("::2", "127.0.0.9")) == reached


def test_unfit_sources_are_not_asked_again() -> None:
    stage = Stage(A, B)
    own = stage.name()
    assert stage.name(unfit={own}) != own
    assert stage.choose(unfit={"a", "b"}) is None


# Addresses that are not here


def test_an_address_that_this_machine_has_not_got_is_told_at_once_and_passed_over_for_a_while() -> None:
    lost = SourceSettings(name="a", address=("198.51.100.1",))
    stage = Stage(lost, B)
    assert stage.told.events == [("absent", "a", "198.51.100.1")]
    assert stage.name(HERE) == stage.name(THERE) == "b"
    assert stage.selection.problems() == (
        "source a: the address 198.51.100.1 cannot be sent from: no interface of this machine has it",
    )
    assert Stage(lost).choose() is None
    own = Stage(replace(A, name="a"), B).name()
    stage.clock.advance(ABSENT_FOR + 1)
    assert stage.name() == own


def test_an_address_that_is_lost_later_is_passed_over_and_told_when_it_is_back() -> None:
    stage = Stage(A, B)
    assert stage.selection.lost(A, SourceFailure("a", "127.0.0.2", "cannot assign"))
    assert stage.selection.lost(A, SourceFailure("a", "127.0.0.2", "cannot assign"))
    assert stage.name() == "b"
    stage.selection.bound(A, "127.0.0.9")
    stage.selection.bound(A, "127.0.0.9")
    assert stage.told.events == [("absent", "a", "127.0.0.2"), ("back", "a", "127.0.0.2")]


def test_status_asks_the_system_again() -> None:
    stage = Stage(A)
    stage.selection.lost(A, SourceFailure("a", "127.0.0.2", "cannot assign"))
    assert stage.selection.problems() == ()
    assert stage.name() == "a"
    assert stage.told.events[-1] == ("back", "a", "127.0.0.2")


def test_without_its_ipv6_a_source_goes_on_over_ipv4() -> None:
    stage = Stage(C)
    assert not stage.selection.lost(C, SourceFailure("c", "::1", "cannot assign"))
    key = stage.key()
    assert key.ipv4_only
    assert stage.selection.reachable(key, ("::2", "127.0.0.9")) == ("127.0.0.9",)
    assert stage.selection.reachable(key, ("::2",)) == ()


def test_without_its_ipv4_a_source_is_passed_over() -> None:
    stage = Stage(C, A)
    assert stage.selection.lost(C, SourceFailure("c", "127.0.0.4", "cannot assign"))
    assert stage.name() == "a"


# Reload


def test_a_reload_keeps_what_is_known_of_sources_that_stay() -> None:
    stage = Stage(A, B)
    stage.refuse("a")
    stage.selection.configure((replace(A, weight=7, ehlo_name="new.example.org"), B))
    assert stage.name() == "b"
    stage.selection.configure((replace(A, address=("127.0.0.5",)), B))
    assert stage.selection.penalties() == []


def test_a_zone_of_yesterday_whose_sources_are_gone_sends_nothing() -> None:
    stage = Stage(A)
    stage.selection.configure((B,))
    assert stage.choose() is None


def test_a_new_name_makes_new_connections() -> None:
    stage = Stage(A)
    before = stage.key()
    stage.selection.configure((replace(A, ehlo_name="new.example.org"),))
    after = stage.key()
    assert not Terms(stage.zone, HERE, before).cover(Terms(stage.zone, HERE, after))


# Outcomes and bounds


def test_a_bounce_for_our_address_becomes_a_deferral_of_the_same_kind() -> None:
    bounced = Outcome(Verdict.BOUNCED, BLOCKED, Scope.MESSAGE, "mx.example.com", "127.0.0.1:25")
    assert from_elsewhere(bounced) == structs.replace(
        bounced,
        verdict=Verdict.DEFERRED,
        reply=Reply(454, "7.1", f"{BLOCKED.text}; will be retried from another source"),
    )


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome(Verdict.BOUNCED, Reply(550, "1.1", "user unknown")),
        Outcome(Verdict.BOUNCED, BLOCKED, local=True),
        Outcome(Verdict.DELIVERED, Reply(250, "0.0", "ok")),
        Outcome(Verdict.DEFERRED, Reply(450, "7.1", "client host [1] blocked using x")),
    ],
)
def test_other_outcomes_stay(outcome: Outcome) -> None:
    assert from_elsewhere(outcome) == outcome


def test_one_refused_source_does_not_suspend_a_destination() -> None:
    outcome = Outcome(Verdict.DEFERRED, Reply(421, "7.0", "go away"), Scope.HOST)
    assert from_elsewhere(outcome).scope is Scope.MESSAGE


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    stage = Stage(A, B)
    for number in range(MAX_REMEMBERED + 10):
        stage.refuse("a", route=route_to(1000 + number))
    found = [each.hosts for each in stage.selection.penalties()]
    assert len(found) == MAX_REMEMBERED
    assert not any(hosts.endswith(":1000") for hosts in found)
    assert found[-1].endswith(f":{1000 + MAX_REMEMBERED + 9}")


# Which of several takes a message


IDS = [f"019aa1f2{number:08x}" for number in range(20_000)]


def source(name: str, weight: int = 1) -> SourceSettings:
    return SourceSettings(name=name, address=("192.0.2.1",), weight=weight)


def names(sources: list[SourceSettings]) -> list[str]:
    return [each.name for each in sources]


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 3), (10, 1), (1, 1, 1, 1, 1), (500, 300, 200)])
def test_messages_are_shared_by_weight(weights: tuple[int, ...]) -> None:
    sources = [source(f"out{at}", weight) for at, weight in enumerate(weights)]
    taken = Counter(in_order(sources, key)[0].name for key in IDS)
    for each, share in zip(sources, shares(sources), strict=True):
        assert abs(taken[each.name] / len(IDS) - share) < 0.02


def test_the_second_choice_is_shared_by_weight_too() -> None:
    """When one is passed over its mail does not all go to one neighbour."""
    sources = [source("a", 1), source("b", 1), source("c", 3)]
    seconds = Counter(order[1] for order in (names(in_order(sources, key)) for key in IDS) if order[0] == "a")
    total = sum(seconds.values())
    assert abs(seconds["c"] / total - 0.75) < 0.03


_sources = st.lists(
    st.builds(source, st.text("abcdefgh.-_0123456789", min_size=1, max_size=8), st.integers(0, 1000)),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.name,
)


@given(_sources, st.text(max_size=30), st.randoms())
def test_the_order_depends_on_nothing_but_names_weights_and_key(
    sources: list[SourceSettings], key: str, random: Random
) -> None:
    shuffled = list(sources)
    random.shuffle(shuffled)
    assert in_order(sources, key) == in_order(shuffled, key)
    assert sorted(names(in_order(sources, key))) == sorted(each.name for each in sources if each.weight)


@given(_sources, st.text(max_size=30), st.integers(0, 5))
def test_taking_one_out_moves_only_its_own_mail(sources: list[SourceSettings], key: str, at: int) -> None:
    gone = sources[at % len(sources)]
    before = in_order(sources, key)
    after = in_order([each for each in sources if each is not gone], key)
    assert after == [each for each in before if each is not gone]


@given(_sources, st.text(max_size=30))
def test_a_heavier_source_only_gains(sources: list[SourceSettings], key: str) -> None:
    light = sources[0]
    heavy = source(light.name, light.weight + 500)
    before = names(in_order(sources, key))
    after = names(in_order([heavy, *sources[1:]], key))
    if light.weight:
        assert after.index(light.name) <= before.index(light.name)
    assert [name for name in before if name != light.name] == [name for name in after if name != light.name]


def test_what_stays_together() -> None:
    first, second = MessageId(IDS[0]), MessageId(IDS[1])
    sender = Mailbox("Ann@Example.org")
    assert key_of(SourceUnit.MESSAGE, first, sender) != key_of(SourceUnit.MESSAGE, second, sender)
    assert key_of(SourceUnit.SENDER, first, sender) == key_of(
        SourceUnit.SENDER, second, Mailbox("ann@EXAMPLE.org")
    )
    assert key_of(SourceUnit.SENDER, first, sender) != key_of(
        SourceUnit.SENDER, first, Mailbox("bob@example.org")
    )
    # Reports are nobody's: they are shared like messages.
    assert key_of(SourceUnit.SENDER, first, NULL_SENDER) != key_of(SourceUnit.SENDER, second, NULL_SENDER)


def test_choices_do_not_change_between_versions() -> None:
    """Mail that waits in a spool would go out from elsewhere after an update."""
    sources = [source("out1"), source("out2", 2), source("out3")]
    assert [names(in_order(sources, key)) for key in IDS[:4]] == [
        ["out3", "out2", "out1"],
        ["out1", "out3", "out2"],
        ["out2", "out1", "out3"],
        ["out2", "out3", "out1"],
    ]
