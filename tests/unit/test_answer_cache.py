from __future__ import annotations

import asyncio

import pytest

from zonerelay.model.clock import ManualClock
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus
from zonerelay.routing.dns.resolver import AnswerCache


class Asked:
    """Answers with a counter; waits for `gate` when it is closed."""

    def __init__(self, clock: ManualClock, ttl: float = 10.0) -> None:
        self.count = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._clock = clock
        self._ttl = ttl

    async def __call__(self) -> DnsAnswer[str]:
        self.count += 1
        await self.gate.wait()
        return DnsAnswer(DnsStatus.OK, (str(self.count),), self._clock.monotonic() + self._ttl)


async def test_an_answer_is_reused_until_it_expires() -> None:
    clock = ManualClock()
    cache: AnswerCache[str] = AnswerCache(10, clock)
    ask = Asked(clock)
    assert (await cache.get(("A", "x"), ask)).records == ("1",)
    clock.step(-3600)  # an operator setting the clock changes nothing
    clock.advance(9.9)
    assert (await cache.get(("A", "x"), ask)).records == ("1",)
    clock.advance(0.2)
    assert (await cache.get(("A", "x"), ask)).records == ("2",)


async def test_the_oldest_answer_makes_room() -> None:
    clock = ManualClock()
    cache: AnswerCache[str] = AnswerCache(2, clock)
    ask = Asked(clock)
    for name in ("a", "b", "c", "b", "a"):
        await cache.get(("A", name), ask)
        assert len(cache) <= 2
    assert ask.count == 4  # b was still there, a was not


async def test_equal_questions_are_asked_once_and_a_caller_that_leaves_does_not_matter() -> None:
    clock = ManualClock()
    cache: AnswerCache[str] = AnswerCache(10, clock)
    ask = Asked(clock)
    ask.gate.clear()
    callers = [asyncio.create_task(cache.get(("A", "x"), ask)) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    ask.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await callers[0]
    assert [(await caller).records for caller in callers[1:]] == [("1",), ("1",)]
    assert ask.count == 1


async def test_closing_gives_up_what_is_being_asked() -> None:
    clock = ManualClock()
    cache: AnswerCache[str] = AnswerCache(10, clock)
    ask = Asked(clock)
    ask.gate.clear()
    caller = asyncio.create_task(cache.get(("A", "x"), ask))
    await asyncio.sleep(0)
    await cache.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
