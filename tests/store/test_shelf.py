"""The memory store's shelf: an orderly restart loses nothing, and damage is told in words."""

from __future__ import annotations

import asyncio
import contextlib
import dbm
import dbm.dumb
import importlib
import logging
import pickle
import shelve
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.store.builders import NOW, attempt, body_of, message_id, own_message, store_message
from tests.store.spools import Spool
from zonerelay.config.settings import Backend
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, MessageNotFoundError, Postpone, StoreOpenError, Submit
from zonerelay.store.memory.shelf import Shelf


def shelved(path: Path) -> Spool:
    return Spool(path / "spool", backend=Backend.MEMORY, places={"shelve": path / "queue.shelf"})


class Bare:
    """A database with no more methods than the ones that every module of `dbm` has: dbm.ndbm has no items()
    and, before Python 3.13, dbm.gnu cannot be iterated over.
    """

    def __init__(self, path: str, flag: str, mode: int) -> None:
        self._database: Any = dbm.dumb.open(path, flag, mode)  # noqa: SIM115  # close() is below

    def keys(self) -> list[bytes]:
        return list(self._database.keys())

    def __getitem__(self, key: bytes) -> bytes:
        return bytes(self._database[key])

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._database[key] = value

    def __delitem__(self, key: bytes) -> None:
        del self._database[key]

    def __contains__(self, key: bytes) -> bool:
        return key in self._database

    def __len__(self) -> int:
        return len(self._database)

    def close(self) -> None:
        self._database.close()

    __iter__ = None


def databases() -> list[ModuleType | SimpleNamespace]:
    """The modules of `dbm` that this Python has, dbm.dumb always, and the barest that there can be."""
    found: list[ModuleType | SimpleNamespace] = [SimpleNamespace(__name__="bare", open=Bare)]
    for name in ("dbm.dumb", "dbm.ndbm", "dbm.gnu", "dbm.sqlite3"):
        with contextlib.suppress(ImportError):
            found.append(importlib.import_module(name))
    return found


@pytest.mark.parametrize("database", databases(), ids=lambda module: module.__name__)
async def test_queue_survives_a_restart_with_every_database_of_dbm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database: ModuleType | SimpleNamespace
) -> None:
    monkeypatch.setattr(dbm, "open", database.open)
    bodies = {number: bytes([number]) * (number * 70_000) for number in range(1, 6)}
    async with shelved(tmp_path) as spool:
        for number, body in bodies.items():
            await store_message(spool.store, number, body=body)
        for _ in range(2):
            store = await spool.reopen()
            assert {number: await body_of(store, message_id(number)) for number in bodies} == bodies
        claimed = await store.claim(queue_of("default"), 10, now=NOW)
        assert len(claimed) == len(bodies)
        await store.settle([Finish(delivery) for delivery in claimed])
        store = await spool.reopen()
        assert await store.claim(queue_of("default"), 10, now=NOW) == []
        assert store.last_message_id() == message_id(5)


async def test_queue_survives_an_orderly_restart(tmp_path: Path) -> None:
    async with shelved(tmp_path) as spool:
        store = spool.store
        await store_message(store, 1, "a@example.net", "b@example.net", body=b"x" * 200_000)
        await store_message(store, 2)
        await store_message(store, 3, "żółw@example.net", zone="other zone", held=True)
        first, second, third = await store.claim(queue_of("default"), 10, now=NOW)
        later = second.deferred(NOW + 60, attempt())
        message, bounce = own_message(message_id(4), b"bounce", "from@example.org")
        await store.settle([Finish(first), Postpone(later), Submit(message, b"bounce", (bounce,))])
        await store.settle([Finish(third)])
        store = await spool.reopen()
        found = [delivery async for delivery in store.scan()]
        assert found[:2] == [later, bounce]
        assert (found[2].zone, found[2].recipient, found[2].held) == ("other zone", "żółw@example.net", True)
        assert await body_of(store, message_id(1)) == b"x" * 200_000
        assert await store.read_message(message_id(4)) == message
        with pytest.raises(MessageNotFoundError):
            await store.read_message(message_id(2))
        assert await store.claim(queue_of("default"), 10, now=NOW) == [bounce]
        assert store.last_message_id() == message_id(4)


async def test_last_message_id_and_an_empty_file_outlive_the_messages(tmp_path: Path) -> None:
    async with shelved(tmp_path) as spool:
        (delivery,) = await store_message(spool.store, 9, body=b"x" * 500_000)
        await spool.store.settle([Finish(delivery)])
        store = await spool.reopen()
        assert store.last_message_id() == message_id(9)
        assert sum(path.stat().st_size for path in tmp_path.glob("queue.shelf*")) < 100_000


async def test_warning_is_in_the_log_and_a_crash_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = shelved(tmp_path)
    with caplog.at_level(logging.WARNING):
        await spool.open()
    assert "survives an orderly restart; a crash loses" in caplog.text
    await store_message(spool.store, 1)
    spool.store._shelf._sync_later()  # type: ignore[attr-defined]  # what the timer does
    await asyncio.sleep(0.2)
    for file in tmp_path.glob("queue.shelf*"):
        shutil.copy(file, tmp_path / f"after-{file.name}")
    await spool.store.close()
    after = Spool(
        tmp_path / "spool", backend=Backend.MEMORY, places={"shelve": tmp_path / "after-queue.shelf"}
    )
    async with after as opened:
        assert "was not closed in order" in caplog.text
        assert len(await opened.store.claim(queue_of("default"), 10, now=NOW)) == 1


async def test_second_opener_is_told_who_may_have_the_shelf(tmp_path: Path) -> None:
    async with shelved(tmp_path):
        with pytest.raises(StoreOpenError, match=r"another zonerelay has .* open"):
            await shelved(tmp_path).open()
    async with shelved(tmp_path):
        pass


class Trap:
    """What unpickling would build if it were allowed to."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.mkdir, (Path("trapped"),))  # type: ignore[return-value]


@pytest.mark.parametrize("value", [Trap(), "text", 5, pickle])
async def test_shelf_with_anything_but_octets_is_refused_and_runs_nothing(
    tmp_path: Path, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with shelve.open(str(tmp_path / "queue.shelf")) as shelf:
        shelf["message"] = b"x"
        shelf.dict[b"other"] = pickle.dumps(value) if value is not pickle else b"\xff"  # type: ignore[attr-defined]
    with pytest.raises(StoreOpenError, match=r"is damaged, or not one: .* Move it away"):
        await shelved(tmp_path).open()
    assert not (tmp_path / "trapped").exists()


async def test_record_that_cannot_be_read_is_stepped_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = shelved(tmp_path)
    await spool.open()
    (bad,) = await store_message(spool.store, 1)
    (good,) = await store_message(spool.store, 2)
    (cut,) = await store_message(spool.store, 3)
    await spool.store.close()
    with shelve.open(str(tmp_path / "queue.shelf")) as shelf:
        shelf[f"delivery-zone default {bad.message_id} {bad.recipient}"] = b"{not json"
        del shelf[f"message {cut.message_id} 000001"]
    async with spool:
        assert await spool.store.claim(queue_of("default"), 10, now=NOW) == [good]
        assert caplog.text.count("stepped over") == 2


async def test_unwritable_shelf_is_logged_once_and_the_queue_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with shelved(tmp_path) as spool:
        shelf: Shelf = spool.store._shelf  # type: ignore[attr-defined]
        assert shelf._shelf is not None
        await asyncio.wrap_future(shelf._executor.submit(shelf._shelf.close))
        shelf._shelf = Broken()  # type: ignore[assignment]
        (delivery,) = await store_message(spool.store, 1)
        await spool.store.settle([Postpone(replace(delivery, held=True))])
        assert [d.held async for d in spool.store.scan()] == [True]
    assert caplog.text.count("cannot be written") == 1


class Broken(dict[str, bytes]):
    """A database on a full disk."""

    def __setitem__(self, key: str, value: bytes) -> None:
        raise OSError("No space left on device")

    def close(self) -> None:
        raise OSError("No space left on device")
