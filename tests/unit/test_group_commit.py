"""Who shares a write with whom, in which order, and what a failure takes with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from zonerelay.store import group_commit
from zonerelay.store.base import StoreError, StoreFullError
from zonerelay.store.group_commit import GroupCommitter
from zonerelay.store.leveldb_engine import Op


class Disk:
    """Takes batches in the writer thread; can be told to wait or to fail."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: Exception | None = None
        self.failures: list[StoreError] = []

    def write(self, batches: Sequence[Sequence[Op]]) -> float:
        self.go_on.wait()
        if self.error is not None:
            raise self.error
        self.batches.append([key for ops in batches for key, _ in ops])
        return 0.001


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def committer(disk: Disk) -> AsyncIterator[GroupCommitter[float]]:
    with ThreadPoolExecutor(1) as executor:
        yield GroupCommitter(disk.write, executor, observe=lambda _seconds: None, failed=disk.failures.append)


def ops(name: str) -> list[Op]:
    return [(name.encode(), b"")]


async def test_what_is_submitted_in_one_turn_shares_one_write(
    disk: Disk, committer: GroupCommitter[float]
) -> None:
    await asyncio.gather(*(committer.submit(ops(name)) for name in "abc"))
    assert disk.batches == [[b"a", b"b", b"c"]]


async def test_next_batch_gathers_while_one_is_written(disk: Disk, committer: GroupCommitter[float]) -> None:
    disk.go_on.clear()
    first = committer.submit(ops("a"))
    await asyncio.sleep(0)
    rest = [committer.submit(ops("b")), committer.submit(ops("c"), lazy=True)]
    await asyncio.sleep(0)
    disk.go_on.set()
    await asyncio.gather(first, *rest)
    assert disk.batches == [[b"a"], [b"b", b"c"]]


async def test_lazy_goes_along_with_urgent_and_keeps_its_place(
    disk: Disk, committer: GroupCommitter[float]
) -> None:
    lazy = committer.submit(ops("a"), lazy=True)
    await asyncio.sleep(0)
    assert not disk.batches
    await committer.submit(ops("b"))
    assert lazy.done()
    assert disk.batches == [[b"a", b"b"]]


async def test_lazy_alone_is_written_after_its_delay(
    disk: Disk, committer: GroupCommitter[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "LAZY_DELAY", 0.001)
    await asyncio.gather(committer.submit(ops("a"), lazy=True), committer.submit(ops("b"), lazy=True))
    assert disk.batches == [[b"a", b"b"]]


async def test_many_lazy_ones_do_not_wait(disk: Disk, committer: GroupCommitter[float]) -> None:
    started = asyncio.get_running_loop().time()
    await asyncio.gather(*(committer.submit(ops(str(n)), lazy=True) for n in range(group_commit.MAX_LAZY)))
    assert asyncio.get_running_loop().time() - started < group_commit.LAZY_DELAY
    assert len(disk.batches) == 1


async def test_batch_is_bounded_and_order_is_kept(disk: Disk, committer: GroupCommitter[float]) -> None:
    half = group_commit.MAX_BATCH // 2
    await asyncio.gather(*(committer.submit(ops(name), size=half) for name in "abcde"))
    assert disk.batches == [[b"a", b"b"], [b"c", b"d"], [b"e"]]


async def test_applied_runs_before_the_submitter_goes_on_even_if_it_left(
    disk: Disk, committer: GroupCommitter[float]
) -> None:
    seen: list[str] = []
    left = committer.submit(ops("a"), applied=lambda: seen.append("a"))
    stays = committer.submit(ops("b"), applied=lambda: seen.append("b"))
    left.cancel()
    await stays
    assert seen == ["a", "b"]


async def test_failure_takes_everything_submitted_behind_it(
    disk: Disk, committer: GroupCommitter[float]
) -> None:
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


async def test_unexpected_error_is_a_store_error(disk: Disk, committer: GroupCommitter[float]) -> None:
    disk.error = ZeroDivisionError("what?")
    with pytest.raises(StoreError, match="could not be written"):
        await committer.submit(ops("a"))


async def test_drain_writes_lazy_work_at_once(disk: Disk, committer: GroupCommitter[float]) -> None:
    lazy = committer.submit(ops("a"), lazy=True)
    await committer.drain()
    assert lazy.done()
