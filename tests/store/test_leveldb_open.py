"""Trouble at opening is told in words that say what to do, and nothing is ever deleted."""

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.store.builders import NOW, delivery_for, envelope_for, message_id, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import queue_of, webhook_queue
from zonerelay.store import records
from zonerelay.store.contract import QueueCounts, StoreOpenError
from zonerelay.store.keys.port import Op
from zonerelay.store.leveldb import engine
from zonerelay.store.leveldb.damage.directory import MARK_NAME, SyncMark, write_mark
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.queue.reads import QueueReads


def raw_rows(path: Path, *, then: list[Op] | None = None) -> dict[bytes, bytes]:
    """Every row of a closed spool, after writing `then`."""
    db = LevelDb(path, write_buffer=1024 * 1024)
    db.open()
    try:
        if then:
            db.write([then])
        return dict(db.rows(b"", limit=100_000))
    finally:
        db.close()


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a directory but those that say nothing."""
    files = (each for each in path.rglob("*") if each.is_file())
    return {str(each.relative_to(path)): each.read_bytes() for each in files if each.name not in UNTOLD}


UNTOLD = {"LOG", "LOG.old", "LOCK", "ballast"}


async def refusal(path: Path) -> str:
    with pytest.raises(StoreOpenError) as caught:
        await Spool(path).open()
    return str(caught.value)


@pytest.mark.parametrize("lockable", [True, False])
async def test_second_opener_is_told_who_may_have_the_spool(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, lockable: bool
) -> None:
    """A network file system may not lock directories; LevelDB locks a file in any case."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if not lockable:
        monkeypatch.setattr(fcntl, "flock", flock)
    text = await refusal(spool.settings.path)
    assert "another zonerelay has " in text
    assert str(spool.settings.path) in text
    await store_message(spool.store, 1)


@pytest.mark.parametrize("marked", [True, False])
async def test_unknown_format_version_is_refused_and_left_alone(spool: Spool, marked: bool) -> None:
    path = spool.settings.path
    await spool.store.close()
    raw_rows(path, then=[(records.META_FORMAT, b"2")])
    (path / MARK_NAME).unlink()
    if marked:
        write_mark(path, SyncMark("2", 1, 0))
    before = contents(path)
    assert "has format version 2, but this zonerelay supports version" in await refusal(path)
    assert contents(path) == before


@pytest.mark.parametrize("has_links", [True, False])
async def test_foreign_database_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Without hard links the look at it opens it; a mark would make it a spool at the next start."""

    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(source), None, str(target))

    with contextlib.closing(plyvel.DB(str(tmp_path), create_if_missing=True)) as db:
        db.put(b"theirs", b"x")
    before = contents(tmp_path)
    if not has_links:
        monkeypatch.setattr(os, "link", link)
    for _ in range(2):
        assert "not a zonerelay spool" in await refusal(tmp_path)
    assert not has_links or contents(tmp_path) == before
    assert not (tmp_path / MARK_NAME).exists()
    with contextlib.closing(plyvel.DB(str(tmp_path))) as db:
        assert list(db) == [(b"theirs", b"x")]


async def test_spool_of_an_older_release_has_no_mark_and_is_opened(spool: Spool) -> None:
    await store_message(spool.store, 1)
    await spool.store.close()
    (spool.settings.path / MARK_NAME).unlink()
    await spool.open()
    assert len(await spool.store.claim(queue_of("default"), 10, now=NOW)) == 1
    assert spool.store.problems() == ()
    assert not (spool.settings.path / "trial").exists()


async def test_damaged_database_says_how_to_repair_it(spool: Spool) -> None:
    await store_message(spool.store, 1)
    await spool.store.close()
    for manifest in spool.settings.path.glob("MANIFEST-*"):
        manifest.write_bytes(b"\xff" * 200)
    before = sorted(path.name for path in spool.settings.path.iterdir())
    text = await refusal(spool.settings.path)
    assert "is damaged" in text
    assert "`zonerelay spool repair` lists what can be restored" in text
    assert set(before) <= {path.name for path in spool.settings.path.iterdir()}


async def test_a_start_that_is_cancelled_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, goes_on, connect = threading.Event(), threading.Event(), engine.connect

    def slow(path: Path, *, write_buffer: int, create: bool = False, is_tight: bool = False) -> plyvel.DB:
        db = connect(path, write_buffer=write_buffer, create=create, is_tight=is_tight)
        entered.set()
        goes_on.wait(10)
        return db

    with monkeypatch.context() as patch:
        patch.setattr(engine, "connect", slow)
        opening = asyncio.create_task(Spool(tmp_path).open())
        await asyncio.to_thread(entered.wait, 10)
        opening.cancel()
        threading.Timer(0.1, goes_on.set).start()
        with pytest.raises(asyncio.CancelledError):
            await opening
    async with Spool(tmp_path) as spool:
        await store_message(spool.store, 1)


@pytest.mark.parametrize("backend", [Backend.LEVELDB, Backend.DISK])
async def test_file_in_place_of_the_directory_is_named(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "file").write_text("")
    for name, text in (("file", "is not a directory"), ("file/spool", "cannot create the directory")):
        with pytest.raises(StoreOpenError, match=text):
            await Spool(tmp_path / name, backend=backend).open()


async def test_missing_directories_are_created_for_the_owner_alone(tmp_path: Path) -> None:
    async with Spool(tmp_path / "var" / "spool") as opened:
        assert opened.settings.path.stat().st_mode & 0o077 == 0
        assert opened.settings.path.parent.stat().st_mode & 0o077 == 0, "a worker's is in that of the first"


async def test_memory_says_that_nothing_survives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with Spool(tmp_path, backend=Backend.MEMORY):
            assert "all mail in it is lost" in caplog.text


async def test_a_spool_says_that_it_is_still_counting(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        await store_message(spool.store, number)
    await until(spool.store.is_counted)
    may_count = threading.Event()
    count_page = QueueReads.count_page

    async def slowly(*arguments: Any) -> Any:
        assert may_count.wait(30)
        return await count_page(*arguments)

    monkeypatch.setattr(QueueReads, "count_page", slowly)
    store = await spool.reopen()
    assert not store.is_counted()
    may_count.set()
    await until(store.is_counted)
    assert store.counts() == {queue_of("default"): QueueCounts(ready=3)}


async def test_chunks_of_an_upload_that_a_crash_cut_off_are_removed(spool: Spool) -> None:
    await store_message(spool.store, 1, body=b"k" * 700_000)
    await spool.store.close()
    lost = [(records.chunk_key(message_id(5), number), b"x" * 1000) for number in range(1, 2500)]
    raw_rows(spool.settings.path, then=list(lost))
    await spool.open()
    assert spool.store.last_message_id() == message_id(5)
    kept = await spool.store.read_message(message_id(1))
    await until(lambda: not spool.store._keeper._tasks)  # type: ignore[attr-defined]  # white box, on purpose
    await spool.store.close()
    chunks = [key for key in raw_rows(spool.settings.path) if key.startswith(b"message ")]
    assert len(chunks) == kept.chunks + 2


async def test_a_start_removes_a_long_overflow_index_without_stepping_over_what_it_removed(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await spool.store.close()
    envelopes = [envelope_for(message_id(number)) for number in range(2500)]
    keys = [delivery_for(each, "user@full.example").key for each in envelopes]
    raw_rows(spool.settings.path, then=[(records.domain_key(key, "full.example"), b"") for key in keys])
    rows, starts = LevelDb.rows, list[bytes]()

    def noted(self: LevelDb, start: bytes, *arguments: Any, **more: Any) -> Any:
        starts.append(start)
        return rows(self, start, *arguments, **more)

    monkeypatch.setattr(LevelDb, "rows", noted)
    await spool.open()
    passes = [start for start in starts if start.startswith(records.DOMAIN_PREFIX)]
    assert len(set(passes)) == len(passes) >= 3
    await spool.store.close()
    assert not any(key.startswith(records.DOMAIN_PREFIX) for key in raw_rows(spool.settings.path))


async def test_keys_and_values_are_spelled_as_documented(spool: Spool) -> None:
    await store_message(spool.store, 1, "ä b@example.net", zone="z 1", next_attempt=NOW + 0.5, body=b"hi")
    (event,) = await store_message(spool.store, 2, "0.0.1@hook", zone="webhook/app")
    await spool.store.close()
    identity = b"0000000000000001"
    rows = raw_rows(spool.settings.path)
    ours = {key: value for key, value in rows.items() if b"%016x" % 2 not in key}
    assert ours.pop(b"message %b *" % identity).startswith(b'{"envelope":')
    assert ours == {
        b"message %b 000001" % identity: b"hi",
        b"message %b #" % identity: b"1700000000",
        b"delivery-zone z%%201 %b %%C3%%A4%%20b@example.net" % identity: (
            b'{"created":1700000000.0,"next_attempt":1700000000.5}'
        ),
        b"deferred-zone z%%201 1700000000.5000000 %b %%C3%%A4%%20b@example.net" % identity: b"",
        b"meta format": b"1",
    }
    assert b"delivery-webhook app %016x 0.0.1@hook" % 2 in rows
    await spool.open()
    assert await spool.store.claim(webhook_queue("app"), 10, now=NOW) == [event]
