"""Turns of rates: never more than allowed as the receiver counts, nothing saved up, and no turn lost."""

import asyncio
import gc
from collections import Counter
from collections.abc import Hashable, Sequence
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.bench.simulate.run import Result, simulate
from tests.bench.simulate.scenarios import SENDERS, Death, Injection, Scenario, limits
from tests.bench.simulate.world import Kind
from tests.support.limits import nothing_assigned
from zonerelay.config.settings import ZoneSettings
from zonerelay.config.units import Rate, parse_rate
from zonerelay.limits.authority import LimitRequest, TurnRequest, ZoneLimits, leased_grace, margin
from zonerelay.limits.worker import ClockBounds, LeasedTurns
from zonerelay.model.clock import ManualClock
from zonerelay.queue.destination.destinations import HORIZON, Pace, Pacer, Rates, Ticket
from zonerelay.queue.zone.zone import LONGEST_FIRST, take_turn
from zonerelay.routing.destinations.route import DestinationKey, SiteKey

SITE = SiteKey("default mx.example.com:25")
LINE = DestinationKey(SITE)
OTHER = DestinationKey(f"{SITE} mta-sts")
FAST, SLOW = parse_rate("60/1m"), parse_rate("6/1m")

rates = st.builds(Rate, st.integers(1, 50), st.sampled_from([0.1, 1.0, 7.5, 60.0, 3600.0]))


def fullest(times: Sequence[float], seconds: float) -> int:
    """The most that any `seconds` hold."""
    times, first, most = sorted(times), 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - seconds:
            first += 1
        most = max(most, last + 1 - first)
    return most


def pace(rates: Rates, rate: Rate | None = FAST, line: DestinationKey = LINE, site: SiteKey = SITE) -> Pace:
    found = rates.pace(site, line, rate)
    assert found is not None
    return found


def take(ticket: Ticket, now: float) -> bool:
    if ticket.due > now:
        return False
    ticket.take(now)
    return True


# One rate


few = st.builds(Rate, st.integers(1, 6), st.sampled_from([0.1, 1.0, 7.5, 60.0, 3600.0]))
part = st.one_of(st.sampled_from([0.0, 0.249, 0.3, 0.749]), st.floats(0, 0.749))


@settings(max_examples=100)
@given(rate=few, asks=st.lists(st.tuples(part, st.integers(0, 2), part), min_size=1, max_size=60))
@example(rate=Rate(1, 60.0), asks=[(0.0, 0, 0.0), (0.26, 0, 0.749), (0.0, 0, 0.0)])
@example(rate=Rate(2, 60.0), asks=[(0.0, 0, 0.0), (0.249, 0, 0.749), (0.0, 0, 0.0), (0.0, 0, 0.0)])
def test_no_time_holds_more_turns_than_allowed(rate: Rate, asks: list[tuple[float, int, float]]) -> None:
    """A little late, or after whole intervals; each mail under way for up to ¾ of the margin."""
    pacer, now = Pacer(rate), 1000.0
    seen = []
    for late, pause, delay in asks:
        now = max(now, pacer.next_turn) + late * margin(rate) + pause * pacer.interval
        pacer.take(now)
        seen.append(now + delay * margin(rate))
    assert fullest(seen, rate.seconds) <= rate.count


@given(rate=rates, late=st.lists(st.floats(0, 0.25), min_size=100, max_size=100))
def test_no_turn_is_lost_by_those_who_come_a_little_late(rate: Rate, late: list[float]) -> None:
    pacer, now = Pacer(rate), 1000.0
    pacer.take(now)
    began = now
    for each in late:
        now = max(now, pacer.next_turn + each * margin(rate) * 0.999)
        pacer.take(now)
    assert now <= began + len(late) * pacer.interval + margin(rate) / 4


@pytest.mark.parametrize(
    ("rate", "promised"), [("600/1m", 0.98), ("10/1s", 0.9), ("5000/1h", 0.98), ("100/1d", 0.98)]
)
def test_the_margin_costs_little(rate: str, promised: float) -> None:
    pacer = Pacer(parse_rate(rate))
    assert promised * parse_rate(rate).count <= parse_rate(rate).seconds / pacer.interval


# Starts and turns


def test_batches_start_when_a_turn_is_due_and_not_for_connections_that_come_late() -> None:
    found = pace(Rates(), parse_rate("60/1m"))
    (pacer,) = found.pacers
    tickets = []
    now = 0.0
    while not pacer.is_crowded:
        assert pacer.due <= now
        tickets.append(found.start(now))
        now = pacer.due
    assert len(tickets) == int(HORIZON / pacer.interval)
    # All connections stand at once: mail goes one by one all the same.
    assert [take(ticket, now) for ticket in tickets] == [True, False, False, False]
    assert not pacer.is_crowded
    assert pacer.due == now + pacer.interval


def test_with_a_slow_rate_one_at_a_time_starts() -> None:
    found = pace(Rates(), parse_rate("1/1h"))
    ticket = found.start(0.0)
    assert found.pacers[0].is_crowded
    ticket.take(100.0)
    assert not found.pacers[0].is_crowded
    assert found.pacers[0].due > 3700.0


def test_a_batch_that_ends_without_a_turn_gives_its_start_back() -> None:
    found = pace(Rates(), parse_rate("1/1h"))
    told: list[tuple[SiteKey, bool]] = []
    found._rates.changed = lambda site, earlier: told.append((site, earlier))
    ticket = found.start(10.0)
    ticket.end()
    ticket.end()
    assert found.pacers[0].due == 10.0
    assert not found.pacers[0].is_crowded
    taken = found.start(10.0)
    taken.take(10.0)
    taken.end()
    assert found.pacers[0].due > 3600.0
    assert told == [(SITE, True), (SITE, False)]


def test_every_transaction_of_a_batch_takes_a_turn() -> None:
    found = pace(Rates())
    ticket = found.start(0.0)
    ticket.take(0.0)
    again = ticket.due
    assert again == found.pacers[0].interval
    ticket.take(again)
    ticket.end()
    assert found.pacers[0].pending == 0
    assert found.pacers[0].due == 2 * found.pacers[0].interval


# Several lines at one site, and the zone


def test_without_rates_there_is_nothing() -> None:
    assert Rates().pace(SITE, LINE, None) is None


FAST_INTERVAL = Pacer(FAST).interval
SLOW_INTERVAL = Pacer(SLOW).interval


def test_a_line_never_exceeds_its_own_rate_and_all_together_never_the_fastest() -> None:
    rates = Rates()
    fast, slow = pace(rates, FAST), pace(rates, SLOW, OTHER)
    slow.start(0.0).take(0.0)
    assert fast.start(0.0).due == FAST_INTERVAL
    fast.start(5.0).take(5.0)
    assert slow.start(5.0).due == SLOW_INTERVAL


def test_a_line_without_a_rate_counts_only_for_the_zone() -> None:
    rates = Rates()
    rates.configure(SLOW)
    limited, free = pace(rates, FAST), pace(rates, None, OTHER)
    free.start(0.0).take(0.0)
    assert limited.at_site[0].due < 0
    assert limited.start(0.0).due == SLOW_INTERVAL
    elsewhere = pace(rates, None, DestinationKey("default mx.example.net:25"), SiteKey("x"))
    assert elsewhere.start(0.0).due == SLOW_INTERVAL


@given(
    rates=st.lists(rates, min_size=1, max_size=3),
    asks=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 2)), max_size=150),
)
def test_no_rate_of_a_site_is_exceeded_by_any_line(rates: list[Rate], asks: list[tuple[int, float]]) -> None:
    known = Rates()
    lines = [pace(known, rate, DestinationKey(f"{n}")) for n, rate in enumerate(rates)]
    taken: list[list[float]] = [[] for _ in lines]
    now = 0.0
    for choice, gap in asks:
        line = choice % len(lines)
        now += gap * Pacer(rates[line]).interval
        ticket = lines[line].start(now)
        if take(ticket, now):
            taken[line].append(now)
        ticket.end()
    for times, rate in zip(taken, rates, strict=True):
        assert fullest(times, rate.seconds) <= rate.count
    fastest = min(rates, key=lambda rate: Pacer(rate).interval)
    assert fullest([time for times in taken for time in times], fastest.seconds) <= fastest.count


# Reloads


def test_a_rate_survives_whoever_asked_for_it() -> None:
    rates = Rates()
    pace(rates, parse_rate("1/1h")).start(0.0).take(0.0)
    gc.collect()
    assert pace(rates, parse_rate("1/1h")).start(1.0).due > 3600


def test_another_rate_counts_from_the_last_turn() -> None:
    rates = Rates()
    rates.configure(parse_rate("1/1h"))
    old = pace(rates, parse_rate("1/1h"))
    old.start(0.0).take(0.0)
    rates.configure(FAST)
    assert pace(rates, SLOW).start(0.0).due == SLOW_INTERVAL
    # Whoever still goes by the old settings waits for the new rate's turns too.
    assert old.start(0.0).due == SLOW_INTERVAL
    rates.configure(None)
    assert pace(rates, FAST).start(0.0).due == FAST_INTERVAL


def test_taking_up_the_same_rate_again_changes_nothing() -> None:
    rates = Rates()
    rates.configure(FAST)
    pace(rates, None).start(0.0).take(0.0)
    rates.configure(parse_rate("60/60s"))
    assert rates.zone is not None
    assert rates.zone.due == FAST_INTERVAL


def test_what_is_over_is_forgotten_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.destination.destinations.MAX_BUSY", 10)
    rates = Rates()
    rates._max_busy = 10
    pace(rates, parse_rate("1/1h")).start(0.0).take(0.0)
    for n in range(200):
        ticket = pace(rates, FAST, DestinationKey(f"{n}"), SiteKey(f"{n}")).start(10.0 * n)
        ticket.take(10.0 * n)
        ticket.end()
    del ticket
    gc.collect()
    assert len(rates._busy) <= 25
    assert len(rates._sites) <= 25
    assert pace(rates, parse_rate("1/1h")).start(2000.0).due > 3600


# How long a batch waits for its turns, with a connection in its hands


async def test_a_first_turn_that_a_reload_has_moved_far_away_is_not_waited_for() -> None:
    """Else the connections of the batches under way, the zone's all perhaps, would wait for hours."""
    clock, rates = ManualClock(), Rates()
    quick = pace(rates, parse_rate("10/1s"))
    first, second = (quick.start(clock.monotonic()) for _ in range(2))
    pace(rates, parse_rate("1/1h"))
    assert await take_turn(first, clock)
    assert not await asyncio.wait_for(take_turn(second, clock), 1)


async def test_a_first_turn_that_is_only_late_is_waited_for() -> None:
    clock, rates = ManualClock(), Rates()
    slow = pace(rates, parse_rate(f"1/{LONGEST_FIRST - 10:.0f}s"))
    first, second = (slow.start(clock.monotonic()) for _ in range(2))
    assert await take_turn(first, clock)
    waiting = asyncio.create_task(take_turn(second, clock))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


# Turns of a rate that several workers share: none is taken too close, and none lost for nothing


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
            with nothing_assigned():
                self.limits.exchange(owner.name, request, self.now)

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


class Unsummed(dict[Hashable, int]):
    values = None  # type: ignore[assignment]


def test_the_demand_of_thousands_of_destinations_is_not_summed_for_each() -> None:
    turns, clock, _ = lone("600/1m")
    turns._waiting = Unsummed()
    for line, waiting in (("a", 2), ("b", 3), ("a", 1), ("b", 0), ("c", 0)):
        turns.expect(line, waiting)
    assert turns.due > clock.monotonic()
    assert turns._demand == 1


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
    assert turns.is_forgettable(clock.monotonic())
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
    turns.given(())
    assert not turns.is_forgettable(clock.monotonic())  # or the next batch would have turns of its own
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
        return exchange(limits, name, request, now, **more)

    monkeypatch.setattr(ZoneLimits, "exchange", counting)
    shared("100/1s", 2, 600)
    assert sum(counts.values()) < 600 / 4
