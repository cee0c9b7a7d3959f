"""The Redis spool alone: what it asks of the server, and what becomes of lost connections."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

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
from tests.store.fleet import Fleet, claim_ids, until_healthy
from tests.store.spools import until
from tests.support.redis_server import RedisServer
from zonerelay.config.settings import LOSS_WORDS, Backend, SpoolSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common.claims import index_claims
from zonerelay.store.contract import (
    CHUNK_SIZE,
    Change,
    Finish,
    MessageNotFoundError,
    Postpone,
    QueueCounts,
    Store,
    StoreError,
    StoreFullError,
    StoreOpenError,
    Submit,
    Unhealthy,
)
from zonerelay.store.open import open_store
from zonerelay.store.redis import keeper as redis_keeper
from zonerelay.store.redis import lease as redis_lease
from zonerelay.store.redis.store import Doubt
from zonerelay.store.surroundings import Surroundings


async def store_with_event(store: Store) -> None:
    """Message 1, and message 2 beside it in a zone of its own."""
    envelope = envelope_for(message_id(1), "a@example.net")
    event, told = own_message(message_id(2), b"event", "0.0.1@hook")
    told = replace(told, queue=queue_of("webhook/hook"))
    async with store.begin(envelope) as writer:
        await writer.write(b"body")
        await writer.commit(
            [delivery_for(envelope, "a@example.net")], beside=lambda _: [Submit(event, b"event", (told,))]
        )


class TestPromises:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("appendonly", "no"),
            ("appendfsync", "everysec"),
            ("appendfsync", "no"),
            ("no-appendfsync-on-rewrite", "yes"),
            ("maxmemory-policy", "allkeys-lru"),
        ],
    )
    async def test_server_that_cannot_keep_the_promise_is_refused_unless_told_otherwise(
        self, name: str, value: str, lonely: Fleet
    ) -> None:
        lonely.server.configure(name, value)
        with pytest.raises(StoreOpenError, match=name):
            await lonely.relay()
        with pytest.raises(StoreOpenError, match=name):
            await lonely.relay(accept_loss="yes")
        spool = await lonely.relay(accept_loss=LOSS_WORDS)
        await store_message(spool.store, 1)

    async def test_promise_that_is_broken_later_stops_new_mail_until_it_is_kept_again(
        self, lonely: Fleet
    ) -> None:
        spool = await lonely.relay()
        lonely.server.configure("appendfsync", "everysec")
        await until(lambda: spool.store.unhealthy() == Unhealthy.SERVER_UNSAFE)
        with pytest.raises(StoreError):
            await store_message(spool.store, 1)
        lonely.server.configure("appendfsync", "always")
        await until_healthy(spool)
        await store_message(spool.store, 2)
        assert spool.health[-1] is None

    async def test_message_waits_for_as_many_replicas_as_were_asked_for(
        self, lonely: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(redis_keeper, "LONGEST_PAUSE", 0.2)
        with pytest.raises(StoreOpenError):
            await lonely.relay(replicas=1, timeout=0.4)
        with RedisServer({"replicaof": f"127.0.0.1 {lonely.server.port}"}) as replica:
            await until(lambda: b"master_link_status:up" in replica.query("INFO", "replication"))
            spool = await lonely.relay(replicas=1, timeout=2.0)
            await store_message(spool.store, 1)
            assert replica.ask("HEXISTS", lonely.key(f"message:{message_id(1)}"), "#") == b":1\r\n"
            with pytest.raises(StoreOpenError, match="replica"):
                await lonely.relay(url=replica.url)
            replica.kill()
            with pytest.raises(StoreError):
                await store_message(spool.store, 2)
            assert spool.store.unhealthy()

    async def test_memory_limit_refuses_new_mail_but_lets_mail_leave(self, lonely: Fleet) -> None:
        spool = await lonely.relay()
        big = b"x" * 200_000
        await store_message(spool.store, 1, body=big)
        await store_message(spool.store, 2, body=big)
        (first, second) = await spool.store.claim(queue_of("default"), 10, now=NOW)
        lonely.server.configure("maxmemory", "1mb")
        with pytest.raises(StoreFullError):
            await store_message(spool.store, 3, body=big)
        await until(lambda: spool.store.unhealthy() is not None)
        await spool.store.probe()
        await spool.store.settle([Postpone(first.deferred(NOW + 60, attempt()))])
        await spool.store.settle([Finish(second)])
        assert spool.store.counts()[queue_of("default")] == QueueCounts(deferred=1)
        lonely.server.configure("maxmemory", "0")
        await until_healthy(spool)
        await store_message(spool.store, 4, body=big)

    async def test_queue_of_another_format_is_not_touched(self, fleet: Fleet) -> None:
        fleet.server.ask("SET", fleet.key("format"), "99")
        with pytest.raises(StoreOpenError, match="prefix"):
            await fleet.relay()

    async def test_older_relay_works_with_what_a_newer_one_stores_if_that_says_so(self, fleet: Fleet) -> None:
        fleet.server.ask("SET", fleet.key("format"), "3 1")
        spool = await fleet.relay()
        await store_message(spool.store, 1)
        assert await claim_ids(spool.store) == [1]
        assert fleet.server.ask("GET", fleet.key("format")).split() == [b"$3", b"3", b"1"]

    async def test_older_relay_refuses_what_it_cannot_understand_also_when_its_lease_was_lost(
        self, fleet: Fleet
    ) -> None:
        spool = await fleet.relay()
        fleet.server.ask("SET", fleet.key("format"), "3 2")
        with pytest.raises(StoreOpenError, match="a newer zonerelay may have been here"):
            await fleet.relay()
        fleet.server.ask("DEL", fleet.key("leases"))
        await until(lambda: spool.store.unhealthy() is not None)
        with pytest.raises(StoreError):
            await store_message(spool.store, 1)

    async def test_newer_relay_waits_until_none_is_alive_that_it_cannot_work_beside(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spool = await fleet.relay()
        await store_message(spool.store, 1)
        monkeypatch.setattr(redis_lease, "FORMAT", 2)
        monkeypatch.setattr(redis_lease, "OLDEST_FORMAT", 2)
        with pytest.raises(StoreOpenError, match="relays of an older version are running"):
            await fleet.relay()
        await spool.store.close()
        newer = await fleet.relay()
        assert await claim_ids(newer.store) == [1]
        monkeypatch.setattr(redis_lease, "FORMAT", 1)
        with pytest.raises(StoreOpenError, match="a newer zonerelay may have been here"):
            await fleet.relay()

    async def test_missing_server_is_said_in_words(self, fleet: Fleet) -> None:
        with pytest.raises(StoreOpenError, match="cannot be reached"):
            await fleet.relay(url="unix:///nonexistent/socket")

    async def test_missing_driver_is_said_in_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in [name for name in sys.modules if name.startswith("zonerelay.store.redis.")]:
            monkeypatch.delitem(sys.modules, module)
        for module in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "redis", None)
        settings = SpoolSettings(backend=Backend.REDIS, path=tmp_path)
        with pytest.raises(StoreOpenError, match=r"pip install -r locks/redis\.lock"):
            await open_store(
                settings,
                Surroundings(clock=ManualClock(), on_health=lambda _: None, observe_commit=lambda _: None),
            )


class TestTrouble:
    async def test_killed_server_is_waited_for_and_nothing_is_lost(self, lonely: Fleet) -> None:
        spool = await lonely.relay(lease=30.0)
        await store_message(spool.store, 1, body=b"x" * 300_000)
        await store_message(spool.store, 2)
        (first,) = await spool.store.claim(queue_of("default"), 1, now=NOW)
        lonely.server.kill()
        await until(lambda: spool.store.unhealthy() is not None)
        assert spool.store.unhealthy() == "the spool's server cannot be reached"
        with pytest.raises(StoreError):
            await store_message(spool.store, 3)
        with pytest.raises(StoreError):
            await spool.store.claim(queue_of("default"), 1, now=NOW)
        with pytest.raises(StoreError):
            await spool.store.settle([Finish(first)])
        spool.news.clear()
        lonely.server.start()
        await until_healthy(spool)
        await until(lambda: queue_of("default") in spool.news)
        assert spool.lost == []
        assert await claim_ids(spool.store) == [2]
        assert await body_of(spool.store, first.message_id) == b"x" * 300_000
        await spool.store.settle([Finish(first)])
        assert spool.health == ["the spool's server cannot be reached", None]

    async def test_reader_does_not_notice_a_server_that_is_started_again(self, lonely: Fleet) -> None:
        spool, other = await lonely.relay(), await lonely.relay()
        body = bytes(range(256)) * 2000
        await store_message(other.store, 1, body=body)
        reading = aiter(spool.store.read_body(message_id(1)))
        read = await anext(reading)
        lonely.server.kill()
        following = asyncio.ensure_future(anext(reading))
        asking = asyncio.ensure_future(spool.store.read_message(message_id(1)))
        await until(lambda: spool.store.unhealthy() is not None)
        lonely.server.start()
        assert (await asking).size == len(body)
        read += await following
        async for chunk in reading:
            read += chunk
        assert read == body

    async def test_cut_connections_are_made_again(self, lonely: Fleet) -> None:
        spool = await lonely.relay()
        for number in range(3):
            await store_message(spool.store, number)
            lonely.server.ask("CLIENT", "KILL", "TYPE", "normal")
            await until(lambda: spool.store.unhealthy() is not None)
            await until_healthy(spool)
        lonely.server.ask("CLIENT", "KILL", "TYPE", "pubsub")
        await until(lambda: len(spool.health) == 7)
        await until_healthy(spool)
        assert await claim_ids(spool.store) == [0, 1, 2]

    async def test_server_that_does_not_answer_is_given_up_in_time(self, lonely: Fleet) -> None:
        spool = await lonely.relay(timeout=0.4)
        lonely.server.ask("CLIENT", "PAUSE", "1500", "ALL")
        started = asyncio.get_running_loop().time()
        with pytest.raises(StoreError):
            await store_message(spool.store, 1)
        assert asyncio.get_running_loop().time() - started < 1.2
        await until_healthy(spool)
        await store_message(spool.store, 2)
        await asyncio.sleep(0.1)
        assert [d.message_id async for d in spool.store.scan()] == [message_id(2)]

    async def test_commit_whose_answer_was_lost_is_taken_back(self, fleet: Fleet) -> None:
        """The client has heard 451 and comes again."""
        spool = await fleet.relay()
        store = spool.store
        await store_with_event(store)
        link = store._keeper  # type: ignore[attr-defined]
        store._doubtful[message_id(1)] = Doubt(link.lease.token, [message_id(2)])  # type: ignore[attr-defined]
        link._on_broken("as if")
        await until_healthy(spool)
        await until(lambda: not any(each.total for each in store.counts().values()))
        for number in (1, 2):
            with pytest.raises(MessageNotFoundError):
                await store.read_message(message_id(number))

    async def test_commit_whose_answer_was_lost_stays_when_somebody_has_claimed_it(
        self, fleet: Fleet
    ) -> None:
        spool, other = await fleet.relay(), await fleet.relay()
        store = spool.store
        await store_with_event(store)
        assert await claim_ids(other.store) == [1]
        link = store._keeper  # type: ignore[attr-defined]
        store._doubtful[message_id(1)] = Doubt(link.lease.token, [message_id(2)])  # type: ignore[attr-defined]
        link._on_broken("as if")
        await until_healthy(spool)
        await until(lambda: not store._doubtful)  # type: ignore[attr-defined]
        for number in (1, 2):
            assert await other.store.read_message(message_id(number))

    async def test_claims_that_nobody_heard_of_are_given_back(self, fleet: Fleet) -> None:
        spool = await fleet.relay()
        await store_message(spool.store, 1)
        claiming = asyncio.create_task(claim_ids(spool.store))
        await asyncio.sleep(0)
        claiming.cancel()
        await asyncio.wait([claiming])
        await spool.store.probe()
        assert await claim_ids(spool.store) == [1]

    async def test_claims_whose_answer_was_lost_are_given_back(self, fleet: Fleet) -> None:
        spool = await fleet.relay()
        await store_message(spool.store, 1)
        link = spool.store._keeper  # type: ignore[attr-defined]
        now = repr(NOW).encode()
        await link.run("claim", link.lease.token, b"default", 10, 10, now, 0, b"")
        assert await claim_ids(spool.store) == []
        link._on_broken("as if")
        await until_healthy(spool)
        for _ in range(100):
            if found := await claim_ids(spool.store):
                break
            await asyncio.sleep(0.02)
        assert found == [1]

    async def test_claims_that_outlived_their_connection_are_given_back(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(index_claims, "RECONCILE", 0.3)
        spool = await fleet.relay()
        for number in range(3):
            await store_message(spool.store, number)
        held = await claim_ids(spool.store, limit=1)
        link = spool.store._keeper  # type: ignore[attr-defined]
        await link.run("claim", link.lease.token, b"default", 10, 10, repr(NOW).encode(), 0, b"")
        found: list[int] = []
        async with asyncio.timeout(10):
            while len(found) < 2:
                found += await claim_ids(spool.store)
                await asyncio.sleep(0.02)
        assert (held, found) == ([0], [1, 2])

    async def test_aborted_upload_leaves_nothing_and_a_crashed_one_goes_by_itself(self, fleet: Fleet) -> None:
        spool = await fleet.relay()
        envelope = envelope_for(message_id(1), "a@example.net")
        key = fleet.key(f"message:{message_id(1)}")
        async with spool.store.begin(envelope) as writer:
            await writer.write(b"x" * (20 * CHUNK_SIZE))
            await writer.write(b"x" * (20 * CHUNK_SIZE))
            assert 0 < int(fleet.server.ask("PTTL", key)[1:]) <= 15 * 60_000
        await spool.store._keeper.call_body("PING")  # type: ignore[attr-defined]
        assert fleet.server.ask("EXISTS", key) == b":0\r\n"

    async def test_slow_upload_is_kept_while_its_relay_lives_and_for_good_when_committed(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("zonerelay.store.redis.store.UPLOAD_KEPT", 800)
        spool = await fleet.relay()
        envelope = envelope_for(message_id(1), "a@example.net")
        body = b"x" * (20 * CHUNK_SIZE)
        async with spool.store.begin(envelope) as writer:
            await writer.write(body)
            await asyncio.sleep(1.2)
            await writer.commit([delivery_for(envelope, "a@example.net")])
        assert fleet.server.ask("PTTL", fleet.key(f"message:{message_id(1)}")) == b":-1\r\n"
        assert await body_of(spool.store, message_id(1)) == body

    async def test_upload_that_the_server_has_given_up_cannot_be_committed(self, fleet: Fleet) -> None:
        spool = await fleet.relay()
        envelope = envelope_for(message_id(1), "a@example.net")
        async with spool.store.begin(envelope) as writer:
            await writer.write(b"x" * (20 * CHUNK_SIZE))
            await spool.store._keeper.call_body("PING")  # type: ignore[attr-defined]
            fleet.server.ask("DEL", fleet.key(f"message:{message_id(1)}"))
            with pytest.raises(StoreError):
                await writer.commit([delivery_for(envelope, "a@example.net")])
        assert await spool.store.queues() == set()

    async def test_unreadable_delivery_holds_nobody_up(
        self, fleet: Fleet, caplog: pytest.LogCaptureFixture
    ) -> None:
        spool = await fleet.relay()
        await store_message(spool.store, 1)
        await store_message(spool.store, 2)
        key = fleet.key(f"deliveries:{message_id(1)}")
        fleet.server.ask("HSET", key, "default to@example.net", "0 1.0 example.net {broken")
        assert await claim_ids(spool.store) == [2]
        # Nor is it handed out again by the next round, and complained about.
        await spool.store.reconcile()  # type: ignore[attr-defined]
        assert await claim_ids(spool.store) == []
        assert sum("unreadable" in record.message for record in caplog.records) == 1

    async def test_repeated_settle_makes_no_second_report(self, fleet: Fleet) -> None:
        spool = await fleet.relay()
        store = spool.store
        await store_message(store, 1)
        (delivery,) = await store.claim(queue_of("default"), 1, now=NOW)
        bounce, bounced = own_message(message_id(9), b"y", "from@example.org")
        changes: list[Change] = [Finish(delivery), Submit(bounce, b"y", (bounced,))]
        await store.settle(changes)
        (again,) = await store.claim(queue_of("default"), 1, now=NOW)
        await store.settle([Finish(again)])
        # As if the answer to the first one had been lost.
        store._doubtful_submits.add(bounce.id)  # type: ignore[attr-defined]
        await store.settle(changes)
        assert await store.queues() == set()
