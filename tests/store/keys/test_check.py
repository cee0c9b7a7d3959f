"""Check and repair of a queue over any engine: each fault is found and mended."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.store import test_spool_check
from tests.store.builders import NOW, body_of, message_id, store_message
from tests.store.keys.places import LEASE, PLACES, Place
from tests.store.keys.test_queue import around, partition_of
from tests.store.test_spool_check import FOUR, ONE
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store.check import DamageKind, Findings, RepairResult, SalvagedMessage
from zonerelay.store.contract import CHUNK_SIZE, MessageNotFoundError, Store, StoredKey, StoreError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import Engine, Write, pages
from zonerelay.store.offline import check_engine, repair_engine, view_engine
from zonerelay.store.queue.partition_keeper import open_queue

ENGINES = [
    "memory",
    *(pytest.param(name, marks=pytest.mark.proof) for name in ("postgres", "redis", "directory", "s3")),
]


class Queue:
    """One queue, and what an operator does to it."""

    def __init__(self, place: Place) -> None:
        self.engine: Engine = place.engine()
        self._other: Engine = place.engine()
        self._kept = place.directory / "kept.jsonl"

    async def close(self) -> None:
        await self.engine.close()
        await self._other.close()

    async def store(self) -> Store:
        return await open_queue(await partition_of(self.engine), around())

    async def change(self, change: test_spool_check.Change) -> None:
        partition = await open_partition(self.engine, 0, token="here", clock=SystemClock(), wait=10.0)
        await apply_change(change, partition)
        await partition.close()

    async def counts(self) -> dict[DamageKind, int]:
        findings = Findings()
        await check_engine(self._other, findings, lambda done, total: None)
        return dict(findings.counts)

    async def repaired(self, *, carry_out: bool = True) -> tuple[RepairResult, test_spool_check.Salvages]:
        found: test_spool_check.Salvages = {}

        def salvage(each: SalvagedMessage) -> None:
            found[each.message_id] = each, b"".join(each.body())

        done = await repair_engine(
            self.engine,
            salvage,
            lambda done, total: None,
            kept=self._kept,
            carry_out=carry_out,
            clock=SystemClock(),
            patience=1.5 * LEASE,
        )
        return done, found


@pytest.fixture(params=ENGINES)
async def queue(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Queue]:
    place = PLACES[request.param](tmp_path)
    made = Queue(place)
    yield made
    await made.close()
    place.close()


@pytest.fixture
async def filled(queue: Queue) -> Queue:
    store = await queue.store()
    await test_spool_check.mixed(store)
    await store.close()
    return queue


async def apply_change(change: test_spool_check.Change, partition: Partition) -> None:
    keys = [key async for rows in pages(partition, b"\x01", b"\xff", values=False) for key, _ in rows]
    await partition.write(Write(dict(change(keys))))


async def test_a_repair_leaves_a_sound_queue_as_it_was(filled: Queue) -> None:
    assert await filled.repaired(carry_out=False) == (RepairResult(before=10, after=10), {})
    assert await filled.repaired() == (RepairResult(before=10, after=10), {})


@pytest.mark.parametrize("name", test_spool_check.CASES)
async def test_each_fault_is_found_and_mended(queue: Queue, name: str) -> None:
    change, expected, left = test_spool_check.CASES[name]
    store = await queue.store()
    await test_spool_check.mixed_with_key(store)
    await store.close()
    await queue.change(change)
    assert await queue.counts() == expected
    looked, none = await queue.repaired(carry_out=False)
    assert not none
    assert await queue.counts() == expected
    done, _ = await queue.repaired()
    assert (done.lost, done.before, done.after) == (looked.lost, looked.before, looked.after)
    assert (done.before - done.after > 0) <= bool(done.lost)
    assert done.after == left
    assert await queue.counts() == {}


async def test_what_can_be_read_stays_and_the_rest_is_salvaged(filled: Queue) -> None:
    for change in (
        test_spool_check.remove(b"message %b 000002" % ONE, b"delivery-zone default %016x" % 2),
        test_spool_check.put(b"delivery-zone other%%20zone %b e9" % FOUR, b"{"),
    ):
        await filled.change(change)
    looked, none = await filled.repaired(carry_out=False)
    done, salvaged = await filled.repaired()
    assert (none, looked.kept, (done.before, done.after)) == ({}, [], (10, 6))
    one, body = salvaged[ONE.decode()]
    assert (one.is_whole, len(body)) == (False, CHUNK_SIZE + 5)
    two, body = salvaged[message_id(2)]
    assert (two.is_whole, two.unknown, body) == (True, ("c@one.example",), b"")
    four, body = salvaged[FOUR.decode()]
    assert (four.is_whole, four.unknown, body) == (True, ("e9@late.example",), b"Subject: four\r\n\r\n")
    kept = [json.loads(line)["where"] for line in Path(*done.kept).read_text().splitlines()]
    assert {ONE.decode(), message_id(2), FOUR.decode()} <= {each.split()[-2] for each in kept}
    store = await filled.store()
    claimed = await store.claim(queue_of("default"), 10, now=NOW)
    assert [each.recipient for each in claimed] == ["d@one.example"]
    assert await body_of(store, message_id(3))
    assert len(await store.claim(queue_of("other zone"), 10, now=NOW + 100)) == 5
    await store.close()


async def test_a_view_reads_the_mail_of_all_nodes(queue: Queue) -> None:
    for node in (0, 1):
        partition = await open_partition(queue.engine, node, token="here", clock=SystemClock(), wait=10.0)
        store = await open_queue(partition, around())
        await store_message(store, 10 + node, f"r{node}@one.example", body=b"x" * (CHUNK_SIZE * 20 + node))
        await store.keep_keys([(str(node) * 64, StoredKey(message_id(10 + node), "digest", NOW + 60))])
        await store.close()
    async with view_engine(queue.engine) as view:
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


@pytest.mark.parametrize("name", ["memory", "postgres", "redis", "s3"])
async def test_a_relay_that_lives_is_in_the_way(tmp_path: Path, name: str) -> None:
    place = PLACES[name](tmp_path)
    queue = Queue(place)
    store = await queue.store()
    await test_spool_check.mixed(store)
    for carry_out in (False, True):
        with pytest.raises(StoreError, match=r"relays use the queue|is in use"):
            await queue.repaired(carry_out=carry_out)
    await store.close()
    assert (await queue.repaired())[0].after == 10
    await queue.close()
    place.close()
