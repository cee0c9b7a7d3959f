"""The simulation of the bench in small: nothing is lost or repeated, limits hold, nobody waits for others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tests.bench.simulate.node import Node
from tests.bench.simulate.run import Result, Simulation, simulate
from tests.bench.simulate.scenarios import SENDERS, Injection, Scenario, limits, scenario
from tests.bench.simulate.store import IndexedStore
from tests.bench.simulate.timeline import NothingLeftError, VirtualClock, VirtualLoop
from tests.bench.simulate.world import Kind
from zonerelay.config.settings import ZoneSettings
from zonerelay.config.units import Rate

T = TypeVar("T")
FAST = Kind(name="fast", share=1.0, domains=100, even=True)
REPORTED = Kind(name=SENDERS, share=0.0, domains=10)


def run(work: Coroutine[Any, Any, T]) -> T:  # Any: what a coroutine sends is nobody's business
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_wait_that_nobody_will_end_is_an_error_and_no_hang() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    loop = VirtualLoop()
    task = loop.create_task(wait())
    with pytest.raises(NothingLeftError):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def small(**changes: object) -> Scenario:
    usual = Scenario(name="small", about="", kinds=(FAST, REPORTED), deliveries=1000, rate=50.0)
    return replace(usual, **changes)  # type: ignore[arg-type]  # fields by name


def facts(result: Result) -> list[object]:
    figures = result.figures
    samples = [replace(sample, rss=0.0, wall=0.0) for sample in figures.samples]
    return [samples, figures.attempts, figures.events, figures.delivered, result.seconds]


@pytest.mark.proof
def test_in_a_mix_of_everything_nothing_is_lost_or_made_twice_no_limit_is_exceeded_and_nobody_waits() -> None:
    mixed = simulate(scenario("mix", deliveries=2500, nodes=2))
    figures = mixed.figures
    assert mixed.faults == []
    assert figures.delivered.total() + figures.returned.total() == figures.accepted + figures.reports
    assert not figures.delivered["dead"] + figures.delivered["silent"] + figures.delivered["nodns"]
    assert figures.delivered["greylisting"]
    for kind in ("bigone", "hosted", "fast"):
        assert figures.wait[kind].percentile(0.99) < 2.0, kind
        assert figures.queue[kind].percentile(0.9) < 4.0, kind


@pytest.mark.proof
def test_the_same_seed_takes_the_same_course_and_another_does_not() -> None:
    one, same, other = (simulate(small(), seed=seed) for seed in (1, 1, 2))
    assert facts(one) == facts(same)
    assert facts(one) != facts(other)


def test_a_delivery_that_the_queue_makes_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forget(store: IndexedStore, changes: object, *, lazy: bool = False) -> None:
        """A store that claims to have written, and hands the deliveries out again."""
        store.release(list(store._claimed))

    monkeypatch.setattr(IndexedStore, "settle", forget)
    plan = small(deliveries=200, zone=ZoneSettings(max_connections=5))
    loop = VirtualLoop()
    faults: list[str] = []

    async def watched() -> None:
        simulation = Simulation(plan, 1, VirtualClock(loop))
        task = asyncio.create_task(simulation.run())
        await asyncio.sleep(20)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        faults.extend(simulation.figures.faults)
        for node in simulation.nodes:
            await node.stop()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(watched())
    assert any("attempted again" in fault for fault in faults)


def test_a_rate_is_used_and_not_exceeded_over_two_nodes() -> None:
    limited = Kind(name="rated", share=1.0, domains=1, limits=limits(4, Rate(120, 60.0)))
    result = simulate(small(kinds=(limited, REPORTED), deliveries=600, nodes=2))
    assert result.faults == []
    took = result.figures.transactions / 2.0  # seconds at the full rate
    assert took <= result.seconds < 1.2 * took


def test_a_relay_that_exceeds_a_connection_limit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Node, "_keeper", lambda node: None)
    crowded = Kind(name="crowded", share=1.0, domains=1, seconds=(5.0, 5.0), limits=limits(4))
    result = simulate(small(kinds=(crowded, REPORTED), deliveries=200, nodes=2))
    assert any("connections to" in fault for fault in result.faults)


@pytest.mark.proof
def test_a_list_holds_up_no_single_message_and_no_attempt_waits_long_for_a_connection() -> None:
    """The list's recipients are all at other hosts, so each attempt needs a place that another gives up."""
    listed = Kind(name="listed", share=0.0, domains=20_000)
    list_ = Injection(at=5.0, kind="listed", recipients=3000, each=1000)
    few = ZoneSettings(max_connections=60)
    plan = small(kinds=(FAST, listed, REPORTED), deliveries=200, rate=10.0, injections=(list_,), zone=few)
    result = simulate(plan)
    assert result.faults == []
    assert result.figures.wait["fast"].longest < 1.0
    assert result.figures.pool.longest < 1.0


@pytest.mark.proof
@pytest.mark.parametrize("name", ["backlog", "hosted"])
def test_a_backlog_at_the_start_holds_up_no_new_message_and_is_not_held_up(name: str) -> None:
    plan = scenario(name, deliveries=150)
    result = simulate(replace(plan, stored=(replace(plan.stored[0], recipients=1400),)))
    assert result.faults == []
    waits = result.figures.wait
    assert waits["fast"].percentile(0.95) < 5.0
    assert waits[plan.stored[0].kind].longest < 60.0
