"""Several relays on one Redis server: claims, leases, fencing, news."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace

import pytest

from tests.store.builders import (
    NOW,
    attempt,
    body_of,
    delivery_for,
    envelope_for,
    message_id,
    own_message,
    store_message,
)
from tests.store.fleet import LEASE, LONG, Fleet, beat_now, claim_ids, lease_of, stop_renewing
from tests.store.spools import Spool, until
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import CHUNK_SIZE, ClaimLostError, Finish, Postpone, StoreError, Submit
from zonerelay.store.redis import lease as redis_lease


@pytest.fixture
def fleet(fleet: Fleet) -> Fleet:
    """Whose leases end when a test says so, not when the machine is busy."""
    fleet.settings = replace(fleet.settings, lease=LONG)
    return fleet


async def taken_over(heir: Spool, count: int) -> list[Delivery]:
    """What comes to it once it has looked after the others."""
    found: list[Delivery] = []

    async def look() -> None:
        while len(found) < count:
            found.extend(await heir.store.claim(queue_of("default"), 100, now=NOW))
            await asyncio.sleep(0.01)

    beat_now(heir)
    await asyncio.wait_for(look(), 20.0)
    return found


async def test_two_relays_share_a_queue_without_overlap(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    assert one.store.node != two.store.node
    for number in range(40):
        await store_message((one if number % 2 else two).store, number)
    batches = await asyncio.gather(
        *(claim_ids(spool.store, limit=7) for spool in (one, two, one, two, one, two))
    )
    claimed = sorted(number for batch in batches for number in batch)
    assert claimed == list(range(40))
    assert one.store.counts() == two.store.counts() or one.store.counts()[queue_of("default")].total <= 40


async def test_relay_hears_of_mail_that_another_took(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1, zone="a b")
    await until(lambda: two.news == [queue_of("a b")])  # long before anybody's next beat
    assert one.news == []


async def test_overdue_retry_of_a_silent_relay_is_news_with_the_next_beat(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1, next_attempt=NOW)
    assert two.news == []
    beat_now(two)
    await until(lambda: queue_of("default") in two.news)


async def test_operator_leaves_alone_what_another_relay_has_claimed(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1)
    await store_message(one.store, 2)
    (claimed,) = await one.store.claim(queue_of("default"), 1, now=NOW)
    keys = [delivery.key async for delivery in two.store.scan()]
    assert await two.store.update(keys, lambda d: replace(d, held=True)) == 1
    assert await two.store.deliveries_of(message_id(1)) == [claimed]
    assert await one.store.update(keys, lambda d: replace(d, held=True)) == 2


async def test_dead_relays_claims_are_taken_over_after_itslease_of(fleet: Fleet) -> None:
    dead, other = await fleet.relay(lease=LEASE), await fleet.relay(lease=LEASE)
    await store_message(dead.store, 1)
    assert await claim_ids(dead.store) == [1]
    stop_renewing(dead)
    await until(lambda: queue_of("default") in other.news[1:])
    found: list[int] = []
    while not found:
        await asyncio.sleep(0.02)
        with contextlib.suppress(
            StoreError
        ):  # so busy here that its own lease has ended: it gets another one
            found = await claim_ids(other.store)
    assert found == [1]


async def test_slow_relay_cannot_finish_what_it_has_lost(fleet: Fleet) -> None:
    slow, other = await fleet.relay(), await fleet.relay()
    await store_message(slow.store, 1, "a@example.net", "b@example.net")
    first, second = await slow.store.claim(queue_of("default"), 10, now=NOW)
    stop_renewing(slow)
    assert await claim_ids(other.store) == []
    fleet.endlease_of(slow)
    await taken_over(other, 2)
    bounce, bounced = own_message(message_id(9), b"y", "from@example.org")
    await slow.store.settle([Finish(first), Submit(bounce, b"y", (bounced,))])
    await slow.store.settle([Postpone(second.deferred(NOW + 60, attempt()))])
    slow.store.release([first.key, second.key])
    await slow.store.probe()
    assert await other.store.deliveries_of(message_id(1)) == [first, second]
    assert await other.store.deliveries_of(message_id(9)) == []
    with pytest.raises(StoreError, match="lease"):
        await claim_ids(slow.store)
    await other.store.settle([Finish(first), Finish(second)])
    assert await other.store.queues() == set()


async def test_reports_among_lost_and_kept_claims_are_asked_for_one_by_one(fleet: Fleet) -> None:
    slow = await fleet.relay()
    await store_message(slow.store, 1)
    (lost,) = await slow.store.claim(queue_of("default"), 10, now=NOW)
    member = f"default {lost.message_id} to@example.net"
    fleet.server.ask("ZADD", fleet.key("claims"), "7", member)
    await store_message(slow.store, 2)
    (kept,) = await slow.store.claim(queue_of("default"), 10, now=NOW)
    bounce, bounced = own_message(message_id(9), b"y", "from@example.org")
    with pytest.raises(StoreError):
        await slow.store.settle([Finish(lost), Finish(kept), Submit(bounce, b"y", (bounced,))])
    assert await slow.store.deliveries_of(kept.message_id) == [kept]
    await slow.store.settle([Finish(kept), Submit(bounce, b"y", (bounced,))])
    assert await slow.store.deliveries_of(message_id(9)) == [bounced]


async def test_relay_that_lost_its_lease_is_told_and_reads_no_message_of_it(fleet: Fleet) -> None:
    slow, other = await fleet.relay(), await fleet.relay()
    await store_message(slow.store, 1)
    (delivery,) = await slow.store.claim(queue_of("default"), 10, now=NOW)
    assert await body_of(slow.store, delivery.message_id)
    fleet.forgetlease_of(slow)
    beat_now(slow)
    await until(lambda: bool(slow.lost))
    assert list(slow.lost[0]) == [delivery.key]
    with pytest.raises(StoreError, match="lost"):
        await slow.store.read_message(delivery.message_id)
    slow.store.release([delivery.key])
    assert await slow.store.read_message(delivery.message_id)
    await store_message(slow.store, 2)
    assert await claim_ids(slow.store) == [1, 2]
    assert other.lost == []


async def test_lease_that_was_not_renewed_in_time_stops_new_attempts(fleet: Fleet) -> None:
    spool = await fleet.relay()
    await store_message(spool.store, 1)
    (delivery,) = await spool.store.claim(queue_of("default"), 10, now=NOW)
    spool.store.check_claim(delivery.message_id)
    spool.store._keeper.lease._valid_until = 0.0  # type: ignore[attr-defined]
    with pytest.raises(ClaimLostError):
        spool.store.check_claim(delivery.message_id)
    with pytest.raises(ClaimLostError):
        await spool.store.read_message(delivery.message_id)
    with pytest.raises(ClaimLostError):
        await spool.store.claim(queue_of("default"), 1, now=NOW)
    beat_now(spool)
    await until(lambda: spool.store._keeper.lease._valid_until > 0.0)  # type: ignore[attr-defined]
    assert await spool.store.read_message(delivery.message_id)


async def test_stopping_relay_gives_back_what_it_has_claimed(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1)
    await claim_ids(one.store)
    await one.store.close()
    assert await claim_ids(two.store) == [1]


async def test_message_id_of_another_relay_is_refused(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    envelope = envelope_for(message_id(1), "a@example.net")
    body = b"x" * (20 * CHUNK_SIZE)
    async with one.store.begin(envelope) as first, two.store.begin(envelope) as second:
        await first.write(body)
        await one.store._keeper.call_body("PING")  # type: ignore[attr-defined]
        await second.write(body)
        with pytest.raises(StoreError):
            await second.commit([delivery_for(envelope, "a@example.net")])
        await first.commit([delivery_for(envelope, "a@example.net")])
    with pytest.raises(StoreError):
        await store_message(two.store, 1)
    assert await body_of(two.store, message_id(1)) == body


async def test_deferred_mail_passed_over_by_one_is_found_by_the_other(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1, "a@full.example", next_attempt=NOW - 5)
    await store_message(one.store, 2, "b@full.example")
    assert await one.store.claim(queue_of("default"), 10, now=NOW, skip_domains={"full.example"}) == []
    assert await claim_ids(two.store) == [1, 2]


async def test_a_servers_clock_that_is_set_back_does_not_keep_a_dead_relays_claims(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_lease, "LONGEST_LEASE", 300)
    fleet.settings = replace(fleet.settings, lease=LEASE)
    dead, heir = await fleet.relay(), await fleet.relay()
    (delivery,) = await store_message(dead.store, 1)
    assert await dead.store.claim(queue_of("default"), 1, now=NOW) == [delivery]
    stop_renewing(dead)
    day = int((time.time() + 86_400) * 1000)
    fleet.server.ask("ZADD", fleet.key("leases"), str(day), lease_of(dead).token.decode())
    assert await taken_over(heir, 1) == [delivery]
