"""Due times that were written while the clock was ahead, over a running scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import attempt
from tests.support.queueing import DEFERRED, DELIVERED, Relay
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageIdSource
from zonerelay.queue.operator.clock_watch import ClockWatch
from zonerelay.queue.operator.journal import Journal
from zonerelay.queue.operator.operations import Operations

DAY = 86_400.0
MINUTE = 60.0


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    retry = RetrySettings(schedule=(MINUTE,), jitter=0.0)
    relay = Relay(zones=(ZoneSettings(next_hop="hop"),), retry=retry, clock=ManualClock())
    relay.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    await relay.scheduler.start()
    yield relay
    await relay.close()


def clock_of(relay: Relay) -> ManualClock:
    assert isinstance(relay.clock, ManualClock)
    return relay.clock


def watch_of(relay: Relay) -> ClockWatch:
    operations = Operations(
        store=relay.store,
        scheduler=relay.scheduler,
        settler=relay.settler,
        events=relay.events,
        clock=relay.clock,
        journal=Journal(Path("no-act"), relay.clock),
    )
    return ClockWatch(operations, events=relay.events, clock=relay.clock)


async def deferred(relay: Relay) -> Delivery:
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    (stored,) = await relay.stored()
    return stored


async def changed(relay: Relay, **fields: object) -> Delivery:
    (stored,) = await relay.stored()
    await relay.store.update([stored.key], lambda each: replace(each, **fields))  # type: ignore[arg-type]  # by name
    return (await relay.stored())[0]


async def test_what_was_deferred_while_the_clock_was_ahead_is_tried_in_time(
    relay: Relay,
) -> None:
    clock = clock_of(relay)
    clock.step(DAY)
    watch = watch_of(relay)
    await deferred(relay)
    clock.step(-DAY)
    await watch.look()
    (stored,) = await relay.stored()
    assert stored.next_attempt == clock.now() + MINUTE
    assert relay.sink.named("clock-set-back")[0]["corrected"] == 1
    relay.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    clock.advance(MINUTE)
    relay.scheduler.wake("default")
    await relay.until_empty()


async def test_a_start_finds_it_by_an_id_in_the_future(relay: Relay) -> None:
    clock = clock_of(relay)
    clock.step(DAY)
    await deferred(relay)
    last = MessageIdSource(clock).next()
    clock.step(-DAY)
    watch = watch_of(relay)
    watch.start(last)
    await relay.until(lambda: len(relay.sink.named("clock-set-back")) == 1)
    await watch.stop()
    (stored,) = await relay.stored()
    assert stored.next_attempt == clock.now() + MINUTE


async def test_times_that_a_sender_or_an_operator_chose_stay(relay: Relay) -> None:
    clock = clock_of(relay)
    watch = watch_of(relay)
    await deferred(relay)
    for fields in (
        {"last": None, "created": clock.now() + DAY},  # FUTURERELEASE
        {"last": attempt(clock.now() - 2 * DAY)},  # chosen after an attempt of the past
    ):
        before = await changed(relay, next_attempt=clock.now() + DAY, **fields)
        clock.step(-2 * MINUTE)
        await watch.look()
        assert await relay.stored() == [before]
    assert [each["corrected"] for each in relay.sink.named("clock-set-back")] == [0, 0]


async def test_nothing_is_read_while_the_clock_goes_on_as_it_should(relay: Relay) -> None:
    clock = clock_of(relay)
    watch = watch_of(relay)
    watch.start(MessageIdSource(clock).next())
    await asyncio.sleep(0)
    for seconds in (30.0, DAY):
        clock.advance(seconds)
        clock.step(-1.0)  # NTP
        await watch.look()
    await watch.stop()
    assert relay.sink.named("clock-set-back") == []
