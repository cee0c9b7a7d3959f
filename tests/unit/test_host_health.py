"""Hosts that were found dead: how long others are tried before them, and who tries them again."""

from __future__ import annotations

import pytest

from zonerelay.delivery.connection.session_limits import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_REMEMBERED,
    PROBE_TIME,
    DeadHosts,
)
from zonerelay.model.clock import ManualClock

KEY = "192.0.2.1:25"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> DeadHosts:
    return DeadHosts(clock)


def test_a_host_that_failed_is_down_for_a_while_and_then_one_may_try_it(
    clock: ManualClock, health: DeadHosts
) -> None:
    assert not health.is_down(KEY)
    health.failed(KEY)
    clock.advance(FIRST_PAUSE - 1)
    assert health.is_down(KEY)
    clock.advance(1)
    assert [health.is_down(KEY) for _ in range(3)] == [False, True, True]


def test_each_failed_probe_doubles_the_pause_up_to_the_longest(clock: ManualClock, health: DeadHosts) -> None:
    pauses = []
    for _ in range(7):
        health.failed(KEY)
        pause = 0
        while health.is_down(KEY):
            clock.advance(1)
            pause += 1
        pauses.append(pause)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert LONGEST_PAUSE == 600


def test_many_that_fail_together_are_one_failure(clock: ManualClock, health: DeadHosts) -> None:
    for _ in range(10):
        health.failed(KEY)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(KEY)


def test_a_host_that_talks_is_forgotten_with_all_its_failures(clock: ManualClock, health: DeadHosts) -> None:
    health.failed(KEY)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(KEY)
    health.failed(KEY)
    health.talked(KEY)
    assert not health.is_down(KEY)
    assert not health
    health.failed(KEY)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(KEY)


def test_a_probe_that_never_reports_back_makes_way_for_another(clock: ManualClock, health: DeadHosts) -> None:
    health.failed(KEY)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(KEY)
    clock.advance(PROBE_TIME)
    assert not health.is_down(KEY)


def test_looking_makes_nobody_a_probe(clock: ManualClock, health: DeadHosts) -> None:
    health.failed(KEY)
    assert health.looks_down(KEY)
    clock.advance(FIRST_PAUSE)
    assert [health.looks_down(KEY) for _ in range(3)] == [False] * 3
    assert not health.is_down(KEY)


def test_memory_is_bounded(health: DeadHosts) -> None:
    for number in range(MAX_REMEMBERED + 10):
        health.failed(f"host{number}:25")
    assert not health.is_down("host0:25")
    assert health.is_down(f"host{MAX_REMEMBERED + 9}:25")
    assert health
