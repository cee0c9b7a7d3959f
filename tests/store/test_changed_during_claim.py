"""What an operator changes while a claim is still reading: never handed out as it was before."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from tests.store.builders import NOW, body_of, message_id, store_message
from tests.store.spools import Spool, until
from zonerelay.store import leveldb_scan
from zonerelay.store.base import Finish
from zonerelay.store.leveldb_engine import LevelDb


@pytest.mark.parametrize("given_back_first", [False, True])
async def test_what_is_dropped_during_a_claim_stays_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_back_first: bool
) -> None:
    read_fresh, reads, go_on = leveldb_scan.read_fresh, 0, threading.Event()

    def slow(db: LevelDb, start: bytes, end: bytes, wanted: int) -> leveldb_scan.Page:
        nonlocal reads
        reads += 1
        if reads == 2:
            assert go_on.wait(10.0)
        return read_fresh(db, start, end, wanted)

    monkeypatch.setattr(leveldb_scan, "PAGE_ROWS", 1)
    monkeypatch.setattr(leveldb_scan, "read_fresh", slow)
    async with Spool(tmp_path / "spool") as spool:
        first, second = await store_message(spool.store, 1, "a@example.net", "b@example.net")
        store = await spool.reopen()
        await store.read_message(message_id(1))
        claiming = asyncio.create_task(store.claim("default", 10, now=NOW))
        await until(lambda: reads == 2)
        await store.update([first.key], lambda _: None)
        if given_back_first:
            store.release([first.key])
        go_on.set()
        claimed = await claiming
        # Until it is given back, whoever dropped it keeps others' hands off it.
        left = {delivery.key for delivery in claimed} - (set() if given_back_first else {first.key})
        assert left == {second.key}
        store.release([first.key])
        assert await store.claim("default", 10, now=NOW) == []
        # Counted down twice, the message would leave with one delivery still open.
        await store.settle([Finish(first)])
        assert await body_of(store, message_id(1))
        assert store.counts()["default"].total == 1
