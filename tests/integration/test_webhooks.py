"""Webhooks that are down cost little: their events share stored messages, and most stay in the spool.

The secret of a webhook is read before each post.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest
from msgspec import structs
from standardwebhooks import Webhook

from tests.support.event_log import EventLog, events_into
from tests.support.mail import make_message
from tests.support.memory_store import MemoryStore
from tests.support.webhooks import Answer, Receiver
from zonerelay.config.settings import WebhookAddresses, WebhookSettings
from zonerelay.config.tables.store import webhook_keys
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery, DeliveryKey, webhook_queue
from zonerelay.model.envelope import MessageId, MessageIdSource
from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import Change, ClaimLostError, OwnMessage
from zonerelay.telemetry.events.events import Field
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.webhook import courier as couriers
from zonerelay.webhook.courier import EventPosition, WebhookCourier
from zonerelay.webhook.endpoint import Endpoint
from zonerelay.webhook.webhooks import Webhooks

COUNT = 100
HistoryEvent = tuple[float, str, Mapping[str, Field]]
Write = Callable[[Sequence[Change], Callable[[], None] | None], None]


class Counting(MemoryStore):
    """Counts the claims that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: set[DeliveryKey] = set()
        self.most = 0
        self.writes: list[asyncio.Task[None]] = []

    async def claim(self, *args: object, **only: object) -> list[Delivery]:
        found = await super().claim(*args, **only)  # type: ignore[arg-type]  # passed on as they came
        self.held |= {each.key for each in found}
        self.most = max(self.most, len(self.held))
        return found

    def write(self, changes: Sequence[Change], then: Callable[[], None] | None) -> None:
        async def settle() -> None:
            await self.settle(changes)
            if then is not None:
                then()

        self.held -= {each.delivery.key for each in changes if not isinstance(each, OwnMessage)}
        self.writes.append(asyncio.get_running_loop().create_task(settle()))


async def stored_event(store: MemoryStore, number: int = 0) -> None:
    body = b'msg_%d\t{"type": "message.delivered"}\r\n' % number
    message = make_message(body)
    message = structs.replace(
        message, envelope=structs.replace(message.envelope, id=MessageId(f"{number:016x}"))
    )
    recipient = EventPosition(f"source{number}", 1, 1).recipient("hook")
    queue, now = webhook_queue("hook"), SystemClock().now()
    event = Delivery(queue=queue, message_id=message.id, recipient=recipient, created=now)
    await store.settle([OwnMessage(message, body, (event,))])


def courier_to(receiver: Receiver, store: MemoryStore, write: Write) -> WebhookCourier:
    clock = SystemClock()
    return WebhookCourier(
        WebhookSettings(name="hook", url=receiver.url(), private=True),
        ["whsec_" + "A" * 32],
        read_keys=tuple,
        store=store,
        write=write,
        make_gap=lambda *_: pytest.fail("no event is lost"),
        events=events_into(EventLog(), clock),
        clock=clock,
        random=Random(1),
    )


async def test_events_for_an_endpoint_that_is_down_stay_in_the_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(couriers, "PAGE", 10)
    store = Counting()
    for number in range(COUNT):
        await stored_event(store, number)
    with Receiver() as receiver:
        receiver.answers["/hook"] = Answer(503)
        courier = courier_to(receiver, store, store.write)
        courier.start()
        async with asyncio.timeout(20):
            while courier.state == "ok":
                await asyncio.sleep(0)
            courier.notify()
            assert courier.queued == COUNT
            receiver.answers["/hook"] = Answer()
            courier.retry()
            while courier.queued or len(receiver.taken()) < COUNT:
                await asyncio.sleep(0)
        await courier.stop()
        await asyncio.gather(*store.writes)
    assert store.most < 2 * 10 + couriers.CONNECTIONS
    assert await store.queues() == set()


async def test_old_events_for_an_endpoint_that_wants_no_more_leave_the_spool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those beyond the first page stayed."""
    monkeypatch.setattr(couriers, "PAGE", 10)
    monkeypatch.setattr(couriers, "LOOK_AGAIN", 0.01)
    store = Counting()
    for number in range(COUNT):
        await stored_event(store, number)
    with Receiver() as receiver:
        receiver.answers["/hook"] = Answer(410)
        courier = courier_to(receiver, store, store.write)
        courier.start()
        async with asyncio.timeout(20):
            while courier.state != "disabled":
                await asyncio.sleep(0)
            courier.settings = dataclasses.replace(courier.settings, max_age=0.0)
            while courier.queued:
                await asyncio.sleep(0.001)
        await courier.stop()
        await asyncio.gather(*store.writes)
    assert await store.queues() == set()


class Shared(MemoryStore):
    """A store whose claims another relay has taken over until `lost` is false."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = True
        self.released = asyncio.Event()

    def check_claim(self, message_id: MessageId) -> None:
        if self.lost:
            raise ClaimLostError(message_id)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        super().release(keys)
        self.released.set()


async def test_an_event_whose_claim_is_lost_is_not_posted() -> None:
    store, written = Shared(), asyncio.Event()
    await stored_event(store)
    with Receiver() as receiver:
        courier = courier_to(receiver, store, lambda *_: written.set())
        courier.start()
        async with asyncio.timeout(10):
            await store.released.wait()
            assert receiver.posts == []
            store.lost = False
            courier.notify()
            await written.wait()
        await courier.stop()
    assert len(receiver.taken()) == 1


async def test_webhooks_that_get_the_same_text_share_a_stored_message() -> None:
    clock, store = SystemClock(), MemoryStore()
    names = itertools.count()
    webhooks = Webhooks(
        hostname="relay.test",
        store=store,
        write=lambda *_: None,
        ids=MessageIdSource(clock),
        hashed=lambda: Redactor(b"key", enabled=True),
        records=lambda _: (),
        environment={"SECRET": "whsec_" + "A" * 32},
        events=events_into(EventLog(), clock),
        clock=clock,
        random=Random(1),
    )

    def hook(*events: str, addresses: WebhookAddresses = WebhookAddresses.PSEUDONYM) -> WebhookSettings:
        return WebhookSettings(
            name=f"hook{next(names)}",
            url="https://hooks.test/",
            secret="SECRET",
            events=events,
            addresses=addresses,
        )

    settings = [hook(), hook(), hook(addresses=WebhookAddresses.CLEAR), hook("delivery.bounced"), hook()]
    await webhooks.configure(settings)
    submits = webhooks.accepted(make_message())
    await store.settle(submits)
    await webhooks.close()
    assert [[each.zone for each in submit.deliveries] for submit in submits] == [
        ["hook0", "hook1", "hook4"],
        ["hook2"],
    ]


async def test_a_secret_that_was_replaced_signs_the_next_event(tmp_path: Path) -> None:
    """It is read before each post, so a new one needs no restart and no signal."""
    file = tmp_path / "secret"
    with Receiver() as receiver:
        settings = WebhookSettings(name="hook", url=receiver.url(), secret=str(file), private=True)
        endpoint = Endpoint(settings, SystemClock(), partial(webhook_keys, settings, {}))
        for secret in ("whsec_" + "A" * 32, "whsec_" + "B" * 32):
            file.write_text(secret)
            assert (await endpoint.post("msg_1", b'{"type": "message.delivered"}')).ok
            post = receiver.taken()[-1]
            Webhook(secret).verify(post.body, post.headers)
        file.unlink()
        answer = await endpoint.post("msg_2", b"{}")
        assert not answer.ok
        assert "cannot be read" in answer.text
        await endpoint.poster.close()


def webhooks_in(store: Counting, records: Sequence[HistoryEvent] = ()) -> Webhooks:
    clock = SystemClock()
    return Webhooks(
        hostname="relay.test",
        store=store,
        write=store.write,
        ids=MessageIdSource(clock),
        hashed=lambda: Redactor(b"key", enabled=True),
        records=lambda _: records,
        environment={},
        events=events_into(EventLog(), clock),
        clock=clock,
        random=Random(1),
    )


async def test_a_replay_of_a_long_history_leaves_time_for_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour of a busy relay stopped the event loop for seconds."""
    turns, seen = itertools.count(), list[int]()
    webhooks = webhooks_in(Counting(), [(1.0, "delivered", {"id": "1"})] * 20)
    webhooks.clock = Mock(monotonic=itertools.count().__next__)  # each event takes a second

    def again(*_: object) -> Sequence[HistoryEvent]:
        seen.append(next(turns))
        return ()

    async def turn() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    monkeypatch.setattr(webhooks, "_again", again)
    turning = asyncio.create_task(turn())
    assert await webhooks.replay(Mock(retry=lambda: 7), 0.0) == 7
    await cancel_all(turning)
    assert len(seen) == 20, seen
    assert seen[-1] - seen[0] > 30, seen


async def test_losses_while_the_endpoint_is_down_become_one_gap(tmp_path: Path) -> None:
    """An endpoint that is down for months would otherwise leave a gap for every write that drops events."""
    store = Counting()
    webhooks = webhooks_in(store)
    secret = tmp_path / "secret"
    secret.write_text("whsec_" + "A" * 32)
    number = itertools.count(1)
    with Receiver() as receiver:
        receiver.answers["/hook"] = Answer(503)
        url = receiver.url()
        hook = WebhookSettings(name="hook", url=url, secret=str(secret), private=True, max_queued=20)
        await webhooks.configure([hook])
        [courier] = webhooks.couriers()
        async with asyncio.timeout(20):
            for _ in range(5):
                for at in itertools.islice(number, 20):
                    await stored_event(store, at)
                courier.notify()
                while courier.queued > 20:
                    await asyncio.sleep(0.001)
                await asyncio.gather(*store.writes)
            receiver.answers["/hook"] = Answer()
            courier.retry()
            while courier.queued:
                await asyncio.sleep(0.001)
        await webhooks.close()
        await asyncio.gather(*store.writes)
        told = {post.id: post.event for post in receiver.taken()}.values()
    gaps = [event["data"] for event in told if event["type"] == "webhook.gap"]
    assert sum(int(gap["lost"]) for gap in gaps) + len(told) - len(gaps) == next(number) - 1
    assert len(gaps) <= 2  # one that was tried, and one for all others
    assert all(gap["first"] <= gap["last"] for gap in gaps)
