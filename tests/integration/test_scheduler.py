"""Scheduler, settler and store together, with scripted couriers and routers and tiny real delays."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from tests.support.queueing import DEFERRED, DELIVERED, NO_HOST, Relay, route_to
from zonerelay.config.settings import InDoubtAction, RetrySettings, ZoneSettings
from zonerelay.model.delivery import MAILBOXES, Delivery, DeliveryKey, DeliveryState, QueueName, queue_of
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.queue.operator.operations import MessageView, steps
from zonerelay.queue.selection import LEAST
from zonerelay.queue.settle import settler as journal
from zonerelay.queue.zone import zone
from zonerelay.routing.destinations.route import Batch, Unroutable
from zonerelay.store.contract import QueueCounts, StoreCorruptError

Make = Callable[..., Relay]
Start = Callable[..., Awaitable[Relay]]
MX = ZoneSettings()
SOON = RetrySettings(jitter=0.0, schedule=(0.02,), suspend_min=0.05, suspend_max=0.2)


class ClockSetBack:
    """The machine's clock, `behind` by some seconds."""

    def __init__(self) -> None:
        self.behind = 0.0

    def now(self) -> float:
        return time.time() - self.behind

    def monotonic(self) -> float:
        return time.monotonic()

    boottime = monotonic


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    relays: list[Relay] = []

    def build(**more: object) -> Relay:
        relays.append(Relay(**more))  # type: ignore[arg-type]  # passed on by name
        return relays[-1]

    yield build
    for relay in relays:
        await relay.close()


@pytest.fixture
def start(make: Make) -> Start:
    """A relay whose scheduler runs."""

    async def started(**more: object) -> Relay:
        relay = make(**more)
        await relay.scheduler.start()
        return relay

    return started


async def test_delivery_begins_within_a_few_turns_of_the_loop(start: Start) -> None:
    relay = await start()
    relay.accept("first@example.com")
    await relay.until_empty()
    relay.accept("b@example.com")
    for turns in range(10):  # noqa: B007 - the number is what is tested
        if len(relay.courier.batches) == 2:
            break
        await asyncio.sleep(0)
    # One turn of these is the test store's own.
    assert turns <= 4


async def test_an_idle_scheduler_asks_the_store_nothing(start: Start) -> None:
    relay = await start(zones=(ZoneSettings(), ZoneSettings(name="other")))
    relay.accept("b@example.com")
    await relay.until_empty()
    await asyncio.sleep(0.05)
    relay.store.asked.clear()
    await asyncio.sleep(0.1)
    assert not relay.store.asked


async def test_transactions_are_counted_per_minute_where_no_rate_applies(start: Start) -> None:
    relay = await start()
    for n in range(5):
        relay.accept(f"u{n}@example.com")
        await relay.until_empty()
    destination = relay.scheduler.destination_of("default", "example.com")
    assert destination is not None
    assert destination.per_minute(relay.clock.monotonic()) == 5


PROVIDER = {f"{name}.example": route_to("default", "mx") for name in ("one", "two", "three")}
FIVE = ("a@one.example", "b@two.example", "c@ONE.example", "d@three.example", "e@two.example")


def together(relay: Relay) -> list[str]:
    """Who shares a batch, as the first letters of their addresses."""
    return sorted("".join(each.recipient[0] for each in batch.deliveries) for batch in relay.courier.batches)


async def start_knowing_the_provider(relay: Relay) -> None:
    relay.router.answers.update(PROVIDER)
    await relay.scheduler.start()
    for domain in PROVIDER:
        relay.accept(f"first@{domain}")
    await relay.until_empty()
    relay.courier.batches.clear()


@pytest.mark.parametrize(
    ("zone", "batches"),
    [
        (MX, ["ac", "be", "d"]),
        (ZoneSettings(mix_domains=True), ["abcde"]),
        (ZoneSettings(next_hop="hop"), ["abcde"]),
        (ZoneSettings(next_hop="hop", mix_domains=False), ["ac", "be", "d"]),
        (ZoneSettings(max_recipients_per_transaction=1), ["a", "b", "c", "d", "e"]),
    ],
)
async def test_domains_mix_in_a_batch_if_allowed(make: Make, zone: ZoneSettings, batches: list[str]) -> None:
    relay = make(zones=(zone,))
    await start_knowing_the_provider(relay)
    relay.accept(*FIVE)
    await relay.until_empty()
    assert together(relay) == batches


@pytest.mark.parametrize(
    ("announced", "mix", "batches"),
    [
        (2, None, ["acd", "be"]),
        (9, None, ["acdbe"]),
        (1, None, ["ac", "be", "d"]),
        (9, False, ["ac", "be", "d"]),
    ],
)
async def test_batches_have_as_many_domains_as_the_hosts_announced_the_last_time(
    make: Make, announced: int, mix: bool | None, batches: list[str]
) -> None:
    relay = make(zones=(ZoneSettings(mix_domains=mix),))

    def announce(batch: Batch) -> Sequence[Outcome]:
        batch.rcptdomainmax = announced
        return [DELIVERED] * len(batch.deliveries)

    relay.courier.script = announce
    await start_knowing_the_provider(relay)
    relay.accept(*FIVE)
    await relay.until_empty()
    assert together(relay) == sorted(batches)


async def test_deferred_mail_found_at_the_start_is_tried_when_due(make: Make) -> None:
    relay = make()
    message = relay.accept("b@example.com", tell=False)
    await relay.store.update(
        [DeliveryKey(queue_of("default"), message.id, message.envelope.recipients[0].address)],
        lambda delivery: structs.replace(delivery, next_attempt=relay.clock.now() + 0.3),
    )
    await relay.scheduler.start()
    await asyncio.sleep(0.02)
    assert not relay.courier.batches
    await relay.until_empty()


async def test_mail_with_a_release_time_leaves_then_and_holds_up_nobody(start: Start) -> None:
    relay = await start()
    relay.accept("before@example.com")
    await relay.until_empty()
    release = relay.clock.now() + 0.15
    relay.accept("later@example.com", release=release)
    relay.accept("now@example.com")
    await relay.until(lambda: len(relay.courier.batches) == 2)
    await relay.until(lambda: relay.store.counts()[queue_of("default")] == QueueCounts(deferred=1))
    await relay.until_empty()
    assert relay.clock.now() >= release
    assert relay.courier.recipients() == ["before@example.com", "now@example.com", "later@example.com"]
    (delivered,) = [each for each in relay.sink.named("delivered") if "later" in str(each["recipient"])]
    assert 0 <= delivered["age"] < 0.1
    assert delivered["attempt"] == 1


async def test_what_comes_due_singly_is_claimed_together(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = make()
    claim, asked = relay.store.claim, 0

    async def counted(queue: QueueName, limit: int, **options: Any) -> list[Delivery]:
        nonlocal asked
        asked += 1
        return await claim(queue, limit, **options)

    monkeypatch.setattr(relay.store, "claim", counted)
    first = relay.clock.now() + 0.3
    for number in range(50):
        relay.accept(f"u{number}@example.com", release=first + number * 0.005)
    await relay.scheduler.start()
    await relay.until_empty()
    assert len(relay.courier.recipients()) == 50
    assert asked < 25


async def test_mail_that_came_due_as_the_clock_was_set_back_is_sent_when_due_again(start: Start) -> None:
    clock = ClockSetBack()
    relay = await start(clock=clock)
    accepted = clock.now()
    clock.behind = 0.1
    relay.accept("list@example.com", release=accepted)
    await relay.until_empty()
    assert clock.now() >= accepted


async def test_mail_with_an_earlier_release_time_is_not_kept_waiting_by_a_later_one(start: Start) -> None:
    relay = await start()
    relay.accept("late@example.com", release=relay.clock.now() + 3600)
    relay.accept("soon@example.com", release=relay.clock.now() + 0.1)
    await relay.until(lambda: relay.store.counts()[queue_of("default")] == QueueCounts(deferred=1))
    assert relay.courier.recipients() == ["soon@example.com"]
    assert [each.recipient for each in await relay.stored()] == ["late@example.com"]


# Suspension


async def test_a_dead_destination_is_suspended_and_others_go_on(start: Start) -> None:
    relay = await start(
        zones=(MX,), retry=replace(SOON, suspend_min=60.0, suspend_max=60.0, schedule=(60.0,))
    )
    relay.courier.script = lambda batch: [
        NO_HOST if batch.route.name == "mx.dead.example" else DELIVERED for _ in batch.deliveries
    ]
    for n in range(100):
        relay.accept(f"u{n}@dead.example")
        relay.accept(f"u{n}@live.example")
    await relay.until(lambda: len(relay.sink.named("delivered")) == 100)
    await relay.until_put_off("u")
    attempted = [name for name in relay.courier.recipients() if name.endswith("dead.example")]
    assert len(attempted) <= 10  # those that were under way together
    assert len(relay.sink.named("suspended")) == 1
    # Later mail is not even tried, and uses up no attempt.
    before = len(relay.courier.batches)
    late = relay.accept("late@dead.example")
    await relay.until_put_off("late")
    assert len(relay.courier.batches) == before
    (stored,) = await relay.store.deliveries_of(late.id)
    assert stored.attempts == 0
    assert stored.last is not None
    assert "suspended: 451 4.4.1 connection refused" in str(stored.last.reply)
    assert stored.next_attempt >= relay.clock.now() + 55
    shown = MessageView(late, ((stored, DeliveryState.DEFERRED),))
    assert [step.event for step in steps(shown)] == ["accepted", "no attempt", "next attempt"]


@pytest.mark.parametrize("zone", [ZoneSettings(), ZoneSettings(next_hop="hop")], ids=["mx", "hop"])
async def test_mail_that_is_put_off_is_not_deferred_and_says_why(start: Start, zone: ZoneSettings) -> None:
    relay = await start(zones=(zone,), retry=SOON)
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    relay.accept("first@example.com")
    await relay.until(lambda: bool(relay.sink.named("suspended")))
    for n in range(5):
        relay.accept(f"late{n}@example.com")
    await relay.until(lambda: len(relay.sink.named("suspended")) == 5)
    assert [line for line in relay.sink.named("deferred") if not line["attempt"]] == []
    assert "connection refused" in str(relay.sink.named("suspended")[0]["reply"])


async def test_one_probe_at_a_time_until_a_success(start: Start) -> None:
    relay = await start(retry=SOON)
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    for n in range(30):
        relay.accept(f"u{n}@example.com")
    await relay.until(lambda: len(relay.sink.named("suspended")) == 1)
    relay.courier.most.clear()
    relay.courier.seconds = 0.005
    await relay.until(lambda: len(relay.sink.named("suspended")) == 3)
    assert relay.courier.most["zone default"] == 1
    relay.courier.script = lambda batch: [DELIVERED] * len(batch.deliveries)
    await relay.until_empty()
    assert len(relay.sink.named("resumed")) == 1
    assert relay.courier.most["zone default"] > 1


# Routes


async def test_an_unroutable_domain_bounces_or_waits_as_the_router_says(start: Start) -> None:
    relay = await start(zones=(MX,), retry=SOON)

    def unroutable(outcome: Outcome) -> Unroutable:
        return Unroutable(zone="default", name="x", outcome=outcome, expires=0.0)

    relay.router.answers = {
        "null.example": unroutable(
            Outcome(Verdict.BOUNCED, Reply(556, "1.10", "null MX"), Scope.DOMAIN, local=True)
        ),
        "servfail.example": unroutable(
            Outcome(Verdict.DEFERRED, Reply(451, "4.3", "DNS"), Scope.DOMAIN, local=True)
        ),
    }
    relay.accept("b@null.example", "c@servfail.example", "d@fine.example")
    await relay.until(lambda: len(relay.sink.named("bounced")) == 1)
    await relay.until(lambda: len(relay.sink.named("deferred")) >= 2)
    del relay.router.answers["servfail.example"]
    await relay.until_empty()
    assert sorted(relay.courier.recipients()) == ["a@example.org", "c@servfail.example", "d@fine.example"]


async def test_a_slow_look_up_holds_up_only_its_domain(make: Make) -> None:
    relay = make(zones=(MX,))
    relay.router.gated = {"slow.example"}
    await relay.scheduler.start()
    relay.accept("b@slow.example", "c@quick.example")
    await relay.until(lambda: relay.courier.recipients() == ["c@quick.example"])
    relay.accept("d@slow.example")
    await asyncio.sleep(0.01)
    assert relay.router.asked["slow.example"] == 1
    relay.router.gates["slow.example"].set()
    await relay.until_empty()


async def test_look_ups_at_once_are_bounded(make: Make) -> None:
    relay = make(zones=(MX,))
    relay.router.gated = {f"d{n}.example" for n in range(80)}
    await relay.scheduler.start()
    relay.accept(*(f"b@d{n}.example" for n in range(80)))
    await asyncio.sleep(0.02)
    assert len(relay.router.asked) == 50
    for gate in relay.router.gated:
        relay.router.gates[gate].set()
    await relay.until_empty()


async def test_a_router_that_raises_costs_a_deferral(start: Start) -> None:
    relay = await start(zones=(MX,))
    relay.router.answers["bug.example"] = RuntimeError("bug")
    relay.accept("b@bug.example")
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    assert [event["where"] for event in relay.sink.named("trouble")] == ["queue.router"]


# Window


async def test_a_slow_destination_never_fills_the_window(make: Make) -> None:
    relay = make(zones=(MX,), window=64)
    slow = asyncio.Event()
    plain = relay.courier.deliver

    async def deliver(batch: Batch) -> Sequence[Outcome]:
        if batch.route.name == "mx.slow.example":
            await slow.wait()
        return await plain(batch)

    relay.courier.deliver = deliver  # type: ignore[method-assign]  # a courier that hangs on one host
    for n in range(300):
        relay.accept(f"u{n}@slow.example", tell=False)
    relay.accept("b@quick.example", tell=False)
    await relay.scheduler.start()
    await relay.until(lambda: relay.courier.recipients() == ["b@quick.example"])
    assert relay.scheduler.zone("default").plan.window.waiting <= 64
    relay.accept("c@quick.example")
    await relay.until(lambda: relay.courier.recipients()[-1] == "c@quick.example")
    slow.set()
    await relay.until_empty()
    assert len(relay.courier.recipients()) == 302


async def test_many_domains_of_one_slow_provider_do_not_hide_the_others(make: Make) -> None:
    relay = make(zones=(replace(MX, max_connections=4, max_connections_per_destination=2),), window=64)
    relay.courier.gate = asyncio.Event()
    plain = relay.courier.deliver

    async def deliver(batch: Batch) -> Sequence[Outcome]:
        if batch.route.name == "mx.quick.example":
            return [DELIVERED] * len(batch.deliveries)
        return await plain(batch)

    relay.courier.deliver = deliver  # type: ignore[method-assign]  # a courier that hangs on one host
    for n in range(200):
        relay.router.answers[f"d{n}.example"] = route_to("default", "provider")
        relay.accept(f"u@d{n}.example", tell=False)
    relay.accept("b@quick.example", tell=False)
    await relay.scheduler.start()
    await relay.until(lambda: any(e["recipient"] == "b@quick.example" for e in relay.sink.named("delivered")))
    relay.courier.gate.set()
    await relay.until_empty()
    assert len(relay.courier.recipients()) == 200


async def test_a_long_queue_is_claimed_in_batches(make: Make) -> None:
    relay = make()
    for n in range(3000):
        relay.accept(f"u{n}@example.com", tell=False)
    await relay.scheduler.start()
    await relay.until_empty(timeout=20)
    assert relay.store.asked["claim"] < 30
    assert len(relay.courier.recipients()) == 3000


# Trouble


async def test_a_courier_that_raises_costs_a_deferral_and_no_lane(start: Start) -> None:
    relay = await start(zones=(ZoneSettings(next_hop="hop", max_connections=1),))

    def script(batch: Batch) -> list[Outcome]:
        if batch.deliveries[0].recipient == "bug@example.com":
            raise RuntimeError("bug")
        if batch.deliveries[0].recipient == "short@example.com":
            return []
        return [DELIVERED]

    relay.courier.script = script
    for name in ("bug", "short", "fine"):
        relay.accept(f"{name}@example.com")
    await relay.until(lambda: len(relay.sink.named("delivered")) == 1)
    await relay.until(lambda: len(relay.sink.named("deferred")) == 2)
    assert [event["where"] for event in relay.sink.named("trouble")] == ["queue.courier"] * 2
    assert all(delivery.attempts == 0 for delivery in await relay.stored())
    assert relay.scheduler.zone("default").plan.round_robin.active == 0


async def test_an_unreadable_message_is_put_off_and_reported(make: Make) -> None:
    relay = make()
    message = relay.accept("b@example.com", age=10 * 86400, tell=False)

    async def corrupt(message_id: str) -> None:
        raise StoreCorruptError("checksum")

    relay.store.read_message = corrupt  # type: ignore[assignment,method-assign]  # a broken record
    await relay.scheduler.start()
    await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
    assert relay.sink.named("trouble")[0]["id"] == message.id
    assert not relay.courier.batches
    (stored,) = await relay.stored()
    assert stored.next_attempt > relay.clock.now() + 600


async def test_outcomes_outlive_trouble_and_claims_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "RETRY_FIRST", 0.01)
    monkeypatch.setattr(zone, "CLAIM_RETRY_FIRST", 0.01)
    relay = make()
    relay.courier.gate = asyncio.Event()
    await relay.scheduler.start()
    for n in range(5):
        relay.accept(f"u{n}@example.com")
    await relay.until(lambda: len(relay.courier.in_flight) == 5)
    relay.store.refuses = True
    relay.courier.gate.set()
    await relay.until(lambda: len(relay.sink.named("delivered")) == 5)
    relay.accept("late@example.com")
    await asyncio.sleep(0.05)
    assert len(relay.courier.batches) == 5
    assert len(relay.scheduler.active_keys()) == 5
    relay.store.refuses = False
    await relay.until_empty()
    # Nobody got anything twice.
    assert sorted(relay.courier.recipients()) == [
        "late@example.com",
        *(f"u{n}@example.com" for n in range(5)),
    ]


async def test_a_repaired_store_is_asked_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zone, "CLAIM_RETRY_FIRST", 3600.0)
    relay = await start()
    await asyncio.sleep(0.01)
    relay.store.refuses = True
    relay.store.repaired = asyncio.Event()
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.sink.named("trouble")) == 1)
    relay.store.refuses = False
    relay.store.repaired.set()
    await relay.until_empty()


async def test_mail_in_an_unknown_zone_waits_until_the_zone_is_back(make: Make) -> None:
    default = ZoneSettings(next_hop="hop")
    relay = make(zones=(default,))
    relay.accept("b@example.com", zone="gone", tell=False)
    relay.accept("c@example.com", zone="gone;high", tell=False)
    await relay.scheduler.start()
    assert relay.sink.named("zone-missing") == [{"zone": "gone", "deliveries": 2}]
    (problem,) = relay.scheduler.problems()
    assert problem.startswith("zone gone is not configured, but 2 deliveries are queued in it")
    # New mail that somebody else has left for it, and an operator's change, do not make it leave.
    relay.accept("d@example.com", zone="gone")
    relay.accept("e@example.com")
    await relay.until(lambda: len(relay.courier.batches) == 1)
    assert relay.courier.recipients() == ["e@example.com"]
    relay.scheduler.configure((default, ZoneSettings(name="gone", next_hop="there")), relay.retry)
    assert relay.scheduler.problems() == ()
    await relay.until_empty()
    assert sorted(relay.courier.recipients()) == [f"{name}@example.com" for name in "bcde"]


async def test_the_default_zone_is_there_though_no_configuration_names_it(start: Start) -> None:
    relay = await start(zones=(ZoneSettings(name="bulk", next_hop="hop"),))
    relay.accept("b@example.com", zone="default")
    await relay.until_empty()
    assert not relay.sink.named("zone-missing")
    assert relay.scheduler.problems() == ()


async def test_a_zone_that_a_reload_takes_away_keeps_its_mail(make: Make) -> None:
    default, bulk = (
        ZoneSettings(next_hop="hop"),
        ZoneSettings(name="bulk", next_hop="there", max_connections=1),
    )
    relay = make(zones=(default, bulk))
    relay.courier.gate = asyncio.Event()
    await relay.scheduler.start()
    for number in range(20):
        relay.accept(f"u{number}@example.com", zone="bulk")
    await relay.until(lambda: relay.courier.running["zone bulk"] == 1)
    relay.scheduler.configure((default,), relay.retry)
    assert relay.sink.named("zone-missing") == [{"zone": "bulk", "deliveries": 20}]
    # What was under way ends by the old settings.
    relay.courier.gate.set()
    await relay.until(lambda: len(relay.sink.named("delivered")) == 1)
    relay.accept("other@example.com")
    await relay.until(lambda: len(relay.sink.named("delivered")) == 2)
    await relay.until(lambda: "but 19 deliveries are queued" in "".join(relay.scheduler.problems()))
    relay.scheduler.configure((default,), relay.retry)
    assert len(relay.sink.named("zone-missing")) == 1
    relay.scheduler.configure((default, bulk), relay.retry)
    await relay.until_empty()
    assert {batch.zone.next_hop for batch in relay.courier.batches} == {"hop", "there"}


@pytest.mark.parametrize("policy", list(InDoubtAction))
async def test_an_outcome_in_doubt_follows_the_zone(start: Start, policy: InDoubtAction) -> None:
    relay = await start(zones=(ZoneSettings(next_hop="hop", in_doubt=policy),), retry=SOON)
    first = structs.replace(DEFERRED, in_doubt=True)
    relay.courier.script = lambda batch: [
        first if d.attempts == 0 and d.recipient == "b@example.com" else DELIVERED for d in batch.deliveries
    ]
    relay.accept("b@example.com")
    if policy is InDoubtAction.HOLD:
        await relay.until(lambda: len(relay.sink.named("deferred")) == 1)
        await asyncio.sleep(0.05)
        (stored,) = await relay.stored()
        assert stored.held
        assert stored.last is not None
        assert stored.last.in_doubt
        assert len(relay.courier.batches) == 1
        return
    await relay.until_empty()
    expected = ["b@example.com", "b@example.com" if policy is InDoubtAction.RETRY else "a@example.org"]
    assert relay.courier.recipients() == expected


# The end


async def test_stop_lets_attempts_end_and_records_them(start: Start) -> None:
    relay = await start()
    relay.courier.seconds = 0.05
    relay.accept("b@example.com")
    await relay.until(lambda: len(relay.courier.in_flight) == 1)
    stopping = asyncio.create_task(relay.scheduler.stop(2.0))
    await asyncio.sleep(0)
    relay.accept("late@example.com")
    await stopping
    assert [delivery.recipient for delivery in await relay.stored()] == ["late@example.com"]
    relay.scheduler.notify(queue_of("default"))
    await asyncio.sleep(0.01)
    assert len(relay.courier.batches) == 1


async def test_stop_cancels_what_takes_too_long_and_forgets_it(make: Make) -> None:
    relay = make(zones=(ZoneSettings(next_hop="hop", max_connections=2),))
    relay.courier.gate = asyncio.Event()
    await relay.scheduler.start()
    for n in range(5):
        relay.accept(f"u{n}@example.com")
    await relay.until(lambda: len(relay.courier.in_flight) == 2)
    await relay.scheduler.stop(0.01)
    assert not relay.courier.in_flight
    claimed = await relay.store.claim(queue_of("default"), 10, now=relay.clock.now())
    assert len(claimed) == 5


async def test_an_idle_scheduler_stops_at_once(start: Start) -> None:
    relay = await start()
    async with asyncio.timeout(0.5):
        await relay.scheduler.stop(30.0)


async def test_mail_that_has_waited_makes_way_on_a_busy_loop_and_leaves_all_the_same(make: Make) -> None:
    """New mail comes as fast as it is delivered; the processor is what is short."""
    relay = make(zones=(ZoneSettings(max_connections=10),), busy=lambda: 1.0)
    relay.courier.seconds = 0.02
    for number in range(100):
        relay.accept(f"old@old{number % 50}.example", tell=False)
    for delivery in await relay.stored():
        await relay.store.update([delivery.key], lambda each: structs.replace(each, next_attempt=1.0))
    await relay.scheduler.start()
    throttle = relay.scheduler.throttle
    sent, slowest = relay.courier.recipients, math.inf
    async with asyncio.timeout(10):
        while sum(recipient.startswith("old") for recipient in sent()) < 100:
            relay.accept("new@new.example")
            await asyncio.sleep(0.005)
            slowest = min(slowest, throttle.rate)
    assert slowest <= LEAST
    assert relay.scheduler.throttle.seconds > 0.5
    assert "new@new.example" in sent()[:50]
    await relay.until_empty()
    await relay.until(lambda: not throttle.is_looked_at)


async def test_unstored_outcomes_stop_further_mail(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent whose outcome cannot be recorded is sent again after a crash."""
    monkeypatch.setattr(journal, "MAX_UNSETTLED", 10)
    zone = ZoneSettings(next_hop="hop", max_connections=4, max_connections_per_destination=4)
    relay = make(zones=(zone,))
    room, waiting = relay.settler.outcome_log.room, Counter[str]()

    async def counted() -> bool:
        waiting["room"] += 1
        await room()
        waiting["room"] -= 1
        return True

    monkeypatch.setattr(relay.settler.outcome_log, "room", counted)
    relay.store.silence = asyncio.Event()
    for n in range(100):
        relay.accept(f"u{n}@example.com", tell=False)
    await relay.scheduler.start()
    await relay.until(lambda: waiting["room"] == 4 or len(relay.courier.batches) == 100)
    assert 10 <= len(relay.courier.batches) <= 10 + 4
    relay.store.silence.set()
    await relay.until_empty()
    assert len(relay.courier.batches) == 100


async def test_rows_of_mailboxes_do_not_count_as_mail_of_a_zone_that_is_not_configured(make: Make) -> None:
    relay = make()
    relay.store.counts = lambda: {MAILBOXES: QueueCounts(ready=3), queue_of("gone"): QueueCounts(ready=1)}  # type: ignore[method-assign]  # an outbox
    (problem,) = relay.scheduler.problems()
    assert problem.startswith("zone gone is not configured, but 1 deliveries are queued in it")
