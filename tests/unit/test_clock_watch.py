"""Due times that were written while the clock was ahead, over a running scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from tests.store.builders import attempt
from tests.support.queueing import DEFERRED, DELIVERED, Relay
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.inbound.cleanup.intake import OVERDUE
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.queue_name import queue_of
from zonerelay.process.tasks import cancel_all
from zonerelay.queue.operator.clock_watch import ClockWatch
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.journal import Act
from zonerelay.queue.orders.order import SUSPEND, Order
from zonerelay.queue.settle.settler import SettlerCallbacks

DAY = 86_400.0
MINUTE = 60.0
NOWHERE = Path("no-act")


class Watched(Relay):
    """A relay by a clock that the test sets, whose mail is tried each minute."""

    clock: ManualClock

    def __init__(self) -> None:
        retry = RetrySettings(schedule=(MINUTE,), jitter=0.0)
        super().__init__(zones=(ZoneSettings(next_hop="hop"),), retry=retry, clock=ManualClock())

    def watch(self, home: Path = NOWHERE) -> ClockWatch:
        correct = self.operations(NOWHERE).correct
        return ClockWatch(home / "clock.json", self.clock, events=self.events, correct=correct)

    async def one(self) -> Delivery:
        (stored,) = await self.stored()
        return stored


@pytest.fixture
async def relay() -> AsyncIterator[Watched]:
    relay = Watched()
    relay.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    await relay.scheduler.start()
    yield relay
    await relay.close()


async def deferred(relay: Watched) -> Delivery:
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    return await relay.one()


async def changed(relay: Watched, **fields: object) -> Delivery:
    stored = await relay.one()
    await relay.store.update([stored.key], lambda each: structs.replace(each, **fields))
    return await relay.one()


async def test_what_was_deferred_while_the_clock_was_ahead_is_tried_in_time(relay: Watched) -> None:
    relay.clock.step(DAY)
    watch = relay.watch()
    await deferred(relay)
    relay.clock.step(-DAY)
    await watch.look()
    stored = await relay.one()
    assert stored.next_attempt == relay.clock.now() + MINUTE
    assert relay.sink.named("clock-set-back")[0]["corrected"] == 1
    relay.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    relay.clock.advance(MINUTE)
    relay.scheduler.wake(queue_of("default"))
    await relay.until_empty()


async def test_mail_whose_attempt_outlasts_the_step_and_has_no_outcome_is_tried_in_time(
    relay: Watched,
) -> None:
    """Its lease was lost: nothing wrote a new due time (seed 3412)."""
    relay.clock.step(DAY)
    watch = relay.watch()
    await deferred(relay)
    relay.courier.gate = asyncio.Event()
    relay.clock.advance(MINUTE)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: len(relay.courier.in_flight) == 1)
    relay.clock.step(-DAY)
    await watch.look()
    assert relay.sink.named("clock-set-back")[0]["corrected"] == 0
    await relay.scheduler.stop(0.0)
    await watch.look()
    stored = await relay.one()
    assert stored.next_attempt <= relay.clock.now() + MINUTE
    await watch.look()
    assert [each["corrected"] for each in relay.sink.named("clock-set-back")] == [0, 1]


async def test_a_start_finds_it_by_an_id_in_the_future(relay: Watched) -> None:
    relay.clock.step(DAY)
    await deferred(relay)
    last = MessageIdSource(relay.clock).next()
    relay.clock.step(-DAY)
    watch = relay.watch()
    running = asyncio.create_task(watch.run(last))
    await relay.until(lambda: len(relay.sink.named("clock-set-back")) == 1)
    await cancel_all(running)
    stored = await relay.one()
    assert stored.next_attempt == relay.clock.now() + MINUTE


async def test_times_that_a_sender_or_an_operator_chose_stay(relay: Watched) -> None:
    watch = relay.watch()
    await deferred(relay)
    for fields in (
        {"last": None, "created": relay.clock.now() + DAY},  # FUTURERELEASE
        {"last": attempt(relay.clock.now() - 2 * DAY)},  # chosen after an attempt of the past
        {"last": attempt(relay.clock.now()), "act": "0123abcd"},  # retry --at
    ):
        before = await changed(relay, next_attempt=relay.clock.now() + DAY, **fields)
        relay.clock.step(-2 * MINUTE)
        await watch.look()
        assert await relay.stored() == [before]
    assert [each["corrected"] for each in relay.sink.named("clock-set-back")] == [0, 0, 0]


async def test_nothing_is_read_while_the_clock_goes_on_as_it_should(relay: Watched) -> None:
    watch = relay.watch()
    running = asyncio.create_task(watch.run(MessageIdSource(relay.clock).next()))
    await asyncio.sleep(0)
    for seconds in (30.0, DAY):
        relay.clock.advance(seconds)
        relay.clock.step(-1.0)  # NTP
        await watch.look()
    await cancel_all(running)
    assert relay.sink.named("clock-set-back") == []


async def test_an_undo_restores_due_times_by_the_clock_as_it_is_now(relay: Watched, tmp_path: Path) -> None:
    (tmp_path / "acts").mkdir()
    operations = relay.operations(tmp_path)
    await deferred(relay)
    hold = Act(id="00000001", at=relay.clock.now(), verb="hold")
    assert (await operations.hold(QueueFilter(), act=hold)).changed == 1
    relay.clock.step(-DAY)
    await relay.watch().look()
    undo = Act(id="00000002", at=relay.clock.now(), verb="undo", undoes=hold.id)
    assert (await operations.undo(hold, undo)).changed == 1
    stored = await relay.one()
    assert (stored.held, stored.next_attempt) == (False, relay.clock.now() + MINUTE)
    # The undo is undone as well.
    again = Act(id="00000003", at=relay.clock.now(), verb="undo", undoes=undo.id)
    assert (await operations.undo(undo, again)).changed == 1
    assert (await relay.one()).held


async def test_what_an_order_held_is_due_by_the_clock_as_it_is_when_the_order_ends(relay: Watched) -> None:
    operations = relay.operations(NOWHERE)
    order = Order(id="0123abcd", effect=SUSPEND, reason="a test", who="ann", since=relay.clock.now())
    await deferred(relay)
    await changed(relay, held=True, act=order.id)
    relay.clock.step(-DAY)
    await relay.watch().look()
    assert await operations.release_orders([order]) == 1
    stored = await relay.one()
    assert (stored.held, stored.next_attempt) == (False, relay.clock.now() + MINUTE)
    # New mail that the order held is due now.
    await changed(relay, held=True, act=order.id, next_attempt=0.0, last=None)
    assert await operations.release_orders([order]) == 1
    assert (await relay.one()).next_attempt == relay.clock.now()


async def test_a_release_and_a_reroute_take_an_acceptance_in_the_future_for_no_release_of_a_sender(
    relay: Watched,
) -> None:
    operations = relay.operations(NOWHERE)
    await deferred(relay)
    await operations.hold(QueueFilter())
    relay.clock.step(-DAY)
    assert (await operations.release(QueueFilter())).changed == 1
    await relay.until(lambda: len(relay.sink.named("deferred")) == 2)
    # A list that was not attempted yet, and mail that its sender holds back.
    for fields, due in (
        ({"next_attempt": relay.clock.now() + DAY - OVERDUE}, relay.clock.now()),
        ({}, relay.clock.now() + DAY),
    ):
        release = {"created": relay.clock.now() + DAY, "next_attempt": relay.clock.now() + DAY}
        before = await changed(relay, **{"last": None, "held": True, **release, **fields})
        assert before.released_at(relay.clock.now()) == due


async def test_a_list_that_waits_is_due_by_the_clock_as_it_is(relay: Watched) -> None:
    await deferred(relay)
    watch = relay.watch()
    born = relay.clock.now()
    relay.clock.step(-DAY)
    await changed(relay, last=None, created=born, next_attempt=born - OVERDUE)
    await watch.look()
    assert (await relay.one()).next_attempt == relay.clock.now()


async def test_mail_does_not_age_by_a_leap_until_it_is_confirmed_or_a_day_has_passed(
    relay: Watched, tmp_path: Path
) -> None:
    path = tmp_path / "clock.json"
    watch = relay.watch(tmp_path)
    before = relay.clock.now()
    relay.clock.suspend(2 * DAY)  # the machine slept: no leap
    relay.clock.step(MINUTE)
    assert (watch.skipped(before), watch.problems()) == (0.0, ())
    relay.clock.step(5 * DAY)
    assert watch.skipped(before) == 5 * DAY
    assert watch.skipped(relay.clock.now()) == 0.0
    assert "jumped forward by 5d" in watch.problems()[0]
    await watch.look()
    again = relay.watch(tmp_path)
    assert again.skipped(before) == 5 * DAY, "a restart does not forget it"
    assert again.confirm()
    assert (again.skipped(before), again.problems(), again.confirm()) == (0.0, (), False)
    relay.clock.advance(DAY + 1)
    assert (watch.skipped(before), watch.problems()) == (0.0, ())
    relay.clock.step(5 * DAY)
    relay.clock.step(-5 * DAY)
    assert watch.skipped(before) == 0.0
    await watch.look()
    assert not path.exists()


async def test_a_leap_is_no_reason_to_expire_or_to_warn(relay: Watched, tmp_path: Path) -> None:
    watch = relay.watch(tmp_path)
    relay.settler._callbacks = SettlerCallbacks(
        paused=lambda delivery, message, where: watch.skipped(delivery.created)
    )
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    relay.clock.step(30 * DAY)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: len(relay.sink.named("deferred")) == 2)
    assert not relay.sink.named("dsn")
    assert watch.confirm()
    relay.clock.advance(MINUTE)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: len(relay.sink.named("expired")) == 1)
