"""A queue of a release that this one does not read is refused in words, and stays as it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.spools import Spool
from tests.upgrades import fixtures
from tests.upgrades.engines import ENGINES, REFUSED
from zonerelay.store import records
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.leveldb.engine import plyvel


def _leveldb(spool: Spool) -> None:
    with contextlib.closing(plyvel.DB(str(spool.settings.path))) as database:
        database.put(records.META_FORMAT, b"2")
    # A newer release writes the version there too.
    (spool.settings.path / "synced").unlink()


def _disk(spool: Spool) -> None:
    for lock in spool.settings.path.rglob("zonerelay.lock"):
        lock.write_bytes(lock.read_bytes().replace(b"queue 2", b"queue 3"))


MARKS: dict[str, tuple[Callable[[Spool], None], str]] = {
    "leveldb": (
        _leveldb,
        "format version 2, but this zonerelay supports version 1",
    ),
    "disk": (
        _disk,
        r"zonerelay\.lock does not belong to a queue that this zonerelay can read",
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_a_newer_queue_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    engine = ENGINES[name]
    spool = engine.unpack((fixtures.newest() / engine.file).read_bytes(), tmp_path)
    mark, words = MARKS[name]
    mark(spool)
    before = engine.records(spool)
    with pytest.raises(StoreOpenError, match=words):
        asyncio.run(spool.open())
    assert engine.records(spool) == before


OLD = {
    "shelf": r"it was written by Python's shelve\. Nothing was changed\. Start the release that wrote it",
    "disk": r"contains a disk queue of zonerelay 0\.1\.0, .* Nothing was changed",
    "redis": "contains the queue of zonerelay 0\\.1\\.0",
    "postgres": "contains the queue of zonerelay 0\\.1\\.0",
    "s3": r"contains a queue of zonerelay 0\.1\.0, .* Nothing was changed",
}


@pytest.mark.parametrize("name", OLD)
def test_a_queue_of_the_first_release_is_refused_and_left_alone(name: str, tmp_path: Path) -> None:
    engine = REFUSED[name]
    spool = engine.unpack((fixtures.DIRECTORY / "0.1.0" / engine.file).read_bytes(), tmp_path)
    before = engine.records(spool)
    with pytest.raises(StoreOpenError, match=OLD[name]):
        asyncio.run(spool.open())
    assert engine.records(spool) == before
