"""Turns of a rate that several workers share: none is taken too close, and none lost for nothing."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.bench.simulate.run import Result, simulate
from tests.bench.simulate.scenarios import SENDERS, Death, Injection, Scenario, limits
from tests.bench.simulate.world import Kind
from tests.unit.test_rates import fullest
from zonerelay.config.settings import ZoneSettings
from zonerelay.config.units import Rate, parse_rate
from zonerelay.limits.authority import ZoneLimits
from zonerelay.limits.values import LimitRequest, TurnRequest, interval, leased_grace, margin
from zonerelay.limits.worker.allowance import ClockBounds, LeasedTurns
from zonerelay.model.clock import ManualClock

RATE = Rate(4, 1.0)
OWNERS = 3
owners = st.integers(0, OWNERS - 1)


class Owner:
    """A worker with a clock of its own; what it asks is on its way until it is answered, or lost."""

    def __init__(self, number: int, now: float) -> None:
        self.name = f"holder{number}"
        self.ahead = 1000.0 * number
        self.clock = ManualClock()
        self.bounds = ClockBounds()
        self.wants = False
        self.question: tuple[float, tuple[TurnRequest, tuple[tuple[str, float], ...]]] | None = None
        self.set(now)
        self.turns = LeasedTurns(
            "a", "", RATE, None, clock=self.clock, bounds=self.bounds, wanted=lambda _: self.want()
        )

    def set(self, now: float) -> None:
        self.clock.advance(now + self.ahead - self.clock.monotonic())

    def want(self) -> None:
        self.turns.asked = self.wants = True


class Shared(RuleBasedStateMachine):
    """Everything may happen at any time; answers and whole books get lost, owners die."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 5000.0
        self.limits = ZoneLimits()
        self.owners = [Owner(number, self.now) for number in range(OWNERS)]
        self.taken: list[float] = []

    def set_clocks(self, seconds: float) -> None:
        self.now += seconds
        for owner in self.owners:
            owner.set(self.now)

    @rule(which=owners, waiting=st.integers(0, 5))
    def mail(self, which: int, waiting: int) -> None:
        turns = self.owners[which].turns
        turns.expect("line", waiting)
        if waiting and turns.due <= self.owners[which].clock.monotonic():
            turns.start(0.0)
            turns.expect("line", waiting - 1)

    @rule(which=owners, seconds=st.floats(0, 0.3))
    def connected(self, which: int, seconds: float) -> None:
        self.owners[which].turns.arrived(seconds)

    @rule(which=owners)
    def take(self, which: int) -> None:
        owner = self.owners[which]
        if owner.turns.pending and owner.turns.next_turn <= owner.clock.monotonic():
            owner.turns.take(0.0)
            owner.turns.pending -= 1
            self.taken.append(self.now)

    @rule(which=owners)
    def a_batch_ends_without_its_turn(self, which: int) -> None:
        if self.owners[which].turns.pending:
            self.owners[which].turns.give_back()

    @rule(which=owners)
    def ask(self, which: int) -> None:
        owner = self.owners[which]
        if owner.wants and owner.question is None:
            owner.wants = False
            asked = owner.turns.ask(), owner.turns.unused()
            owner.question = owner.clock.monotonic(), asked

    @rule(which=owners, there=st.floats(0, 0.02), back=st.floats(0, 0.02), lost=st.booleans())
    def answer(self, which: int, there: float, back: float, lost: bool) -> None:
        owner = self.owners[which]
        if owner.question is None:
            return
        (asked, (ask, unused)), owner.question = owner.question, None
        self.set_clocks(there)
        self.limits = ZoneLimits.decode(self.limits.encode())
        request = LimitRequest(9, turns=(ask,), unused=unused)
        answer = self.limits.exchange(owner.name, request, self.now)[0]
        theirs = self.now
        self.set_clocks(back)
        if lost:
            owner.want()
            return
        owner.bounds.note(asked, theirs, owner.clock.monotonic())
        owner.turns.given(answer.turns[0])

    @rule(seconds=st.sampled_from((0.005, 0.05, 0.25, 1.0)))
    def wait(self, seconds: float) -> None:
        self.set_clocks(seconds)

    @rule(which=owners)
    def die(self, which: int) -> None:
        self.owners[which] = Owner(which, self.now)

    @precondition(lambda self: not any(owner.question for owner in self.owners))
    @rule()
    def the_authority_starts_again(self) -> None:
        """With what those who are there say. What the dead had it would not hear of."""
        if self.taken and self.now - self.taken[-1] < 2 * RATE.seconds:
            return
        self.limits = ZoneLimits()
        for owner in self.owners:
            known = () if owner.turns.known is None else (owner.turns.known,)
            request = LimitRequest(9, everything=True, known_turns=known)
            self.limits.exchange(owner.name, request, self.now, allocate=False)

    @invariant()
    def no_time_holds_more_than_the_rate_allows(self) -> None:
        assert fullest(self.taken, RATE.seconds + margin(RATE) - leased_grace(RATE) - 1e-5) <= RATE.count


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)


def lone(rate: str) -> tuple[LeasedTurns, ManualClock, list[LeasedTurns]]:
    clock, bounds, wanted = ManualClock(), ClockBounds(), list[LeasedTurns]()
    bounds.note(clock.monotonic(), clock.monotonic(), clock.monotonic())

    def want(turns: LeasedTurns) -> None:
        turns.asked = True
        wanted.append(turns)

    made = LeasedTurns("a", "", parse_rate(rate), None, clock=clock, bounds=bounds, wanted=want)
    return made, clock, wanted


def test_no_more_turns_are_asked_for_than_deliveries_wait() -> None:
    turns, clock, wanted = lone("600/1m")
    turns.expect("line", 1)
    assert turns.due > clock.monotonic()
    assert wanted == [turns]
    assert turns.ask().count == 1
    turns.given((clock.monotonic(),))
    assert turns.due <= clock.monotonic()
    turns.start(0.0)
    turns.expect("line", 0)
    turns.take(0.0)
    turns.pending -= 1
    assert wanted == [turns]
    assert not turns.unused()


def test_what_is_not_needed_any_more_goes_back_while_others_can_use_it() -> None:
    turns, clock, wanted = lone("60/1m")
    now = clock.monotonic()
    turns.expect("line", 3)
    assert turns.due
    turns.ask()
    turns.given((now, now + 1.0, now + 2.0))
    turns.start(0.0)
    turns.expect("line", 0)  # one batch took them all
    assert turns.unused() == (("a", now + 2.0), ("a", now + 1.0))
    assert turns.unused() == ()
    assert wanted == [turns, turns]


def test_a_turn_that_was_missed_goes_back_with_the_next_question_and_no_question_for_it() -> None:
    turns, clock, wanted = lone("60/1m")
    turns.given((clock.monotonic(),))
    clock.advance(1.0)
    assert turns.is_over(clock.monotonic())
    assert not wanted
    assert len(turns.unused()) == 1


def test_who_waits_for_a_turn_hears_of_new_ones_until_it_looks_away() -> None:
    turns, clock, _ = lone("60/1m")
    heard = Counter[str]()
    turns.watch(tell := lambda: heard.update(["turns"]), further=False)
    turns.given((clock.monotonic(),))
    turns.unwatch(tell)
    turns.given((clock.monotonic() + 1.0,))
    assert heard == {"turns": 1}


def test_a_batch_that_needs_a_second_turn_asks_for_it_and_it_is_not_given_back_as_a_surplus() -> None:
    """A batch with a second transaction waited for good: nothing asked (the simulation, seed 13)."""
    turns, clock, wanted = lone("600/1m")
    turns.expect("line", 1)
    assert turns.due > clock.monotonic()
    turns.ask()
    turns.given((clock.monotonic(),))
    turns.start(0.0)
    turns.expect("line", 0)
    turns.take(0.0)
    turns.pending -= 1  # as its ticket does
    wanted.clear()
    assert turns.next_turn > clock.monotonic()
    turns.watch(tell := lambda: None, further=True)
    assert wanted == [turns]
    assert turns.ask().count == 1
    assert not turns.is_over(clock.monotonic())  # or the next batch would have turns of its own
    turns.given((clock.monotonic() + 1.0,))
    turns.unwatch(tell)
    assert turns.next_turn == clock.monotonic() + 1.0
    assert not turns.unused()


# All of it, in virtual time: the relay's schedulers, keepers and table


def shared(rate: str, nodes: int, messages: int, **more: object) -> Result:
    """All messages for one destination with a rate come at once."""
    found = parse_rate(rate)
    per_second = found.count / found.seconds
    kinds = (
        Kind(name="rated", share=1.0, domains=1, limits=limits(max(4, int(per_second)), found)),
        Kind(name=SENDERS, share=0.0, domains=10),
    )
    plan = Scenario(
        name="shared",
        about="",
        kinds=kinds,
        deliveries=0,
        rate=1.0,
        injections=(Injection(at=0.1, kind="rated", recipients=messages),),
        nodes=nodes,
        zone=ZoneSettings(max_connections=1000),
        **more,  # type: ignore[arg-type]  # fields by name
    )
    result = simulate(plan, seed=Random(rate).randint(0, 99))
    assert result.faults == []
    return result


def used(result: Result, begin: float = 0.05, end: float = 0.8) -> float:
    """Of the rate, in a part of the time: while everybody has mail."""
    (use,) = result.figures.rates.values()
    first, last = use.times[0], use.times[-1]
    return use.part(first + begin * (last - first), first + end * (last - first))


@pytest.mark.parametrize(
    ("rate", "messages"),
    [
        ("20/1s", 300),
        pytest.param("1/1s", 60, marks=pytest.mark.proof),
        pytest.param("5/1m", 40, marks=pytest.mark.proof),
        pytest.param("600/1h", 60, marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_rate_is_used_by_all_who_share_it(rate: str, messages: int, nodes: int) -> None:
    assert used(shared(rate, nodes, messages)) >= (0.95 if nodes == 1 else 0.93)


@pytest.mark.parametrize(
    ("rate", "messages"), [("20/1s", 400), pytest.param("5/1m", 60, marks=pytest.mark.proof)]
)
def test_a_rate_is_used_where_one_has_ten_times_the_others_mail(rate: str, messages: int) -> None:
    assert used(shared(rate, 2, messages, busy=(10.0, 1.0))) >= 0.9


def test_a_rate_is_used_while_a_node_comes_and_goes() -> None:
    deaths = tuple(Death(node=1, at=at, seconds=4.0) for at in (3.0, 12.0))
    assert used(shared("20/1s", 3, 500, deaths=deaths)) >= 0.9


def test_a_question_brings_several_turns_where_much_mail_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter[int]()
    exchange = ZoneLimits.exchange

    def counting(limits: ZoneLimits, name: str, request: LimitRequest, now: float, **more: float) -> object:
        counts[sum(ask.count for ask in request.turns)] += 1
        return exchange(limits, name, request, now, **more)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(ZoneLimits, "exchange", counting)
    shared("100/1s", 2, 600)
    assert sum(counts.values()) < 600 / 4


def test_the_interval_of_a_rate_costs_no_more_than_a_twentieth() -> None:
    for text in ("1/1s", "1000/1s", "5/1m", "100/1d"):
        rate = parse_rate(text)
        assert rate.seconds / rate.count / interval(rate) > 0.95
