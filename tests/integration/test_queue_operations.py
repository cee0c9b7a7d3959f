"""Operators' verbs over a running scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest
from msgspec import structs

from tests.support.queueing import BOUNCED, DEFERRED, DELIVERED, NO_HOST, Relay
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery, DeliveryKey, DeliveryState
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import queue_of
from zonerelay.queue.operator import operations as module
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.operations import ChangeCounts, Operations
from zonerelay.queue.zone import zone
from zonerelay.queue.zone.window import QueueWindow
from zonerelay.store.contract import MessageNotFoundError

ALL = QueueFilter()


class Desk(Relay):
    """A relay with what operators do to its queue."""

    verbs: Operations


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    retry = RetrySettings(jitter=0.0, suspend_min=60.0, suspend_max=60.0)
    desk = Desk(zones=(ZoneSettings(max_connections=100),), retry=retry)
    desk.verbs = desk.operations(tmp_path)
    desk.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    await desk.scheduler.start()
    yield desk
    await desk.close()


async def deferred(relay: Relay, *recipients: str, **more: object) -> MessageId:
    before = len(relay.sink.named("deferred"))
    message = relay.accept(*recipients, **more)  # type: ignore[arg-type]  # by name
    await relay.until(lambda: len(relay.sink.named("deferred")) == before + len(recipients))
    return message.id


async def only(relay: Relay) -> Delivery:
    (stored,) = await relay.stored()
    return stored


async def test_retry_lifts_the_suspension(desk: Desk) -> None:
    desk.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await deferred(desk, "b@example.com")
    assert len(desk.sink.named("suspended")) == 1
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    await desk.verbs.retry(QueueFilter(recipient="b@*"))
    await desk.until_empty()
    assert len(desk.sink.named("resumed")) == 1


async def test_due_mail_of_an_unreachable_host_is_deferred_until_the_host_is_tried_again(desk: Desk) -> None:
    desk.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    message_id = await deferred(desk, "b@example.com")
    await desk.until(lambda: not desk.scheduler.active_count("default"))
    keys = [each.key for each in await desk.store.deliveries_of(message_id)]
    await desk.store.update(keys, lambda each: structs.replace(each, next_attempt=desk.clock.now() - 1))
    found = [(each, state) async for each, _, state in desk.verbs.select(ALL)]
    assert [state for _, state in found] == [DeliveryState.DEFERRED]
    assert await desk.verbs.count(QueueFilter(state=DeliveryState.READY)) == 0
    assert await desk.verbs.count(QueueFilter(state=DeliveryState.DEFERRED)) == 1
    suspension = desk.verbs.suspension_of(found[0][0])
    assert suspension is not None
    last = (await desk.verbs.trace(message_id))[-1]
    assert (last.event, last.at) == ("next attempt", suspension[0])


async def test_hold_keeps_mail_until_release(desk: Desk) -> None:
    await deferred(desk, "b@example.com")
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    assert (await desk.verbs.hold(ALL)).changed == 1
    assert (await desk.verbs.hold(ALL)).changed == 0
    assert (await desk.verbs.retry(ALL)).changed == 0
    await asyncio.sleep(0.02)
    assert (await only(desk)).held
    assert (await desk.verbs.release(ALL)).changed == 1
    await desk.until_empty()


async def test_mail_that_waits_in_memory_can_be_held(desk: Desk) -> None:
    desk.courier.gate = asyncio.Event()
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    for n in range(20):
        desk.accept(f"u{n:02}@example.com")
    await desk.until(lambda: desk.scheduler.zone("default").plan.waiting == 19)
    assert await desk.verbs.hold(ALL) == ChangeCounts(matched=20, changed=19, busy=1)
    desk.courier.gate.set()
    await desk.until(lambda: len(desk.sink.named("delivered")) == 1)
    await asyncio.sleep(0.02)
    assert [(d.recipient, d.held) for d in await desk.stored()] == [
        (f"u{n:02}@example.com", True) for n in range(1, 20)
    ]
    await desk.verbs.release(ALL)
    await desk.until_empty()
    assert len(desk.courier.recipients()) == 20


class Hesitation:
    """The first change in the store waits until it is told to go on."""

    def __init__(self, relay: Relay) -> None:
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self._update = relay.store.update
        relay.store.update = self._hesitate  # type: ignore[method-assign]  # for one change

    async def _hesitate(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> dict[DeliveryKey, Delivery]:
        if not self.begun.is_set():
            self.begun.set()
            await self.goes_on.wait()
        return await self._update(keys, change)


async def test_two_operators_do_not_change_the_same_delivery_at_the_same_time(desk: Desk) -> None:
    await deferred(desk, "b@example.com")
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    desk.courier.gate = asyncio.Event()
    hesitation = Hesitation(desk)
    first = asyncio.create_task(desk.verbs.retry(ALL))
    await hesitation.begun.wait()
    assert await desk.verbs.retry(ALL) == ChangeCounts(matched=1, changed=0, busy=1)
    hesitation.goes_on.set()
    assert await first == ChangeCounts(matched=1, changed=1, busy=0)
    await desk.until(lambda: desk.scheduler.active_count("default") == 1)
    assert await desk.verbs.retry(ALL) == ChangeCounts(matched=1, changed=0, busy=1)
    desk.courier.gate.set()
    await desk.until_empty()
    assert len(desk.courier.recipients()) == 2


async def test_settings_that_change_meanwhile_do_not_let_an_attempt_cross_a_change(desk: Desk) -> None:
    message_id = await deferred(desk, "b@example.com")
    (stored,) = await desk.stored()
    await desk.store.update([stored.key], lambda each: structs.replace(each, next_attempt=0.0))
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    hesitation = Hesitation(desk)
    drop = asyncio.create_task(desk.verbs.drop(QueueFilter(message_ids=frozenset({message_id}))))
    await hesitation.begun.wait()
    desk.scheduler.configure([ZoneSettings(max_connections=50)], RetrySettings())
    desk.accept("c@example.com")
    await desk.until(lambda: len(desk.courier.batches) > 1)
    await asyncio.sleep(0.02)
    hesitation.goes_on.set()
    assert await drop == ChangeCounts(matched=1, changed=1, busy=0)
    assert desk.courier.recipients() == ["b@example.com", "c@example.com"]


async def put_off_soon(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail has been claimed for a suspended destination, while enough waits for a pause between claims."""
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await deferred(relay, "b@dead.example")
    monkeypatch.setattr(zone, "CLAIM_PAUSE", 0.2)
    monkeypatch.setattr(QueueWindow, "is_crowded", True)
    relay.accept("c@dead.example", tell=False)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: relay.store.asked["claim"] > 1)
    await asyncio.sleep(0.02)


async def test_mail_that_is_about_to_be_put_off_can_be_held(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_off_soon(desk, monkeypatch)
    assert (await desk.verbs.hold(QueueFilter(recipient="c@*"))).changed == 1
    await asyncio.sleep(0.4)
    assert [each.held for each in await desk.stored()] == [False, True]


async def test_mail_that_is_about_to_be_put_off_is_sent_by_the_next_settings(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_off_soon(desk, monkeypatch)
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    desk.scheduler.configure([ZoneSettings(max_connections=50)], RetrySettings())
    await desk.until(lambda: "c@dead.example" in desk.courier.recipients())


async def test_what_a_claim_brings_after_settings_have_changed_does_not_wait_for_old_attempts(
    desk: Desk,
) -> None:
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    desk.courier.gate = asyncio.Event()
    desk.accept("b@slow.example")
    await desk.until(lambda: len(desk.courier.batches) == 1)
    desk.courier.gate = None
    claim, answer = desk.store.claim, asyncio.Event()

    async def late(*questions: object, **more: object) -> list[Delivery]:
        desk.store.claim = claim  # type: ignore[method-assign]  # only this one is late
        claimed = await claim(*questions, **more)  # type: ignore[arg-type]  # passed on
        await answer.wait()
        return claimed

    desk.store.claim = late  # type: ignore[method-assign]  # for one question
    desk.accept("c@example.com", tell=False)
    desk.scheduler.wake(queue_of("default"))
    await desk.until(lambda: desk.store.claim == claim)
    desk.scheduler.configure([ZoneSettings(max_connections=50)], RetrySettings())
    await asyncio.sleep(0.02)
    answer.set()
    await desk.until(lambda: "c@example.com" in desk.courier.recipients())


async def test_bounce_tells_the_sender(desk: Desk) -> None:
    about = await deferred(desk, "b@example.com", "c@example.com", "d@example.com")
    result = await desk.verbs.bounce(
        QueueFilter(recipient="*@example.com", domain="example.com"), "moved\naway"
    )
    assert result == ChangeCounts(3, 3, 0)
    (event,) = desk.sink.named("dsn")
    assert (event["about"], event["recipients"]) == (about, 3)
    assert {str(e["reply"]) for e in desk.sink.named("bounced")} == {"554 5.7.0 moved away"}
    assert (await only(desk)).recipient == "a@example.org"


async def test_what_is_on_its_way_is_left_alone(desk: Desk) -> None:
    desk.courier.gate = asyncio.Event()
    desk.accept("b@example.com")
    await desk.until(lambda: len(desk.courier.in_flight) == 1)
    for verb in (desk.verbs.retry, desk.verbs.hold, desk.verbs.release, desk.verbs.drop):
        assert await verb(ALL) == ChangeCounts(matched=1, changed=0, busy=1)
    assert [state async for _, _, state in desk.verbs.select(ALL)] == [DeliveryState.ACTIVE]
    desk.courier.gate.set()


async def test_a_verb_over_a_long_queue_works_in_batches(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH", 7)
    desk.courier.script = lambda batch: [BOUNCED] * len(batch.deliveries)
    for n in range(50):
        message = desk.accept(f"u{n}@example.com", tell=False)
        await desk.store.update(
            [d.key for d in await desk.store.deliveries_of(message.id)],
            lambda d: structs.replace(d, next_attempt=desk.clock.now() + 1000),
        )
    assert await desk.verbs.count(ALL) == 50
    assert await desk.verbs.drop(ALL) == ChangeCounts(50, 50, 0)


async def test_filters_narrow(desk: Desk) -> None:
    first = await deferred(desk, "b@one.example", "c@two.example", sender="x@here.example")
    await deferred(desk, "d@one.example", sender="", age=100.0)
    await deferred(desk, "e?[x]@three.example", sender="y@here.example")

    async def found(**wanted: object) -> list[str]:
        chosen = QueueFilter(**wanted)  # type: ignore[arg-type]  # by name
        return sorted([d.recipient[0] async for d, _, _ in desk.verbs.select(chosen)])

    assert await found() == ["b", "c", "d", "e"]
    assert await found(domain="ONE.example") == ["b", "d"]
    assert await found(domain="*o.example") == ["c"]
    assert await found(recipient="*@*.example") == ["b", "c", "d", "e"]
    assert await found(recipient="e?[x]@three.example") == ["e"]
    assert await found(recipient="?@one.example") == []
    assert await found(sender="*@here.example") == ["b", "c", "e"]
    assert await found(sender="<>") == ["d"]
    assert await found(sender="") == ["d"]
    assert await found(message_ids=frozenset({first})) == ["b", "c"]
    assert await found(min_age=50.0) == ["d"]
    assert await found(max_age=50.0) == ["b", "c", "e"]
    assert await found(reply_text="LATER") == ["b", "c", "d", "e"]
    assert await found(reply_text="never") == []
    assert await found(zone="default", state=DeliveryState.DEFERRED) == ["b", "c", "d", "e"]
    assert await found(zone="other") == []
    assert await found(state=DeliveryState.HELD) == []


async def held_back(relay: Relay, **more: object) -> float:
    release = relay.clock.now() + 3600
    relay.accept("b@example.com", release=release, **more)  # type: ignore[arg-type]  # by name
    await asyncio.sleep(0.02)
    assert not relay.courier.batches
    return release


async def test_retry_sends_at_once_what_its_sender_holds_back(desk: Desk) -> None:
    await held_back(desk)
    desk.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    assert await desk.verbs.retry(ALL) == ChangeCounts(matched=1, changed=1, busy=0)
    await desk.until_empty()
    assert desk.sink.named("delivered")[0]["age"] == 0.0


async def test_mail_that_was_sent_too_early_and_deferred_is_retried_as_usual(desk: Desk) -> None:
    release = await held_back(desk)
    await desk.verbs.retry(ALL)
    await desk.until(lambda: len(desk.sink.named("deferred")) == 1)
    stored = await only(desk)
    assert (stored.attempts, stored.created) == (1, release)
    assert 0 < stored.next_attempt - desk.clock.now() <= 60


async def test_a_hold_and_its_release_do_not_shorten_the_senders_own(desk: Desk) -> None:
    release = await held_back(desk)
    await desk.verbs.hold(ALL)
    assert (await only(desk)).held
    await desk.verbs.release(ALL)
    stored = await only(desk)
    assert (stored.held, stored.next_attempt) == (False, release)
    await asyncio.sleep(0.02)
    assert not desk.courier.batches


async def test_held_back_mail_can_be_bounced_and_is_reported(desk: Desk) -> None:
    await held_back(desk)
    assert await desk.verbs.bounce(ALL, "not wanted any more") == ChangeCounts(matched=1, changed=1, busy=0)
    assert [each["kind"] for each in desk.sink.named("dsn")] == ["failed"]


async def test_trace_names_the_release(desk: Desk) -> None:
    release = await held_back(desk, age=60.0)
    message_id = (await only(desk)).message_id
    steps = await desk.verbs.trace(message_id)
    assert [step.event for step in steps] == ["accepted", "release", "next attempt"]
    assert steps[1].at == release


async def test_show_and_trace_tell_what_is_known(desk: Desk) -> None:
    answers = {"gone@example.com": DELIVERED, "b@example.com": DEFERRED}
    desk.courier.script = lambda batch: [answers[d.recipient] for d in batch.deliveries]
    message = desk.accept("gone@example.com", "b@example.com")
    await desk.until(lambda: len(desk.sink.named("deferred")) == 1)
    shown = await desk.verbs.show(message.id)
    assert [(d.recipient, state) for d, state in shown.deliveries] == [
        ("b@example.com", DeliveryState.DEFERRED)
    ]
    steps = await desk.verbs.trace(message.id)
    assert [step.event for step in steps] == ["accepted", "settled", "attempt", "next attempt"]
    assert "mx.example.com [192.0.2.1:25]: 451 4.2.0 later" in steps[2].text
    with pytest.raises(MessageNotFoundError):
        await desk.verbs.show(MessageId("0000000000000000"))


@pytest.mark.parametrize("hop", ["", "hop"])
async def test_mail_that_is_being_put_off_is_changed_all_the_same(hop: str, tmp_path: Path) -> None:
    retry = RetrySettings(jitter=0.0, suspend_min=60.0, suspend_max=60.0)
    relay = Relay(zones=(ZoneSettings(next_hop=hop, max_connections=1),), retry=retry)
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    operators = relay.operations(tmp_path)
    for n in range(3000):
        relay.accept(f"u{n}@example.com", tell=False)
    await relay.scheduler.start()
    await relay.until(
        lambda: bool(relay.settler.unsettled_keys()) and not relay.scheduler.active_count("default")
    )
    assert await operators.hold(ALL) == ChangeCounts(matched=3000, changed=3000, busy=0)
    await asyncio.sleep(0.1)
    assert all(each.held for each in await relay.stored())
    await relay.close()
