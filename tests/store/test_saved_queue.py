"""The memory queue's shelf: an orderly restart loses nothing, and damage is reported."""

import asyncio
import contextlib
import importlib
import logging
import shelve
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay import durable
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import queue_of
from zonerelay.store.contract import Finish, StoreOpenError


def shelved(path: Path) -> Spool:
    return Spool(path / "spool", backend=Backend.MEMORY, places={"shelve": path / "queue.shelf"})


async def test_last_message_id_outlives_the_messages(tmp_path: Path) -> None:
    async with shelved(tmp_path) as spool:
        (delivery,) = await store_message(spool.store, 9, body=b"x" * 500_000)
        await spool.store.settle([Finish(delivery)])
        store = await spool.reopen()
        assert store.last_message_id() == message_id(9)
        assert sum(path.stat().st_size for path in tmp_path.glob("queue.shelf*")) < 1000


async def test_what_was_there_at_a_crash_remains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = shelved(tmp_path)
    with caplog.at_level(logging.WARNING):
        await spool.open()
    assert "survives an orderly restart; a crash loses" in caplog.text
    await store_message(spool.store, 1)
    store = await spool.reopen()
    await store_message(store, 2)
    assert "was not closed properly" not in caplog.text
    shutil.copy(tmp_path / "queue.shelf", tmp_path / "after")
    await store.close()
    crashed = Spool(tmp_path / "spool", backend=Backend.MEMORY, places={"shelve": tmp_path / "after"})
    async with crashed:
        assert "was not closed properly" in caplog.text
        found = await crashed.store.claim(queue_of("default"), 10, now=NOW)
        assert [each.message_id for each in found] == [message_id(1)]


async def test_a_start_that_was_cancelled_leaves_the_shelf_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with shelved(tmp_path) as spool:
        await store_message(spool.store, 1)
    began, go, write = threading.Event(), threading.Event(), durable.write

    def held_up(path: Path, pieces: Iterable[bytes]) -> None:
        began.set()
        go.wait()
        write(path, pieces)

    monkeypatch.setattr(durable, "write", held_up)
    start = asyncio.create_task(shelved(tmp_path).open())
    await until(began.is_set)
    start.cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({start})
    assert start.cancelled()
    async with shelved(tmp_path) as spool:
        assert "was not closed properly" not in caplog.text
        assert [each.message_id async for each in spool.store.scan()] == [message_id(1)]


async def test_second_opener_is_told_who_may_have_the_shelf(tmp_path: Path) -> None:
    async with shelved(tmp_path):
        with pytest.raises(StoreOpenError, match=r"another zonerelay has opened"):
            await shelved(tmp_path).open()
    async with shelved(tmp_path):
        pass


@pytest.mark.parametrize("place", [0, 5, 100, -1])
async def test_damage_is_refused_and_nothing_is_changed(tmp_path: Path, place: int) -> None:
    async with shelved(tmp_path) as spool:
        await store_message(spool.store, 1)
    shelf = tmp_path / "queue.shelf"
    content = bytearray(shelf.read_bytes())
    content[place] ^= 1
    shelf.write_bytes(content)
    with pytest.raises(StoreOpenError, match=r"was written by another release.* or move it away"):
        await shelved(tmp_path).open()
    assert shelf.read_bytes() == content


@pytest.mark.parametrize("database", ["dumb", "ndbm", "gnu", "sqlite3"])
async def test_a_shelf_of_python_is_refused(tmp_path: Path, database: str) -> None:
    with contextlib.suppress(ImportError):
        module = importlib.import_module(f"dbm.{database}")
        opened: shelve.Shelf[bytes] = shelve.Shelf(module.open(str(tmp_path / "queue.shelf"), "c"))
        with opened as shelf:
            shelf["message"] = b"x"
        with pytest.raises(StoreOpenError, match="was written by another release"):
            await shelved(tmp_path).open()


async def test_a_shelf_that_cannot_be_written_is_told_and_the_one_before_remains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = shelved(tmp_path)
    await spool.open()
    before = (tmp_path / "queue.shelf").read_bytes()
    await store_message(spool.store, 1)

    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(durable, "write", full)
        await spool.store.close()
        assert "cannot be written, so the queue does not survive this stop" in caplog.text
        with pytest.raises(StoreOpenError, match=r"cannot be used: .*No space left"):
            await shelved(tmp_path).open()
    assert (tmp_path / "queue.shelf").read_bytes() == before
    async with shelved(tmp_path):
        assert "was not closed properly" in caplog.text
