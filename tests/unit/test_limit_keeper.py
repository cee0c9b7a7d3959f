"""What a worker may have of shared limits: with an authority that is scripted, and time that is passed in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from tests.support.queueing import Sink, make_events
from zonerelay.config.units import Rate
from zonerelay.limits.values import AuthorityError, LimitAnswer, LimitRequest, SlotGrant
from zonerelay.limits.worker.keeper import FORGET, SAFE, LimitKeeper
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

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        self.asked.append(request)
        if zone == self.failing:
            raise AuthorityError("read only")
        trouble, self.problem = self.problem, None
        if trouble is not None:
            raise trouble
        held = tuple(
            SlotGrant(each.site, each.destination, max(each.want, each.keep)) for each in request.claims
        )
        return LimitAnswer(0.0, held, tuple(() for _ in request.turns))

    async def close(self) -> None:
        pass


class Kept:
    def __init__(self) -> None:
        self.clock, self.authority, self.sink = ManualClock(), Authority(), Sink()
        self.granted: list[str] = []
        self.keeper = LimitKeeper(
            self.authority,
            self.clock,
            make_events(self.sink, self.clock).limits,
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
    monkeypatch.setattr(LimitKeeper, "_look", lambda keeper, zone, now: looked.append(zone.allowance.name))
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
    for trouble in (AuthorityError("away"), ValueError("a broken row")):
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
