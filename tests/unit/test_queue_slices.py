"""Work over thousands of destinations or deliveries is done a little at a time."""

from __future__ import annotations

import asyncio
import gc
from itertools import chain

import pytest

from tests.support.queueing import DELIVERED, NO_HOST
from tests.unit.test_queue_plan import NOW, make, number, resolve, start_all
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.queue.destinations import Destination
from zonerelay.queue.directory import LOOKED_AT, TIDIED
from zonerelay.queue.slices import SLICE, in_slices
from zonerelay.queue.zone_queue import ZoneQueue


def to_domains(start: int, stop: int) -> list[Delivery]:
    return [number(n, f"u@d{n}.example") for n in range(start, stop)]


def known(count: int, *hosts: str, suspended: bool = False) -> ZoneQueue:
    """A plan that has sent to so many domains, each a destination unless they share `hosts`."""
    queue = make(max_connections=count)
    for start in range(0, count, 1000):
        queue.add(to_domains(start, min(count, start + 1000)), NOW)
        resolve(queue, *hosts)
        while works := start_all(queue):
            for work in works:
                queue.finished(work, [NO_HOST if suspended else DELIVERED], NOW)
        queue.take_parked()
    return queue


@pytest.mark.parametrize("suspended", [True, False])
def test_a_new_destination_is_made_without_looking_at_all_others(
    monkeypatch: pytest.MonkeyPatch, *, suspended: bool
) -> None:
    queue = known(1500, suspended=suspended)
    looked_at = 0
    real = Destination.is_forgettable

    def counted(destination: Destination, now: float) -> bool:
        nonlocal looked_at
        looked_at += 1
        return real(destination, now)

    monkeypatch.setattr(Destination, "is_forgettable", counted)
    queue.add(to_domains(5000, 5001), NOW)
    resolve(queue)
    assert looked_at <= LOOKED_AT


def test_idle_destinations_behind_many_suspended_ones_are_found_in_the_end() -> None:
    queue = known(1200, suspended=True)
    queue.add(to_domains(2000, 2400), NOW)
    resolve(queue)
    for work in start_all(queue):
        queue.finished(work, [DELIVERED], NOW)
    for n in range(3000, 3400):
        queue.add(to_domains(n, n + 1), NOW)
        resolve(queue)
        for work in start_all(queue):
            queue.finished(work, [DELIVERED], NOW)
    assert 1200 < len(queue._directory.destinations) < 1400


def test_domains_of_many_destinations_are_tidied_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = known(900)
    monkeypatch.setattr(queue._directory, "_max_domains", 100)
    before = len(queue._lines)
    queue.add((), NOW)
    assert 0 < before - len(queue._lines) <= TIDIED
    for _ in range(5):
        queue.add((), NOW)
    assert not queue._lines


async def test_others_have_a_turn_between_two_slices() -> None:
    clock, turns = ManualClock(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    turn()
    found = []
    async for step in in_slices(range(20), clock.monotonic):
        clock.advance(0.6 * SLICE)  # so two make a slice
        found.append(step)
    assert found == list(range(20))
    assert turns == 10


def test_a_plan_that_is_given_up_leaves_nothing_to_the_garbage_collector() -> None:
    """Each reload left all that a zone knew in cycles: 50,000 objects that were looked for in one go."""
    queue = known(300)
    queue.add(to_domains(0, 600), NOW)
    gc.collect()
    gc.disable()
    try:
        assert len(list(chain.from_iterable(queue.drain()))) == 600
        for _ in queue.clear():
            pass
        del queue
        assert gc.collect() < 100
    finally:
        gc.enable()
