"""When reference cycles are looked for: the young often, all of the memory seldom."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator

import pytest

from zonerelay.cycles import (
    FULL,
    FULL_AFTER,
    FULL_AT_LAST,
    IDLE_STEP,
    OLDER,
    STEP,
    YOUNG,
    CycleRounds,
    Rounds,
)

BLOCKS = 1_000_000
MADE = 60_000


@pytest.fixture
def _as_before() -> Iterator[None]:
    gc.collect()
    yield
    gc.unfreeze()


def after(seconds: float, *, busy: bool, blocks: int = BLOCKS) -> int:
    """What is looked at when so much time has passed since all of the memory was."""
    rounds = Rounds(now=0.0, cpu=0.0, blocks=BLOCKS)
    return rounds.next(now=seconds, cpu=0.09 if busy else 0.0001, blocks=blocks)


def test_the_middle_generation_has_every_fifth_turn() -> None:
    rounds = Rounds(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = [rounds.next(now=n / 10, cpu=n / 10, blocks=BLOCKS) for n in range(10)]
    assert found == [YOUNG, YOUNG, YOUNG, YOUNG, OLDER] * 2


def test_all_of_the_memory_is_looked_at_when_the_loop_is_idle_and_it_was_long_ago() -> None:
    assert after(FULL_AFTER - 1, busy=False) == YOUNG
    assert after(FULL_AFTER, busy=False) == FULL
    assert after(FULL_AFTER, busy=True) == YOUNG


def test_a_loop_that_is_never_idle_waits_no_longer_than_an_hour() -> None:
    assert after(FULL_AT_LAST - 1, busy=True) == YOUNG
    assert after(FULL_AT_LAST, busy=True) == FULL


def test_a_loop_that_has_nothing_to_do_is_woken_seldom() -> None:
    rounds = Rounds(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = []
    for n, cpu in enumerate([0.05, 0.0501, 0.0502, 0.09], 1):
        rounds.next(now=n / 10, cpu=cpu, blocks=BLOCKS)
        found.append(rounds.pause)
    assert found == [STEP, IDLE_STEP, IDLE_STEP, STEP]


def test_memory_that_grows_is_looked_at_at_once_and_then_not_before_it_has_grown_again() -> None:
    assert after(1, busy=True, blocks=2 * BLOCKS) == FULL
    rounds = Rounds(now=0.0, cpu=0.0, blocks=BLOCKS)
    rounds.collected_all(now=1.0, blocks=2 * BLOCKS)
    assert rounds.next(now=2.0, cpu=2.0, blocks=3 * BLOCKS) == YOUNG
    assert rounds.next(now=3.0, cpu=3.0, blocks=4 * BLOCKS) == FULL


@pytest.mark.usefixtures("_as_before")
async def test_a_queue_that_frees_as_much_as_it_makes_does_not_pile_up_young_objects() -> None:
    """By its counts alone the interpreter never looked, and then at everything in one go."""
    rounds = CycleRounds()
    rounds.start()
    try:
        waiting: deque[list[int]] = deque(([] for _ in range(MADE)), maxlen=MADE)
        rounds._step(asyncio.get_running_loop())
        waiting.extend([] for _ in range(MADE))
        assert len(gc.get_objects(generation=0)) > MADE // 2
        rounds._step(asyncio.get_running_loop())
        assert len(gc.get_objects(generation=0)) < 1000
    finally:
        rounds.stop()


@pytest.mark.usefixtures("_as_before")
async def test_rounds_that_are_stopped_leave_the_interpreter_as_it_was() -> None:
    before = gc.get_threshold()
    rounds = CycleRounds()
    rounds.stop()
    rounds.start()
    assert gc.get_threshold() != before
    rounds.stop()
    assert gc.get_threshold() == before
