"""What many removed messages leave on the disk of a LevelDB spool."""

import asyncio
import contextlib
import itertools
import os
from pathlib import Path

import pytest

from tests.store.builders import message_id, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.store import records
from zonerelay.store.contract import StoreError
from zonerelay.store.leveldb import keeper as leveldb_compaction
from zonerelay.store.leveldb.keeper import slices
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.queue import keeper as queue_keeper

BODY = 8 * 1024


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leveldb_compaction, "MANY", 100)
    monkeypatch.setattr(leveldb_compaction, "SLICE", 256 * 1024)
    monkeypatch.setattr(leveldb_compaction, "PAUSE", 0.0)


def on_disk(path: Path) -> int:
    size = 0
    for file in path.glob("*.ldb"):
        with contextlib.suppress(FileNotFoundError):  # compacted away meanwhile
            size += file.stat().st_size
    return size


async def test_the_space_of_a_dropped_queue_comes_back_while_the_rest_stays(tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool") as spool:
        keys = []
        for number in range(1, 301):
            (delivery,) = await store_message(spool.store, number, body=os.urandom(BODY))
            keys.append(delivery.key)
        full = on_disk(spool.settings.path)
        assert len(await spool.store.update(keys[20:], lambda _: None)) == 280
        for _ in range(600):
            if on_disk(spool.settings.path) < full // 4:
                break
            await asyncio.sleep(0.01)
        assert on_disk(spool.settings.path) < full // 4
        assert len([each async for each in spool.store.scan()]) == 20
        assert len(b"".join([piece async for piece in spool.store.read_body(message_id(1))])) == BODY


async def test_a_spool_closes_while_it_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    compact = LevelDb.compact

    def told(db: LevelDb, start: bytes, stop: bytes) -> None:
        loop.call_soon_threadsafe(began.set)
        compact(db, start, stop)

    monkeypatch.setattr(LevelDb, "compact", told)
    async with Spool(tmp_path / "spool") as spool:
        keys = [(await store_message(spool.store, n, body=os.urandom(BODY)))[0].key for n in range(1, 201)]
        await spool.store.update(keys[:150], lambda _: None)
        await asyncio.wait_for(began.wait(), 10)
        await spool.store.close()
        await spool.open()
        assert len([each async for each in spool.store.scan()]) == 50


async def test_a_compaction_that_a_reopening_cut_short_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact, failed = LevelDb.compact, list[bytes]()

    def fail_once(db: LevelDb, start: bytes, stop: bytes) -> None:
        if not failed:
            failed.append(start)
            raise StoreError("the spool is closed")
        compact(db, start, stop)

    monkeypatch.setattr(LevelDb, "compact", fail_once)
    monkeypatch.setattr(queue_keeper, "INTERVAL", 0.05)
    async with Spool(tmp_path / "spool") as spool:
        keys = [(await store_message(spool.store, n, body=os.urandom(BODY)))[0].key for n in range(1, 301)]
        full = on_disk(spool.settings.path)
        await spool.store.update(keys[20:], lambda _: None)
        await until(lambda: bool(failed) and on_disk(spool.settings.path) < full // 4)


@pytest.mark.parametrize("count", [1, 3, 64])
def test_slices_hold_every_message_once(count: int) -> None:
    first, last = message_id(0x19A000000000), message_id(0x19A0000003E7)
    found = slices(first, last, count)[:-4]
    assert len(found) <= count
    assert found[0][0] <= records.metadata_key(first)
    assert found[-1][1] > records.chunk_key(last, 999_999)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(found))
