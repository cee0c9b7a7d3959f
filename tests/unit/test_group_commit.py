"""Who shares a write with whom, in which order, and what a failure takes with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from zonerelay.model.clock import ManualClock
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys import group_commit
from zonerelay.store.keys.group_commit import (
    GroupCommitter,
    JobFailure,
    SubmittedChanges,
    WriterThread,
)
from zonerelay.store.keys.port import Op


class Disk:
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


Committer = GroupCommitter[list[Op], list[bytes], float]


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def committer(disk: Disk, clock: ManualClock) -> AsyncIterator[Committer]:
    writers: list[WriterThread[list[bytes], float]] = []

    def start_writer(tell: Callable[[float | JobFailure], None]) -> Callable[[list[bytes]], None]:
        writers.append(WriterThread("spool-writer", disk.write, tell))
        return writers[0].put

    committer = GroupCommitter(
        disk.prepare, start_writer, clock=clock, observe=lambda _seconds: None, failed=disk.failures.append
    )
    yield committer
    await committer.drain()
    writers[0].stop()


def ops(name: str) -> list[Op]:
    return [(name.encode(), b"")]


async def test_what_is_submitted_in_one_turn_shares_one_write(disk: Disk, committer: Committer) -> None:
    await asyncio.gather(*(committer.submit(ops(name)) for name in "abc"))
    assert disk.batches == [[b"a", b"b", b"c"]]


async def test_next_batch_gathers_while_one_is_written(disk: Disk, committer: Committer) -> None:
    disk.go_on.clear()
    first = committer.submit(ops("a"))
    await asyncio.sleep(0)
    rest = [committer.submit(ops("b")), committer.submit(ops("c"), lazy=True)]
    await asyncio.sleep(0)
    disk.go_on.set()
    await asyncio.gather(first, *rest)
    assert disk.batches == [[b"a"], [b"b", b"c"]]


async def test_lazy_goes_along_with_urgent_and_keeps_its_place(disk: Disk, committer: Committer) -> None:
    lazy = committer.submit(ops("a"), lazy=True)
    await asyncio.sleep(0)
    assert not disk.batches
    await committer.submit(ops("b"))
    assert lazy.done()
    assert disk.batches == [[b"a", b"b"]]


async def test_lazy_alone_is_written_after_its_delay(
    disk: Disk, committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LAZY_DELAY", 0.001)
    await asyncio.gather(committer.submit(ops("a"), lazy=True), committer.submit(ops("b"), lazy=True))
    assert disk.batches == [[b"a", b"b"]]


async def test_many_lazy_ones_do_not_wait(disk: Disk, committer: Committer) -> None:
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(committer.submit(ops(str(n)), lazy=True) for n in range(group_commit.MAX_LAZY)))
    assert asyncio.get_running_loop().time() - started < group_commit.LAZY_DELAY
    assert len(disk.batches) == 1


async def test_batch_is_bounded_and_order_is_kept(disk: Disk, committer: Committer) -> None:
    half = group_commit.MAX_BATCH // 2
    await asyncio.gather(*(committer.submit(ops(name), size=half) for name in "abcde"))
    assert disk.batches == [[b"a", b"b"], [b"c", b"d"], [b"e"]]


async def test_applied_runs_before_the_submitter_goes_on_even_if_it_left(
    disk: Disk, committer: Committer
) -> None:
    seen: list[str] = []
    left = committer.submit(ops("a"), applied=lambda: seen.append("a"))
    stays = committer.submit(ops("b"), applied=lambda: seen.append("b"))
    left.cancel()
    await stays
    assert seen == ["a", "b"]


async def test_failure_takes_everything_submitted_behind_it(disk: Disk, committer: Committer) -> None:
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


async def test_unexpected_error_is_a_store_error(disk: Disk, committer: Committer) -> None:
    disk.error = ZeroDivisionError("what?")
    with pytest.raises(StoreError, match="could not be written"):
        await committer.submit(ops("a"))


async def test_drain_writes_lazy_work_at_once(disk: Disk, committer: Committer) -> None:
    lazy = committer.submit(ops("a"), lazy=True)
    await committer.drain()
    assert lazy.done()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_busy_loop_gathers_and_an_idle_turn_ends_it(
    disk: Disk, committer: Committer, clock: ManualClock
) -> None:
    first = committer.submit(ops("a"))
    for _ in range(5):
        clock.advance(2 * group_commit.BUSY_TURN)
        await turns(1)
    assert not disk.sizes, "it was written while the loop was busy"
    second = committer.submit(ops("b"))
    await asyncio.gather(first, second)
    assert disk.batches == [[b"a", b"b"]]


async def test_loop_that_is_always_busy_waits_no_longer_than_the_limit(
    disk: Disk, committer: Committer, clock: ManualClock
) -> None:
    committer.submit(ops("a"))
    clock.advance(group_commit.GATHER_LIMIT)
    await turns(1)
    assert len(disk.sizes) == 1


async def used_to_eight(committer: Committer, disk: Disk) -> None:
    for _ in range(12):
        await asyncio.gather(*(committer.submit(ops("x")) for _ in range(8)))
    disk.sizes.clear()
    disk.batches.clear()


async def test_an_idle_loop_waits_while_fewer_than_half_as_many_as_usual_have_come(
    disk: Disk, committer: Committer
) -> None:
    await used_to_eight(committer, disk)
    first = committer.submit(ops("a"))
    await turns(5)
    assert not disk.sizes
    await asyncio.gather(first, *(committer.submit(ops(name)) for name in "bcd"))
    assert disk.batches == [[b"a", b"b", b"c", b"d"]]


async def test_company_that_does_not_come_is_waited_for_no_longer_than_the_limit_and_soon_not_at_all(
    disk: Disk, committer: Committer
) -> None:
    await used_to_eight(committer, disk)
    for _ in range(12):
        await asyncio.wait_for(committer.submit(ops("a")), 1.0)
    disk.sizes.clear()
    last = committer.submit(ops("c"))
    await turns(3)
    assert disk.sizes == [0], "at once"
    await last


async def test_batch_that_cannot_be_prepared_fails_like_one_that_cannot_be_written(
    disk: Disk, committer: Committer
) -> None:
    disk.preparing = StoreFullError("full")
    with pytest.raises(StoreFullError):
        await committer.submit(ops("a"))
    assert len(disk.failures) == 1
    disk.preparing = None
    committer.resume()
    await committer.submit(ops("b"))
    assert disk.batches == [[b"b"]]


async def test_what_is_durable_is_applied_though_another_cannot_be_and_memory_is_then_read_anew(
    disk: Disk, committer: Committer
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
