"""The disk queue: what its files say, what a start makes of what it finds, and failed writes."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.store.builders import (
    NOW,
    attempt,
    body_of,
    delivery_for,
    envelope_for,
    message_id,
    own_message,
    store_message,
)
from tests.store.spools import Spool, until
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.envelope import Notify
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import (
    Change,
    Finish,
    Postpone,
    QueueCounts,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreOpenError,
    Submit,
)
from zonerelay.store.disk import batch as disk_batch
from zonerelay.store.disk import files as disk_files
from zonerelay.store.disk.directories import Directory

LARGE = bytes(range(256)) * 4000


def queue_in(path: Path, **places: Path) -> Spool:
    return Spool(path / "q", backend=Backend.DISK, clock=SystemClock(), places=places)


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Spool]:
    """A disk queue in one directory."""
    async with queue_in(tmp_path) as opened:
        yield opened


def files(queue: Spool, suffix: str = "") -> set[str]:
    """Names below the queue's directory, what belongs to the directory itself left out."""
    names = {path.name for path in queue.settings.path.rglob("*") if path.is_file()}
    return {name for name in names if name.endswith(suffix) and not name.endswith(".lock")}


def env(queue: Spool, number: int) -> Path:
    return queue.settings.path / f"{message_id(number)}.env"


def meta(queue: Spool, number: int) -> Path:
    return queue.settings.path / f"{message_id(number)}.meta"


class TestFiles:
    async def test_message_and_state_are_two_files_that_people_can_read(self, queue: Spool) -> None:
        await store_message(queue.store, 1, "ä b@example.net", zone="z 1", body=b"Subject: x\r\n\r\nhi\r\n")
        assert files(queue) == {"0000000000000001.env", "0000000000000001.meta"}
        head, *lines, tail, foot = env(queue, 1).read_bytes().split(b"\n")[:-1]
        assert head == b"zonerelay-env 1"
        assert lines[:3] == [b"Subject: x\r", b"\r", b"hi\r"]
        said = json.loads(tail)
        assert said["message"]["size"] == 18
        assert foot.endswith(b" zonerelay-end")
        (state,) = said["deliveries"]
        assert (state["zone"], state["recipient"], state["created"]) == ("z 1", "ä b@example.net", NOW)
        assert json.loads(meta(queue, 1).read_bytes()) == {"deliveries": [state]}
        assert all(path.stat().st_mode & 0o077 == 0 for path in queue.settings.path.rglob("*"))

    async def test_state_is_rewritten_and_both_leave_with_the_last_delivery(self, queue: Spool) -> None:
        first, second = await store_message(queue.store, 1, "a@example.net", "b@example.net")
        before = meta(queue, 1).stat().st_ino
        await queue.store.settle([Finish(first), Postpone(second.deferred(NOW + 9, attempt()))])
        assert meta(queue, 1).stat().st_ino != before
        (state,) = json.loads(meta(queue, 1).read_bytes())["deliveries"]
        assert (state["recipient"], state["next_attempt"], state["attempts"]) == ("b@example.net", NOW + 9, 1)
        await queue.store.settle([Finish(second)])
        assert files(queue) == {"0000000000000001.last"}

    async def test_three_directories(self, tmp_path: Path) -> None:
        apart = {name: tmp_path / name for name in ("env_directory", "meta_directory", "scratch_directory")}
        async with queue_in(tmp_path, **apart) as queue:
            (delivery,) = await store_message(queue.store, 1, body=LARGE)
            assert (apart["env_directory"] / "0000000000000001.env").exists()
            assert (apart["meta_directory"] / "0000000000000001.meta").exists()
            assert [path.name for path in apart["scratch_directory"].iterdir()] == ["zonerelay.lock"]
            assert not queue.settings.path.exists()
            store = await queue.reopen()
            assert await store.claim(queue_of("default"), 10, now=NOW) == [delivery]
            assert await body_of(store, message_id(1)) == LARGE
            await store.settle([Finish(delivery)])
            assert [path.name for path in apart["env_directory"].iterdir()] == ["zonerelay.lock"]

    async def test_sessions_share_the_syncs_of_the_directory(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[int] = []
        real = os.fsync

        def count(descriptor: int) -> None:
            synced.append(descriptor)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", count)
        await asyncio.gather(*(store_message(queue.store, number) for number in range(100)))
        assert len(synced) < 20

    async def test_large_upload_is_in_scratch_until_it_is_committed(self, queue: Spool) -> None:
        envelope = envelope_for(message_id(1), "a@example.net")
        async with queue.store.begin(envelope) as writer:
            await writer.write(LARGE)
            await writer.write(LARGE)
            assert not env(queue, 1).exists()
        await until(lambda: not files(queue))
        async with queue.store.begin(envelope) as writer:
            await writer.write(LARGE)
            await queue.store.close()
            assert not files(queue)


class TestStart:
    async def test_restart_resumes_states_due_times_counts_and_ids(self, queue: Spool) -> None:
        await store_message(queue.store, 1)
        await store_message(queue.store, 2, next_attempt=NOW + 50)
        await store_message(queue.store, 3, held=True)
        (first,) = await queue.store.claim(queue_of("default"), 10, now=NOW)
        store = await queue.reopen()
        assert store.counts() == {queue_of("default"): QueueCounts(ready=1, deferred=1, held=1)}
        assert await store.next_due(queue_of("default")) == NOW + 50
        assert await store.claim(queue_of("default"), 10, now=NOW) == [first]
        assert store.last_message_id() == message_id(3)

    async def test_last_message_id_outlives_the_message(self, queue: Spool) -> None:
        for number in (8, 9, 5):
            (delivery,) = await store_message(queue.store, number)
            await queue.store.update([delivery.key], lambda _: None)
            store = await queue.reopen()
            assert store.last_message_id() == message_id(max(number, 9 if number == 5 else 0))
        assert files(queue) == {"0000000000000009.last"}

    async def test_message_without_a_state_is_recovered_with_every_wish(
        self, queue: Spool, caplog: pytest.LogCaptureFixture
    ) -> None:
        envelope = envelope_for(message_id(1), "a@example.net", "b@example.net")
        wished = [
            replace(
                delivery_for(envelope, "a@example.net", zone="one"), notify=Notify.DELAY, orcpt="rfc822;x"
            ),
            delivery_for(envelope, "b@example.net", zone="two", next_attempt=NOW + 5),
        ]
        async with queue.store.begin(envelope) as writer:
            await writer.write(b"x" * 100_000)
            await writer.commit(wished)
        await queue.store.close()
        meta(queue, 1).unlink()
        store = await queue.open()
        assert "had no state" in caplog.text
        assert await store.claim(queue_of("one"), 10, now=NOW) == wished[:1]
        assert await store.claim(queue_of("two"), 10, now=NOW + 5) == wished[1:]
        assert meta(queue, 1).exists()
        assert await body_of(store, message_id(1)) == b"x" * 100_000

    async def test_state_without_a_message_is_removed(self, queue: Spool) -> None:
        await store_message(queue.store, 1)
        await queue.store.close()
        env(queue, 1).unlink()
        store = await queue.open()
        assert await store.queues() == set()
        assert not meta(queue, 1).exists()
        assert store.last_message_id() == message_id(1)

    async def test_whatever_cannot_be_used_is_told_counted_and_left(
        self, queue: Spool, caplog: pytest.LogCaptureFixture
    ) -> None:
        (good,) = await store_message(queue.store, 1)
        for number in range(2, 7):
            await store_message(queue.store, number)
        await queue.store.close()
        env(queue, 2).write_bytes(b"")
        meta(queue, 3).write_bytes(b"")
        meta(queue, 4).write_bytes(b'{"deliveries":[{"zone":1}]}')
        meta(queue, 5).unlink()
        env(queue, 5).write_bytes(env(queue, 5).read_bytes()[:-5])
        env(queue, 6).unlink()
        env(queue, 6).mkdir()
        strangers = ["note.txt", "0123.env", "1ed7859e379975881ed7859e37997588.env", "x.meta", "9.intent"]
        for name in strangers:
            (queue.settings.path / name).write_bytes(b"\xff")
        # What the intent is about may be nowhere else.
        (queue.settings.path / "scratch" / env(queue, 7).name).write_bytes(b"\xff")
        before = files(queue)
        store = await queue.open()
        assert await store.claim(queue_of("default"), 10, now=NOW) == [good]
        assert files(queue) >= before - {meta(queue, 6).name}
        for text in ("2.env", "3.meta", "4.meta", "5.env", *strangers):
            assert text in caplog.text
        assert "has 5 unreadable and 5 foreign files" in caplog.text
        for number in range(10, 22):
            (delivery,) = await store_message(store, number)
            message, bounce = own_message(message_id(number + 20), b"bounce", "from@example.org")
            await store.settle([Finish(delivery), Submit(message, b"bounce", (bounce,))])
        assert files(queue) >= before - {meta(queue, 6).name}

    async def test_message_that_turns_out_to_be_damaged_raises_and_stays(self, queue: Spool) -> None:
        (delivery,) = await store_message(queue.store, 1, body=b"x" * 200_000)
        await store_message(queue.store, 2)
        await queue.store.close()
        raw = bytearray(env(queue, 1).read_bytes())
        raw[100_000] ^= 1
        env(queue, 1).write_bytes(raw)
        raw = bytearray(env(queue, 2).read_bytes())
        raw[-60] ^= 1
        env(queue, 2).write_bytes(raw)
        store = await queue.open()
        assert len(await store.claim(queue_of("default"), 10, now=NOW)) == 2
        with pytest.raises(StoreCorruptError, match="chunk 2 of 4 is damaged"):
            await body_of(store, message_id(1))
        with pytest.raises(StoreCorruptError, match="damaged behind the body"):
            await store.read_message(message_id(2))
        await store.settle([Postpone(delivery.deferred(NOW + 5, attempt()))])
        assert env(queue, 1).exists()

    async def test_files_that_are_taken_away_while_it_runs_stop_nobody_else(self, queue: Spool) -> None:
        for number in range(1, 4):
            await store_message(queue.store, number)
        store = await queue.reopen()
        env(queue, 1).unlink()
        meta(queue, 2).write_bytes(b"?")
        claimed = await store.claim(queue_of("default"), 10, now=NOW)
        assert [delivery.message_id for delivery in claimed] == [message_id(3)]
        assert await store.claim(queue_of("default"), 10, now=NOW) == []
        assert not store.has_ready(queue_of("default"))


class TestDirectories:
    @pytest.mark.parametrize("shared", ["env_directory", "meta_directory", "scratch_directory"])
    async def test_two_relays_cannot_share_a_directory(self, tmp_path: Path, shared: str) -> None:
        async with queue_in(tmp_path, **{shared: tmp_path / "shared"}):
            other = queue_in(tmp_path / "other", **{shared: tmp_path / "shared"})
            with pytest.raises(StoreOpenError, match=f"another zonerelay has .*shared.*{shared}"):
                await other.open()

    async def test_scratch_on_another_file_system_is_refused(self, tmp_path: Path) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            assert Path(name).stat().st_dev != tmp_path.stat().st_dev
            for scratch, path in ((Path(name), tmp_path), (tmp_path / "s", Path(name))):
                with pytest.raises(StoreOpenError, match="have to be on the same file system"):
                    await queue_in(path, scratch_directory=scratch).open()
            assert [path.name for path in Path(name).iterdir() if path.is_file()] == ["zonerelay.lock"]

    async def test_scratch_needs_a_directory_of_its_own(self, tmp_path: Path) -> None:
        async with queue_in(tmp_path):
            pass
        with pytest.raises(StoreOpenError, match="a directory of its own"):
            await queue_in(tmp_path, scratch_directory=tmp_path / "q").open()

    @pytest.mark.parametrize("away", ["env_directory", "meta_directory"])
    async def test_directory_that_is_not_mounted_is_refused_and_nothing_is_given_up(
        self, tmp_path: Path, away: str
    ) -> None:
        apart = {name: tmp_path / name for name in ("env_directory", "meta_directory")}
        queue = queue_in(tmp_path, **apart)
        async with queue:
            (delivery,) = await store_message(queue.store, 1)
        apart[away].rename(tmp_path / "unmounted")
        with pytest.raises(StoreOpenError, match="is its file system mounted"):
            await queue.open()
        assert len(list(tmp_path.glob("*/*.env"))) == len(list(tmp_path.glob("*/*.meta"))) == 1
        (apart[away] / "zonerelay.lock").unlink()
        apart[away].rmdir()
        (tmp_path / "unmounted").rename(apart[away])
        assert await (await queue.open()).claim(queue_of("default"), 10, now=NOW) == [delivery]
        await queue.store.close()

    async def test_directory_of_another_queue_is_refused(self, tmp_path: Path) -> None:
        one, two = queue_in(tmp_path), queue_in(tmp_path, meta_directory=tmp_path / "two")
        async with one, queue_in(tmp_path / "x", meta_directory=tmp_path / "two"):
            pass
        with pytest.raises(StoreOpenError, match="belong to different queues"):
            await two.open()

    async def test_unknown_format_is_refused(self, queue: Spool) -> None:
        await queue.store.close()
        (queue.settings.path / "zonerelay.lock").write_bytes(b"zonerelay queue 2 x\n")
        with pytest.raises(StoreOpenError, match="run the release that wrote it"):
            await queue.open()

    async def test_file_in_place_of_a_directory_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "q").write_text("")
        with pytest.raises(StoreOpenError, match="is not a directory"):
            await queue_in(tmp_path).open()
        with pytest.raises(StoreOpenError, match="cannot create the directory"):
            await queue_in(tmp_path / "q").open()


class TestFailedWrites:
    @pytest.mark.parametrize("step", ["fdatasync", "rename", "fsync", "unlink"])
    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
    async def test_failed_step_loses_nothing_and_the_queue_recovers(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch, step: str, code: int
    ) -> None:
        store = queue.store
        await store_message(store, 1, "a@example.net", "b@example.net", "c@example.net")
        active, leaving, waiting = await store.claim(queue_of("default"), 10, now=NOW)
        store.release([waiting.key])
        (gone,) = await store_message(store, 2)
        message, bounce = own_message(message_id(5), b"bounce", "from@example.org")
        broken = True

        def fail(*_args: object, **_more: object) -> None:
            if broken:
                raise OSError(code, os.strerror(code))
            real(*_args, **_more)

        real = getattr(os, step)
        monkeypatch.setattr(os, step, fail)
        results = await asyncio.gather(
            store_message(store, 3, body=LARGE),
            store_message(store, 4),
            store.settle([Finish(leaving), Submit(message, b"bounce", (bounce,))]),
            store.settle([Finish(gone)]),
            return_exceptions=True,
        )
        refused = [isinstance(result, StoreError) for result in results]
        assert all(refused), results
        assert store.unhealthy() is not None
        repaired = asyncio.create_task(store.usable())
        for verb in (
            store.settle([Finish(active)]),
            store.claim(queue_of("default"), 10, now=NOW),
            store.probe(),
            store.update([waiting.key], lambda _: None),
            store_message(store, 6),
        ):
            with pytest.raises(StoreFullError if code == errno.ENOSPC else StoreError):
                await verb
        broken = False
        await until(lambda: store.unhealthy() is None)
        assert await repaired
        await store.probe()
        found = {delivery.key for delivery in [d async for d in store.scan()]}
        assert {active.key, waiting.key} <= found
        numbers = {int(key.message_id, 16) for key in found}
        assert not numbers & {3, 4, 6}, "a message that was refused is there all the same"
        assert (leaving.key in found) != (5 in numbers), "the bounce and what it reports came apart"
        assert {d.message_id for d in await store.claim(queue_of("default"), 10, now=NOW)} >= {
            waiting.message_id
        }
        await store.settle([Finish(active)])
        if leaving.key in found:
            await store.settle([Finish(leaving), Submit(message, b"bounce", (bounce,))])
        await store.settle([Finish(gone)])
        before = store.counts()
        assert list((queue.settings.path / "scratch").glob("*.meta")) == []
        store = await queue.reopen()
        assert {int(d.message_id, 16) async for d in store.scan()} == {1, 5}
        assert store.counts() == before
        assert await body_of(store, message_id(5)) == b"bounce"
        assert not files(queue, ".intent")
        assert list((queue.settings.path / "scratch").glob("0*")) == []

    async def test_change_that_fails_behind_another_of_the_same_message_leaves_the_counts_right(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, go_on, failed = queue.store, threading.Event(), threading.Event()
        (delivery,) = await store_message(store, 1)
        publish, remove = disk_batch.publish, Directory.remove

        def slow(*args: Any, **more: Any) -> None:  # Any: as it is
            assert go_on.wait(10.0)
            publish(*args, **more)

        def fail(directory: Directory, name: str) -> bool:
            remove(directory, name)
            if not failed.is_set():
                failed.set()
                raise StoreError("broken")
            return True

        monkeypatch.setattr(disk_batch, "publish", slow)
        monkeypatch.setattr(Directory, "remove", fail)
        held = asyncio.create_task(store.update([delivery.key], lambda d: replace(d, held=True)))
        await until(lambda: bool(list(queue.settings.path.glob("scratch/*.meta"))))
        dropped = asyncio.create_task(store.update([delivery.key], lambda _: None))
        await asyncio.sleep(0)
        go_on.set()
        assert await held == 1
        with pytest.raises(StoreError):
            await dropped
        await until(lambda: store.unhealthy() is None)
        assert [d async for d in store.scan()] == []
        assert store.counts()[queue_of("default")].total == 0
        assert await store.queues() == set()

    async def test_message_in_the_place_of_one_that_leaves_is_stored(self, queue: Spool) -> None:
        (delivery,) = await store_message(queue.store, 1, body=b"first")
        await asyncio.gather(
            queue.store.update([delivery.key], lambda _: None),
            store_message(queue.store, 1, body=b"second"),
        )
        for open_again in (False, True):
            store = await queue.reopen() if open_again else queue.store
            assert store.counts()[queue_of("default")].total == 1
            assert [d async for d in store.scan()] == [delivery]
            assert await body_of(store, message_id(1)) == b"second"

    async def test_report_that_a_repair_has_brought_is_not_made_again(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = queue.store
        (delivery,) = await store_message(store, 1)
        message, bounce = own_message(message_id(5), b"bounce", "from@example.org")
        outcome: list[Change] = [Finish(delivery), Submit(message, b"bounce", (bounce,))]
        broken, real = True, Directory.remove

        def fail(directory: Directory, name: str) -> bool:
            if broken:
                raise StoreError("broken")
            return real(directory, name)

        monkeypatch.setattr(Directory, "remove", fail)
        with pytest.raises(StoreError):
            await store.settle(outcome)
        broken = False
        await until(lambda: store.unhealthy() is None)
        (found,) = await store.claim(queue_of("default"), 10, now=NOW)
        assert found == bounce
        await store.settle([Finish(bounce)])
        await store.settle(outcome)
        assert [d async for d in store.scan()] == []
        assert store.counts()[queue_of("default")].total == 0

    async def test_failed_append_fails_only_its_own_message(
        self, queue: Spool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("zonerelay.store.disk.files.write_all", _full)
        with pytest.raises(StoreFullError):
            await store_message(queue.store, 1, body=LARGE)
        # The store looks again by itself, and may have found room before we ask.
        await until(lambda: "insufficient disk space" in queue.health)
        monkeypatch.undo()
        await until(lambda: queue.store.unhealthy() is None)
        await store_message(queue.store, 2)
        await until(lambda: not (queue.settings.path / "scratch" / env(queue, 1).name).exists())

    async def test_change_that_cannot_be_encoded_changes_nothing(self, queue: Spool) -> None:
        (delivery,) = await store_message(queue.store, 1)
        bad = replace(delivery, orcpt="\udcff")
        with pytest.raises(StoreError):
            await queue.store.settle([Postpone(bad)])
        assert await queue.store.deliveries_of(message_id(1)) == [delivery]
        await queue.store.settle([Finish(delivery)])


def _full(_descriptor: int, _data: bytes) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


async def test_large_state_is_written_once_for_all_that_settle_together(
    queue: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [f"r{number:04}@example.net" for number in range(1000)]
    deliveries = await store_message(queue.store, 1, *addresses)
    written: list[object] = []
    real = disk_files.state_file

    def count(message_id: MessageId, number: int, records: Iterable[bytes]) -> disk_files.Staged:
        written.append(number)
        return real(message_id, number, records)

    monkeypatch.setattr(disk_files, "state_file", count)
    with caplog.at_level(logging.WARNING):
        await asyncio.gather(*(queue.store.settle([Finish(d)], lazy=True) for d in deliveries[:900]))
    assert len(written) < 20
    assert len(json.loads(meta(queue, 1).read_bytes())["deliveries"]) == 100
