"""Full disks and failed writes: new mail is refused, nothing is lost, and it recovers by itself."""

import asyncio
import contextlib
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.store import builders
from tests.store.builders import NOW, body_of, message_id, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store import records
from zonerelay.store.contract import CHUNK_SIZE, Finish, OwnMessage, QueueCounts, StoreError, StoreFullError
from zonerelay.store.queue.body import GROUP_CHUNKS


@contextlib.contextmanager
def largest_file(octets: int) -> Iterator[None]:
    """Writes beyond this size of a file fail, after as much of them as fits: a torn record in the log."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (octets, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def fill(spool: Spool, first: int, size: int) -> int:
    """Store messages until the store refuses one; returns the number of the refused one."""
    number = first
    while True:
        try:
            await store_message(
                spool.store, number, "a@example.net", "b@example.net", body=body(number, size)
            )
        except StoreError:
            return number
        number += 1


def body(number: int, size: int) -> bytes:
    return (b"%06d\r\n" % number * size)[:size]


@pytest.fixture
async def real_time_spool(tmp_path: Path) -> AsyncIterator[Spool]:
    async with Spool(tmp_path / "spool", clock=SystemClock(), write_buffer=4 * 1024 * 1024) as opened:
        yield opened


@pytest.mark.parametrize("size", [3_000, 60_000, 700_000])
async def test_failed_write_loses_nothing_and_the_spool_recovers(real_time_spool: Spool, size: int) -> None:
    spool, store = real_time_spool, real_time_spool.store
    await store_message(store, 1, "a@example.net", "b@example.net", body=body(1, size))
    active, waiting = await store.claim(queue_of("default"), 10, now=NOW)
    store.release([waiting.key])
    with largest_file(2_000_000):
        refused = await fill(spool, 2, size)
        repaired = asyncio.create_task(store.usable())
        assert store.unhealthy() == "the spool cannot be written"
        for verb in (
            store.settle([Finish(active)]),
            store.claim(queue_of("default"), 10, now=NOW),
            store.probe(),
            store.update([waiting.key], lambda _: None),
        ):
            with pytest.raises(StoreError):
                await verb
    await until(lambda: store.unhealthy() is None)
    assert spool.health == ["the spool cannot be written", None]
    assert await repaired
    await store.probe()
    await store.settle([Finish(active)])
    claimed = await store.claim(queue_of("default"), 10_000, now=NOW)
    assert active.key not in {d.key for d in claimed}, "a claim did not survive the reopening"
    numbers = {int(d.message_id, 16) for d in claimed}
    # The refused one may be there: its client will send it again, and at least once is the promise.
    assert numbers - {refused} == set(range(1, refused))
    for number in numbers:
        assert await body_of(store, message_id(number)) == body(number, size)
    await until(lambda: store.counts()[queue_of("default")] == QueueCounts(ready=len(claimed)))
    assert await fill_one(spool, refused + 1)
    await store.settle([Finish(d) for d in claimed])
    await spool.reopen()
    rest = await spool.store.claim(queue_of("default"), 10, now=NOW)
    assert {int(d.message_id, 16) for d in rest} == {refused + 1}


async def fill_one(spool: Spool, number: int) -> bool:
    return len(await store_message(spool.store, number)) == 1


async def test_settles_that_failed_together_keep_the_message(real_time_spool: Spool) -> None:
    """The second settle was computed as the last one; had it been written alone, the body would be gone."""
    store = real_time_spool.store
    await store_message(store, 1, "a@example.net", "b@example.net", body=b"x" * 10)
    first, second = await store.claim(queue_of("default"), 10, now=NOW)
    message, bounce = builders.own_message(message_id(2), b"y" * 300_000, "from@example.org")
    with largest_file(100_000):
        results = await asyncio.gather(
            store.settle([Finish(first), OwnMessage(message, b"y" * 300_000, (bounce,))]),
            store.settle([Finish(second)]),
            return_exceptions=True,
        )
    assert all(isinstance(result, StoreError) for result in results)
    await until(lambda: store.unhealthy() is None)
    assert await body_of(store, message_id(1)) == b"x" * 10
    await store.settle([Finish(second)])
    assert await store.deliveries_of(message_id(1)) == [first]
    assert await body_of(store, message_id(1)) == b"x" * 10


@pytest.mark.parametrize(
    ("groups", "others"),
    [
        pytest.param(2, True, id="others' write fails"),
        pytest.param(10, False, id="a group fails"),
        pytest.param(3, False, id="the commit fails"),
    ],
)
async def test_chunks_of_an_upload_that_failed_go(real_time_spool: Spool, groups: int, others: bool) -> None:
    """Left until the next start, they would keep the disk full."""
    spool, store = real_time_spool, real_time_spool.store
    await store_message(store, 1, body=body(1, 700_000))
    envelope = builders.envelope_for(message_id(2), "a@example.net")

    async def upload() -> None:
        async with store.begin(envelope) as writer:
            for _ in range(groups * GROUP_CHUNKS):
                await writer.write(b"x" * CHUNK_SIZE)
            if others:
                await fill(spool, 3, 100_000)
            await writer.commit([builders.delivery_for(envelope, "a@example.net")])

    with largest_file(2_000_000):
        with pytest.raises(StoreError):
            await upload()
        assert store.unhealthy() is not None
    await until(lambda: store.unhealthy() is None)
    read = store._keeper.read  # type: ignore[attr-defined]  # nobody else can see them
    deadline = asyncio.get_running_loop().time() + 5.0
    while await read(lambda reads: reads.keys_under(records.message_prefix(message_id(2)))):
        assert asyncio.get_running_loop().time() < deadline, "they are still there"
    assert await body_of(store, message_id(1)) == body(1, 700_000)


async def test_too_little_free_space_refuses_new_mail_and_still_stores_outcomes(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", clock=SystemClock())
    await spool.open()
    await store_message(spool.store, 1)
    await spool.store.close()
    store = await spool.open(min_free_space=shutil.disk_usage(tmp_path).free * 2)
    await until(lambda: store.unhealthy() is not None)
    assert store.unhealthy() == "insufficient disk space"
    with pytest.raises(StoreFullError):
        await store_message(store, 2)
    # What waits for this to succeed is what frees space.
    await store.probe()
    assert not await store.usable()
    (delivery,) = await store.claim(queue_of("default"), 10, now=NOW)
    await store.settle([Finish(delivery)])
    assert await store.queues() == set()
    await store.close()


async def test_large_messages_that_found_no_room_do_not_count_as_arriving(tmp_path: Path) -> None:
    """The more arrive at a time the smaller are their groups, and the more often each is synced."""
    free = shutil.disk_usage(tmp_path).free
    async with Spool(tmp_path / "spool", clock=SystemClock(), min_free_space=free * 2) as spool:
        store = spool.store
        await until(lambda: store.unhealthy() is not None)
        with pytest.raises(StoreFullError):
            await store_message(store, 1, body=b"x" * (2 * GROUP_CHUNKS * CHUNK_SIZE))
        assert store.uploads == 0  # type: ignore[attr-defined]  # nobody else sees the size of a write


async def test_claims_made_while_a_write_fails_are_claims(tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool") as spool:
        for number in range(1, 4):
            await store_message(spool.store, number)
        store = await spool.reopen()
        claiming = asyncio.create_task(store.claim(queue_of("default"), 10, now=NOW))
        await asyncio.sleep(0)
        store._reset()  # type: ignore[attr-defined]  # what a failed write does; here while the claim reads
        claimed = await claiming
        assert len(claimed) == 3
        assert await store.claim(queue_of("default"), 10, now=NOW) == [], "handed out twice"
        store.release([delivery.key for delivery in claimed])
        assert {d.key for d in await store.claim(queue_of("default"), 10, now=NOW)} == {
            d.key for d in claimed
        }


def can_mount() -> bool:
    """Whether this process may have a small file system of its own."""
    probe = "import pathlib; from tests.store import disks; disks.mount_tmpfs(pathlib.Path('/mnt'), 65536)"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this process may not mount a small file system")
@pytest.mark.parametrize("size", [4_000, 900_000])
@pytest.mark.parametrize("backend", [Backend.LEVELDB, Backend.DISK])
def test_full_file_system_is_told_and_recovers(tmp_path: Path, backend: Backend, size: int) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.store.full_disk_worker", backend, str(tmp_path), str(size)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("recovered\n")
