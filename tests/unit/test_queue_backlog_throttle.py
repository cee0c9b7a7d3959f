"""While new mail keeps the processor busy, mail that has waited before starts at a limited rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import NOW, PlanBed
from tests.support.queueing import NO_HOST
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import FRESH_WEIGHT
from zonerelay.queue.selection import BUSY, FRESH_STARTS, LEAST, LOOK, PATIENCE, BacklogThrottle
from zonerelay.telemetry.metrics.instruments import CpuDemand
from zonerelay.telemetry.metrics.metrics import Metrics

SATURATED, IDLE = 0.95, 0.2
PUT_OFF = NOW - 1
"""`next_attempt` of what was deferred before."""


def run(throttle: BacklogThrottle, seconds: float, *, fresh: int, other: int, busy: float) -> int:
    """So many want to start in each look; how many of the others did."""
    started = 0
    for _ in range(round(seconds / LOOK)):
        for number in range(max(fresh, other)):
            if number < fresh:
                throttle.started(is_fresh=True)
            if number < other and not throttle.is_used_up:
                throttle.started(is_fresh=False)
                started += 1
        throttle.look(LOOK, busy)
    return started


@pytest.fixture
def throttle() -> BacklogThrottle:
    return BacklogThrottle()


def test_a_backlog_is_slowed_down_to_its_least_while_new_mail_saturates_the_loop(
    throttle: BacklogThrottle,
) -> None:
    run(throttle, 2.0, fresh=90, other=60, busy=SATURATED)
    assert throttle.rate == LEAST
    assert run(throttle, 10.0, fresh=90, other=60, busy=SATURATED) == pytest.approx(10 * LEAST, rel=0.1)
    run(throttle, 10.0, fresh=300, other=60, busy=SATURATED)
    assert throttle.rate == pytest.approx(3000 / FRESH_STARTS, rel=0.1)


def test_where_it_lasts_the_rest_gets_the_part_that_it_has_of_the_turns(throttle: BacklogThrottle) -> None:
    run(throttle, PATIENCE + 10.0, fresh=100, other=60, busy=SATURATED)
    assert throttle.rate == pytest.approx(1000 / FRESH_WEIGHT, rel=0.01)
    run(throttle, PATIENCE + 10.0, fresh=0, other=60, busy=SATURATED)
    run(throttle, 5.0, fresh=200, other=60, busy=SATURATED)
    assert throttle.rate == pytest.approx(2000 / FRESH_STARTS, rel=0.1)


def test_a_queue_that_is_restrained_by_little_new_mail_keeps_its_least(throttle: BacklogThrottle) -> None:
    run(throttle, 5.0, fresh=20, other=60, busy=SATURATED)
    assert run(throttle, 1.0, fresh=20, other=60, busy=SATURATED) == pytest.approx(LEAST, rel=0.1)


@pytest.mark.parametrize(("fresh", "busy"), [(0, SATURATED), (10, SATURATED), (90, BUSY - 0.01)])
def test_without_new_mail_with_a_trickle_of_it_or_with_time_left_nothing_is_held_back(
    fresh: int, busy: float, throttle: BacklogThrottle
) -> None:
    assert run(throttle, 5.0, fresh=fresh, other=60, busy=busy) == 50 * 60
    assert throttle.rate == math.inf


def test_the_rate_rises_when_the_loop_has_time_again_and_ends_with_the_new_mail(
    throttle: BacklogThrottle,
) -> None:
    run(throttle, 3.0, fresh=90, other=60, busy=SATURATED)
    assert run(throttle, 3.0, fresh=90, other=60, busy=IDLE) > 900
    assert throttle.rate == math.inf
    run(throttle, 3.0, fresh=90, other=60, busy=SATURATED)
    assert throttle.rate < 100
    run(throttle, 3.0, fresh=0, other=60, busy=SATURATED)
    assert throttle.rate == math.inf


async def test_it_is_looked_at_while_mail_that_has_waited_starts_and_not_longer() -> None:
    begun = []

    def busy() -> float:
        begun.append(True)
        return IDLE

    throttle = BacklogThrottle(busy)
    throttle.started(is_fresh=True)
    assert not begun
    for _ in range(3):
        throttle.started(is_fresh=False)
    assert len(begun) == 1
    throttle.look(LOOK, IDLE)
    assert throttle.is_looked_at
    throttle.look(LOOK, IDLE)
    assert not throttle.is_looked_at
    throttle.started(is_fresh=False)
    assert len(begun) == 2
    throttle.stop()


def test_what_started_while_nobody_looked_is_not_taken_for_a_flood(throttle: BacklogThrottle) -> None:
    for _ in range(100_000):
        throttle.started(is_fresh=True)
    run(throttle, 1.0, fresh=0, other=60, busy=SATURATED)
    assert throttle.rate == math.inf


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1), st.floats(0.01, 5))))
def test_nothing_stands_still_longer_than_until_the_next_look(
    looks: list[tuple[int, int, float, float]],
) -> None:
    throttle = BacklogThrottle()
    for fresh, other, busy, seconds in looks:
        for _ in range(fresh):
            throttle.started(is_fresh=True)
        for _ in range(other):
            if not throttle.is_used_up:
                throttle.started(is_fresh=False)
        assert throttle.is_looked_at or not throttle.is_used_up
        throttle.look(seconds, busy)
        assert not throttle.is_used_up


class Zone(PlanBed):
    """A zone's plan for known hosts and others, some with deferred mail, some with fresh."""

    def __init__(self, *, known: bool = True) -> None:
        self.throttle = BacklogThrottle()
        super().__init__(proven=known, driver={"throttle": self.throttle}, max_connections=4)

    def put_in(self, name: str, count: int, **more: Any) -> None:
        for number in range(count):
            self.add(f"{name}{number}.example", **more)

    def use_up(self) -> None:
        run(self.throttle, 3.0, fresh=50, other=50, busy=SATURATED)
        while not self.throttle.is_used_up:
            self.throttle.started(is_fresh=False)

    def let_go(self) -> None:
        for _ in range(40):
            self.throttle.look(LOOK, IDLE)

    def send(self) -> list[str]:
        """The names that batches go to until nothing may start any more."""
        return [each.domain[:3] for each in self.sent()]


@pytest.mark.parametrize(
    ("known", "priority"), [(True, Priority.NORMAL), (False, Priority.NORMAL), (True, Priority.HIGH)]
)
def test_only_fresh_mail_starts_until_the_next_look_and_then_the_rest(
    *, known: bool, priority: Priority
) -> None:
    zone = Zone(known=known)
    zone.use_up()
    zone.put_in("old", 5, due=PUT_OFF, priority=priority)
    zone.put_in("new", 5)
    assert zone.send() == ["new"] * 5
    assert zone.queue.active == 0
    zone.let_go()
    assert zone.send() == ["old"] * 5


def test_starts_are_counted_by_what_is_sent() -> None:
    zone = Zone()
    zone.put_in("old", 3, due=PUT_OFF)
    zone.put_in("new", 2)
    zone.throttle.started(is_fresh=False)
    zone.send()
    assert (zone.throttle._fresh, zone.throttle._other) == (2, 1 + 3)


def test_fresh_mail_for_a_dead_host_counts_although_it_does_not_start() -> None:
    """The probes of 50,000 dead domains took the processor from the mail that still arrived for them."""
    zone = Zone(known=False)
    zone.add("dead.example")
    assert zone.start() == ["dead.example"]
    for _ in range(3):
        zone.throttle.started(is_fresh=False)
    zone.finish("dead.example", NO_HOST)
    zone.add("dead.example", recipients=2)
    zone.add("dead.example", due=PUT_OFF)
    assert zone.start() == []
    assert (zone.throttle._fresh, zone.throttle._other) == (1, 3)


def test_a_thread_that_works_needs_a_processor_and_one_that_sleeps_does_not(tmp_path: Path) -> None:
    """Other programs may hold the processor as long as they like: that counts as need."""
    waited = tmp_path / "schedstat"
    waited.write_text("0 0 0\n")
    demand = CpuDemand(schedstat=waited)
    assert demand.since_last() == 0.0
    end = demand._at + 0.02
    while demand.since_last() < 0.5 and demand._at < end + 1:
        sum(range(10_000))
    assert demand._at < end + 1
    waited.write_text("0 99000000000 0\n")
    assert demand.since_last() == 1.0
    waited.unlink()
    assert demand.since_last() == 0.0


def test_how_long_it_lasted_is_shown() -> None:
    metrics = Metrics()
    metrics.read_number("zonerelay_restrained_seconds_total", lambda: 12.5)
    assert "zonerelay_restrained_seconds_total 12.5" in metrics.exposition().decode()
