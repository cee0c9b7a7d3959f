"""The lanes of a zone carry one batch after another and are kept for the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import cast

import pytest

from tests.support.queueing import Sink, make_events, route_to
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.outcome import Outcome
from zonerelay.queue.contract import Courier, Router
from zonerelay.queue.destination.destinations import Destination, Site, Work
from zonerelay.queue.settle.settler import Settler
from zonerelay.queue.zone import attempts as module
from zonerelay.queue.zone.attempts import Attempts
from zonerelay.queue.zone.parts import ZoneParts
from zonerelay.store.contract import QueueStore


class Carried(Attempts):
    """Attempts that note what they carry, once the gate is open."""

    def __init__(self, following: Callable[[Work], Work | None], store: QueueStore) -> None:
        clock = ManualClock()
        super().__init__(
            ZoneSettings(),
            ZoneParts(
                store=store,
                router=cast("Router", None),
                courier=cast("Courier", None),
                settler=cast("Settler", None),
                retry=RetrySettings(),
                events=make_events(Sink(), clock),
                clock=clock,
                random=Random(1),
            ),
            following,
            lambda work, _: self.finished.append(work),
            lambda _: None,
        )
        self.finished: list[Work] = []
        self.carried: list[tuple[Work, asyncio.Task[object] | None]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def make(self, work: Work) -> Sequence[Outcome]:
        await self.gate.wait()
        self.carried.append((work, asyncio.current_task()))
        return ()


class Bench:
    def __init__(self) -> None:
        self.waiting: deque[Work] = deque()
        self.released: list[object] = []
        self.lanes = Carried(self._following, cast("QueueStore", self))
        self.carried, self.gate = self.lanes.carried, self.lanes.gate

    def release(self, keys: Sequence[DeliveryKey]) -> None:
        """The store's."""
        self.released.append(keys)

    def _following(self, last: Work) -> Work | None:
        return self.waiting.popleft() if self.waiting else None

    @property
    def tasks(self) -> int:
        return len({task for _, task in self.carried})


def make_work() -> Work:
    route = route_to("default", "mx.example.com")
    destination = Destination(route, Site(route.site), RetrySettings())
    return Work(destination, route, (), 0)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_lane_goes_on_with_what_follows() -> None:
    bench = Bench()
    works = [make_work() for _ in range(3)]
    bench.waiting.extend(works[1:])
    bench.lanes.start(works[0])
    await turns()
    assert [work for work, _ in bench.carried] == works
    assert bench.tasks == 1
    bench.lanes.close()
    assert await bench.lanes.tasks.wait(1.0)


async def test_a_lane_that_has_run_dry_takes_the_next_work() -> None:
    bench = Bench()
    for _ in range(3):
        bench.lanes.start(make_work())
        await turns()
    assert len(bench.carried) == 3
    assert bench.tasks == 1
    bench.lanes.close()
    assert await bench.lanes.tasks.wait(1.0)


async def test_only_so_many_lanes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE", 2)
    bench = Bench()
    for _ in range(2):
        for _ in range(5):
            bench.lanes.start(make_work())
        await turns()
    assert bench.tasks == 8
    bench.lanes.close()
    assert await bench.lanes.tasks.wait(1.0)


async def test_closing_ends_lanes_when_their_work_is_done() -> None:
    bench = Bench()
    bench.lanes.start(make_work())
    bench.gate.clear()
    bench.lanes.start(make_work())
    await turns()
    bench.lanes.close()
    assert not await bench.lanes.tasks.wait(0.01)
    bench.gate.set()
    assert await bench.lanes.tasks.wait(1.0)
    assert len(bench.carried) == 2


async def test_work_handed_to_a_lane_that_is_cancelled_is_dropped() -> None:
    bench = Bench()
    bench.lanes.start(make_work())
    await turns()
    late = make_work()
    bench.lanes.start(late)
    await bench.lanes.tasks.cancel()
    assert bench.released == [[]]
    assert bench.lanes.finished[-1] is late
    assert late not in [work for work, _ in bench.carried]
