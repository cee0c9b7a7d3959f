"""The queue over ordered keys: the contract of every store, over partitions of several engines, and
failures.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.store.builders import NOW, body_of, envelope_for, message_id, own_message, store_message
from tests.store.keys.conftest import Opened
from tests.store.keys.places import PLACES
from tests.store.keys.unreliable import Unreliable
from tests.support.waiting import until
from zonerelay.model.clock import ManualClock, SystemClock
from zonerelay.model.delivery import DeliveryKey, QueueName, queue_of
from zonerelay.store import records
from zonerelay.store.check import Findings
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import (
    CHUNK_SIZE,
    Change,
    Finish,
    MessageNotFoundError,
    News,
    OwnMessage,
    QueueCounts,
    StoredKey,
    StoreError,
)
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import Engine, KeyPage
from zonerelay.store.memory import MemoryKeys
from zonerelay.store.offline import check_engine, view_engine
from zonerelay.store.queue.partition_keeper import open_queue
from zonerelay.store.queue.store import PartitionStore


async def queue_in(
    engine: Engine, *, on_news: News = lambda queue: None, patience: float = 5.0
) -> PartitionStore:
    clock = SystemClock()
    partition = await open_partition(engine, 0, token="here", clock=clock, wait=10.0, patience=patience)
    return await open_queue(partition, StoreContext(ManualClock(), on_news=on_news))


# --- failures


@pytest.fixture
async def unreliable() -> AsyncIterator[tuple[PartitionStore, Unreliable, list[QueueName]]]:
    engine = Unreliable(PLACES["memory"](Path()).engine())
    news: list[QueueName] = []
    opened = await queue_in(engine, on_news=news.append, patience=0.05)
    yield opened, engine, news
    await opened.close()


Failing = tuple[PartitionStore, Unreliable, list[QueueName]]


@pytest.mark.parametrize("what", ["before", "after", "late"])
async def test_a_lost_answer_is_no_trouble_of_mail(unreliable: Failing, what: str) -> None:
    store, engine, _ = unreliable
    losses = [what]
    engine.lose = lambda batch: losses.pop() if losses else ""
    (delivery,) = await store_message(store, 1)
    assert await store.claim(queue_of("default"), 10, now=NOW) == [delivery]
    losses.append(what)
    await store.settle([Finish(delivery)])
    assert await store.queues() == set()
    assert store.unhealthy() is None


@pytest.mark.parametrize("what", ["before", "after"])
async def test_mail_that_was_refused_in_an_outage_is_taken_back(unreliable: Failing, what: str) -> None:
    """Its client has heard 451 and comes again. Outcomes stay: a report is not lost with its delivery."""
    store, engine, _ = unreliable
    (first,) = await store_message(store, 1, next_attempt=NOW - 5)
    assert await store.claim(queue_of("default"), 10, now=NOW) == [first]
    report, bounced = own_message(message_id(9), b"y", "from@example.org")
    bounce: list[Change] = [OwnMessage(report, b"y", (bounced,), (first.key,)), Finish(first)]

    def lose(batch: object) -> str:
        engine.is_away = True
        return what

    engine.lose = lose
    settling = asyncio.ensure_future(store.settle(bounce))
    with pytest.raises(StoreError):
        await store_message(store, 2, "a@example.net", "b@example.net")
    with pytest.raises(StoreError):
        await settling
    assert store.unhealthy() is not None
    engine.lose = lambda batch: ""
    engine.is_away = False
    await until(lambda: store.unhealthy() is None)
    await store.settle(bounce)  # the claim has outlived it
    assert [each.key async for each in store.scan()] == [bounced.key]
    assert await store._keeper.partition.get([f"message {message_id(2)} #".encode()]) == [None]  # type: ignore[attr-defined]
    await store_message(store, 3)
    claimed = await store.claim(queue_of("default"), 10, now=NOW)
    assert [each.message_id for each in claimed] == [message_id(3), message_id(9)]


async def test_an_upload_that_a_crash_has_left_is_removed() -> None:
    engine = PLACES["memory"](Path()).engine()
    store = await queue_in(engine)
    await store_message(store, 9)
    writer = store.begin(envelope_for(message_id(1), "a@example.net"))
    for _ in range(20):
        await writer.write(bytes(CHUNK_SIZE))
    await asyncio.sleep(0.05)
    await store._keeper.partition.abandon()  # type: ignore[attr-defined]
    again = await queue_in(engine)
    partition = again._keeper.partition  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        while (await partition.page(b"message ", b"message " + message_id(2).encode(), values=False)).rows:
            await asyncio.sleep(0.01)
    assert await body_of(again, message_id(9))
    await again.close()


async def test_what_changes_while_a_queue_is_counted_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PLACES["memory"](Path()).engine()
    choose = random.Random(4)
    store = await queue_in(engine)
    keys: list[DeliveryKey] = []
    for first in range(2, 6000, 500):
        stored = await asyncio.gather(*(store_message(store, first + number) for number in range(0, 500, 2)))
        keys += [each.key for (each,) in stored]
    await store.close()
    page = Partition.page

    async def slow_page(self: Partition, start: bytes, end: bytes, **other: Any) -> KeyPage:
        await asyncio.sleep(choose.random() * 0.05)
        found = await page(self, start, end, **other)
        await asyncio.sleep(choose.random() * 0.05)
        return found

    monkeypatch.setattr(Partition, "page", slow_page)
    store = await queue_in(engine)
    odd = choose.sample(range(1, 6000, 2), 3000)
    while not store.is_counted():
        await asyncio.gather(
            *(store_message(store, odd.pop()) for _ in range(5)),
            store.update(choose.sample(keys, 5), lambda _: None),
            store.update(choose.sample(keys, 5), lambda each: structs.replace(each, held=True)),
        )
    monkeypatch.undo()
    found = QueueCounts()
    async for delivery in store.scan():
        found.count(delivery.next_attempt, held=delivery.held)
    assert store.counts()[queue_of("default")] == found
    assert len(odd) < 2990, "much has changed"
    await store.close()
    await engine.close()


# --- without joining


async def test_mail_that_arrives_in_a_new_zone_during_a_check_is_no_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check looked for deliveries only in the zones that had some when it began."""
    engine = PLACES["memory"](Path()).engine()
    store = await queue_in(engine)
    page, findings = MemoryKeys.page, Findings()

    async def page_after_mail(keeper: MemoryKeys, start: bytes, end: bytes, **other: Any) -> KeyPage:
        if start == records.MESSAGE_PREFIX and not await store.queues():
            await store_message(store, 1)
        return await page(keeper, start, end, **other)

    monkeypatch.setattr(MemoryKeys, "page", page_after_mail)
    contents = await check_engine(engine, findings, lambda done, total: None)
    assert (contents.messages, findings) == (1, Findings())
    await store.close()


async def test_a_view_reads_the_mail_of_all_nodes(opened: Opened) -> None:
    engine = opened.engine()
    for node in (0, 1):
        partition = await opened(node, engine=engine)
        store = await open_queue(partition, StoreContext(SystemClock()))
        await store_message(store, 10 + node, f"r{node}@one.example", body=b"x" * (CHUNK_SIZE * 20 + node))
        await store.keep_keys([(str(node) * 64, StoredKey(message_id(10 + node), "digest", NOW + 60))])
        await store.close()
    async with view_engine(engine) as view:
        assert await view.queues() == {queue_of("default")}
        assert [each.recipient async for each in view.scan()] == ["r0@one.example", "r1@one.example"]
        assert (await view.read_messages([message_id(10), message_id(11)])).keys() == {
            message_id(10),
            message_id(11),
        }
        for node in (0, 1):
            (delivery,) = await view.deliveries_of(message_id(10 + node))
            assert delivery.recipient == f"r{node}@one.example"
            body = [each async for each in view.read_body(message_id(10 + node))]
            assert len(b"".join(body)) == CHUNK_SIZE * 20 + node
            assert (await view.read_message(message_id(10 + node))).id == message_id(10 + node)
        with pytest.raises(MessageNotFoundError):
            await view.read_message(message_id(99))
        kept, cursor = await view.kept_keys()
        while cursor:
            page, cursor = await view.kept_keys(cursor)
            kept = [*kept, *page]
        assert [identity[0] for identity, _ in kept] == ["0", "1"]
