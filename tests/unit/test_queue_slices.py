"""Work over thousands of destinations or deliveries is done a little at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.support.queueing import DELIVERED, NO_HOST, Relay
from tests.unit.test_queue_plan import NOW, make, number, resolve, start_all
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.queue.aio import SLICE, in_slices
from zonerelay.queue.destination.destinations import Destination
from zonerelay.queue.settle.bounces import DsnMaker
from zonerelay.queue.settle.disposition import UNREADABLE_DELAY
from zonerelay.queue.settle.settler import AT_ONCE, TOGETHER
from zonerelay.queue.zone.plan import LOOKED_AT, ZonePlan
from zonerelay.store.contract import OwnMessage


def to_domains(start: int, stop: int) -> list[Delivery]:
    return [number(n, f"u@d{n}.example") for n in range(start, stop)]


def known(count: int, *hosts: str, suspended: bool = False) -> ZonePlan:
    """A plan that has sent to so many domains, each a destination unless they share `hosts`."""
    queue = make(max_connections=count)
    queue.add(to_domains(0, count), NOW)
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
    monkeypatch.setattr("zonerelay.queue.zone.plan.MAX_DESTINATIONS", 100)
    queue = known(150, suspended=suspended)
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


def test_idle_destinations_behind_many_suspended_ones_are_found_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zonerelay.queue.zone.plan.MAX_DESTINATIONS", 50)
    queue = known(100, suspended=True)
    for n in range(1000, 1200):
        queue.add(to_domains(n, n + 1), NOW)
        resolve(queue)
        for work in start_all(queue):
            queue.finished(work, [DELIVERED], NOW)
    assert 100 < len(queue._destinations) < 150


def test_domains_of_many_destinations_are_tidied_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.zone.plan.TIDIED", 50)
    queue = known(90)
    monkeypatch.setattr(queue, "_max_domains", 10)
    before = len(queue._lines)
    queue.add((), NOW)
    assert 0 < before - len(queue._lines) <= 50
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


# Outcomes without an attempt


async def test_many_that_expire_are_read_and_reported_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that waited for a next hop that is down expired in one turn of the loop, with its reports."""
    relay = Relay(clock=ManualClock())
    for n in range(100):
        relay.accept(f"u{n}@example.com", age=6 * 86400.0, tell=False)
    busy = Counter[str]()
    read, report = relay.store.read_message, DsnMaker.report

    async def reading(message_id: MessageId) -> Message:
        busy["now"] += 1
        busy["most"] = max(busy["most"], busy["now"])
        await asyncio.sleep(0)
        busy["now"] -= 1
        return await read(message_id)

    async def reporting(*given: Any, **more: Any) -> OwnMessage:  # Any: passed on as it comes
        busy["reports"] += 1
        busy["in one turn"] += 1
        busy["most in one turn"] = max(busy["most in one turn"], busy["in one turn"])
        asyncio.get_running_loop().call_soon(busy.__setitem__, "in one turn", 0)
        assert isinstance(relay.clock, ManualClock)
        relay.clock.advance(0.6 * SLICE)
        return await report(*given, **more)

    monkeypatch.setattr(relay.store, "read_message", reading)
    monkeypatch.setattr(DsnMaker, "report", reporting)
    relay.settler.post_unattempted(await relay.stored(), NO_HOST, destination="mx", until=relay.clock.now)
    assert len(relay.settler.unsettled_keys()) == 100
    await relay.settler.drain()
    assert not relay.settler.unsettled_keys()
    assert busy["most"] <= AT_ONCE
    assert busy["most in one turn"] == 2
    assert busy["reports"] == len(relay.sink.named("dsn")) == len(relay.sink.named("expired")) == 100


async def test_an_error_half_way_puts_the_rest_off() -> None:
    relay = Relay(clock=ManualClock())
    for n in range(2 * TOGETHER):
        relay.accept(f"u{n}@example.com", tell=False)
    times = iter([relay.clock.now() + 30] * TOGETHER)
    relay.settler.post_unattempted(await relay.stored(), NO_HOST, destination="mx", until=times.__next__)
    await relay.settler.drain()
    later = Counter(round(each.next_attempt - relay.clock.now()) for each in await relay.stored())
    assert later == {30: TOGETHER, round(UNREADABLE_DELAY): TOGETHER}
    assert [event["where"] for event in relay.sink.named("trouble")] == ["queue.settle"]
    assert not relay.settler.unsettled_keys()


# Other settings


async def test_what_waits_is_handed_to_the_new_settings_although_an_old_attempt_never_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zonerelay.queue.aio.SLICE", 0.0)
    relay = Relay(zones=[ZoneSettings(max_connections=1)])
    relay.courier.gate = asyncio.Event()
    await relay.scheduler.start()
    for n in range(12):
        relay.accept(f"u@d{n}.example")
    async with asyncio.timeout(10):
        while not relay.courier.in_flight:
            await asyncio.sleep(0)
        relay.scheduler.configure([ZoneSettings(max_connections=24)], RetrySettings())
        while len(relay.courier.in_flight) < 12:
            await asyncio.sleep(0)
    relay.courier.gate.set()
    await relay.scheduler.stop(5.0)
