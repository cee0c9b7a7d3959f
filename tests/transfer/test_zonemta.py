"""A queue that ZoneMTA of 2016 has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.spools import Spool
from tests.support.zonemta import fill_queue
from tests.transfer.queues import import_into, rows
from zonerelay.model.clock import SystemClock
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.transfer.others import reading
from zonerelay.transfer.stored import TransferError

BODY = (
    b"From: a@example.org\r\nSubject: caf\xe9\r\n folded\r\n\r\n.dot \xff\r\n" + (b"x" * 70 + b"\r\n") * 2000
)


def files_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in directory.iterdir()}


async def test_a_queue_moves_in(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    with fill_queue(queue, "wait") as zonemta:
        assert zonemta.stdout is not None
        assert len(zonemta.stdout.readline().split()) == 2
        with pytest.raises(TransferError, match=f"ZoneMTA is running as process {zonemta.pid}"):
            async with reading("zonemta", str(queue), 0.0):
                pass
        zonemta.kill()
    before = files_of(queue)
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "zonemta", str(queue))
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (2, 3, 0)
        found = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "zonemta", str(queue))
        assert (again.messages, again.already) == (0, 3)
    assert files_of(queue) == before
    (null, (alone,), _), (mail, (bad, late), body) = sorted(found, key=lambda row: row[0].envelope.sender)
    assert (null.envelope.sender, alone.recipient) == ("", "late@example.org")
    assert (bad.recipient, late.recipient) == ("bad@example.net", "late+1@example.net")
    assert body == BODY + b"end\r\n"
    assert mail.envelope.created == 1700000000.25
    assert (mail.envelope.origin.client_address, mail.envelope.origin.user) == ("192.0.2.1", "app")
    assert (late.attempts, late.next_attempt, late.last) == (0, 0.0, None)
    assert bad.attempts == 1
    assert 3500 < bad.next_attempt - SystemClock.now() <= 3600
    assert bad.last is not None
    assert str(bad.last.reply) == "450 4.2.1 <x> mailbox busy"


async def test_tables_are_read_and_left_alone(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    with fill_queue(queue) as zonemta:
        assert zonemta.wait(60) == 0
    database = plyvel.DB(str(queue))
    database.compact_range()
    database.put(b"ref 1 default a%40example.net", b'{"recipient": "a@example.net"}')
    database.close()
    assert list(queue.glob("*.ldb"))
    before = files_of(queue)
    async with Spool(tmp_path / "spool") as spool:
        loaded = await import_into(spool.store, tmp_path, "zonemta", str(queue))
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (2, 3, 1)
    assert files_of(queue) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["imported", "queue", "spool"]


async def test_other_directories_are_refused(tmp_path: Path) -> None:
    for name, why in (("sst_0", "Basho"), ("nothing", "not a LevelDB database")):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(TransferError, match=why):
            async with reading("zonemta", str(tmp_path / name), 0.0):
                pass
