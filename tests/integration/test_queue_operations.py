"""Operators' verbs over a running scheduler."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from tests.support.queueing import BOUNCED, DEFERRED, DELIVERED, NO_HOST, Relay
from zonerelay.config.settings import RetrySettings, RouteSettings, TlsMode, ZoneSettings
from zonerelay.control.acts import OperatorActs
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery, DeliveryKey, DeliveryState, queue_of
from zonerelay.model.envelope import MessageId
from zonerelay.operations.answers import ActRow, ChangeResult
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError, NotFoundError
from zonerelay.operations.requests import CHANGES, ChangeVerb, Filter, Undo
from zonerelay.process.tasks import cancel_all
from zonerelay.queue.operator import operations
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.journal import KEPT, Journal, JournalEntry
from zonerelay.queue.operator.operations import Bin, ChangeCounts, Operations, RerouteError
from zonerelay.queue.zone import zone
from zonerelay.queue.zone.window import QueueWindow
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import ChangeOne, MessageNotFoundError, StoreError

ALL = QueueFilter()


class Queue(Relay):
    """A relay with what operators do to its queue."""

    verbs: Operations


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Queue]:
    retry = RetrySettings(jitter=0.0, suspend_min=60.0, suspend_max=60.0)
    queue = Queue(zones=(ZoneSettings(max_connections=100),), retry=retry)
    queue.verbs = queue.operations(tmp_path)
    queue.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    await queue.scheduler.start()
    yield queue
    await queue.close()


async def put_off(relay: Relay, *recipients: str, **more: object) -> MessageId:
    before = len(relay.sink.named("deferred"))
    message = relay.accept(*recipients, **more)  # type: ignore[arg-type]  # by name
    await relay.until(lambda: len(relay.sink.named("deferred")) == before + len(recipients))
    return message.id


async def only(relay: Relay) -> Delivery:
    (stored,) = await relay.stored()
    return stored


async def test_retry_lifts_the_suspension(queue: Queue) -> None:
    queue.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await put_off(queue, "b@example.com")
    assert len(queue.sink.named("suspended")) == 1
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    await queue.verbs.retry(QueueFilter(recipient="b@*"))
    await queue.until_empty()
    assert len(queue.sink.named("resumed")) == 1


async def test_due_mail_of_an_unreachable_host_is_deferred_until_its_next_probe(queue: Queue) -> None:
    queue.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    message_id = await put_off(queue, "b@example.com")
    await queue.until(lambda: not queue.scheduler.active_count("default"))
    keys = [each.key for each in await queue.store.deliveries_of(message_id)]
    await queue.store.update(keys, lambda each: structs.replace(each, next_attempt=queue.clock.now() - 1))
    found = [(each, state) async for each, _, state in queue.verbs.select(ALL)]
    assert [state for _, state in found] == [DeliveryState.DEFERRED]
    assert await queue.verbs.count(QueueFilter(state=DeliveryState.READY)) == 0
    assert await queue.verbs.count(QueueFilter(state=DeliveryState.DEFERRED)) == 1
    suspension = queue.verbs.suspension_of(found[0][0])
    assert suspension is not None
    last = (await queue.verbs.trace(message_id))[-1]
    assert (last.event, last.at) == ("next attempt", suspension[0])


async def test_hold_keeps_mail_until_release(queue: Queue) -> None:
    await put_off(queue, "b@example.com")
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    assert (await queue.verbs.hold(ALL)).changed == 1
    assert (await queue.verbs.hold(ALL)).changed == 0
    assert (await queue.verbs.retry(ALL)).changed == 0
    await asyncio.sleep(0.02)
    assert (await only(queue)).held
    assert (await queue.verbs.release(ALL)).changed == 1
    await queue.until_empty()


async def test_mail_that_waits_in_memory_can_be_held(queue: Queue) -> None:
    queue.courier.gate = asyncio.Event()
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    for n in range(20):
        queue.accept(f"u{n:02}@example.com")
    await queue.until(lambda: queue.scheduler.zone("default").plan.window.waiting == 19)
    assert await queue.verbs.hold(ALL) == ChangeCounts(matched=20, changed=19, busy=1)
    queue.courier.gate.set()
    await queue.until(lambda: len(queue.sink.named("delivered")) == 1)
    await asyncio.sleep(0.02)
    assert [(d.recipient, d.held) for d in await queue.stored()] == [
        (f"u{n:02}@example.com", True) for n in range(1, 20)
    ]
    await queue.verbs.release(ALL)
    await queue.until_empty()
    assert len(queue.courier.recipients()) == 20


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


async def test_two_operators_do_not_change_the_same_delivery_at_the_same_time(queue: Queue) -> None:
    await put_off(queue, "b@example.com")
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    queue.courier.gate = asyncio.Event()
    hesitation = Hesitation(queue)
    first = asyncio.create_task(queue.verbs.retry(ALL))
    await hesitation.begun.wait()
    assert await queue.verbs.retry(ALL) == ChangeCounts(matched=1, changed=0, busy=1)
    hesitation.goes_on.set()
    assert await first == ChangeCounts(matched=1, changed=1, busy=0)
    await queue.until(lambda: queue.scheduler.active_count("default") == 1)
    assert await queue.verbs.retry(ALL) == ChangeCounts(matched=1, changed=0, busy=1)
    queue.courier.gate.set()
    await queue.until_empty()
    assert len(queue.courier.recipients()) == 2


async def test_settings_that_change_meanwhile_do_not_let_an_attempt_cross_a_change(queue: Queue) -> None:
    message_id = await put_off(queue, "b@example.com")
    (stored,) = await queue.stored()
    await queue.store.update([stored.key], lambda each: structs.replace(each, next_attempt=0.0))
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    hesitation = Hesitation(queue)
    drop = asyncio.create_task(queue.verbs.drop(QueueFilter(message_ids=frozenset({message_id}))))
    await hesitation.begun.wait()
    queue.scheduler.configure([ZoneSettings(max_connections=50)], RetrySettings())
    queue.accept("c@example.com")
    await queue.until(lambda: len(queue.courier.batches) > 1)
    await asyncio.sleep(0.02)
    hesitation.goes_on.set()
    assert await drop == ChangeCounts(matched=1, changed=1, busy=0)
    assert queue.courier.recipients() == ["b@example.com", "c@example.com"]


async def put_off_soon(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail has been claimed for a suspended destination, while enough waits for a pause between claims."""
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await put_off(relay, "b@dead.example")
    monkeypatch.setattr(zone, "CLAIM_PAUSE", 0.2)
    monkeypatch.setattr(QueueWindow, "is_crowded", True)
    relay.accept("c@dead.example", tell=False)
    relay.scheduler.wake(queue_of("default"))
    await relay.until(lambda: relay.store.asked["claim"] > 1)
    await asyncio.sleep(0.02)


async def test_mail_that_is_being_put_off_can_be_held(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_off_soon(queue, monkeypatch)
    assert (await queue.verbs.hold(QueueFilter(recipient="c@*"))).changed == 1
    await asyncio.sleep(0.4)
    assert [each.held for each in await queue.stored()] == [False, True]


async def test_mail_that_is_about_to_be_put_off_is_sent_by_the_next_settings(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_off_soon(queue, monkeypatch)
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    queue.scheduler.configure([ZoneSettings(max_connections=50)], RetrySettings())
    await queue.until(lambda: "c@dead.example" in queue.courier.recipients())


async def test_what_a_claim_brings_after_a_reload_does_not_wait_for_old_attempts(queue: Queue) -> None:
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    queue.courier.gate = asyncio.Event()
    queue.accept("b@slow.example")
    await queue.until(lambda: len(queue.courier.batches) == 1)
    queue.courier.gate = None
    claim, answer = queue.store.claim, asyncio.Event()

    async def late(*questions: object, **more: object) -> list[Delivery]:
        queue.store.claim = claim  # type: ignore[method-assign]  # only this one is late
        claimed = await claim(*questions, **more)  # type: ignore[arg-type]  # passed on
        await answer.wait()
        return claimed

    queue.store.claim = late  # type: ignore[method-assign]  # for one question
    queue.accept("c@example.com", tell=False)
    queue.scheduler.wake(queue_of("default"))
    await queue.until(lambda: queue.store.claim == claim)
    queue.scheduler.configure([ZoneSettings(max_connections=50)], RetrySettings())
    await asyncio.sleep(0.02)
    answer.set()
    await queue.until(lambda: "c@example.com" in queue.courier.recipients())


async def test_bounce_tells_the_sender(queue: Queue) -> None:
    about = await put_off(queue, "b@example.com", "c@example.com", "d@example.com")
    result = await queue.verbs.bounce(
        QueueFilter(recipient="*@example.com", domain="example.com"), "moved\naway"
    )
    assert result == ChangeCounts(3, 3, 0)
    (event,) = queue.sink.named("dsn")
    assert (event["about"], event["recipients"]) == (about, 3)
    assert {str(e["reply"]) for e in queue.sink.named("bounced")} == {"554 5.7.0 moved away"}
    assert (await only(queue)).recipient == "a@example.org"


async def test_what_is_on_its_way_is_left_alone(queue: Queue) -> None:
    queue.courier.gate = asyncio.Event()
    queue.accept("b@example.com")
    await queue.until(lambda: len(queue.courier.in_flight) == 1)
    for verb in (queue.verbs.retry, queue.verbs.hold, queue.verbs.release, queue.verbs.drop):
        assert await verb(ALL) == ChangeCounts(matched=1, changed=0, busy=1)
    assert [state async for _, _, state in queue.verbs.select(ALL)] == [DeliveryState.ACTIVE]
    queue.courier.gate.set()


async def test_a_verb_on_a_long_queue_works_in_batches(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "BATCH", 7)
    queue.courier.script = lambda batch: [BOUNCED] * len(batch.deliveries)
    for n in range(50):
        message = queue.accept(f"u{n}@example.com", tell=False)
        await queue.store.update(
            [d.key for d in await queue.store.deliveries_of(message.id)],
            lambda d: structs.replace(d, next_attempt=queue.clock.now() + 1000),
        )
    assert await queue.verbs.count(ALL) == 50
    assert await queue.verbs.drop(ALL) == ChangeCounts(50, 50, 0)


async def test_filters_narrow(queue: Queue) -> None:
    first = await put_off(queue, "b@one.example", "c@two.example", sender="x@here.example")
    await put_off(queue, "d@one.example", sender="", age=100.0)
    await put_off(queue, "e?[x]@three.example", sender="y@here.example")

    async def found(**wanted: object) -> list[str]:
        chosen = QueueFilter(**wanted)  # type: ignore[arg-type]  # by name
        return sorted([d.recipient[0] async for d, _, _ in queue.verbs.select(chosen)])

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


async def test_retry_sends_at_once_what_its_sender_holds_back(queue: Queue) -> None:
    await held_back(queue)
    queue.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    assert await queue.verbs.retry(ALL) == ChangeCounts(matched=1, changed=1, busy=0)
    await queue.until_empty()
    assert queue.sink.named("delivered")[0]["age"] == 0.0


async def test_mail_that_was_sent_too_early_and_deferred_is_retried_as_usual(queue: Queue) -> None:
    release = await held_back(queue)
    await queue.verbs.retry(ALL)
    await queue.until(lambda: len(queue.sink.named("deferred")) == 1)
    stored = await only(queue)
    assert (stored.attempts, stored.created) == (1, release)
    assert 0 < stored.next_attempt - queue.clock.now() <= 60


async def test_a_hold_and_its_release_do_not_shorten_the_senders_own(queue: Queue) -> None:
    release = await held_back(queue)
    await queue.verbs.hold(ALL)
    assert (await only(queue)).held
    await queue.verbs.release(ALL)
    stored = await only(queue)
    assert (stored.held, stored.next_attempt) == (False, release)
    await asyncio.sleep(0.02)
    assert not queue.courier.batches


async def test_a_bounce_that_fails_gives_nothing_back_while_other_mail_bounces(queue: Queue) -> None:
    first, second = [await put_off(queue, recipient) for recipient in ("a@example.com", "b@example.com")]
    settle, message, goes_on = queue.verbs.settler.settle, queue.verbs._message, asyncio.Event()

    async def slow(*given: Any) -> None:  # Any: what settle takes
        await goes_on.wait()
        await settle(*given)

    async def unreadable(message_id: MessageId) -> object:
        if message_id == second:
            raise StoreError("the disk is broken")
        return await message(message_id)

    with patch.object(queue.verbs.settler, "settle", slow), patch.object(queue.verbs, "_message", unreadable):
        bounce = asyncio.create_task(queue.verbs.bounce(ALL, "gone"))
        await asyncio.sleep(0.02)
        assert not bounce.done()
        goes_on.set()
        with pytest.raises(StoreError, match="broken"):
            await bounce
    left = {each.message_id for each in await queue.stored()}
    assert second in left
    assert first not in left


async def test_held_back_mail_can_be_bounced_and_is_reported(queue: Queue) -> None:
    await held_back(queue)
    assert await queue.verbs.bounce(ALL, "not wanted any more") == ChangeCounts(matched=1, changed=1, busy=0)
    assert [each["kind"] for each in queue.sink.named("dsn")] == ["failed"]


async def test_trace_names_the_release(queue: Queue) -> None:
    release = await held_back(queue, age=60.0)
    message_id = (await only(queue)).message_id
    steps = await queue.verbs.trace(message_id)
    assert [step.event for step in steps] == ["accepted", "release", "next attempt"]
    assert steps[1].at == release


async def test_show_and_trace_tell_what_is_known(queue: Queue) -> None:
    answers = {"gone@example.com": DELIVERED, "b@example.com": DEFERRED}
    queue.courier.script = lambda batch: [answers[d.recipient] for d in batch.deliveries]
    message = queue.accept("gone@example.com", "b@example.com")
    await queue.until(lambda: len(queue.sink.named("deferred")) == 1)
    shown = await queue.verbs.show(message.id)
    assert [(d.recipient, state) for d, state in shown.deliveries] == [
        ("b@example.com", DeliveryState.DEFERRED)
    ]
    steps = await queue.verbs.trace(message.id)
    assert [step.event for step in steps] == ["accepted", "settled", "attempt", "next attempt"]
    assert "mx.example.com [192.0.2.1:25]: 451 4.2.0 later" in steps[2].text
    with pytest.raises(MessageNotFoundError):
        await queue.verbs.show(MessageId("0000000000000000"))


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


# ---- acts: an undo reverts what its change did, and nothing else ---------------------------------


ZONES = (
    ZoneSettings(),
    ZoneSettings(name="other", next_hop="[smart.example]:587"),
    ZoneSettings(name="clear", tls=TlsMode.NONE),
    ZoneSettings(name="twin-a", next_hop="twin.example"),
    ZoneSettings(name="twin-b", next_hop="twin.example"),
)
ROUTES = (RouteSettings(zone="clear", recipient_domain=("routed.example",)),)


class Progress:
    done = 0
    total = 0


@dataclass
class Desk:
    relay: Relay
    acts: OperatorActs
    bin: Bin
    verbs: Operations

    async def change(self, action: ChangeVerb, who: str = "ann", **more: object) -> ChangeResult:
        wanted = Filter(**more.pop("filter", {}))  # type: ignore[arg-type]  # by name
        request = CHANGES[action](filter=wanted, everything=True, **more)  # type: ignore[arg-type]
        return await self.acts.change(request, OperationCall(request=request, caller=who), Progress())

    async def undo(self, changed: ChangeResult | str) -> ChangeResult:
        act = changed if isinstance(changed, str) else changed.act
        request = Undo(undoes=act)
        return await self.acts.undo(request, OperationCall(request=request, caller="bob"), Progress())

    async def rows(self) -> list[ActRow]:
        return await self.acts.rows(100)

    async def of(self, name: str) -> Delivery:
        (found,) = [each for each in await self.relay.stored() if each.recipient.startswith(name)]
        return found

    async def states(self) -> dict[str, str]:
        now = self.relay.clock.now()
        return {d.recipient.partition("@")[0]: d.state(now).value for d in await self.relay.stored()}


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    retry = RetrySettings(schedule=(600.0,), jitter=0.0)
    relay = Relay(zones=ZONES, retry=retry, clock=ManualClock())
    relay.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    await relay.scheduler.start()
    verbs = relay.operations(tmp_path)
    acts = OperatorActs(verbs, Zones(ZONES, ROUTES))
    yield Desk(relay, acts, Bin(verbs), verbs)
    await relay.close()


async def deferred(desk: Desk, *names: str, domain: str = "example.com") -> None:
    before = len(desk.relay.sink.named("deferred"))
    desk.relay.accept(*(f"{name}@{domain}" for name in names))
    await desk.relay.until(lambda: len(desk.relay.sink.named("deferred")) == before + len(names))


async def test_undo_of_a_hold_leaves_what_was_held_before(desk: Desk) -> None:
    await deferred(desk, "a", "b", "c")
    due = (await desk.of("b")).next_attempt
    await desk.change("hold", filter={"recipient": "a@*"})
    held = await desk.change("hold", reason="peer is down")
    assert (held.changed, held.no_undo) == (2, "")
    undone = await desk.undo(held)
    assert (undone.changed, undone.gone, undone.altered, undone.undoes) == (2, 0, 0, held.act)
    assert await desk.states() == {"a": "held", "b": "deferred", "c": "deferred"}
    assert (await desk.of("b")).next_attempt == due
    again = await desk.undo(held)
    assert again.changed == 0
    assert "already undone" in again.note
    told = desk.relay.sink.named("operated")[1]
    assert (told["verb"], told["act"], told["by"], told["reason"]) == (
        "hold",
        held.act,
        "ann",
        "peer is down",
    )
    # An undo is an act, too.
    assert (await desk.undo(undone)).changed == 2
    assert await desk.states() == {"a": "held", "b": "held", "c": "held"}
    assert sorted((row.action, row.changed, row.who) for row in await desk.rows()) == [
        ("hold", 1, "ann"),
        ("hold", 2, "ann"),
        ("undo", 2, "bob"),
        ("undo", 2, "bob"),
    ]


@pytest.mark.parametrize("verb", ["release", "retry", "reroute", "undo"])
async def test_mail_that_comes_back_into_the_queue_is_due_and_not_new(desk: Desk, verb: str) -> None:
    """Claims of new mail go by the message id: they would step over everything between it and this."""
    desk.relay.courier.gate = asyncio.Event()
    desk.relay.accept("first@example.com")
    desk.relay.accept("b@example.com")  # it waits for the answer to the first
    await desk.relay.until(lambda: desk.relay.scheduler.active_count("default") == 1)
    wanted = {"recipient": "b@*"}
    held = await desk.change("hold", filter=wanted)
    assert (await desk.of("b")).next_attempt == 0.0
    if verb == "undo":
        await desk.undo(held)
    else:
        await desk.change("release", filter=wanted)
    if verb == "retry":
        await desk.change("retry", filter=wanted)
    if verb == "reroute":
        await desk.change("reroute", to_zone="clear", filter=wanted)
    assert (await desk.of("b")).next_attempt == desk.relay.clock.now()
    desk.relay.courier.gate.set()


async def test_undo_of_acts_one_upon_the_other(desk: Desk) -> None:
    await deferred(desk, "a")
    hold = await desk.change("hold")
    release = await desk.change("release")
    await desk.relay.until(lambda: len(desk.relay.sink.named("deferred")) == 2)
    assert (await desk.undo(release)).altered == 1, "it was attempted since"
    hold = await desk.change("hold")
    desk.relay.courier.gate = asyncio.Event()
    release = await desk.change("release")
    await desk.relay.until(lambda: desk.relay.scheduler.active_count("default") == 1)
    assert (await desk.undo(release)).busy == 1
    desk.relay.courier.gate.set()
    await desk.relay.until(lambda: len(desk.relay.sink.named("deferred")) == 3)
    first = await desk.change("retry", at=desk.relay.clock.now() + 50)
    second = await desk.change("hold")
    assert (await desk.undo(first)).altered == 1, "it is held by the second"
    assert (await desk.undo(second)).changed == 1
    assert (await desk.of("a")).next_attempt == desk.relay.clock.now() + 50
    assert (await desk.undo(hold)).altered == 1


async def test_undo_of_a_retry_restores_the_schedule_of_what_was_not_attempted(desk: Desk) -> None:
    await deferred(desk, "a", "b")
    due = (await desk.of("a")).next_attempt
    retried = await desk.change("retry", at=desk.relay.clock.now() + 60, filter={"recipient": "a@*"})
    assert (await desk.of("a")).next_attempt == desk.relay.clock.now() + 60
    assert (await desk.undo(retried)).changed == 1
    assert (await desk.of("a")).next_attempt == due
    desk.relay.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    retried = await desk.change("retry")
    await desk.relay.until_empty()
    undone = await desk.undo(retried)
    assert (undone.changed, undone.gone) == (0, 2)
    with pytest.raises(ControlError, match="within the next year"):
        await desk.change("retry", at=desk.relay.clock.now() + 1e9)


async def test_what_cannot_be_undone_says_so(desk: Desk) -> None:
    await deferred(desk, "a", "b")
    for verb in ("bounce", "drop"):
        wanted = {"recipient": "a@*" if verb == "bounce" else "b@*"}
        more: dict[str, Any] = {"purge": True} if verb == "drop" else {}
        gone = await desk.change(verb, filter=wanted, **more)
        assert "has left the queue" in gone.no_undo
        with pytest.raises(ControlError, match=f"{verb}.*cannot be undone"):
            await desk.undo(gone)
    with pytest.raises(NotFoundError, match="no change 00000000"):
        await desk.undo("00000000")
    held = await desk.change("hold")
    assert isinstance(desk.relay.clock, ManualClock)
    desk.relay.clock.advance(KEPT + 1)
    with pytest.raises(NotFoundError, match="last 24 hours"):
        await desk.undo(held)


async def test_dropped_mail_is_nowhere_and_comes_back_by_undo_until_a_day_has_passed(desk: Desk) -> None:
    await deferred(desk, "a", "b")
    await desk.change("hold", filter={"recipient": "b@*"})
    states, store = await desk.states(), desk.relay.store
    for _ in range(2):
        dropped = await desk.change("drop")
        assert (dropped.changed, dropped.no_undo) == (2, "")
        assert [each async for each in store.scan()] == []
        assert sum(each.total for each in store.counts().values()) == 0
        assert (await desk.change("retry")).matched == 0
        await desk.bin.sweep()
        assert (await desk.undo(dropped)).changed == 2
        assert await desk.states() == states
    dropped = await desk.change("drop")
    assert isinstance(desk.relay.clock, ManualClock)
    desk.relay.clock.advance(KEPT - 1)
    await desk.bin.sweep()
    assert len(await store.queues()) == 1
    desk.relay.clock.advance(2)
    await desk.bin.sweep()
    assert await store.queues() == set()


async def test_a_purge_also_destroys_dropped_mail_and_only_a_filter_of_the_state_shows_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had been dropped could not be destroyed before a day had passed."""
    await deferred(desk, "a", "b", "c")
    await deferred(desk, "d", domain="example.net")
    for name in "abd":
        dropped = await desk.change("drop", filter={"recipient": f"{name}@*"})
    verbs = desk.verbs
    in_bin = QueueFilter(state=DeliveryState.DROPPED)
    everything = QueueFilter(zone="default", in_bin=True)
    assert await verbs.count(structs.replace(in_bin, zone="other")) == 0
    recorded: list[DeliveryKey] = []
    monkeypatch.setattr(desk.relay.events, "dropped", recorded.extend)
    purged = await desk.change("drop", purge=True, filter={"domain": "example.net"})
    assert (purged.matched, purged.changed, recorded) == (1, 1, []), "its history ended with the first drop"
    assert (await desk.undo(dropped)).gone == 1
    purged = await desk.change("drop", purge=True, filter={"state": DeliveryState.DROPPED})
    assert (purged.changed, await verbs.count(everything)) == (2, 1)
    purged = await desk.change("drop", purge=True)
    assert (purged.changed, await desk.relay.store.queues(), len(recorded)) == (1, set(), 1)


@pytest.mark.parametrize("verb", ["retry", "hold", "release", "reroute", "bounce", "drop"])
async def test_another_change_of_dropped_mail_is_refused_and_names_undo(desk: Desk, verb: ChangeVerb) -> None:
    await deferred(desk, "a")
    gone = (await desk.of("a")).message_id
    await desk.change("drop")
    more = {"to_zone": "other"} if verb == "reroute" else {}
    with pytest.raises(MessageNotFoundError, match=r"was dropped.*`zonerelay undo`"):
        await desk.change(verb, filter={"message_id": gone}, **more)
    assert [(row.action, row.what) for row in await desk.rows()] == [("drop", "everything")], (
        "no other change"
    )
    assert (await desk.change("drop", purge=True, filter={"message_id": gone})).changed == 1


async def test_what_has_left_before_a_drop_reaches_it_is_not_recorded_as_dropped(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await deferred(desk, "a", "b")
    left, note = (await desk.of("a")).key, Journal.note

    async def note_late(journal: Journal, *given: Any) -> bool:
        await desk.relay.store.update([left], lambda _: None)
        return await note(journal, *given)

    recorded: list[DeliveryKey] = []
    stays = (await desk.of("b")).key
    monkeypatch.setattr(Journal, "note", note_late)
    monkeypatch.setattr(desk.relay.events, "dropped", recorded.extend)
    assert (await desk.change("drop")).changed == 1
    assert recorded == [stays]


async def test_the_bin_is_bounded_its_oldest_goes_first(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message counts once, in however many batches its recipients come."""
    whole = Bin._batches

    async def one_by_one(bin_: Bin) -> AsyncGenerator[list[Delivery], None]:
        async for batch in whole(bin_):
            for each in batch:
                yield [each]

    monkeypatch.setattr(Bin, "_batches", one_by_one)
    await deferred(desk, "a", "b", "c")
    message = await desk.relay.store.read_message((await desk.of("a")).message_id)
    monkeypatch.setattr(operations, "MAX_BIN_SIZE", message.size)
    await desk.change("drop")
    await desk.bin.sweep()
    assert await desk.relay.store.queues() != set()
    monkeypatch.setattr(operations, "MAX_BIN_SIZE", message.size - 1)
    await desk.bin.sweep()
    assert await desk.relay.store.queues() == set()


async def test_a_bin_that_is_too_large_is_emptied(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a drop made room after ten minutes only."""
    monkeypatch.setattr(operations, "MAX_BIN_SIZE", 1)
    monkeypatch.setattr(operations, "PAUSE", 0.0)
    await deferred(desk, "a")
    running = asyncio.create_task(desk.bin.run())
    await asyncio.sleep(0.05)  # its first check is over
    await desk.change("drop")
    async with asyncio.timeout(5.0):
        while await desk.relay.store.queues():
            await asyncio.sleep(0.01)
    await cancel_all(running)


async def test_reroute_moves_mail_and_undo_moves_it_back(desk: Desk) -> None:
    await deferred(desk, "a", "b")
    await desk.change("hold", filter={"recipient": "b@*"})
    before = await desk.of("a")
    desk.relay.courier.script = lambda batch: [DEFERRED] * len(batch.deliveries)
    moved = await desk.change("reroute", to_zone="other", filter={"zone": "default"})
    assert (moved.changed, moved.note) == (2, "to zone other")
    await desk.relay.until(lambda: len(desk.relay.sink.named("deferred")) == 3)
    assert desk.relay.sink.named("deferred")[-1]["zone"] == "other", "it is attempted there at once"
    undone = await desk.undo(moved)
    assert (undone.changed, undone.altered) == (1, 1)
    assert (await desk.of("b")).zone == "default"
    assert (await desk.of("b")).held
    held = await desk.change("hold", filter={"recipient": "a@*"})
    await desk.change("reroute", to_zone="twin-a", filter={"recipient": "a@*"})
    undone = await desk.undo(held)
    assert (undone.gone, undone.altered) == (0, 1), "it was moved since"
    hop = await desk.change("reroute", next_hop="[smart.example]:587", filter={"recipient": "b@*"})
    assert (hop.changed, (await desk.of("b")).zone) == (1, "other")
    assert before.attempts < (await desk.of("a")).attempts
    desk.relay.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    await desk.change("release")
    await desk.change("retry")
    await desk.relay.until_empty()


async def test_reroute_does_not_weaken_tls_nor_guess(desk: Desk) -> None:
    await deferred(desk, "a")
    await deferred(desk, "b", domain="routed.example")
    refused = await desk.change("reroute", to_zone="clear")
    assert refused.changed == 0
    assert "2 are not moved: zone default has tls = opportunistic, but clear has only" in refused.note
    # The routes themselves would send new mail that way.
    asked = await desk.change("reroute", ask_again=True)
    assert (asked.changed, (await desk.of("b")).zone, (await desk.of("a")).zone) == (1, "clear", "default")
    for wrong, words in (
        ({"to_zone": "nowhere"}, "zone nowhere is not configured; configured are default, other"),
        ({"next_hop": "192.0.2.1"}, r"no zone has next_hop.*add a \[\[zone\]\]"),
        ({"next_hop": "twin.example"}, "twin-a, twin-b have the next hop"),
        ({"next_hop": "no host"}, "is not a next hop"),
        ({}, "no target selected"),
        ({"to_zone": "other", "ask_again": True}, "no target selected"),
    ):
        with pytest.raises(RerouteError, match=words):
            await desk.change("reroute", **wrong)


@pytest.mark.parametrize(("verb", "more"), [("bounce", {}), ("drop", {}), ("drop", {"purge": True})])
async def test_an_act_that_is_killed_shows_how_much_it_may_have_changed(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: ChangeVerb, more: dict[str, Any]
) -> None:
    """A bounce and a drop with `--purge` that were killed showed "up to 0"."""
    await deferred(desk, "a", "b", "c")
    whole, begun = desk.relay.store.update, asyncio.Event()
    settle = desk.relay.settler.settle

    async def never(*given: Any, **_: Any) -> Any:
        await (settle if verb == "bounce" else whole)(*given)
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(desk.relay.settler, "settle", never)
    monkeypatch.setattr(desk.relay.store, "update", never)
    running = asyncio.create_task(desk.change(verb, **more))
    await asyncio.wait_for(begun.wait(), 10)
    (act,) = await Journal(tmp_path / "acts", desk.relay.clock).acts()
    assert (act.verb, act.finished, act.changed) == (verb, False, 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_an_act_that_fails_half_way_is_undone_as_far_as_it_came(desk: Desk) -> None:
    await deferred(desk, *(f"u{number}" for number in range(6)))
    whole = desk.relay.store.update

    async def update(keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        await whole(list(keys)[:4], change)
        raise StoreError("insufficient disk space")

    desk.relay.store.update = update  # type: ignore[method-assign]  # for one act
    with pytest.raises(ControlError, match=r"disk space; change \w+ was only partly"):
        await desk.change("hold")
    desk.relay.store.update = whole  # type: ignore[method-assign]  # as it was
    assert Counter((await desk.states()).values()) == {"held": 4, "deferred": 2}
    (row,) = await desk.rows()
    assert (row.finished, row.no_undo, row.changed) == (False, "", 6)
    undone = await desk.undo(row.act)
    assert (undone.matched, undone.changed, undone.altered) == (6, 4, 0)
    assert Counter((await desk.states()).values()) == {"deferred": 6}


async def test_a_change_of_several_messages_is_one_and_shows_what_it_did_if_killed(desk: Desk) -> None:
    for name in "abcd":
        await deferred(desk, name)
    ids = [(await desk.of(name)).message_id for name in "abcd"]
    dropped = await desk.change("drop", message_ids=ids[:3])
    assert (dropped.matched, dropped.changed) == (3, 3)
    (row,) = [row for row in await desk.rows() if row.action == "drop"]
    assert (row.act, row.changed, row.what) == (dropped.act, 3, f"message_id={','.join(ids[:3])}")
    assert (await desk.undo(dropped.act)).changed == 3
    note = desk.verbs.journal.note
    noted = asyncio.Event()

    async def killed(act_id: str, entries: Sequence[JournalEntry]) -> bool:
        await note(act_id, entries)
        noted.set()
        await asyncio.Event().wait()
        return True

    with patch.object(desk.verbs.journal, "note", killed):
        change = asyncio.create_task(desk.change("drop", message_ids=ids))
        async with asyncio.timeout(10):
            await noted.wait()
        change.cancel()
        await asyncio.wait({change})
    (row,) = [row for row in await desk.rows() if row.action == "drop" and row.act != dropped.act]
    assert (row.changed, row.finished) == (4, False)
