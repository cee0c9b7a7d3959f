"""Limits over workers: what a worker may have of them, and that none is exceeded."""

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.event_log import EventLog, events_into
from zonerelay.config.units import Rate
from zonerelay.limits import authority
from zonerelay.limits.authority import QUANTUM, LimitRequest, SlotClaim, SlotGrant, TurnRequest, ZoneLimits
from zonerelay.limits.worker import FORGET, KEEP, SAFE, LimitKeeper
from zonerelay.model.clock import ManualClock

LEASE = 15.0


class Authority:
    """Gives whatever is wanted; `trouble` comes instead of the next answer."""

    name = "the test"
    lease = LEASE
    failing = ""

    def __init__(self) -> None:
        self.asked: list[LimitRequest] = []
        self.problem: Exception | None = None

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        self.news, self.back = news, back

    async def exchange(self, zone: str, request: LimitRequest) -> authority.LimitAnswer:
        self.asked.append(request)
        if zone == self.failing:
            raise authority.AuthorityError("read only")
        trouble, self.problem = self.problem, None
        if trouble is not None:
            raise trouble
        held = tuple(
            SlotGrant(each.site, each.destination, max(each.want, each.keep)) for each in request.claims
        )
        return authority.LimitAnswer(0.0, held, tuple(() for _ in request.turns))

    async def close(self) -> None:
        pass


class Kept:
    def __init__(self) -> None:
        self.clock, self.authority, self.sink = ManualClock(), Authority(), EventLog()
        self.granted: list[str] = []
        self.keeper = LimitKeeper(
            self.authority,
            self.clock,
            events_into(self.sink, self.clock),
            granted=self.granted.append,
            relieve=lambda zone: None,
        )
        self.zone = self.keeper.zone("z")

    def may_start(self, zone_limit: int = 20) -> bool:
        return self.zone.may_start("a", "", 10, zone_limit, 1)

    async def settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@asynccontextmanager
async def kept() -> AsyncIterator[Kept]:
    found = Kept()
    await found.keeper.start()
    try:
        yield found
    finally:
        await found.keeper.close()


async def test_a_zone_that_is_dismissed_leaves_nothing_behind() -> None:
    """Each mailbox of the outbox has a zone while it has mail, and there may be any number of mailboxes."""
    async with kept() as it:
        for number in range(100):
            zone = it.keeper.zone(f"mailbox/{number}")
            assert not zone.may_start("a", "", 10, 20, 1)
        await it.settled()
        assert it.keeper.zone("mailbox/0").may_start("a", "", 10, 20, 1)  # it is kept while it has slots
        del zone
        for _ in range(5):
            it.clock.advance(KEEP)
            it.keeper._tick()
            await it.settled()
        gc.collect()
        assert it.keeper.figures().keys() == {"z"}


async def test_who_was_refused_because_a_lease_had_run_out_hears_when_it_is_renewed() -> None:
    async with kept() as it:
        assert not it.may_start()
        await it.settled()
        assert it.may_start()
        it.clock.advance(LEASE * SAFE + 0.1)
        assert not it.may_start()
        grants = len(it.granted)
        it.authority.news("z")
        await it.settled()
        assert len(it.granted) > grants
        assert it.may_start()


async def test_the_authority_hears_of_another_limit_of_the_zone_at_once() -> None:
    async with kept() as it:
        it.may_start()
        await it.settled()
        assert it.may_start(zone_limit=5)
        await it.settled()
        assert it.authority.asked[-1].zone_limit == 5
        asked = len(it.authority.asked)
        assert it.may_start(zone_limit=5)
        await it.settled()
        assert len(it.authority.asked) == asked


async def test_zones_that_want_nothing_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(LimitKeeper, "_look", lambda keeper, zone, now: looked.append(zone.name))
    async with kept() as it:
        for n in range(100):
            it.keeper.zone(f"mailbox{n}")
        it.may_start()
        await it.settled()
        asked = len(it.authority.asked)
        it.authority.back()
        await it.settled()
        assert len(it.authority.asked) == asked + 1
        it.keeper._tick()
        assert looked == ["z"]


async def test_after_trouble_of_any_kind_everything_is_asked_for_again() -> None:
    for trouble in (authority.AuthorityError("away"), ValueError("a broken row")):
        async with kept() as it:
            it.authority.problem = trouble
            assert not it.may_start()
            await it.settled()
            assert it.sink.named("limits-lost")
            it.authority.news("z")
            await it.settled()
            assert it.may_start()


async def test_an_outage_is_told_once_although_other_zones_are_answered() -> None:
    """A store that took no writes answered zones without any: 100 destinations a second said lost and
    restored.
    """
    async with kept() as it:
        other = it.keeper.zone("other")
        it.authority.failing = "z"
        it.may_start()
        other.may_start("a", "", 10, 20, 1)
        for _ in range(5):
            for news in ("z", "other"):
                it.authority.news(news)
                await it.settled()
            it.authority.back()
        assert [lost["reason"] for lost in it.sink.named("limits-lost")] == ["read only"]
        assert "read only" in (it.keeper.problem or "")
        it.authority.failing = ""
        it.authority.back()
        await it.settled()
        assert it.keeper.problem is None


async def test_turns_that_were_idle_are_declared_again_once_they_are_used() -> None:
    """Seed 2554: a supervisor that was started again gave a second turn within a rate's time."""
    async with kept() as it:
        rate = Rate(1, 4.0)
        turns = it.keeper.turns("z", "a", "", rate, None)
        turns.expect("line", 1)
        assert turns.due > it.clock.monotonic()
        await it.settled()
        it.clock.advance(FORGET + 1)
        it.keeper._tick()
        assert turns.due > it.clock.monotonic()
        await it.settled()
        turns.given((it.clock.monotonic(),))
        it.authority.back()
        await it.settled()
        assert [known.site for known, _ in it.authority.asked[-1].known_turns] == ["a"]
        assert it.keeper.turns("z", "a", "", rate, None) is turns


# Limits over all workers; that none is ever exceeded is proved in tests/store/test_limit_authorities.py


def say(
    ledger: ZoneLimits, name: str, *claims: SlotClaim, now: float = 0.0, zone: int = 20
) -> authority.LimitAnswer:
    return ledger.exchange(name, LimitRequest(zone, claims), now)[0]


@pytest.fixture
def ledger() -> ZoneLimits:
    return ZoneLimits()


def test_two_who_want_everything_share_it_equally(ledger: ZoneLimits) -> None:
    assert say(ledger, "one", SlotClaim("a", "", 20, want=20)).held == (SlotGrant("a", "", 20),)
    _, news = ledger.exchange("two", LimitRequest(20, (SlotClaim("a", "", 20, want=20),)), 0.0)
    assert news == {"one"}
    has = SlotGrant("a", "", 20)
    for held in say(ledger, "one").held:
        has = held
    while has.revoked:
        keep = has.slots - has.revoked
        (has,) = say(ledger, "one", SlotClaim("a", "", 20, keep, has.revoked, want=20)).held
    assert has.slots == 10
    assert ledger.allocator.owners["two"].slots == 10


def test_a_full_zone_gives_way_to_another_site(ledger: ZoneLimits) -> None:
    say(ledger, "one", SlotClaim("a", "", 6, want=6), zone=6)
    _, news = ledger.exchange("two", LimitRequest(6, (SlotClaim("b", "", 6, want=6),)), 0.0)
    assert news == {"one"}
    assert say(ledger, "one", zone=6).held == (SlotGrant("a", "", 6, 3),)


def test_the_last_slot_is_asked_back_after_a_while_and_once(ledger: ZoneLimits) -> None:
    say(ledger, "one", SlotClaim("a", "", 1, want=1), zone=1)
    for now, revoked in ((0.0, 0), (QUANTUM - 0.1, 0), (QUANTUM, 1), (QUANTUM + 0.1, 1)):
        say(ledger, "two", SlotClaim("b", "", 1, want=1), now=now, zone=1)
        assert ledger.allocator.owners["one"].leases["a", ""].revoked == revoked, now


def test_a_destination_with_fewer_slots_takes_them_from_its_sites(ledger: ZoneLimits) -> None:
    say(ledger, "one", SlotClaim("a", "", 4, want=3))
    assert say(ledger, "two", SlotClaim("a", "few", 2, want=2)).held[0].slots == 1


def test_ones_own_destinations_share_what_it_has(ledger: ZoneLimits) -> None:
    say(ledger, "one", SlotClaim("a", "", 4, want=4), zone=4)
    held = say(ledger, "one", SlotClaim("b", "", 4, want=4), zone=4).held
    assert SlotGrant("a", "", 4, 2) in held


def test_the_smaller_of_two_configurations_counts(ledger: ZoneLimits) -> None:
    say(ledger, "old", SlotClaim("a", "", 10, want=3))
    assert say(ledger, "new", SlotClaim("a", "", 4, want=4)).held[0].slots == 1
    assert say(ledger, "old", SlotClaim("a", "", 10, keep=3, want=10)).held[0].slots == 3


def test_what_is_too_much_for_a_lowered_limit_goes_back_although_nobody_waits(ledger: ZoneLimits) -> None:
    say(ledger, "one", SlotClaim("a", "", 10, want=10))
    say(ledger, "two", SlotClaim("b", "", 10, want=10))
    (held,) = say(ledger, "one", SlotClaim("a", "", 4, keep=10, want=10)).held
    assert (held.slots, held.revoked) == (10, 6)
    (held,) = say(ledger, "one", SlotClaim("a", "", 4, keep=4, back=6, want=4)).held
    assert (held.slots, held.revoked) == (4, 0)
    _, news = ledger.exchange("one", LimitRequest(6), 0.0)
    assert news == {"two"}
    assert say(ledger, "two").held == (SlotGrant("b", "", 10, 7),)


def test_who_is_not_heard_of_loses_what_it_had(ledger: ZoneLimits) -> None:
    ledger.exchange("one", LimitRequest(20, (SlotClaim("a", "", 4, want=4),)), 0.0, until=10.0)
    assert say(ledger, "two", SlotClaim("a", "", 4, want=4), now=9.9).held == (
        SlotGrant("a", "", 0, waiters=1),
    )
    assert say(ledger, "two", now=10.0).held == (SlotGrant("a", "", 4),)


# Turns


ZONE = 6
owners = st.sampled_from(["one", "two", "three"])


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
    calendar = authority.Calendar()
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


class _Counted(list[authority.SendTime]):
    """Counts the items that are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_thousands_of_turns_are_not_searched_for_each_new_one(ledger: ZoneLimits) -> None:
    turns = _Counted([authority.SendTime(0.0, 0.1, authority.ZONE)])
    ledger.calendars[authority.ZONE] = authority.Calendar(turns)
    asks = tuple(TurnRequest(f"s{each}", "", 60.0, 0.1, 1, after=each % 7 / 10) for each in range(2000))
    ledger.exchange("one", LimitRequest(ZONE, turns=asks), 0.0)
    assert len(turns) == 1 + len(asks)
    assert turns.reads < 60 * len(asks)


def test_turns_that_bind_nobody_are_forgotten() -> None:
    calendar = authority.Calendar()
    for number in range(100):
        calendar.add(number * 0.1, 0.1, "")
    calendar.forget(9.95)
    assert len(calendar.turns) == 1
    calendar.forget(30.0)
    assert not calendar.turns


def test_a_request_for_many_destinations_goes_through_all_calendars_once(
    ledger: ZoneLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[authority.Calendar] = []
    monkeypatch.setattr(authority.Calendar, "forget", lambda calendar, _: forgotten.append(calendar))
    asks = tuple(TurnRequest(f"s{number}", "", 1.0, 0.0, 1) for number in range(100))
    for now in (0.0, 0.1):
        ledger.exchange("one", LimitRequest(ZONE, turns=asks), now)
    assert len(forgotten) == 100


def test_a_turn_that_is_given_back_goes_to_whoever_asks_next(ledger: ZoneLimits) -> None:
    ask = TurnRequest("a", "", 1.0, 0.5, 3)
    (first,) = ledger.exchange("one", LimitRequest(ZONE, turns=(ask,)), 0.0)[0].turns
    ledger.exchange("two", LimitRequest(ZONE, turns=(ask,)), 0.0)
    ledger.exchange("one", LimitRequest(ZONE, unused=(("a", first[1]),)), 0.1)
    (later,) = ledger.exchange("three", LimitRequest(ZONE, turns=(ask,)), 0.1)[0].turns
    assert later[0] == first[1]


def test_a_turn_of_the_zone_stays_that_another_site_has_at_the_same_moment(ledger: ZoneLimits) -> None:
    """As while a new rate of the zone is known to one worker, and not yet to another."""
    old, new = TurnRequest("a", "", 0.1, 0.0, 1), TurnRequest("b", "", 0.2, 0.25, 1)
    for ask in (old, new):
        assert ledger.exchange(ask.site, LimitRequest(ZONE, turns=(ask,)), 0.0)[0].turns == ((0.0,),)
    ledger.exchange("a", LimitRequest(ZONE, unused=(("a", 0.0),)), 0.0)
    assert ledger.exchange("b", LimitRequest(ZONE, turns=(new,)), 0.0)[0].turns == ((0.25,),)


def test_no_turn_is_earlier_than_it_is_wanted(ledger: ZoneLimits) -> None:
    ask = TurnRequest("a", "", 1.0, 0.0, 2, after=7.0)
    assert ledger.exchange("one", LimitRequest(ZONE, turns=(ask,)), 0.0)[0].turns == ((7.0, 8.0),)


def test_one_that_died_while_it_waited_is_given_nothing_that_others_give_back(ledger: ZoneLimits) -> None:
    everything = SlotClaim("a", "", 3, want=3)

    def ask(name: str, now: float, *claims: SlotClaim, all_of_it: bool = False) -> int:
        request = LimitRequest(20, claims, everything=all_of_it)
        answer, _ = ledger.exchange(name, request, now, until=now + 15.0)
        return sum(held.slots for held in answer.held)

    assert ask("dead", 0.0, SlotClaim("a", "", 3, want=1)) == 1
    assert ask("other", 0.0, everything) == 2
    assert ask("dead", 0.1, SlotClaim("a", "", 3, 1, 0, 3)) == 1
    assert ask("other", 3.0, all_of_it=True) == 0
    assert ask("next", 4.0, everything) == 2, "all but what the dead one had"
    assert ask("next", 15.5, SlotClaim("a", "", 3, 2, 0, 3)) == 3
