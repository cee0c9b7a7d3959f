"""The judges of long tests are right: the bench's simulation, three nodes, receivers."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.simulate.node import Node
from tests.bench.simulate.run import Simulation, simulate
from tests.bench.simulate.scenarios import SENDERS, Injection, Scenario, limits, scenario
from tests.bench.simulate.store import IndexedStore
from tests.bench.simulate.timeline import NothingLeftError, VirtualClock, VirtualLoop
from tests.bench.simulate.world import Kind
from tests.support.nodes.judge import Fault, above_rate, judge, most_within
from tests.support.nodes.sink import Arrival, Begun
from tests.support.receivers.ledger import Promise, Tally
from tests.unit.test_rates import fullest
from zonerelay.config.settings import ZoneSettings

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


# The judge of the three-node tests finds what must not be


FAULT = Fault("kill", frozenset({"a"}), at=10.0, known=10.1)


def arrivals(*copies: tuple[str, float, float]) -> dict[str, list[Arrival]]:
    return {"t1": [Arrival("t1", node, began, ended, began) for node, began, ended in copies]}


def test_what_was_acknowledged_and_never_came_is_missing() -> None:
    assert judge({"t1", "t2"}, arrivals(("a", 1, 2)), []).missing == {"t2"}


def test_a_copy_is_explained_by_a_fault_of_the_node_that_sent_the_other_just_then() -> None:
    verdict = judge({"t1"}, arrivals(("a", 9.9, 10.0), ("b", 13.0, 13.1)), [FAULT])
    assert verdict.repeated == {"kill": 1}
    assert not verdict.unexplained


def test_a_copy_of_what_was_done_long_before_the_fault_or_begun_after_it_is_not_explained() -> None:
    for copies in ((("a", 5.0, 5.1), ("b", 13.0, 13.1)), (("a", 11.0, 11.1), ("b", 13.0, 13.1))):
        assert judge({"t1"}, arrivals(*copies), [FAULT]).unexplained


def test_a_copy_is_not_explained_by_the_fault_of_a_node_that_did_not_send_it() -> None:
    assert judge({"t1"}, arrivals(("c", 9.9, 10.0), ("b", 13.0, 13.1)), [FAULT]).unexplained


def test_a_machine_that_is_late_with_everything_explains_that_much_more() -> None:
    for copy in (("a", 8.0, 8.6), ("a", 10.5, 10.6)):
        copies = arrivals(copy, ("b", 13.0, 13.1))
        assert judge({"t1"}, copies, [FAULT], slack=0.3).unexplained
        assert not judge({"t1"}, copies, [FAULT], slack=0.5).unexplained


def test_a_copy_that_may_have_begun_in_time_was_only_read_late() -> None:
    late = Arrival("t1", "a", began=10.4, ended=10.5, earliest=10.0)
    assert not judge({"t1"}, {"t1": [late, *arrivals(("b", 13.0, 13.1))["t1"]]}, [FAULT]).unexplained


def test_two_nodes_that_send_it_at_the_same_time_are_found() -> None:
    assert judge({"t1"}, arrivals(("c", 20.0, 20.5), ("b", 20.2, 20.6)), [FAULT]).at_once


def begun(*moments: float, late: float = 0.0) -> list[Begun]:
    return [Begun("a", "limited.test", at, at + late) for at in moments]


def test_more_than_a_rate_allows_is_found_in_any_second() -> None:
    assert not above_rate(begun(0.0, 0.5, 1.0, 1.5), 2, 1.0)
    ((first, last),) = above_rate(begun(0.0, 0.6, 1.1, 1.5), 2, 1.0)
    assert (first.at, last.at) == (0.6, 1.5)
    assert most_within(begun(0.0, 0.6, 1.1, 1.5), 1.0) == 3


def test_what_the_receiver_read_late_is_not_held_against_the_rate() -> None:
    assert not above_rate(begun(0.0, 0.5, 0.9, late=0.1), 2, 1.0)
    assert above_rate(begun(0.0, 0.5, 0.8, late=0.1), 2, 1.0)


# The ledger of the receivers tells when a limit does not hold


PROMISE = Promise(connections=2, recipients=3, messages=4, rate=(3, 1.0))


def test_what_is_within_the_promise_is_no_complaint() -> None:
    tally = Tally(PROMISE)
    tally.opened()
    tally.opened()
    tally.closed()
    tally.opened()
    tally.recipients(3)
    tally.messages(4)
    for n in range(6):
        tally.mail(100 + n * 0.34)
    assert tally.seen.exceeded == []
    assert abs(tally.seen.used - 1 / 3 / 0.34) < 1e-9


def test_each_limit_that_is_exceeded_is_named() -> None:
    tally = Tally(PROMISE)
    for _ in range(3):
        tally.opened()
    tally.recipients(4)
    tally.messages(5)
    for n in range(4):
        tally.mail(100 + n * 0.33)
    assert tally.seen.exceeded == [
        "connections: 3 of 2",
        "recipients: 4 of 3",
        "messages: 5 of 4",
        "rate: 4 of 3",
    ]


def test_a_connection_that_its_client_has_closed_already_is_none() -> None:
    tally = Tally(PROMISE)
    tally.opened()
    tally.opened()
    assert tally.is_full
    tally.opened(gone=1)
    assert tally.seen.connections == 2


@given(st.lists(st.floats(0, 0.5), max_size=60), st.integers(1, 4))
def test_the_fullest_window_is_found(gaps: list[float], count: int) -> None:
    tally = Tally(Promise(rate=(count, 1.0)))
    now, times = 100.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        tally.mail(now)
    assert (tally.seen.in_window > count) == (fullest(times, 1.0) > count)
