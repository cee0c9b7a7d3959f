from __future__ import annotations

import asyncio

import pytest

from zonerelay.model.clock import ManualClock
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus
from zonerelay.routing.dns.resolver import AnswerCache


class Asked:
    """A cache of some answers, which count what was asked and live for 10 s; they wait for `gate`."""

    def __init__(self, capacity: int = 10) -> None:
        self.clock = ManualClock()
        self.cache: AnswerCache[str] = AnswerCache(capacity, self.clock)
        self.count = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, name: str = "x") -> DnsAnswer[str]:
        return await self.cache.get(("A", name), self._ask)

    async def _ask(self) -> DnsAnswer[str]:
        self.count += 1
        await self.gate.wait()
        return DnsAnswer(DnsStatus.OK, (str(self.count),), self.clock.monotonic() + 10.0)


async def test_an_answer_is_reused_until_it_expires() -> None:
    asked = Asked()
    assert (await asked.get()).records == ("1",)
    asked.clock.step(-3600)  # an operator setting the clock changes nothing
    asked.clock.advance(9.9)
    assert (await asked.get()).records == ("1",)
    asked.clock.advance(0.2)
    assert (await asked.get()).records == ("2",)


async def test_the_oldest_answer_makes_room() -> None:
    asked = Asked(2)
    for name in ("a", "b", "c", "b", "a"):
        await asked.get(name)
        assert len(asked.cache) <= 2
    assert asked.count == 4  # b was still there, a was not


async def test_equal_questions_are_asked_once_and_a_caller_that_leaves_does_not_matter() -> None:
    asked = Asked()
    asked.gate.clear()
    callers = [asyncio.create_task(asked.get()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    asked.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await callers[0]
    assert [(await caller).records for caller in callers[1:]] == [("1",), ("1",)]
    assert asked.count == 1


async def test_closing_gives_up_what_is_being_asked() -> None:
    asked = Asked()
    asked.gate.clear()
    caller = asyncio.create_task(asked.get())
    await asyncio.sleep(0)
    await asked.cache.close()
    with pytest.raises(asyncio.CancelledError):
        await caller
