"""The destinations of `status`: nothing says 0 while mail waits, and what hurts comes first."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from msgspec import structs

from tests.support.queueing import DEFERRED, NO_HOST, Relay
from zonerelay.config.settings import ZoneSettings
from zonerelay.control import destinations as module
from zonerelay.control.destinations import DestinationRows
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.operations.answers import DestinationStatus, hurts


@pytest.fixture
async def relay() -> AsyncIterator[Relay]:
    relay = Relay(clock=ManualClock())
    yield relay
    await relay.close()


@pytest.fixture
async def counts(relay: Relay) -> AsyncIterator[DestinationRows]:
    counts = DestinationRows(relay.store, relay.scheduler, relay.clock)
    yield counts
    await counts.close()


async def test_what_is_only_in_the_store_is_counted(relay: Relay, counts: DestinationRows) -> None:
    def later(delivery: Delivery) -> Delivery:
        now = relay.clock.now()
        return delivery.deferred(now + 600, DEFERRED.attempt(now), counts=True)

    waiting = relay.accept("a@slow.example", "b@slow.example", age=7200.0, tell=False)
    held = relay.accept("a@held.example", tell=False)
    await relay.store.update([each.key for each in await relay.store.deliveries_of(waiting.id)], later)
    await relay.store.update(
        [each.key for each in await relay.store.deliveries_of(held.id)],
        lambda each: structs.replace(each, held=True),
    )
    (slow, other), _ = await counts.rows()
    assert (slow.destination, slow.ready, slow.deferred, slow.held) == ("slow.example", 0, 2, 0)
    assert (slow.oldest_seconds, slow.reply) == (7200.0, str(DEFERRED.reply))
    assert (other.destination, other.ready, other.deferred, other.held) == ("held.example", 0, 0, 1)
    assert counts.every == 1


async def test_domains_beyond_the_most_are_counted_together(
    relay: Relay, counts: DestinationRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    for number in range(5):
        relay.accept(f"a@d{number}.example", tell=False)
    assert {row.destination: row.ready for row in (await counts.rows())[0]} == {
        "d0.example": 1,
        "d1.example": 1,
        module.OTHERS: 3,
    }


async def test_an_answer_does_not_wait_for_a_slow_store(
    relay: Relay, counts: DestinationRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    scan, go = relay.store.scan, asyncio.Event()

    async def slow(**named: object) -> AsyncGenerator[Delivery, None]:
        await go.wait()
        async for each in scan():
            yield each

    monkeypatch.setattr(relay.store, "scan", slow)
    relay.accept("a@slow.example", tell=False)
    assert (await counts.rows(), counts.every) == (([], 0), 0)
    go.set()
    assert [row.ready for row in (await counts.rows())[0]] == [1]


async def test_a_suspended_destination_counts_its_domains(relay: Relay, counts: DestinationRows) -> None:
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await relay.scheduler.start()
    relay.accept("a@down.example")
    await relay.until(lambda: bool(relay.sink.named("suspended")))
    (row,), _ = await counts.rows()
    assert row.suspended_until is not None
    assert row.ready + row.deferred == 1
    assert row.oldest_seconds >= 0


async def test_mail_of_an_unreachable_host_is_deferred(relay: Relay, counts: DestinationRows) -> None:
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await relay.scheduler.start()
    message = relay.accept("a@down.example")
    await relay.until(lambda: bool(relay.sink.named("suspended")))
    await relay.until(lambda: not relay.scheduler.active_count("default"))
    due = relay.clock.now() - 1.0
    keys = [each.key for each in await relay.store.deliveries_of(message.id)]
    await relay.store.update(keys, lambda each: structs.replace(each, next_attempt=due))
    relay.accept("b@down.example", tell=False)
    (row,), _ = await counts.rows()
    assert (row.ready, row.deferred) == (0, 2)
    assert counts.unreachable["default"] == 1, "of the other, its zone knows"


async def test_two_answers_at_a_time_count_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE", 1)
    relay = Relay(zones=(ZoneSettings(),), clock=ManualClock())
    counts = DestinationRows(relay.store, relay.scheduler, relay.clock)
    relay.courier.script = lambda batch: [NO_HOST] * len(batch.deliveries)
    await relay.scheduler.start()
    names = ("one", "two", "three")
    for name in names:
        relay.accept(f"a@{name}.example")
    await relay.until(lambda: len(relay.sink.named("suspended")) == len(names))
    for name in names:
        relay.accept(f"b@{name}.example", tell=False)
    await asyncio.gather(counts.rows(), counts.rows())
    assert counts.unreachable["default"] == len(names)
    await counts.close()
    await relay.close()


async def test_of_many_the_worst_are_chosen_before_rows_are(relay: Relay, counts: DestinationRows) -> None:
    for number in range(30):
        for _ in range(1 + number % 7):
            relay.accept(f"a@d{number}.example", tell=False)
    assert isinstance(relay.clock, ManualClock)
    relay.clock.advance(60.0)
    for number in range(50):
        relay.accept(f"{number}@largest.example", tell=False)
    everything, total = await counts.rows()
    some, still = await counts.rows(5, largest=1)
    assert (total, still) == (31, 31)
    assert everything == sorted(everything, key=hurts)
    assert some[:5] == everything[:5]
    assert [row.destination for row in some[5:]] == ["largest.example"]


def test_what_hurts_comes_first() -> None:
    def row(name: str, **fields: object) -> DestinationStatus:
        made = DestinationStatus(zone="default", destination=name, hosts="", active=0, waiting=0)
        return structs.replace(made, **fields)

    rows = [
        row("busy", active=20, ready=900),
        row("old", deferred=3, oldest_seconds=9e5),
        row("many", deferred=400, oldest_seconds=60.0),
        row("idle"),
        row("down", suspended_until=1.0),
    ]
    assert [each.destination for each in sorted(rows, key=hurts)] == ["down", "many", "old", "busy", "idle"]
