"""The room that is kept back for a full disk, and that the spool's guard counts it as free."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.store.builders import NOW, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store.contract import Finish, StoreFullError
from zonerelay.store.directories import FILE_NAME, ReserveFile

MB = 1024 * 1024


def test_ballast_takes_real_blocks_and_gives_them_back_once(tmp_path: Path) -> None:
    ballast = ReserveFile(tmp_path, 3 * MB)
    assert not ballast.is_whole
    ballast.make()
    assert (ballast.held, ballast.is_whole) == (3 * MB, True)
    assert (tmp_path / FILE_NAME).stat().st_blocks * 512 >= 3 * MB
    assert ballast.drop()
    assert (ballast.held, ballast.is_whole) == (0, False)
    assert not ballast.drop()
    assert not (tmp_path / FILE_NAME).exists()


def test_of_two_writes_at_once_each_gets_the_room_of_the_reserve(tmp_path: Path) -> None:
    """A disk queue writes several files at a time, and only one of the threads removes the reserve."""
    ballast = ReserveFile(tmp_path, MB)
    ballast.make()
    meeting = threading.Barrier(2)

    def write(tries: list[int]) -> str:
        tries.append(1)
        if len(tries) == 1:
            meeting.wait(10)
            raise StoreFullError("no space")
        return "written"

    with ThreadPoolExecutor(2) as threads:
        writes = [threads.submit(ballast.make_way, partial(write, [])) for _ in range(2)]
        assert [each.result() for each in writes] == ["written"] * 2
    with pytest.raises(StoreFullError):
        ballast.make_way(partial(_fail, StoreFullError("no space")))


def _fail(error: StoreFullError) -> None:
    raise error


def test_ballast_that_was_needed_waits_for_more_room_than_before(tmp_path: Path) -> None:
    ballast = ReserveFile(tmp_path, 2 * MB)
    assert ballast.count_in(4 * MB, wanted=4 * MB) == 4 * MB
    assert ballast.drop()
    assert ballast.count_in(MB - 1, wanted=4 * MB) == MB - 1
    assert ballast.held == 0, "it was the last room there was"
    for free, held in ((MB, MB // 2), (4 * MB, MB // 2), (5 * MB, MB // 2), (6 * MB, 2 * MB)):
        before = ballast.held
        assert ballast.count_in(free, wanted=4 * MB) == free + before
        assert ballast.held == held
    assert ballast.count_in(2 * MB, wanted=4 * MB) == 4 * MB


@pytest.mark.parametrize("size", [0, 2 * MB, 8 * MB])
def test_ballast_of_the_last_run_counts_and_follows_the_setting(tmp_path: Path, size: int) -> None:
    ReserveFile(tmp_path, 5 * MB).make()
    ballast = ReserveFile(tmp_path, size)
    assert ballast.held >= 5 * MB
    assert not ballast.is_whole
    ballast.make()
    assert (ballast.held, ballast.is_whole) == (size, True)
    path = tmp_path / FILE_NAME
    assert (path.stat().st_size if path.exists() else 0) == size


def test_ballast_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    ballast = ReserveFile(tmp_path, 1 << 60)
    ballast.make()
    assert ballast.held == 0
    assert not (tmp_path / FILE_NAME).exists()


async def test_spool_keeps_half_of_the_guard_back_and_leaves_it_at_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    file = path / FILE_NAME
    async with Spool(path, clock=SystemClock(), min_free_space=4 * MB) as spool:
        await until(file.exists)
        (delivery,) = await store_message(spool.store, 1)
        await spool.reopen()
        assert await spool.store.claim(queue_of("default"), 10, now=NOW) == [delivery]
        await spool.store.settle([Finish(delivery)])
        await spool.store.close()
        # LevelDB needs more than the 4 MB of the setting, so the guard is four times its tables.
        assert file.stat().st_size == (4 * MB + MB // 4) * 4 // 2
        await spool.open(min_free_space=0)
        await until(lambda: not file.exists())
        assert spool.health == []


async def test_kept_room_counts_as_free(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    spool = Spool(tmp_path / "spool", clock=SystemClock())
    await spool.open()
    await spool.store.close()
    (tmp_path / "spool" / FILE_NAME).write_bytes(b"")
    ReserveFile(tmp_path / "spool", 200 * MB).make()
    # Other things may come and go on this disk meanwhile, but not as much as that.
    store = await spool.open(min_free_space=free - 100 * MB)
    await until((tmp_path / "spool" / FILE_NAME).exists)
    await store_message(store, 1)
    assert spool.health == []
    await store.close()
