"""Several relays on one bucket: leases, take-over, fencing, intents, mail that is left to others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from tests.store.fleet import claim_ids
from tests.store.spools import Spool, s3_settings, until
from tests.support.s3_server import BUCKET, KEY, SECRET, shared_moto
from zonerelay.config.settings import Backend, S3Settings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common.claims import index_claims
from zonerelay.store.contract import (
    Change,
    ClaimLostError,
    Finish,
    Postpone,
    QueueCounts,
    StoreError,
    StoreOpenError,
)
from zonerelay.store.contract import Submit as Report
from zonerelay.store.s3 import alerts as s3_alerts
from zonerelay.store.s3 import store as s3
from zonerelay.store.s3.client import Bucket, UnsureError
from zonerelay.store.s3.objects import Abilities
from zonerelay.store.s3.store import S3Store

LEASE = 2.0
LONG = 600.0
"""A lease that does not end, however busy the machine is. Beats are ten seconds apart."""
PATIENCE = 20.0


class Fleet:
    """Relays that share a bucket and a prefix. Their leases end when a test says so."""

    def __init__(self, stack: AsyncExitStack, **other: Any) -> None:  # Any: settings by their names
        self.settings: S3Settings = s3_settings(shared_moto().url, timeout=15.0, **{"lease": LONG, **other})
        self._stack = stack

    async def relay(self, **other: Any) -> Spool:  # Any: as above
        settings = replace(self.settings, **other)
        spool = Spool(Path("spool"), backend=Backend.S3, s3=settings, clock=SystemClock())
        return await self._stack.enter_async_context(spool)

    def keys(self, name: str = "") -> list[str]:
        prefix = self.settings.prefix
        return [key.removeprefix(prefix) for key in shared_moto().keys(prefix + name)]


@pytest.fixture
async def fleet(home: None) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(stack)


def inside(spool: Spool) -> S3Store:
    assert isinstance(spool.store, S3Store)
    return spool.store


def stop_renewing(spool: Spool) -> None:
    """What a relay looks like from outside that hangs, or cannot be reached: its lease will end."""
    task = inside(spool)._keeper._task
    assert task is not None
    task.cancel()


async def find_dead(heir: Spool, dead: Spool) -> None:
    """As if a lease had passed since `heir` has last heard of it."""
    nodes = inside(heir)._nodes
    await heir.store.probe()
    nodes.others[dead.store.node].since = float("-inf")
    await heir.store.probe()
    assert nodes.others[dead.store.node].lease.state == "dead"


def cut_off(spool: Spool, *, after: int = 0) -> None:
    """A relay that is gone after so many more requests: none of them arrives any more."""
    bucket = inside(spool)._objects.bucket
    ask, left = bucket._ask, after
    stop_renewing(spool)

    async def gone(verb: str, **what: Any) -> dict[str, Any]:  # Any: as in the client
        nonlocal left
        if verb == "get_object" or not left:
            raise UnsureError("cut off")
        left -= 1
        return await ask(verb, **what)

    bucket._ask = gone  # type: ignore[method-assign]  # what a crash is


def leave_mail_to_others(spool: Spool) -> None:
    """A relay that has more than it can send."""
    store = inside(spool)
    store._has_room = store._walks._has_room = lambda: False  # type: ignore[method-assign]  # as if it were full
    if store._alerts is not None:
        store._alerts._has_room = lambda: False


def lose_answer(spool: Spool, verb: str) -> None:
    """The next such request happens, and nobody hears of it."""
    bucket = inside(spool)._objects.bucket
    ask = bucket._ask

    async def deaf(asked: str, **what: Any) -> dict[str, Any]:  # Any: as in the client
        answer = await ask(asked, **what)
        if asked == verb and "/queue/" in str(what.get("Key", "")):
            bucket._ask = ask  # type: ignore[method-assign]  # as above
            error = UnsureError("the answer was lost")
            bucket.trouble(error)
            raise error
        return answer

    bucket._ask = deaf  # type: ignore[method-assign,assignment]  # what the network does


async def claimed(*spools: Spool, count: int, beating: bool = True) -> list[Delivery]:
    """What comes in to them, with beat after beat unless it must come by itself."""
    found: list[Delivery] = []
    async with asyncio.timeout(PATIENCE):
        while len(found) < count:
            for spool in spools:
                found += await spool.store.claim(queue_of("default"), 100, now=NOW)
            await (beat(*spools) if beating else asyncio.sleep(0.05))
    return found


async def beat(*spools: Spool) -> None:
    """Everybody renews its lease and looks at the others."""
    for spool in spools:
        await spool.store.probe()


async def healthy(spool: Spool) -> None:
    await until(lambda: spool.store.unhealthy() is None)


async def test_mail_stays_with_who_took_it_and_everybody_sees_all_of_it(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    assert {one.store.node, two.store.node} == {0, 1}
    for number in range(4):
        await store_message((one if number % 2 else two).store, number)
    assert await claim_ids(one.store) == [1, 3]
    assert await claim_ids(two.store) == [0, 2]
    keys = [d.key async for d in two.store.scan()]
    assert [int(key.message_id, 16) for key in keys] == [0, 1, 2, 3]
    assert await two.store.update(keys, lambda d: replace(d, warned=True)) == 2
    await beat(one, two, one)
    assert one.store.counts() == two.store.counts() == {queue_of("default"): QueueCounts(ready=4)}
    assert await two.store.oldest(queue_of("default"), now=NOW + 1) == NOW


async def test_zones_with_something_to_claim_are_woken_in_each_round_and_no_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_claims, "RECONCILE", 0.0)
    spool = await fleet.relay()
    await store_message(spool.store, 1)
    await store_message(spool.store, 2, next_attempt=NOW - 1)
    for expected in ([queue_of("default")], [queue_of("default")], []):
        spool.news.clear()
        await beat(spool)
        assert spool.news == expected
        await spool.store.claim(queue_of("default"), 1, now=NOW)


async def test_dead_relays_mail_is_taken_over_after_its_lease(fleet: Fleet) -> None:
    dead, one, two = await fleet.relay(), await fleet.relay(), await fleet.relay()
    body = bytes(range(256)) * 1200
    for number in range(6):
        await store_message(dead.store, number, body=body)
    assert len(await claim_ids(dead.store)) == 6
    cut_off(dead)
    await beat(one, two)
    assert await claim_ids(one.store) == await claim_ids(two.store) == []
    await find_dead(one, dead)
    found = await claimed(one, two, count=6)
    assert sorted(int(d.message_id, 16) for d in found) == list(range(6))
    assert queue_of("default") in one.news + two.news
    assert await body_of(one.store, message_id(3)) == body


async def test_slow_relay_is_told_and_cannot_finish_what_it_has_lost(fleet: Fleet) -> None:
    slow, other = await fleet.relay(), await fleet.relay()
    await store_message(slow.store, 1, "a@example.net", "b@example.net")
    first, second = await slow.store.claim(queue_of("default"), 10, now=NOW)
    stop_renewing(slow)
    await find_dead(other, slow)
    await claimed(other, count=2)
    # As fast as if its lease still held: only the condition on the object stands against it.
    inside(slow)._nodes.held_until = float("inf")
    bounce, bounced = own_message(message_id(9), b"y", "from@example.org")
    await slow.store.settle([Finish(first), Report(bounce, b"y", (bounced,), (first.key,))])
    assert list(slow.lost[0]) == [second.key]
    with pytest.raises(StoreError, match="lost"):
        await slow.store.read_message(second.message_id)
    await slow.store.settle([Postpone(second.deferred(NOW + 60, attempt()))])
    assert await other.store.deliveries_of(message_id(1)) == [first, second]
    assert await other.store.deliveries_of(message_id(9)) == []
    await other.store.settle([Finish(first), Finish(second)])


async def test_relay_that_lost_its_lease_begins_anew_and_nothing_is_handed_out_twice(fleet: Fleet) -> None:
    slow, other = await fleet.relay(), await fleet.relay()
    await store_message(slow.store, 1)
    (delivery,) = await slow.store.claim(queue_of("default"), 10, now=NOW)
    store, session = inside(slow), inside(slow)._nodes.session
    store._nodes._etag = '"another"'
    stored = store._nodes._bucket
    lease = (await stored.get(store._nodes._keys.node(slow.store.node))).data
    await stored.put(
        store._nodes._keys.node(slow.store.node), lease.replace(b'"beat"', b'"state":"dead","beat"')
    )
    await beat(slow)
    assert list(slow.lost[0]) == [delivery.key]
    await until(lambda: store._nodes.session not in ("", session))
    await healthy(slow)
    # Whoever of both takes it: the attempt that is under way counts, or is another's.
    await until(lambda: store.counts().get(queue_of("default"), QueueCounts()).ready == 1)
    if delivery.message_id in store._mine.ids:
        assert await claim_ids(slow.store) == []
        await slow.store.settle([Finish(delivery)])
        assert await slow.store.deliveries_of(delivery.message_id) == []
    else:
        assert await claim_ids(other.store) == [1]


async def test_relay_whose_lease_is_over_takes_nothing_from_the_relay_that_has_its_number_now(
    fleet: Fleet,
) -> None:
    """A relay that had stood still took mail of a live one, and both sent it (the simulation, seed 232)."""
    slow, other = await fleet.relay(), await fleet.relay()
    stop_renewing(slow)
    await find_dead(other, slow)
    newcomer = await fleet.relay()
    assert newcomer.store.node == slow.store.node
    await store_message(newcomer.store, 1)
    writer = newcomer.store.begin(envelope_for(message_id(2), "a@example.net"))
    await writer.write(b"x" * (6 * 1024 * 1024))
    await until(lambda: all(u.parts for u in inside(newcomer)._uploads._open.values()))
    inside(slow)._nodes.held_until = 0.0
    with pytest.raises(StoreError, match="lease"):
        await inside(slow)._walks.walk()
    with contextlib.suppress(StoreError):
        await inside(slow)._walks._remove_leftovers()
    await writer.commit([delivery_for(envelope_for(message_id(2), "a@example.net"), "a@example.net")])
    found = await newcomer.store.claim(queue_of("default"), 9, now=NOW)
    await newcomer.store.settle([Finish(delivery) for delivery in found])
    assert len(found) == 2
    assert fleet.keys("queue/") == []


async def test_lease_that_was_not_renewed_in_time_stops_new_attempts_and_new_mail(fleet: Fleet) -> None:
    spool = await fleet.relay()
    await store_message(spool.store, 1)
    (delivery,) = await spool.store.claim(queue_of("default"), 10, now=NOW)
    spool.store.check_claim(delivery.message_id)
    inside(spool)._nodes.held_until = 0.0
    with pytest.raises(ClaimLostError):
        spool.store.check_claim(delivery.message_id)
    with pytest.raises(ClaimLostError):
        await spool.store.read_message(delivery.message_id)
    with pytest.raises(StoreError, match="lease"):
        await store_message(spool.store, 2)
    inside(spool)._keeper._wake.set()  # the next beat comes
    await healthy(spool)
    assert await spool.store.read_message(delivery.message_id)


async def test_who_starts_again_in_time_goes_on_without_a_write(fleet: Fleet) -> None:
    one, other = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1, next_attempt=NOW - 5)
    session, number = inside(one)._nodes.session, one.store.node
    await one.reopen()
    assert (inside(one)._nodes.session, one.store.node) == (session, number)
    assert inside(one)._mine.get(message_id(1)).rev == 1  # type: ignore[union-attr]  # it is there
    assert await claim_ids(one.store) == [1]
    await one.store.close()
    await find_dead(other, one)
    await claimed(other, count=1)


async def test_what_a_newer_version_has_added_survives_a_deferral_and_a_take_over(fleet: Fleet) -> None:
    newer, older = await fleet.relay(), await fleet.relay()
    await store_message(newer.store, 1, body=b"x" * 100)
    bucket, key = inside(older)._objects.bucket, inside(older)._objects.keys.message(message_id(1))
    line, _, body = (await bucket.get(key)).data.partition(b"\n")
    members = json.loads(line) | {"tenant": "blue"}
    members["message"]["language"] = "pl"
    await bucket.put(key, json.dumps(members).encode() + b"\n" + body)
    cut_off(newer)
    await find_dead(older, newer)
    (delivery,) = await claimed(older, count=1)
    await older.store.settle([Postpone(delivery.deferred(NOW + 60, attempt()))])
    line, _, body = (await bucket.get(key)).data.partition(b"\n")
    found = json.loads(line)
    assert (found["rev"], found["tenant"], found["message"]) == (3, "blue", members["message"])
    assert body == b"x" * 100


async def test_message_id_of_another_relay_is_refused(fleet: Fleet) -> None:
    one, two = await fleet.relay(), await fleet.relay()
    await store_message(one.store, 1)
    with pytest.raises(StoreError, match="another"):
        await store_message(two.store, 1, body=b"something else")
    assert await body_of(one.store, message_id(1)) != b"something else"


@pytest.mark.parametrize("removes", [True, False])
async def test_settle_is_all_or_nothing_wherever_it_is_cut_off(
    fleet: Fleet, removes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounce, and the outcomes of two messages that it reports; the relay dies after each request."""

    async def cut(requests: int) -> bool:
        mine = Fleet(AsyncExitStack())
        async with mine._stack:
            spool = await mine.relay()
            inside(spool)._objects.abilities = Abilities(conditional_put=True, conditional_delete=removes)
            (one,) = await store_message(spool.store, 1)
            (two,) = await store_message(spool.store, 2)
            report, bounced = own_message(message_id(9), b"y" * 300_000, "from@example.org")
            changes: list[Change] = [Finish(one), Finish(two), Report(report, b"y" * 300_000, (bounced,))]
            await spool.store.claim(queue_of("default"), 9, now=NOW)
            cut_off(spool, after=requests)
            is_over = True
            try:
                await spool.store.settle(changes)
            except StoreError:
                is_over = False
            heir = await mine.relay()
            await find_dead(heir, spool)
            await inside(heir)._walking  # type: ignore[misc]  # it has begun
            await inside(heir)._writer.drain()
            found = await claim_ids(heir.store)
            assert found in ([1, 2], [9]), (requests, found)
            assert not is_over or found == [9]
            if found == [9]:
                assert await body_of(heir.store, message_id(9)) == b"y" * 300_000
            return found == [9]

    outcomes = await asyncio.gather(*map(cut, range(6 if removes else 8)))
    assert outcomes == sorted(outcomes)
    assert len(set(outcomes)) == 2


async def test_deferral_that_was_decided_with_a_bounce_is_carried_out_by_the_heir(fleet: Fleet) -> None:
    """The relay dies when the intent is written, before it reaches the other message."""
    spool = await fleet.relay()
    (one,) = await store_message(spool.store, 1)
    (two,) = await store_message(spool.store, 2)
    report, bounced = own_message(message_id(9), b"y", "from@example.org")
    later = two.deferred(NOW + 60, attempt())
    await spool.store.claim(queue_of("default"), 9, now=NOW)
    cut_off(spool, after=1)
    await spool.store.settle([Finish(one), Postpone(later), Report(report, b"y", (bounced,))])
    heir = await fleet.relay()
    await find_dead(heir, spool)
    await inside(heir)._walking  # type: ignore[misc]  # it has begun
    await inside(heir)._writer.drain()
    assert await heir.store.deliveries_of(message_id(1)) == []
    assert await heir.store.deliveries_of(message_id(2)) == [later]
    assert await heir.store.deliveries_of(message_id(9)) == [bounced]


async def test_what_stands_beside_a_message_is_carried_out_by_the_heir(fleet: Fleet) -> None:
    """The relay is cut off behind the request that stores the message: its client hears 250 all the same."""
    spool = await fleet.relay()
    envelope = envelope_for(message_id(1), "a@example.net")
    event, told = own_message(message_id(2), b"event", "0.0.1@hook")
    cut_off(spool, after=1)
    async with spool.store.begin(envelope) as writer:
        await writer.write(b"body")
        delivery = delivery_for(envelope, "a@example.net")
        await writer.commit([delivery], beside=lambda _: [Report(event, b"event", (told,))])
    heir = await fleet.relay()
    await find_dead(heir, spool)
    await inside(heir)._walking  # type: ignore[misc]  # it has begun
    await inside(heir)._writer.drain()
    assert await heir.store.deliveries_of(message_id(1)) == [delivery]
    assert await heir.store.deliveries_of(message_id(2)) == [told]
    assert await body_of(heir.store, message_id(2)) == b"event"


async def test_commit_whose_answer_was_lost_is_taken_back(fleet: Fleet) -> None:
    """The client has heard 451 and comes again."""
    spool = await fleet.relay()
    lose_answer(spool, "put_object")
    with pytest.raises(StoreError):
        await store_message(spool.store, 1)
    await healthy(spool)
    await until(lambda: not inside(spool)._refusals.open)
    inside(spool)._begin_walk()
    await inside(spool)._walking  # type: ignore[misc]  # it has begun
    assert [d async for d in spool.store.scan()] == []
    assert await spool.store.queues() == set()


@pytest.mark.parametrize("verb", ["put_object", "delete_object"])
async def test_settle_whose_answer_was_lost_is_repeated_without_a_second_report(
    fleet: Fleet, verb: str
) -> None:
    spool = await fleet.relay()
    (delivery,) = await store_message(spool.store, 1)
    await spool.store.claim(queue_of("default"), 9, now=NOW)
    bounce, bounced = own_message(message_id(9), b"y", "from@example.org")
    changes: list[Change] = [Finish(delivery), Report(bounce, b"y", (bounced,), (delivery.key,))]
    lose_answer(spool, verb)
    for _ in range(100):
        try:
            await spool.store.settle(changes)
            break
        except StoreError:
            await asyncio.sleep(0.05)
    await until(lambda: fleet.keys("queue/") == [f"queue/{message_id(9)}"])
    await healthy(spool)
    assert await claim_ids(spool.store) == [9]


async def test_what_crashes_leave_behind_is_removed_and_uploads_of_the_living_are_not(fleet: Fleet) -> None:
    dead, living = await fleet.relay(), await fleet.relay()
    big = b"x" * (6 * 1024 * 1024)
    writers = []
    for number, spool in ((1, dead), (2, living)):
        writer = spool.store.begin(envelope_for(message_id(number), "a@example.net"))
        await writer.write(big)
        writers.append(writer)
    bucket, keys = inside(dead)._objects.bucket, inside(dead)._objects.keys
    await until(lambda: all(u.parts for s in (dead, living) for u in inside(s)._uploads._open.values()))
    await bucket.put(keys.body(message_id(3), inside(dead)._nodes.session), b"without a message")
    assert len(await bucket.uploads(keys.bodies)) == 2
    cut_off(dead)
    await find_dead(living, dead)
    bucket = inside(living)._objects.bucket

    async def left() -> int:
        return len(await bucket.uploads(keys.bodies)) + len(fleet.keys("body/"))

    async with asyncio.timeout(PATIENCE):
        while await left() > 1:
            await asyncio.sleep(0.05)
    await writers[1].commit([delivery_for(envelope_for(message_id(2), "a@example.net"), "a@example.net")])
    assert await body_of(living.store, message_id(2)) == big
    assert await bucket.uploads(keys.bodies) == []
    (delivery,) = await living.store.claim(queue_of("default"), 9, now=NOW)
    await living.store.settle([Finish(delivery)])
    await until(lambda: not fleet.keys("body/"))


class TestMailThatIsLeftToOthers:
    async def test_without_a_queue_relays_list(self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        full, other = await fleet.relay(), await fleet.relay()
        await beat(full)
        leave_mail_to_others(full)
        await store_message(full.store, 1)
        assert await claim_ids(full.store) == []
        await beat(full)
        assert [int(d.message_id, 16) for d in await claimed(other, count=1)] == [1]

    async def test_alone_a_full_relay_keeps_its_mail(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3, "CROWDED", 0)
        spool = await fleet.relay()
        await store_message(spool.store, 1)
        assert await claim_ids(spool.store) == [1]

    async def test_alert_brings_it_at_once_and_is_deleted_after_that(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_alerts, "WAIT", 1)
        place = S3Settings(bucket=BUCKET, region="us-east-1", access_key=KEY)
        bucket = Bucket(place, lambda: SECRET)
        bucket._secret_key = SECRET  # which `open` would read
        async with bucket._make("sqs", shared_moto().url) as queues:
            url = (await queues.create_queue(QueueName=uuid.uuid4().hex))["QueueUrl"]
            ways = {"queue_url": url, "queue_endpoint_url": shared_moto().url}
            full, other = await fleet.relay(**ways), await fleet.relay(**ways)
            await beat(full)
            stop_renewing(other)  # without a beat it finds nothing by listing
            leave_mail_to_others(full)
            await store_message(full.store, 1)
            found = await claimed(other, count=1, beating=False)
            assert [int(d.message_id, 16) for d in found] == [1]
            names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
            async with asyncio.timeout(PATIENCE):
                left = {""}
                while left != {"0"}:
                    answer = await queues.get_queue_attributes(QueueUrl=url, AttributeNames=names)
                    left = set(answer["Attributes"].values())

    async def test_queue_that_is_not_there_stops_nothing(
        self, fleet: Fleet, caplog: pytest.LogCaptureFixture
    ) -> None:
        gone = f"{shared_moto().url}/123456789012/gone"
        ways = {"queue_url": gone, "queue_endpoint_url": shared_moto().url}
        full, other = await fleet.relay(**ways), await fleet.relay(**ways)
        await beat(full)
        leave_mail_to_others(full)
        await store_message(full.store, 1)
        assert full.store.unhealthy() is None
        await beat(full)
        await claimed(other, count=1)
        assert "could not be alerted" in caplog.text


class TestAlone:
    async def test_second_relay_is_refused_while_the_first_lives(self, fleet: Fleet) -> None:
        first = await fleet.relay(shared=False, lease=LEASE)
        await store_message(first.store, 1)
        with pytest.raises(StoreOpenError, match="only one relay"):
            await fleet.relay(shared=False, lease=LEASE)
        await first.reopen()
        assert await claim_ids(first.store) == [1]

    async def test_service_without_conditions_is_refused_to_those_who_share(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that ignores them: what a condition says is tried, not asked."""

        async def ignore(self: Any, key: str, data: bytes, *, match: str = "", new: bool = False) -> str:
            return str((await self._ask("put_object", Key=key, Body=data))["ETag"])

        monkeypatch.setattr("zonerelay.store.s3.client.Bucket.put", ignore)
        with pytest.raises(StoreOpenError, match="shared = false"):
            await fleet.relay()
        spool = await fleet.relay(shared=False, lease=LEASE)
        await store_message(spool.store, 1)

    async def test_wrong_bucket_or_service_is_said_in_words(self, fleet: Fleet) -> None:
        with pytest.raises(StoreOpenError, match="NoSuchBucket"):
            await fleet.relay(bucket="another")
        with pytest.raises(StoreOpenError, match="mail-queue"):
            await fleet.relay(endpoint_url="http://127.0.0.1:9", timeout=1.0)
