"""The disk queue: what its files say, what a start makes of what it finds, and failed writes."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from tests.store.builders import NOW, attempt, body_of, envelope_for, message_id, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay import durable
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store import contract
from zonerelay.store.contract import Finish, Postpone, StoreOpenError
from zonerelay.store.objects import disk
from zonerelay.store.objects import engine as objects
from zonerelay.store.objects.disk import DirectoryPlace

LARGE = bytes(range(256)) * 4000
NAMES = ("env_directory", "meta_directory", "scratch_directory")


def queue_in(path: Path, **places: Path) -> Spool:
    return Spool(path / "q", backend=Backend.DISK, clock=SystemClock(), places=places)


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Spool]:
    """A disk queue in one directory."""
    async with queue_in(tmp_path) as opened:
        yield opened


def bodies(queue: Spool) -> list[Path]:
    """The files of messages, in order."""
    place = queue.settings.env_directory or queue.settings.path / "messages"
    return sorted(path for path in place.iterdir() if path.name != "zonerelay.lock")


class TestFiles:
    async def test_a_body_is_a_file_that_people_can_read(self, queue: Spool) -> None:
        await store_message(queue.store, 1, body=b"Subject: x\r\n\r\nhi\r\n")
        await store_message(queue.store, 2, body=LARGE)
        small, *parts = bodies(queue)
        assert small.name.startswith("message-0000000000000001-000001.")
        assert small.read_bytes() == b"Subject: x\r\n\r\nhi\r\n"
        assert b"".join(path.read_bytes() for path in parts) == LARGE
        assert len(parts) == 2
        directories = [queue.settings.path, *filter(Path.is_dir, queue.settings.path.rglob("*"))]
        assert all(path.stat().st_mode & 0o077 == 0 for path in (*directories, small, *parts))

    async def test_sessions_share_syncs(self, queue: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
        synced: list[int] = []
        real = os.fsync

        def count(descriptor: int) -> None:
            synced.append(descriptor)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", count)
        await asyncio.gather(*(store_message(queue.store, number) for number in range(100)))
        assert len(synced) < 120

    async def test_an_upload_that_is_given_up_leaves_nothing(self, queue: Spool) -> None:
        envelope = envelope_for(message_id(1), "a@example.net")
        async with queue.store.begin(envelope) as writer:
            await writer.write(LARGE)
            await writer.write(LARGE)
            await until(lambda: bool(bodies(queue)))
        await until(lambda: not bodies(queue))
        async with queue.store.begin(envelope) as writer:
            await writer.write(LARGE)
            await writer.write(LARGE)
            await queue.store.close()
        store = await queue.open()
        await until(lambda: not bodies(queue))
        assert await store.left_over() == ""

    async def test_an_upload_that_is_given_up_while_a_group_is_stored_leaves_nothing(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go, store = asyncio.Event(), DirectoryPlace.store

        async def held_up(place: DirectoryPlace, values: Sequence[objects.Object]) -> None:
            await go.wait()
            await store(place, values)

        monkeypatch.setattr(DirectoryPlace, "store", held_up)
        async with queue.store.begin(envelope_for(message_id(1))) as upload:
            await upload.write(LARGE)
        await asyncio.sleep(0.1)  # longer than a removal waits for other writes
        go.set()
        await until(lambda: bool(bodies(queue)))
        (delivery,) = await store_message(queue.store, 2)
        await queue.store.settle([Finish(delivery)])
        await until(lambda: not bodies(queue))
        assert await queue.store.left_over() == ""


class TestStart:
    async def test_a_damaged_body_and_a_lost_one_stay_and_are_told(self, queue: Spool) -> None:
        (delivery,) = await store_message(queue.store, 1, body=b"x" * 200_000)
        await store_message(queue.store, 2)
        await store_message(queue.store, 3)
        store = await queue.reopen()
        one, two, _ = bodies(queue)
        raw = bytearray(one.read_bytes())
        raw[100_000] ^= 1
        one.write_bytes(raw)
        two.unlink()
        assert len(await store.claim(queue_of("default"), 10, now=NOW)) == 3
        with pytest.raises(contract.StoreCorruptError, match=r"message-0+1-000001\.\S+ is damaged"):
            await body_of(store, message_id(1))
        with pytest.raises(contract.StoreCorruptError, match=r"message-0+2-000001\.\S+ is missing"):
            await body_of(store, message_id(2))
        await body_of(store, message_id(3))
        assert len(queue.damage) == 2
        assert "2 records" in store.problems()[0]
        await store.settle([Postpone(delivery.deferred(NOW + 5, attempt()))])
        assert one.exists()

    async def test_a_damaged_log_stops_a_start_that_needs_it(self, queue: Spool) -> None:
        await store_message(queue.store, 1)
        await store_message(queue.store, 2)
        await queue.store.close()
        entry = sorted((queue.settings.path / "nodes/0/log").iterdir())[2]
        raw = bytearray(entry.read_bytes())
        raw[20] ^= 1
        entry.write_bytes(raw)
        store = await queue.reopen()  # the index of this machine knows what the entry said
        assert len(await store.claim(queue_of("default"), 10, now=NOW)) == 2
        await store.close()
        shutil.rmtree(queue.settings.path / "scratch")
        with pytest.raises(StoreOpenError, match=r"nodes/0/log/0+3 is damaged.*files were not changed"):
            await queue.open()
        assert entry.read_bytes() == raw


class TestDirectories:
    @pytest.mark.parametrize("shared", NAMES)
    async def test_two_relays_cannot_share_a_directory(self, tmp_path: Path, shared: str) -> None:
        async with queue_in(tmp_path, **{shared: tmp_path / "shared"}):
            other = queue_in(tmp_path / "other", **{shared: tmp_path / "shared"})
            with pytest.raises(StoreOpenError, match=f"another zonerelay has .*shared.*{shared}"):
                await other.open()

    async def test_scratch_needs_a_directory_of_its_own(self, tmp_path: Path) -> None:
        async with queue_in(tmp_path):
            pass
        for taken in (tmp_path / "q", tmp_path / "q" / "messages"):
            with pytest.raises(StoreOpenError, match="must be a separate directory"):
                await queue_in(tmp_path, scratch_directory=taken).open()

    @pytest.mark.parametrize("away", ["env_directory", "meta_directory"])
    async def test_directory_that_is_not_mounted_costs_time_only(self, tmp_path: Path, away: str) -> None:
        apart = {name: tmp_path / name for name in ("env_directory", "meta_directory")}
        queue = queue_in(tmp_path, **apart)
        async with queue:
            (delivery,) = await store_message(queue.store, 1)
        apart[away].rename(tmp_path / "unmounted")
        with pytest.raises(StoreOpenError, match="check whether its file system is mounted"):
            await queue.open()
        (apart[away] / "zonerelay.lock").unlink()
        apart[away].rmdir()
        (tmp_path / "unmounted").rename(apart[away])
        store = await queue.open()
        assert await store.claim(queue_of("default"), 10, now=NOW) == [delivery]
        assert await body_of(store, message_id(1))
        await store.close()

    async def test_a_queue_whose_log_is_gone_is_refused_and_its_bodies_stay(self, queue: Spool) -> None:
        await store_message(queue.store, 1)
        await queue.store.close()
        shutil.rmtree(queue.settings.path / "nodes")
        for _ in range(2):
            with pytest.raises(StoreOpenError, match=r"contains no log, but 1 bodies"):
                await queue.open()
        assert len(bodies(queue)) == 1

    async def test_directory_of_another_queue_is_refused(self, tmp_path: Path) -> None:
        one, two = queue_in(tmp_path), queue_in(tmp_path, meta_directory=tmp_path / "two")
        async with one, queue_in(tmp_path / "x", meta_directory=tmp_path / "two"):
            pass
        with pytest.raises(StoreOpenError, match="belong to different queues"):
            await two.open()

    async def test_unknown_format_is_refused(self, queue: Spool) -> None:
        await queue.store.close()
        (queue.settings.path / "zonerelay.lock").write_bytes(b"zonerelay queue 3 x\n")
        with pytest.raises(StoreOpenError, match="run the release that wrote it"):
            await queue.open()


class TestFailedWrites:
    async def test_an_upload_without_room_is_alone(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.writev

        def full(descriptor: int, pieces: list[bytes]) -> int:
            if sum(map(len, pieces)) > 100_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, pieces)

        monkeypatch.setattr(os, "writev", full)
        with pytest.raises(contract.StoreFullError):
            await store_message(queue.store, 1, body=LARGE)
        await until(lambda: "insufficient disk space" in queue.health)
        await until(lambda: queue.store.unhealthy() is None)
        await store_message(queue.store, 2)
        monkeypatch.undo()
        await store_message(queue.store, 3)
        await until(lambda: len(bodies(queue)) == 2)

    async def test_change_that_cannot_be_encoded_changes_nothing(self, queue: Spool) -> None:
        (delivery,) = await store_message(queue.store, 1)
        bad = structs.replace(delivery, orcpt="\udcff")
        with pytest.raises(contract.StoreError):
            await queue.store.settle([Postpone(bad)])
        assert await queue.store.deliveries_of(message_id(1)) == [delivery]
        await queue.store.settle([Finish(delivery)])


@pytest.mark.parametrize("fails", [False, True])
async def test_the_name_of_a_staged_body_is_durable_before_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """A snapshot that is written at the same time does not take over the sync, and may be cancelled."""
    is_under_way, may_go_on = threading.Event(), threading.Event()
    write, sync, synced = disk._write, durable.sync_directory, list[Path]()

    def slow(path: Path, pieces: Sequence[bytes]) -> None:
        if "000001" in path.name:
            is_under_way.set()
            may_go_on.wait(20)
        write(path, pieces)

    def noted(directory: Path) -> None:
        synced.append(directory)
        sync(directory)

    place = DirectoryPlace(tmp_path, values=tmp_path / "bodies")
    try:
        await place.store([("nodes/0/values/body", [b"body"])])
        monkeypatch.setattr(disk, "_write", slow)
        monkeypatch.setattr(durable, "sync_directory", noted)
        snapshot = asyncio.create_task(place.create("nodes/0/snapshot/1/000001", b"rows"))
        await asyncio.to_thread(is_under_way.wait, 20)
        if fails:
            snapshot.cancel()
        await place.create("nodes/0/log/1", b"entry")
        assert tmp_path / "bodies" in synced
        may_go_on.set()
        await asyncio.gather(snapshot, return_exceptions=True)
        synced.clear()
        await place.create("nodes/0/log/2", b"entry")
        assert tmp_path / "bodies" not in synced
    finally:
        may_go_on.set()
        await place.close()
