"""What every store promises (zonerelay/store/contract.py). A store that does not pass is not shipped."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from itertools import pairwise

import pytest
from msgspec import structs

from tests.store import builders
from tests.store.builders import NOW, body_of, delivery_for, envelope_for, message_id, store_message
from tests.support.waiting import until
from zonerelay.model.delivery import Delivery, DeliveryKey, bin_of, queue_of, webhook_queue
from zonerelay.model.envelope import Mailbox, Notify, Recipient
from zonerelay.store import contract
from zonerelay.store.contract import CHUNK_SIZE, Finish, MessageNotFoundError, Postpone, QueueCounts, Store
from zonerelay.store.queue import in_flight


async def claim_all(store: Store, zone: str = "default", *, now: float = NOW) -> list[Delivery]:
    return await store.claim(queue_of(zone), 10_000, now=now)


def names(deliveries: list[Delivery]) -> list[tuple[int, str]]:
    return [(int(delivery.message_id, 16), delivery.recipient) for delivery in deliveries]


class TestTakingMail:
    async def test_committed_message_reads_back_whole(self, store: Store) -> None:
        envelope = structs.replace(
            envelope_for(message_id(1), "a@example.net", "b@example.net"),
            recipients=(
                Recipient(
                    address=Mailbox("a@example.net"),
                    notify=Notify.FAILURE | Notify.DELAY,
                    orcpt="rfc822;a+2Bx@example.net",
                ),
                Recipient(address=Mailbox("żółw@example.net")),
            ),
            smtputf8=True,
        )
        deliveries = [
            structs.replace(
                delivery_for(envelope, "a@example.net"),
                notify=Notify.FAILURE | Notify.DELAY,
                orcpt="rfc822;x",
            ),
            delivery_for(envelope, "żółw@example.net"),
        ]
        async with store.begin(envelope) as writer:
            await writer.write(b"Subject: hi\r\n\r\n")
            await writer.write(b"body\r\n")
            message = await writer.commit(
                deliveries, headers=(("Subject", "hi"),), eight_bit=True, trace=("listener=x",)
            )
        assert message == await store.read_message(message_id(1))
        assert message.envelope == envelope
        assert (message.size, message.eight_bit) == (21, True)
        assert message.headers == (("Subject", "hi"),)
        assert await body_of(store, message_id(1)) == b"Subject: hi\r\n\r\nbody\r\n"
        assert await claim_all(store) == deliveries

    @pytest.mark.parametrize(
        "size", [0, 1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 9 * CHUNK_SIZE - 1, 20 * CHUNK_SIZE + 7]
    )
    @pytest.mark.parametrize("piece", [977, CHUNK_SIZE, 3 * CHUNK_SIZE + 1])
    async def test_body_of_any_size_and_pieces_is_exact(self, store: Store, size: int, piece: int) -> None:
        body = bytes(number % 251 for number in range(size))
        envelope = envelope_for(message_id(1), "a@example.net")
        async with store.begin(envelope) as writer:
            for start in range(0, size, piece):
                await writer.write(body[start : start + piece])
            message = await writer.commit([delivery_for(envelope, "a@example.net")])
        assert message.size == size
        chunks = [chunk async for chunk in store.read_body(message_id(1))]
        assert b"".join(chunks) == body
        assert all(0 < len(chunk) <= CHUNK_SIZE for chunk in chunks)
        assert len(chunks) == message.chunks

    @pytest.mark.parametrize("size", [10, 20 * CHUNK_SIZE])
    async def test_leaving_without_commit_aborts(self, store: Store, size: int) -> None:
        envelope = envelope_for(message_id(1), "a@example.net")
        async with store.begin(envelope) as writer:
            await writer.write(b"x" * size)
        with pytest.raises(contract.StoreError):
            await writer.commit([delivery_for(envelope, "a@example.net")])
        with pytest.raises(MessageNotFoundError):
            await body_of(store, message_id(1))
        assert await claim_all(store) == []

    async def test_message_that_is_cut_off_by_an_error_is_aborted(self, store: Store) -> None:
        async def session() -> None:
            async with store.begin(envelope_for(message_id(1), "a@example.net")) as writer:
                await writer.write(b"x")
                raise ConnectionResetError

        with pytest.raises(ConnectionResetError):
            await session()
        assert await store.queues() == set()

    async def test_session_that_leaves_during_commit_does_not_undo_it(self, store: Store) -> None:
        committing = asyncio.create_task(store_message(store, 1))
        await asyncio.sleep(0)
        committing.cancel()
        await asyncio.wait([committing])
        await until(lambda: store.counts().get(queue_of("default"), QueueCounts()).ready == 1)
        assert names(await claim_all(store)) == [(1, "to@example.net")]

    async def test_same_recipient_twice_is_one_delivery(self, store: Store) -> None:
        await store_message(store, 1, "a@example.net", "a@example.net", "b@example.net")
        claimed = await claim_all(store)
        assert names(claimed) == [(1, "a@example.net"), (1, "b@example.net")]
        await store.settle([Finish(delivery) for delivery in claimed])
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(1))

    async def test_message_without_deliveries_or_with_anothers_is_refused(self, store: Store) -> None:
        envelope = envelope_for(message_id(1), "a@example.net")
        async with store.begin(envelope) as writer:
            with pytest.raises(contract.StoreError):
                await writer.commit([])
            stranger = delivery_for(envelope_for(message_id(2), "a@example.net"), "a@example.net")
            with pytest.raises(contract.StoreError):
                await writer.commit([stranger])

    async def test_last_message_id_is_the_highest_committed(self, store: Store) -> None:
        assert store.last_message_id() is None
        await store_message(store, 7)
        await store_message(store, 3)
        assert store.last_message_id() == message_id(7)


class TestHandingOut:
    async def test_each_delivery_is_claimed_once_in_message_order(self, store: Store) -> None:
        for number in (5, 2, 7, 1, 6, 3, 4):
            await store_message(store, number)
        claims = (store.claim(queue_of("default"), 3, now=NOW) for _ in range(4))
        batches = await asyncio.gather(*claims)
        found = [[number for number, _ in names(batch)] for batch in batches]
        assert found == [[1, 2, 3], [4, 5, 6], [7], []]
        assert await store.claim(queue_of("default"), 10, now=NOW, domain="example.net") == []
        nobodys = DeliveryKey(queue_of("nowhere"), message_id(9), Mailbox("x@example.net"))
        store.release([batches[1][0].key, nobodys])
        assert await claim_all(store) == [batches[1][0]]

    async def test_zones_and_recipients_of_any_spelling_are_kept_apart(self, store: Store) -> None:
        zones = (
            "default",
            "defaul",
            "default2",
            "default ",
            "default~",
            "~",
            " ",
            "%20",
            "défaut",
            "default;bulk",
        )
        recipients = (
            *('"a b"@example.net', "~x@example.net", "100%@example.net"),
            *("żółw@example.net", "a@[192.0.2.1]", "postmaster"),
        )
        stored = {zone: await store_message(store, n, *recipients, zone=zone) for n, zone in enumerate(zones)}
        assert await store.queues() == {queue_of(zone) for zone in zones}
        for zone, deliveries in stored.items():
            claimed = await claim_all(store, zone)
            assert sorted(claimed, key=lambda each: recipients.index(each.recipient)) == deliveries
            await store.settle([Finish(delivery) for delivery in claimed])
        assert await store.queues() == set()

    async def test_skipped_domain_is_passed_over_and_found_later(self, store: Store) -> None:
        await store_message(store, 1, "a@full.example", "b@free.example")
        await store_message(store, 2, "c@full.example", next_attempt=NOW - 1)
        free = await store.claim(queue_of("default"), 10, now=NOW, skip_domains={"full.example"})
        assert names(free) == [(1, "b@free.example")]
        first = await store.claim(queue_of("default"), 1, now=NOW, domain="full.example")
        rest = await store.claim(queue_of("default"), 10, now=NOW, domain="full.example")
        assert names(first) == [(1, "a@full.example")]
        assert names(rest) == [(2, "c@full.example")]
        await store_message(store, 3, "d@full.example")
        assert await store.claim(queue_of("default"), 10, now=NOW, skip_domains={"full.example"}) == []
        assert names(await claim_all(store)) == [(3, "d@full.example")]

    async def test_fresh_and_due_deliveries_take_turns(self, store: Store) -> None:
        for number in range(10):
            await store_message(store, number, next_attempt=NOW - 10)
            await store_message(store, 100 + number)
        for _ in range(5):
            batch = [number for number, _ in names(await store.claim(queue_of("default"), 4, now=NOW))]
            assert len([number for number in batch if number < 100]) == 2
        assert await claim_all(store) == []

    async def test_new_mail_is_claimed_before_what_is_older(self, store: Store) -> None:
        async def new_since(number: int, limit: int, skip: Collection[str] = ()) -> list[Delivery]:
            since = message_id(number)
            return await store.claim(queue_of("default"), limit, now=NOW, since=since, skip_domains=skip)

        for number in range(1, 9):
            await store_message(store, number, f"r@{'full' if number == 6 else 'b'}.example")
        await store_message(store, 9, "r@c.example", next_attempt=NOW - 5)
        some = await new_since(5, 2, {"full.example"})
        assert names(some) == [(5, "r@b.example"), (7, "r@b.example")]
        assert names(await new_since(5, 10)) == [(8, "r@b.example")]
        await store_message(store, 10, "r@b.example")
        assert names(await new_since(9, 10)) == [(10, "r@b.example")]
        store.release([delivery.key for delivery in some])
        assert names(await new_since(6, 1, {"full.example"})) == [(7, "r@b.example")]
        # Nothing of the rest is forgotten: older, passed over, released, deferred.
        assert sorted(number for number, _ in names(await claim_all(store))) == [1, 2, 3, 4, 5, 6, 9]


class TestDeferring:
    async def test_deferred_delivery_is_claimed_when_due_and_not_before(self, store: Store) -> None:
        (delivery,) = await store_message(store, 1)
        await claim_all(store)
        later = delivery.deferred(NOW + 60.125, builders.attempt())
        await store.settle([Postpone(later)])
        assert await claim_all(store, now=NOW + 60) == []
        assert await store.next_due(queue_of("default")) == NOW + 60.125
        assert await claim_all(store, now=NOW + 60.125) == [later]
        assert await store.next_due(queue_of("default")) is None

    async def test_every_due_time_found_by_next_due_is_claimable_at_that_time(self, store: Store) -> None:
        times = [NOW + 0.1 * number / 7 for number in range(1, 30)]
        for number, when in enumerate(times):
            await store_message(store, number, next_attempt=when)
        seen = []
        while (due := await store.next_due(queue_of("default"))) is not None:
            claimed = await claim_all(store, now=due)
            assert claimed
            seen += [delivery.next_attempt for delivery in claimed]
        assert seen == times

    async def test_next_due_is_the_earliest_time_of_what_can_be_claimed(self, store: Store) -> None:
        await store_message(store, 2, next_attempt=NOW + 5, held=True)
        await store_message(store, 4, next_attempt=NOW + 1, zone="other")
        for number, when in ((3, NOW + 9), (1, NOW - 5)):
            await store_message(store, number, next_attempt=when)
            assert await store.next_due(queue_of("default")) == when
        (claimed,) = await claim_all(store)
        assert await store.next_due(queue_of("default")) == NOW + 9
        store.release([claimed.key])
        assert await store.next_due(queue_of("default")) == NOW - 5


class TestSettling:
    async def test_last_delivery_takes_the_message_with_it(self, store: Store) -> None:
        await store_message(store, 1, "a@example.net", "b@example.net", body=b"x" * 200_000)
        first, second = await claim_all(store)
        await store.settle([Finish(first)])
        assert len(await body_of(store, message_id(1))) == 200_000
        await store.settle([Finish(second)])
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(1))
        with pytest.raises(MessageNotFoundError):
            await body_of(store, message_id(1))
        assert await store.queues() == set()

    async def test_recipients_of_one_message_settle_at_once_from_several_sides(self, store: Store) -> None:
        await store_message(store, 1, *(f"r{number}@example.net" for number in range(20)))
        claimed = await claim_all(store)
        last, others = claimed[-1], claimed[:-1]
        await asyncio.gather(*(store.settle([Finish(delivery)], lazy=True) for delivery in others))
        assert await store.deliveries_of(message_id(1)) == [last]
        assert await body_of(store, message_id(1))
        await store.settle([Finish(last)])
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(1))

    async def test_outcome_and_bounce_appear_together(self, store: Store) -> None:
        await store_message(store, 1)
        (delivery,) = await claim_all(store)
        message, bounce = builders.own_message(message_id(2), b"y" * 100_000, "from@example.org")
        await store.settle([contract.OwnMessage(message, b"y" * 100_000, (bounce,)), Finish(delivery)])
        assert await claim_all(store) == [bounce]
        assert await store.read_message(message_id(2)) == message
        assert await body_of(store, message_id(2)) == b"y" * 100_000
        assert store.last_message_id() == message_id(2)

    async def test_messages_of_our_own_appear_with_the_one_that_they_stand_beside(self, store: Store) -> None:
        """Of any size, and in the queue of a webhook, which is none of mail."""
        envelope = envelope_for(message_id(1), "a@example.net")
        event, delivery = builders.own_message(message_id(2), b"event", "0.0.1@hook")
        delivery = structs.replace(delivery, queue=webhook_queue("hook"))
        async with store.begin(envelope) as writer:
            await writer.write(b"z" * 700_000)
            await writer.commit(
                [delivery_for(envelope, "a@example.net")],
                companions=lambda _: [contract.OwnMessage(event, b"event", (delivery,))],
            )
        assert len(await claim_all(store)) == 1
        assert await store.queues() == {queue_of("default"), webhook_queue("hook")}
        assert {queue for queue, counts in store.counts().items() if counts.total} == {queue_of("default")}
        assert [each.message_id async for each in store.scan()] == [message_id(1)]
        assert [each async for each in store.scan(webhook_queue("hook"))] == [delivery]
        assert await store.deliveries_of(message_id(2)) == [delivery]
        assert await store.claim(webhook_queue("hook"), 10, now=NOW) == [delivery]
        assert await body_of(store, message_id(2)) == b"event"
        await store.settle([Finish(delivery)])
        assert await store.queues() == {queue_of("default")}

    async def test_message_that_does_not_describe_its_body_changes_nothing(self, store: Store) -> None:
        await store_message(store, 1)
        (delivery,) = await claim_all(store)
        message, bounce = builders.own_message(message_id(2), b"y", "from@example.org")
        with pytest.raises(contract.StoreError):
            await store.settle([Finish(delivery), contract.OwnMessage(message, b"longer", (bounce,))])
        assert await store.deliveries_of(message_id(1)) == [delivery]
        assert await store.deliveries_of(message_id(2)) == []
        await store.settle([Finish(delivery)])

    async def test_settling_what_an_operator_dropped_is_ignored(self, store: Store) -> None:
        await store_message(store, 1, "a@example.net", "b@example.net")
        first, second = await claim_all(store)
        assert len(await store.update([first.key], lambda _delivery: None)) == 1
        await store.settle([Finish(first)])
        await store.settle([Postpone(first)])
        assert await store.deliveries_of(message_id(1)) == [second]
        assert await body_of(store, message_id(1))
        await store.update([second.key], lambda _delivery: None)
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(1))

    async def test_same_delivery_finished_twice_in_one_write_counts_once(self, store: Store) -> None:
        await store_message(store, 1, "a@example.net", "b@example.net")
        first, second = await claim_all(store)
        await store.settle([Finish(first), Finish(first)])
        assert await body_of(store, message_id(1))
        await store.settle([Finish(second)])


class TestOperations:
    async def test_update_moves_a_delivery_to_another_queue(self, store: Store) -> None:
        """It is claimed when it goes, and it may come back; its message stays with the last one."""
        deliveries = await store_message(store, 1, "a@example.net", "b@example.net")
        (claimed, _) = await claim_all(store)
        moved = structs.replace(claimed, queue=queue_of("other;bulk"), next_attempt=NOW + 5, act="0a0b0c0d")
        assert len(await store.update([claimed.key], lambda _: moved)) == 1
        store.release([claimed.key])
        assert store.counts()[queue_of("default")].total == 1
        assert store.counts()[queue_of("other;bulk")] == QueueCounts(deferred=1)
        assert await store.deliveries_of(message_id(1)) == [moved, deliveries[1]]
        assert [d async for d in store.scan(queue_of("other;bulk"))] == [moved]
        assert len(await store.update([claimed.key], lambda d: d)) == 0
        assert await store.next_due(queue_of("other;bulk")) == NOW + 5
        assert await store.claim(queue_of("other;bulk"), 10, now=NOW) == []
        assert await store.claim(queue_of("other;bulk"), 10, now=NOW + 5) == [moved]
        await store.update(
            [moved.key], lambda d: structs.replace(d, queue=queue_of("default"), next_attempt=0.0)
        )
        store.release([moved.key])
        assert store.counts().get(queue_of("other;bulk"), QueueCounts()).total == 0
        back = [structs.replace(claimed, act="0a0b0c0d")]
        assert await claim_all(store) == back
        await store.settle([Finish(delivery) for delivery in (*back, deliveries[1])])
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(1))
        assert await store.left_over() in ("", contract.SHARED)

    async def test_what_is_moved_into_a_bin_is_no_mail_until_it_is_moved_back(self, store: Store) -> None:
        (delivery, other) = await store_message(store, 1, "a@example.net", "b@example.net")
        binned = structs.replace(delivery, queue=bin_of(delivery.queue), held=True, next_attempt=NOW + 5)
        await store.update([delivery.key], lambda _: binned)
        assert [d async for d in store.scan()] == [other]
        assert store.counts().keys() == {delivery.queue}
        assert [d async for d in store.scan(binned.queue)] == [binned]
        assert await store.queues() == {delivery.queue, binned.queue}
        assert await store.claim(binned.queue, 10, now=NOW + 10) == []
        await store.update([binned.key], lambda _: delivery)
        assert await claim_all(store) == [delivery, other]
        assert await store.queues() == {delivery.queue}

    async def test_update_rewrites_and_reports_what_exists(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(in_flight, "UPDATE_BATCH", 2)
        deliveries = [(await store_message(store, number))[0] for number in range(5)]
        keys = [delivery.key for delivery in deliveries]
        gone = DeliveryKey(queue_of("default"), message_id(99), Mailbox("x@example.net"))
        held = await store.update([*keys[:3], gone], lambda each: structs.replace(each, held=True))
        assert list(held.values()) == deliveries[:3]
        assert store.counts()[queue_of("default")] == QueueCounts(ready=2, held=3)
        assert await claim_all(store) == deliveries[3:]
        await store.update(keys[:2], lambda each: structs.replace(each, held=False))
        assert await claim_all(store) == deliveries[:2]
        await store.update(keys[:1], lambda each: structs.replace(each, warned=True))
        await store.update(keys[1:2], lambda each: structs.replace(each, held=True))
        assert await claim_all(store) == [], "handed out twice"
        store.release(keys[:2])
        assert await claim_all(store) == [structs.replace(deliveries[0], warned=True)]

    async def test_a_change_of_what_was_delivered_meanwhile_is_no_error(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        gone = DeliveryKey(queue_of("default"), message_id(99), Mailbox("x@example.net"))
        assert not await store.update([gone], lambda delivery: delivery)
        assert not caplog.records

    async def test_a_sample_is_spread_over_the_queue(self, store: Store) -> None:
        """With gaps of up to 2 x 4 - 1; and what is at every fourth place is not met alone, or never."""
        for number in range(1, 121):
            await store_message(store, number)
        found = [int(d.message_id, 16) async for d in store.scan(wanted=contract.EveryNth(4))]
        assert found == sorted(set(found))
        gaps = [after - before for before, after in pairwise([0, *found, 121])]
        assert 1 <= min(gaps) <= max(gaps) <= 8
        assert len({number % 4 for number in found}) > 1

    async def test_scan_goes_on_behind_a_delivery_that_may_be_gone(self, store: Store) -> None:
        for number in range(4):
            await store_message(
                store, number, "a@example.net", "b c@example.net", zone=("a", "b")[number % 2]
            )
        await claim_all(store, "b")
        every = [delivery.key async for delivery in store.scan()]
        assert len(every) == 8
        assert every == sorted(every)
        for at, key in enumerate(every):
            assert [d.key async for d in store.scan(after=key)] == every[at + 1 :]
            behind = [each for each in every[at + 1 :] if each.queue == key.queue]
            assert [d.key async for d in store.scan(key.queue, after=key)] == behind
        await store.update([every[2]], lambda _: None)
        assert [d.key async for d in store.scan(after=every[2])] == every[3:]

    async def test_scan_shows_one_moment(self, store: Store) -> None:
        for number in range(5):
            await store_message(store, number)
        scan = aiter(store.scan())
        first = await anext(scan)
        assert first.message_id == message_id(0)
        await store.update([first.key], lambda _: None)
        await store_message(store, 9)
        assert [int(d.message_id, 16) async for d in scan] == [1, 2, 3, 4]


class TestFigures:
    async def test_oldest_is_the_acceptance_time_of_the_first_delivery(self, store: Store) -> None:
        assert await store.oldest(queue_of("default"), now=NOW + 9) is None
        for number, created in ((5, NOW + 5), (6, NOW + 6)):
            await store_message(store, number, created=created)
        assert await store.oldest(queue_of("default"), now=NOW + 9) == NOW + 5
        (first, second) = await claim_all(store)
        await store.settle([Finish(first)])
        assert await store.oldest(queue_of("default"), now=NOW + 9) == NOW + 6
        await store_message(store, 1, created=NOW + 1)
        assert await store.oldest(queue_of("default"), now=NOW + 9) == NOW + 1
        await store.settle([Finish(second)])

    async def test_what_its_sender_holds_back_is_not_the_oldest(self, store: Store) -> None:
        for number, created in ((1, NOW + 3600), (2, NOW + 5), (3, NOW + 7200), (4, NOW + 6)):
            due = created if created > NOW + 9 else 0.0
            await store_message(store, number, created=created, next_attempt=due)
        assert await store.oldest(queue_of("default"), now=NOW + 9) == NOW + 5
        for delivery in await claim_all(store):
            await store.settle([Finish(delivery)])
        assert await store.oldest(queue_of("default"), now=NOW + 9) is None
        assert await store.oldest(queue_of("default"), now=NOW + 3600) == NOW + 3600
        assert await store.oldest(queue_of("default"), now=NOW + 9) is None

    async def test_a_claim_that_holds_is_no_objection_and_neither_is_none(self, store: Store) -> None:
        await store_message(store, 1)
        store.check_claim(message_id(1))
        (delivery,) = await store.claim(queue_of("default"), 10, now=NOW)
        store.check_claim(message_id(1))
        await store.settle([Finish(delivery)])
        store.check_claim(message_id(1))

    async def test_healthy_store_says_so_and_can_be_probed(self, store: Store) -> None:
        assert store.unhealthy() is None
        assert not await store.usable()
        await store.probe()


class TestClosing:
    async def test_closed_store_answers_with_store_errors_only(self, store: Store) -> None:
        (delivery,) = await store_message(store, 1, body=b"x" * 200_000)
        writer = store.begin(envelope_for(message_id(2), "a@example.net"))
        await store.close()
        await store.close()
        assert store.unhealthy()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.claim(queue_of("default"), 1, now=NOW),
            lambda: store.claim(queue_of("default"), 1, now=NOW, domain="example.net"),
            lambda: store.settle([Finish(delivery)]),
            lambda: store.update([delivery.key], lambda _: None),
            lambda: store.read_message(message_id(1)),
            lambda: body_of(store, message_id(1)),
            lambda: store.next_due(queue_of("default")),
            lambda: store.oldest(queue_of("default"), now=NOW + 9),
            store.queues,
            lambda: store.deliveries_of(message_id(1)),
            store.probe,
            lambda: anext(aiter(store.scan())),
            lambda: writer.commit([structs.replace(delivery, message_id=message_id(2))]),
        ]
        for call in calls:
            with pytest.raises(contract.StoreError):
                await call()
        await writer.abort()
        store.release([delivery.key])
