"""What stores wait for: the cursors of a queue, shared writes, and what a Redis server promises."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
from msgspec import structs

from tests.store.builders import NOW, delivery_for, envelope_for, message_id
from zonerelay.config.settings import RedisSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.store import records
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys import group_commit
from zonerelay.store.keys.group_commit import GroupCommitter, SubmittedChanges, WriterThread
from zonerelay.store.keys.port import Op
from zonerelay.store.queue.claims import DiskRange, QueueCursors, Taken
from zonerelay.store.redis.connection import Argument, Confirmation, Reply, SharedConnection
from zonerelay.store.redis.engine import ServerFacts, confirmations, server_facts


class Disk:
    """What is stored, and cursors that read one page of `page` rows when it asks."""

    def __init__(self, *stored: int, page: int = 100) -> None:
        self.rows: dict[DeliveryKey, Delivery] = {}
        self.busy: set[DeliveryKey] = set()
        self.cursors = QueueCursors(queue_of("default"), self.busy.__contains__, empty=False)
        self.page = page
        for number in stored:
            delivery = fresh(number)
            self.rows[delivery.key] = delivery

    def commit(self, number: int) -> None:
        delivery = fresh(number)
        self.rows[delivery.key] = delivery
        self.cursors.add(delivery.key, delivery)

    def read(self, source: DiskRange) -> tuple[list[Delivery], bytes | None]:
        """What the reader thread sees at this moment."""
        start = self.cursors.start_reading(source)
        keys = sorted(key for key in self.rows if records.delivery_key(key) >= start)
        behind = [records.delivery_key(key) for key in keys[self.page :]]
        return [self.rows[key] for key in keys[: self.page]], behind[0] if behind else None

    def absorb(self, source: DiskRange, read: tuple[list[Delivery], bytes | None]) -> None:
        self.cursors.put_back(self.cursors.absorb(source, *read, NOW))

    def take(self, limit: int = 100, skip: tuple[str, ...] = ()) -> list[int]:
        """A whole claim."""
        found: Taken = {}
        while (source := self.cursors.take(limit, skip, NOW, found, {})) is not None:
            self.busy.update(found)
            if source is self.cursors.fresh_range:
                self.absorb(source, self.read(source))
            else:
                self.cursors.start_reading(source)
                self.cursors.absorb(source, [], None, NOW)
        self.busy.update(found)
        return [int(key.message_id, 16) for key in found]


def fresh(number: int) -> Delivery:
    return delivery_for(envelope_for(message_id(number), "a@example.net"), "a@example.net")


def test_commit_during_a_read_that_did_not_see_it_is_not_missed() -> None:
    disk = Disk(1, 9)
    source = disk.cursors.fresh_range
    read = disk.read(source)
    disk.commit(5)
    disk.absorb(source, read)
    assert disk.take() == [1, 5, 9]


def test_commit_behind_the_page_that_is_being_read_is_not_missed() -> None:
    disk = Disk(1, 2, page=2)
    source = disk.cursors.fresh_range
    read = disk.read(source)
    disk.commit(3)
    disk.absorb(source, read)
    assert disk.take() == [1, 2, 3]


def test_delivery_finished_during_the_read_that_saw_it_does_not_come_back() -> None:
    disk = Disk(1, 2)
    source = disk.cursors.fresh_range
    read = disk.read(source)
    disk.cursors.forget(fresh(1).key)
    del disk.rows[fresh(1).key]
    disk.absorb(source, read)
    assert disk.take() == [2]


def test_delivery_whose_commit_is_not_confirmed_yet_is_left_to_its_confirmation() -> None:
    disk = Disk(1)
    disk.busy.add(fresh(1).key)
    assert disk.take() == []
    disk.busy.clear()
    disk.cursors.add(fresh(1).key, fresh(1))
    assert disk.take() == [1]


def test_failed_read_is_tried_again() -> None:
    disk = Disk(1)
    source = disk.cursors.fresh_range
    disk.read(source)
    disk.cursors.stop_reading()
    assert disk.take() == [1]


def test_newcomers_stay_on_disk_and_are_found_in_order() -> None:
    disk = Disk(page=2)
    assert disk.take() == []
    for number in (10, 30, 20, 40, 25, 5, 15):
        disk.commit(number)
    taken = []
    while batch := disk.take(2):
        taken += batch
    assert taken == [5, 10, 15, 20, 25, 30, 40]


def test_new_mail_is_given_away_only_while_nothing_older_waits() -> None:
    disk = Disk(1)
    assert not disk.cursors.is_next(fresh(2)), "the disk has not been read"
    assert disk.take() == [1]
    assert disk.cursors.is_next(fresh(2))
    assert not disk.cursors.is_next(structs.replace(fresh(2), next_attempt=NOW + 5))
    disk.cursors.put_back([fresh(1)])
    assert not disk.cursors.is_next(fresh(2)), "one that was released comes first"
    disk.busy.clear()
    assert disk.take() == [1]
    disk.commit(5)
    assert not disk.cursors.is_next(fresh(6)), "one on disk comes first"
    assert disk.cursors.is_next(fresh(4)), "the disk has none that is older"


def test_new_mail_is_given_away_beside_a_backlog_that_was_not_read() -> None:
    disk = Disk(*range(1, 9), page=2)
    disk.take(1)
    assert disk.cursors.take_new(10, message_id(20), (), {}, {}) is disk.cursors.new_range
    source = disk.cursors.new_range
    assert source is not None
    disk.absorb(source, disk.read(source))
    assert disk.cursors.is_next(fresh(21))
    assert not disk.cursors.is_next(fresh(10)), "it belongs to the backlog"


def test_cursor_never_goes_back_over_what_was_delivered() -> None:
    disk = Disk(*range(10), page=4)
    disk.take()
    assert disk.cursors.fresh_range.low is None
    disk.commit(20)
    assert disk.cursors.fresh_range.low == records.delivery_key(fresh(20).key)
    assert disk.take() == [20]


def test_skipped_deliveries_are_for_the_index_of_their_domain() -> None:
    disk = Disk(1, 2, 3)
    disk.take(0)
    cursors = disk.cursors
    spill: Taken = {}
    while (source := cursors.take(10, {"example.net"}, NOW, {}, spill)) is not None:
        if source is cursors.fresh_range:
            disk.absorb(source, disk.read(source))
        else:
            cursors.start_reading(source)
            cursors.absorb(source, [], None, NOW)
    assert [int(key.message_id, 16) for key in spill] == [1, 2, 3]
    assert cursors.take_domain("example.net") is None
    for key in spill:
        cursors.spilled("example.net", key)
    source = cursors.take_domain("example.net")
    assert source is not None
    assert source.low == records.domain_key(fresh(1).key, "example.net")


def test_stale_hint_is_dropped_when_read() -> None:
    disk = Disk()
    disk.take()
    cursors = disk.cursors
    for number in (1, 2, 3):
        cursors.spilled("example.net", fresh(number).key)
    disk.busy.add(fresh(1).key)
    postponed = structs.replace(fresh(2), next_attempt=NOW + 50)
    source = cursors.take_domain("example.net")
    assert source is not None
    cursors.start_reading(source)
    assert cursors.absorb(source, [fresh(1), postponed, fresh(3)], None, NOW) == [fresh(3)]
    assert cursors.take_domain("example.net") is None


# Who shares a write with whom, in which order, and what a failure takes with it


class Storage:
    """Takes batches in the writer thread; can be told to wait or to fail."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None
        self.preparing: Exception | None = None
        self.sizes: list[int] = []
        self.failures: list[StoreError] = []

    def prepare(self, submissions: Sequence[SubmittedChanges[list[Op]]], size: int) -> list[bytes]:
        self.sizes.append(size)
        if self.preparing is not None:
            raise self.preparing
        return [key for each in submissions for key, _ in each.ops]

    def write(self, keys: list[bytes]) -> float:
        self.go_on.wait()
        if self.error is not None:
            raise self.error
        self.batches.append(keys)
        return 0.001


Committer = GroupCommitter[list[Op], list[bytes]]


@pytest.fixture
def disk() -> Storage:
    return Storage()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def committer(disk: Storage, clock: ManualClock) -> AsyncIterator[Committer]:
    writer = WriterThread("spool-writer", disk.write, lambda result: made.written(result))
    made: Committer = GroupCommitter(
        disk.prepare, writer.put, clock=clock, observe=lambda _seconds: None, failed=disk.failures.append
    )
    yield made
    await made.drain()
    writer.stop()


def ops(name: str) -> list[Op]:
    return [(name.encode(), b"")]


async def test_what_is_submitted_in_one_turn_shares_one_write(disk: Storage, committer: Committer) -> None:
    await asyncio.gather(*(committer.submit(ops(name)) for name in "abc"))
    assert disk.batches == [[b"a", b"b", b"c"]]


async def test_next_batch_gathers_while_one_is_written(disk: Storage, committer: Committer) -> None:
    disk.go_on.clear()
    first = committer.submit(ops("a"))
    await asyncio.sleep(0)
    rest = [committer.submit(ops("b")), committer.submit(ops("c"), lazy=True)]
    await asyncio.sleep(0)
    disk.go_on.set()
    await asyncio.gather(first, *rest)
    assert disk.batches == [[b"a"], [b"b", b"c"]]


async def test_lazy_goes_along_with_urgent_and_keeps_its_place(disk: Storage, committer: Committer) -> None:
    lazy = committer.submit(ops("a"), lazy=True)
    await asyncio.sleep(0)
    assert not disk.batches
    await committer.submit(ops("b"))
    assert lazy.done()
    assert disk.batches == [[b"a", b"b"]]


async def test_lazy_alone_is_written_after_its_delay(
    disk: Storage, committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LAZY_DELAY", 0.001)
    await asyncio.gather(committer.submit(ops("a"), lazy=True), committer.submit(ops("b"), lazy=True))
    assert disk.batches == [[b"a", b"b"]]


async def test_many_lazy_ones_do_not_wait(disk: Storage, committer: Committer) -> None:
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(committer.submit(ops(str(n)), lazy=True) for n in range(group_commit.MAX_LAZY)))
    assert asyncio.get_running_loop().time() - started < group_commit.LAZY_DELAY
    assert len(disk.batches) == 1


async def test_batch_is_bounded_and_order_is_kept(disk: Storage, committer: Committer) -> None:
    half = group_commit.MAX_BATCH // 2
    await asyncio.gather(*(committer.submit(ops(name), size=half) for name in "abcde"))
    assert disk.batches == [[b"a", b"b"], [b"c", b"d"], [b"e"]]


async def test_applied_runs_first_even_if_the_submitter_left(disk: Storage, committer: Committer) -> None:
    seen: list[str] = []
    left = committer.submit(ops("a"), applied=lambda: seen.append("a"))
    stays = committer.submit(ops("b"), applied=lambda: seen.append("b"))
    left.cancel()
    await stays
    assert seen == ["a", "b"]


async def test_failure_takes_everything_submitted_behind_it(disk: Storage, committer: Committer) -> None:
    disk.go_on.clear()
    disk.error = StoreFullError("full")
    applied: list[str] = []
    first = committer.submit(ops("a"), applied=lambda: applied.append("a"))
    await asyncio.sleep(0)
    second = committer.submit(ops("b"), applied=lambda: applied.append("b"))
    disk.go_on.set()
    for future in (first, second, committer.submit(ops("c"))):
        with pytest.raises(StoreFullError):
            await future
    with pytest.raises(StoreFullError):
        await committer.submit(ops("d"))
    assert (applied, len(disk.failures)) == ([], 1)
    disk.error = None
    committer.resume()
    await committer.submit(ops("e"))
    assert disk.batches == [[b"e"]]


async def test_unexpected_error_is_a_store_error(disk: Storage, committer: Committer) -> None:
    disk.error = ZeroDivisionError("what?")
    with pytest.raises(StoreError, match="could not be written"):
        await committer.submit(ops("a"))


async def test_drain_writes_lazy_work_at_once(disk: Storage, committer: Committer) -> None:
    lazy = committer.submit(ops("a"), lazy=True)
    await committer.drain()
    assert lazy.done()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_busy_loop_gathers_until_idle(disk: Storage, committer: Committer, clock: ManualClock) -> None:
    first = committer.submit(ops("a"))
    for _ in range(5):
        clock.advance(2 * group_commit.BUSY_TURN)
        await turns(1)
    assert not disk.sizes, "it was written while the loop was busy"
    second = committer.submit(ops("b"))
    await asyncio.gather(first, second)
    assert disk.batches == [[b"a", b"b"]]


async def test_loop_that_is_always_busy_waits_no_longer_than_the_limit(
    disk: Storage, committer: Committer, clock: ManualClock
) -> None:
    committer.submit(ops("a"))
    clock.advance(group_commit.GATHER_LIMIT)
    await turns(1)
    assert len(disk.sizes) == 1


async def used_to_eight(committer: Committer, disk: Storage) -> None:
    for _ in range(12):
        await asyncio.gather(*(committer.submit(ops("x")) for _ in range(8)))
    disk.sizes.clear()
    disk.batches.clear()


async def test_an_idle_loop_waits_for_half_of_what_is_usual(disk: Storage, committer: Committer) -> None:
    await used_to_eight(committer, disk)
    first = committer.submit(ops("a"))
    await turns(5)
    assert not disk.sizes
    await asyncio.gather(first, *(committer.submit(ops(name)) for name in "bcd"))
    assert disk.batches == [[b"a", b"b", b"c", b"d"]]


async def test_company_that_does_not_come_is_waited_for_no_longer_than_the_limit_and_soon_not_at_all(
    disk: Storage, committer: Committer
) -> None:
    await used_to_eight(committer, disk)
    for _ in range(12):
        await asyncio.wait_for(committer.submit(ops("a")), 1.0)
    disk.sizes.clear()
    last = committer.submit(ops("c"))
    await turns(3)
    assert disk.sizes == [0], "at once"
    await last


async def test_batch_that_cannot_be_prepared_fails_like_a_write(disk: Storage, committer: Committer) -> None:
    disk.preparing = StoreFullError("full")
    with pytest.raises(StoreFullError):
        await committer.submit(ops("a"))
    assert len(disk.failures) == 1
    disk.preparing = None
    committer.resume()
    await committer.submit(ops("b"))
    assert disk.batches == [[b"b"]]


async def test_what_is_durable_is_applied_though_another_cannot_be_and_memory_is_then_read_anew(
    disk: Storage, committer: Committer
) -> None:
    applied: list[str] = []

    def broken() -> None:
        raise ValueError("a bug")

    first = committer.submit(ops("a"), applied=broken)
    second = committer.submit(ops("b"), applied=lambda: applied.append("b"))
    third = committer.submit(ops("c"), lazy=True, applied=lambda: applied.append("c"))
    await asyncio.gather(first, second, third)  # they are on disk: that is what was promised
    assert disk.batches == [[b"a", b"b", b"c"]]
    assert applied == ["b", "c"]
    (failure,) = disk.failures  # the store repairs itself from the disk, as after a failed write
    assert isinstance(failure.__cause__, ValueError)
    with pytest.raises(StoreError):
        await committer.submit(ops("d"))
    committer.resume()


# What is asked of a server behind every batch, and what is enough of an answer


def facts(version: tuple[int, ...], *, syncs_log: bool = True, max_memory: int = 0) -> ServerFacts:
    info = {"redis_version": ".".join(map(str, version)), "used_memory": "100", "maxmemory": str(max_memory)}
    return ServerFacts(info, syncs_log=syncs_log)


@pytest.mark.parametrize(
    ("version", "syncs_log", "asked"),
    [((7, 0, 15), True, False), ((7, 2, 0), True, True), ((8, 0, 0), True, True), ((7, 2, 4), False, False)],
)
def test_log_is_awaited_where_the_server_can(version: tuple[int, ...], syncs_log: bool, asked: bool) -> None:
    assert facts(version, syncs_log=syncs_log).can_wait_for_log is asked


@pytest.mark.parametrize(
    ("least", "reply", "enough"),
    [(1, [1, 0], True), (1, [0, 2], False), (2, 2, True), (2, 1, False), (1, None, False)],
)
def test_confirmation_counts(least: int, reply: Reply, enough: bool) -> None:
    assert Confirmation(("WAIT",), least, "").is_enough(reply) is enough


def test_free_memory_is_what_is_left_below_the_limit() -> None:
    assert facts((7, 0)).free_memory is None
    assert facts((7, 0), max_memory=150).free_memory == 50


@pytest.mark.parametrize(("appendfsync", "waits"), [(b"always", True), (b"everysec", False), (b"no", False)])
async def test_a_log_that_is_not_always_synced_is_not_waited_for(appendfsync: bytes, waits: bool) -> None:
    """The operator has accepted that loss; a batch would wait up to a second for the next sync."""

    class Server:
        async def call(self, *command: Argument) -> Reply:
            if command[0] == "INFO":
                return b"redis_version:8.0.0\r\nrole:master\r\naof_enabled:1\r\n"
            return [b"appendonly", b"yes", b"appendfsync", appendfsync]

    facts = await server_facts(cast(SharedConnection, Server()))
    assert bool(confirmations(facts, RedisSettings())) is waits
