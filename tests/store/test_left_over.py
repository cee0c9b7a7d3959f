"""A spool that nobody has any more is removed when it is empty, and that is proved, not assumed."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from tests.store.builders import NOW, flip, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import bin_of, queue_of
from zonerelay.store import records
from zonerelay.store.contract import SHARED, Finish, Store
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.memory import SavedQueueFile
from zonerelay.worker import worker as heir_module

SHARED_ONES = ("redis", "postgres", "s3")


async def test_nothing_is_left_over_when_all_has_left(store: Store, request: pytest.FixtureRequest) -> None:
    shared = request.node.callspec.params["store"] in SHARED_ONES
    await store_message(store, 1, "a@example.net", "b@example.net", body=b"x" * 200_000)
    await store_message(store, 2, "c@example.net", zone="other", next_attempt=NOW + 5)
    for zone in ("default", "other"):
        await store.settle([Finish(each) for each in await store.claim(queue_of(zone), 10, now=NOW + 9)])
    assert await store.queues() == set()
    # Nobody may remove what others have mail in, whatever this relay sees of it.
    assert await store.left_over() == (SHARED if shared else "")


Heir = Callable[[Store], tuple[asyncio.Task[None], list[str]]]


@pytest.fixture
def heir(monkeypatch: pytest.MonkeyPatch) -> Heir:
    """Waits until a store is empty, in a task, and says what it finds there meanwhile."""
    monkeypatch.setattr(heir_module, "LOOK_EVERY", 0.001)

    def wait(store: Store) -> tuple[asyncio.Task[None], list[str]]:
        told: list[str] = []
        return asyncio.create_task(heir_module.until_empty(store, told.append)), told

    return wait


Damage = Callable[[Path], object]


def records_of(path: Path, change: Callable[[LevelDb, bytes], None]) -> None:
    db = LevelDb(path, write_buffer=256 * 1024)
    db.open()
    for key, _ in list(db.rows(records.DELIVERY_PREFIX, records.DELIVERY_PREFIX[:-1] + b"!", limit=9)):
        change(db, key)
    db.close()


def lost_record(path: Path) -> None:
    records_of(path, lambda db, key: db.write([[(key, None)]]))


def unreadable_key(path: Path) -> None:
    records_of(
        path, lambda db, key: db.write([[(key, None), (records.DELIVERY_PREFIX + b"d \xff x", b"{}")]])
    )


def damaged_block(path: Path) -> None:
    (table,) = path.glob("*.ldb")
    flip(table, 30)


def of_a_disk_queue(path: Path) -> None:
    """The backend has been changed: LevelDB would see an empty database beside it."""
    for file in path.iterdir():
        file.unlink()
    (path / "messages").mkdir()
    (path / "messages" / "message-0000000000000001-000001.000001-000000000003-0").write_bytes(b"x")


def cut_in_the_shelf(path: Path) -> None:
    shelf = SavedQueueFile(path)
    for key in [key for key in shelf.rows if key.startswith(records.DELIVERY_PREFIX)]:
        del shelf.rows[key]
    shelf.close()


DAMAGE: list[tuple[Backend, Damage]] = [
    (Backend.LEVELDB, lost_record),
    (Backend.LEVELDB, unreadable_key),
    (Backend.LEVELDB, damaged_block),
    (Backend.LEVELDB, of_a_disk_queue),
    (Backend.MEMORY, cut_in_the_shelf),
]


@pytest.mark.parametrize(("backend", "damage"), DAMAGE)
async def test_spool_with_mail_that_cannot_be_read_is_kept(
    tmp_path: Path, heir: Heir, backend: Backend, damage: Damage
) -> None:
    path = tmp_path / "q"
    spool = Spool(path, backend=backend, places={"shelve": path} if backend is Backend.MEMORY else {})
    async with spool:
        await store_message(spool.store, 1)
        await spool.reopen()
    damage(path)
    async with spool:
        assert await spool.store.queues() == set()
        waiting, told = heir(spool.store)
        await until(lambda: bool(told))
        assert not waiting.done()
        waiting.cancel()
    async with spool:  # nothing of it is gone by then
        assert told[0] in (await spool.store.left_over(), *spool.store.problems())


async def test_spool_whose_bin_has_mail_is_kept(spool: Spool, heir: Heir) -> None:
    """An undo of the drop would not find the mail otherwise."""
    (delivery,) = await store_message(spool.store, 1)
    dropped = structs.replace(delivery, queue=bin_of(delivery.queue), held=True)
    await spool.store.update([delivery.key], lambda _: dropped)
    waiting, told = heir(spool.store)
    await until(lambda: bool(told))
    assert "dropped mail is kept for a day" in told[0]
    await spool.store.update([dropped.key], lambda _: None)
    await asyncio.wait_for(waiting, 10.0)
    assert told[1:] == [""]


async def test_spool_that_was_cleared_is_empty(tmp_path: Path, heir: Heir) -> None:
    async with Spool(tmp_path / "q", backend=Backend.DISK) as spool:
        (delivery,) = await store_message(spool.store, 1)
        (tmp_path / "q" / "note").touch()
        waiting, told = heir(spool.store)
        await spool.store.settle([Finish(delivery)])
        await until(lambda: bool(told))
        assert "1 files, " in told[0]
        assert "note" in told[0]
        (tmp_path / "q" / "note").unlink()
        await asyncio.wait_for(waiting, 10.0)
        assert told[1:] == [""]
