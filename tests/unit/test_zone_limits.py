"""Limits over all workers: whatever they do, in whichever order, none is exceeded and nobody starves."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zonerelay.limits.authority import QUANTUM, Calendar, ZoneLimits
from zonerelay.limits.values import LimitAnswer, LimitRequest, SlotClaim, SlotGrant, TurnRequest

ZONE = 6
DESTINATIONS = {("a", ""): 4, ("a", "few"): 2, ("b", ""): 3, ("c", ""): 1}
OWNERS = ("one", "two", "three")
owners = st.sampled_from(OWNERS)
destinations = st.sampled_from(sorted(DESTINATIONS))


class Worker:
    """What an owner knows, and does: it believes the newest answer, and uses no more."""

    def __init__(self) -> None:
        self.slots: Counter[tuple[str, str]] = Counter()
        self.want: Counter[tuple[str, str]] = Counter()
        self.revoked: Counter[tuple[str, str]] = Counter()

    def hear(self, answer: LimitAnswer) -> None:
        for held in answer.held:
            key = (held.site, held.destination)
            self.slots[key], self.revoked[key] = held.slots, held.revoked


class Limits(RuleBasedStateMachine):
    """Owners of one zone; an exchange may be lost on its way there or back."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = ZoneLimits()
        self.now = 1000.0
        self.quiet_until = 0.0
        self.workers = {name: Worker() for name in OWNERS}

    def exchange(
        self, name: str, *claims: SlotClaim, everything: bool = False, lost: bool = False
    ) -> LimitAnswer:
        request = LimitRequest(ZONE, claims, everything=everything)
        allocate = self.now >= self.quiet_until
        # Through what is written down: so it is where machines share it.
        self.limits = ZoneLimits.decode(self.limits.encode())
        answer, _ = self.limits.exchange(name, request, self.now, allocate=allocate)
        if not lost:
            self.workers[name].hear(answer)
        return answer

    def claim(self, name: str, key: tuple[str, str], *, back: int = 0) -> SlotClaim:
        worker = self.workers[name]
        worker.slots[key] -= back
        worker.want[key] = max(worker.want[key], worker.slots[key]) if not back else worker.slots[key]
        return SlotClaim(*key, DESTINATIONS[key], worker.slots[key], back, worker.want[key])

    @rule(name=owners, key=destinations, count=st.integers(1, 5), lost=st.booleans())
    def wish(self, name: str, key: tuple[str, str], count: int, lost: bool) -> None:
        worker = self.workers[name]
        worker.want[key] = min(DESTINATIONS[key], worker.slots[key] + count)
        self.exchange(name, self.claim(name, key), lost=lost)

    @rule(name=owners, key=destinations, lost=st.booleans())
    def give_back(self, name: str, key: tuple[str, str], lost: bool) -> None:
        if self.workers[name].slots[key]:
            self.exchange(name, self.claim(name, key, back=1), lost=lost)

    @rule(name=owners, lost=st.booleans())
    def ask_again(self, name: str, lost: bool) -> None:
        self.exchange(name, lost=lost)

    @rule(name=owners)
    def say_everything(self, name: str) -> None:
        keys = [key for key in DESTINATIONS if self.workers[name].slots[key] or self.workers[name].want[key]]
        self.exchange(name, *(self.claim(name, key) for key in keys), everything=True)

    @rule(name=owners)
    def die(self, name: str) -> None:
        self.limits.end(name, self.now, allocate=self.now >= self.quiet_until)
        self.workers[name] = Worker()

    @rule(seconds=st.floats(0.1, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def authority_restarts(self) -> None:
        """Who is alive comes back within the quiet time."""
        self.limits = ZoneLimits()
        self.quiet_until = self.now + 2.0
        for name in OWNERS:
            self.say_everything(name)
        self.now = self.quiet_until

    @invariant()
    def no_limit_is_exceeded(self) -> None:
        used: Counter[tuple[str, str]] = Counter()
        for worker in self.workers.values():
            used.update(worker.slots)
        assert sum(used.values()) <= ZONE
        for site in {site for site, _ in DESTINATIONS}:
            limits = {limit for (each, _), limit in DESTINATIONS.items() if each == site}
            for limit in limits:
                of = [key for key, most in DESTINATIONS.items() if key[0] == site and most <= limit]
                assert sum(used[key] for key in of) <= limit

    @precondition(lambda self: self.now >= self.quiet_until)
    @rule(name=owners, key=destinations)
    def nobody_waits_for_ever(self, name: str, key: tuple[str, str]) -> None:
        """Others want all they can get, for ever, and use what they have until they are asked for it."""
        for other in OWNERS:
            for each, limit in DESTINATIONS.items():
                self.workers[other].want[each] = limit
                self.exchange(other, self.claim(other, each))
        for _ in range(60):
            if self.workers[name].slots[key]:
                return
            self.now += QUANTUM
            for other, worker in self.workers.items():
                self.exchange(other)
                for each in DESTINATIONS:
                    for _ in range(worker.revoked[each]):
                        if worker.slots[each]:
                            want = worker.want[each]
                            claim = self.claim(other, each, back=1)
                            worker.want[each] = want
                            back = SlotClaim(claim.site, claim.destination, claim.limit, claim.keep, 1, want)
                            self.exchange(other, back)
        raise AssertionError(f"{name} never got anything of {key}")

    @rule(name=owners)
    def what_is_given_back_can_be_had(self, name: str) -> None:
        self.now = max(self.now, self.quiet_until)
        for other in OWNERS:
            self.exchange(other, everything=True)
            self.workers[other] = Worker()
        assert self.limits.is_empty
        for key in (("a", ""), ("b", "")):
            self.workers[name].want[key] = DESTINATIONS[key]
            self.exchange(name, self.claim(name, key))
        assert sum(self.workers[name].slots.values()) == ZONE


TestLimits = Limits.TestCase
TestLimits.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def say(limits: ZoneLimits, name: str, *claims: SlotClaim, now: float = 0.0, zone: int = 20) -> LimitAnswer:
    return limits.exchange(name, LimitRequest(zone, claims), now)[0]


@pytest.fixture
def limits() -> ZoneLimits:
    return ZoneLimits()


def test_two_who_want_everything_share_it_equally(limits: ZoneLimits) -> None:
    assert say(limits, "one", SlotClaim("a", "", 20, want=20)).held == (SlotGrant("a", "", 20),)
    _, news = limits.exchange("two", LimitRequest(20, (SlotClaim("a", "", 20, want=20),)), 0.0)
    assert news == {"one"}
    has = SlotGrant("a", "", 20)
    for held in say(limits, "one").held:
        has = held
    while has.revoked:
        keep = has.slots - has.revoked
        (has,) = say(limits, "one", SlotClaim("a", "", 20, keep, has.revoked, want=20)).held
    assert has.slots == 10
    assert limits.allocator.owners["two"].slots == 10


def test_the_smaller_of_two_configurations_counts(limits: ZoneLimits) -> None:
    say(limits, "old", SlotClaim("a", "", 10, want=3))
    assert say(limits, "new", SlotClaim("a", "", 4, want=4)).held[0].slots == 1
    assert say(limits, "old", SlotClaim("a", "", 10, keep=3, want=10)).held[0].slots == 3


def test_what_is_too_much_for_a_lowered_limit_goes_back_although_nobody_waits(limits: ZoneLimits) -> None:
    say(limits, "one", SlotClaim("a", "", 10, want=10))
    say(limits, "two", SlotClaim("b", "", 10, want=10))
    (held,) = say(limits, "one", SlotClaim("a", "", 4, keep=10, want=10)).held
    assert (held.slots, held.revoked) == (10, 6)
    (held,) = say(limits, "one", SlotClaim("a", "", 4, keep=4, back=6, want=4)).held
    assert (held.slots, held.revoked) == (4, 0)
    _, news = limits.exchange("one", LimitRequest(6), 0.0)
    assert news == {"two"}
    assert say(limits, "two").held == (SlotGrant("b", "", 10, 7),)


def test_who_is_not_heard_of_loses_what_it_had(limits: ZoneLimits) -> None:
    limits.exchange("one", LimitRequest(20, (SlotClaim("a", "", 4, want=4),)), 0.0, until=10.0)
    assert say(limits, "two", SlotClaim("a", "", 4, want=4), now=9.9).held == (
        SlotGrant("a", "", 0, waiters=1),
    )
    assert say(limits, "two", now=10.0).held == (SlotGrant("a", "", 4),)


def test_one_whose_site_is_full_does_not_stop_the_others(limits: ZoneLimits) -> None:
    say(limits, "one", SlotClaim("a", "", 1, want=1))
    say(limits, "two", SlotClaim("a", "", 1, want=1))
    assert say(limits, "two", SlotClaim("b", "", 1, want=1)).held[0].slots == 1


# Turns


class Rates(RuleBasedStateMachine):
    """Two destinations of one site with rates of their own, and a rate of the zone."""

    ASKS = (
        TurnRequest("a", "", 0.1, 0.0, 3),
        TurnRequest("a", "slow", 1.0, 0.25, 2),
        TurnRequest("b", "", 0.2, 0.25, 2),
    )

    def __init__(self) -> None:
        super().__init__()
        self.limits = ZoneLimits()
        self.now = 0.0
        self.given: list[tuple[TurnRequest, float]] = []

    @rule(name=owners, which=st.integers(0, 2), after=st.floats(0, 1.5))
    def ask(self, name: str, which: int, after: float) -> None:
        self.now += after
        ask = self.ASKS[which]
        self.limits = ZoneLimits.decode(self.limits.encode())
        answer, _ = self.limits.exchange(name, LimitRequest(ZONE, turns=(ask,)), self.now)
        (turns,) = answer.turns
        assert len(turns) == ask.count
        assert min(turns) >= self.now
        self.given += [(ask, at) for at in turns]

    @rule(name=owners, part=st.floats(0, 1), count=st.integers(0, 3))
    def give_back(self, name: str, part: float, count: int) -> None:
        """Somewhere in the middle; and ask for as many in the same breath."""
        at = int(part * len(self.given))
        back, self.given = self.given[at : at + count], self.given[:at] + self.given[at + count :]
        ask = self.ASKS[0]
        request = LimitRequest(ZONE, turns=(ask,), unused=tuple((ask.site, at) for ask, at in back))
        ((*turns,),) = self.limits.exchange(name, request, self.now)[0].turns
        self.given += [(ask, at) for at in turns]

    @rule()
    def authority_restarts(self) -> None:
        self.limits = ZoneLimits()
        known = tuple((ask, (at,)) for ask, at in self.given if at > self.now - 1.0)
        self.limits.exchange("one", LimitRequest(ZONE, everything=True, known_turns=known), self.now)

    @invariant()
    def turns_are_far_enough_apart(self) -> None:
        for group, interval in (
            ([at for ask, at in self.given if ask.site == "a"], 0.1),
            ([at for ask, at in self.given if ask.destination == "slow"], 1.0),
            ([at for ask, at in self.given if ask.site == "b"], 0.2),
            ([at for ask, at in self.given if ask.zone_interval], 0.25),
        ):
            group.sort()
            assert all(b - a >= interval - 1e-5 for a, b in itertools.pairwise(group))


TestRates = Rates.TestCase
TestRates.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_a_fast_line_goes_between_the_turns_of_a_slow_one() -> None:
    calendar = Calendar()
    for at in (0.0, 1.0, 2.0):
        calendar.add(at, 1.0, "slow")
    found = []
    at = 0.0
    for _ in range(12):
        at = calendar.earliest(at, 0.2, "fast")
        calendar.add(at, 0.2, "fast")
        found.append(round(at, 3))
    assert found[:4] == [0.2, 0.4, 0.6, 0.8]
    assert found[4] == 1.2


def test_turns_that_bind_nobody_are_forgotten() -> None:
    calendar = Calendar()
    for number in range(100):
        calendar.add(number * 0.1, 0.1, "")
    calendar.forget(9.95)
    assert len(calendar.turns) == 1
    calendar.forget(30.0)
    assert not calendar.turns


def test_a_turn_that_is_given_back_goes_to_whoever_asks_next(limits: ZoneLimits) -> None:
    ask = TurnRequest("a", "", 1.0, 0.5, 3)
    (first,) = limits.exchange("one", LimitRequest(ZONE, turns=(ask,)), 0.0)[0].turns
    limits.exchange("two", LimitRequest(ZONE, turns=(ask,)), 0.0)
    limits.exchange("one", LimitRequest(ZONE, unused=(("a", first[1]),)), 0.1)
    (later,) = limits.exchange("three", LimitRequest(ZONE, turns=(ask,)), 0.1)[0].turns
    assert later[0] == first[1]


def test_no_turn_is_earlier_than_it_is_wanted(limits: ZoneLimits) -> None:
    ask = TurnRequest("a", "", 1.0, 0.0, 2, after=7.0)
    assert limits.exchange("one", LimitRequest(ZONE, turns=(ask,)), 0.0)[0].turns == ((7.0, 8.0),)


def test_one_that_died_while_it_waited_is_given_nothing_that_others_give_back(limits: ZoneLimits) -> None:
    everything = SlotClaim("a", "", 3, want=3)

    def ask(name: str, now: float, *claims: SlotClaim, all_of_it: bool = False) -> int:
        request = LimitRequest(20, claims, everything=all_of_it)
        answer, _ = limits.exchange(name, request, now, until=now + 15.0)
        return sum(held.slots for held in answer.held)

    assert ask("dead", 0.0, SlotClaim("a", "", 3, want=1)) == 1
    assert ask("other", 0.0, everything) == 2
    assert ask("dead", 0.1, SlotClaim("a", "", 3, 1, 0, 3)) == 1
    assert ask("other", 3.0, all_of_it=True) == 0
    assert ask("next", 4.0, everything) == 2, "all but what the dead one had"
    assert ask("next", 15.5, SlotClaim("a", "", 3, 2, 0, 3)) == 3
