"""Logs of objects: snapshots, indexes, late writes, gaps, orphans, and services that do not keep
conditions.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3_server import BUCKET, KEY, SECRET, shared_moto
from zonerelay.config.settings import S3Settings
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import FencedError, Position, Write, WriteBatch, pages
from zonerelay.store.objects import engine as objects
from zonerelay.store.objects import index
from zonerelay.store.objects.disk import DirectoryPlace
from zonerelay.store.objects.engine import Object, ObjectEngine, ObjectKeys
from zonerelay.store.objects.s3 import Bucket


class SlowPlace(DirectoryPlace):
    """`hold` says which objects are made only when `land` is called; their makers get an error."""

    hold: Callable[[str], bool] = staticmethod(lambda name: False)

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.held: list[tuple[str, bytes]] = []

    async def create(
        self, name: str, data: bytes, *, values: Sequence[Object] = (), makes_room: bool = False
    ) -> bool:
        if self.hold(name):
            await self.store(values)
            self.held.append((name, data))
            raise StoreError("no answer")
        return await self._make(name, data, values=values, makes_room=makes_room)

    async def _make(self, name: str, data: bytes, **other: Any) -> bool:  # Any: as in `create`
        if not self.is_conditional:
            await self.store(other.get("values", ()))
            await self.replace(name, data)
            return True
        return await super().create(name, data, **other)

    async def land(self) -> list[bool]:
        """Whether each of them was made."""
        return [await self._make(*each) for each in self.held]


class Queue:
    """Opens the partition of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.place = SlowPlace(directory / "queue")
        self._opened: list[Partition] = []

    async def open(
        self, index: str = "index", *, place: SlowPlace | None = None, lease: float = 30.0
    ) -> Partition:
        engine = ObjectEngine(place or self.place, self.directory / index, clock=SystemClock(), lease=lease)
        partition = await open_partition(engine, 0, token="here", clock=SystemClock())
        self._opened.append(partition)
        return partition

    def files(self, kind: str) -> list[str]:
        found = (self.directory / "queue/nodes/0" / kind).rglob("*")
        return sorted(path.name for path in found if path.is_file())

    async def close(self) -> None:
        for partition in self._opened:
            await partition.close()
        await self.place.close()


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[Queue]:
    made = Queue(tmp_path)
    yield made
    await made.close()


async def all_rows(partition: Partition) -> dict[bytes, bytes]:
    return {key: value async for rows in pages(partition, b"\x01", b"\xff") for key, value in rows}


def keys_of(partition: Partition) -> ObjectKeys:
    assert isinstance(partition.keeper, ObjectKeys)
    return partition.keeper


async def settled(partition: Partition) -> None:
    """Removals and snapshots are done."""
    await keys_of(partition)._tasks.wait()


async def test_a_log_is_replaced_by_snapshots(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LEAST_LOG", 20_000)
    choose = random.Random(3)
    model: dict[bytes, bytes] = {}
    partition = await queue.open()
    for round_ in range(8):
        for _ in range(30):
            key, value = b"%03d" % choose.randrange(60), choose.randbytes(choose.choice([50, 700, 20_000]))
            await partition.write(Write({key: value}))
            model[key] = value
        gone = choose.sample(sorted(model), 5)
        await partition.write(Write(dict.fromkeys(gone)))
        model = {key: value for key, value in model.items() if key not in gone}
        await settled(partition)
        await partition.close()
        partition = await queue.open(f"index {round_ // 2}")  # a new one, and the same once more
        assert await all_rows(partition) == model
    await settled(partition)
    large = [value for value in model.values() if len(value) > objects.LARGE_VALUE]
    assert len(queue.files("values")) == len(large)
    assert len(queue.files("log")) < 150  # of 256 entries
    assert queue.files("snapshot").count("end") <= 2


async def test_a_writer_that_stood_still_meets_a_mark(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all entries around it have gone into a snapshot: there is no free slot below."""
    monkeypatch.setattr(objects, "LEAST_LOG", 2000)
    old = await queue.open("old")
    await old.write(Write({b"a": b"1"}))
    new = await queue.open("new")
    for number in range(60):
        await new.write(Write({b"b": b"%d" % number * 100}))
    await settled(new)
    log = queue.files("log")
    assert int(log[0]) == 1
    assert int(log[1]) == 3
    assert int(log[2]) > 20
    with pytest.raises(FencedError):
        await old.write(Write({b"a": b"2"}))
    assert (await all_rows(new))[b"a"] == b"1"


async def test_an_index_of_another_log_is_made_anew(queue: Queue, tmp_path: Path) -> None:
    first = await queue.open()
    await first.write(Write({b"a": b"1"}))
    await first.close()
    other = Queue(tmp_path / "other")
    second = await other.open()
    await second.write(Write({b"b": b"2"}))
    await second.close()
    third = await queue.open("index", place=other.place)
    assert await all_rows(third) == {b"b": b"2"}
    await third.close()
    await other.close()


async def test_an_index_that_cannot_be_read_is_made_anew(queue: Queue) -> None:
    first = await queue.open()
    await first.write(Write({b"a": b"1", b"large": bytes(70_000)}))
    await first.close()
    for path in (queue.directory / "index/0").iterdir():
        path.write_bytes(b"nonsense")
    again = await queue.open()
    assert await all_rows(again) == {b"a": b"1", b"large": bytes(70_000)}


async def test_an_index_is_not_opened_after_its_keeper(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by seed 50 of the simulation: its lock was kept, and the node never took mail again."""
    await (await queue.open()).close()
    engine = ObjectEngine(queue.place, queue.directory / "index", clock=SystemClock(), lease=30.0)
    keeper, go_on, read = engine.keeper(0), asyncio.Event(), queue.place.read

    async def read_late(name: str) -> bytes | None:
        await go_on.wait()
        return await read(name)

    monkeypatch.setattr(queue.place, "read", read_late)
    looking = asyncio.create_task(keeper.look())
    await asyncio.sleep(0)
    await keeper.close()
    go_on.set()
    with pytest.raises(StoreError):
        await looking
    again = engine.keeper(0)
    assert await again.look()
    await again.close()


async def test_nothing_is_missing_while_the_index_of_a_writer_is_made_anew(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = await queue.open()
    await partition.write(Write({b"large": bytes(50_000), b"a": b"1"}))
    values = queue.files("values")
    begun, go_on = asyncio.Event(), asyncio.Event()
    read, apply = queue.place.read, index.ObjectIndex.apply

    async def read_when_told(name: str) -> bytes | None:
        if "/log/" in name:
            begun.set()
            await go_on.wait()
        return await read(name)

    def refuse(*_: object) -> None:
        monkeypatch.setattr(index.ObjectIndex, "apply", apply)
        raise StoreFullError("no space for the index")

    monkeypatch.setattr(queue.place, "read", read_when_told)
    monkeypatch.setattr(index.ObjectIndex, "apply", refuse)
    write = partition.write(Write({b"b": b"2"}))
    await begun.wait()
    found = asyncio.ensure_future(partition.get([b"a"]))
    swept = asyncio.ensure_future(
        keys_of(partition)._remove_unnamed([f"nodes/0/values/{each}" for each in values])
    )
    await asyncio.sleep(0)  # both have begun
    go_on.set()
    assert await found == [b"1"]
    await swept
    await write
    assert queue.files("values") == values
    assert await partition.get([b"large", b"b"]) == [bytes(50_000), b"2"]


async def test_a_gap_in_the_log_is_an_error(queue: Queue) -> None:
    partition = await queue.open()
    for number in range(5):
        await partition.write(Write({b"a": b"%d" % number}))
    await partition.close()
    (queue.directory / "queue/nodes/0/log" / f"{3:016d}").unlink()
    with pytest.raises(StoreError, match="is missing, but later entries exist"):
        await queue.open("new index")


async def test_values_of_batches_that_never_were_are_swept(queue: Queue) -> None:
    partition = await queue.open()
    await partition.write(Write({b"kept": bytes(50_000)}))
    queue.place.hold = lambda name: "/log/" in name
    waiting = asyncio.ensure_future(partition.write(Write({b"lost": bytes(60_000)})))
    while not queue.place.held:
        await asyncio.sleep(0.01)
    assert len(queue.files("values")) == 2
    await partition.abandon()
    waiting.cancel()
    queue.place = SlowPlace(queue.directory / "queue")
    again = await queue.open()
    await settled(again)
    assert len(queue.files("values")) == 1
    assert await all_rows(again) == {b"kept": bytes(50_000)}
    await again.write(Write({b"kept": None}))
    await settled(again)
    assert queue.files("values") == []


async def test_what_is_staged_survives_an_epoch_that_began_after_a_failure(queue: Queue) -> None:
    """A sweep took the body of a message that was answered 250 a moment later."""
    partition = await queue.open()
    await partition.stage(Write({b"staged": bytes(50_000)}))
    waiting = asyncio.ensure_future(partition.write(Write({b"other": b"1"})))
    # The batch fails, and so does the first beginning of an epoch after it.
    failures = 2

    def fails(name: str) -> bool:
        nonlocal failures
        failures -= "/log/" in name
        return "/log/" in name and failures >= 0

    queue.place.hold = fails
    await waiting
    await settled(partition)
    assert await partition.get([b"staged", b"other"]) == [bytes(50_000), b"1"]
    again = await queue.open("another")
    assert await again.get([b"staged"]) == [bytes(50_000)]


@pytest.mark.parametrize("is_conditional", [True, False])
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_lands_late_the_log_is_what_was_confirmed(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, seed: int, is_conditional: bool
) -> None:
    """Also beginnings of an epoch, over restarts, and with snapshots between."""
    monkeypatch.setattr(objects, "SETTLING", 0.0)
    monkeypatch.setattr(objects, "LEAST_LOG", 2000)
    choose = random.Random(seed)
    queue.place.is_conditional = is_conditional
    queue.place.hold = lambda name: "/log/" in name and choose.random() < 0.2
    confirmed: dict[bytes, bytes] = {}

    async def opened(index: str) -> Partition:
        while True:
            with contextlib.suppress(StoreError):
                return await queue.open(index)

    partition = await opened("index 0")
    for number in range(60):
        key, value = b"%d" % choose.randrange(20), b"%d" % number * 20
        try:
            await partition.write(Write({key: value}))
            confirmed[key] = value
        except StoreError:  # held more than once
            while True:
                with contextlib.suppress(StoreError):
                    await partition.write(Write({b"again": b""}))
                    break
                await asyncio.sleep(0.01)
            found = await partition.get([key, b"again"])
            confirmed |= {
                key: value for key, value in zip((key, b"again"), found, strict=True) if value is not None
            }
        if choose.random() < 0.3:
            await queue.place.land()
        if choose.random() < 0.1:
            await partition.abandon()
            partition = await opened(f"index {number * (number % 2)}")
    await queue.place.land()
    await partition.close()
    queue.place.hold = lambda name: False
    assert await all_rows(await queue.open("another index")) == confirmed


async def test_a_second_relay_where_there_are_no_conditions_is_noticed(queue: Queue) -> None:
    """It has started all the same, as after a standstill: only one of both goes on."""
    queue.place.is_conditional = False
    first = await queue.open("one")
    await first.write(Write({b"a": b"1"}))
    second = await queue.open("two")
    with pytest.raises(FencedError):
        await keys_of(first).renew()
    with pytest.raises(FencedError):
        await first.write(Write({b"a": b"2"}))
    await second.write(Write({b"a": b"3"}))


async def test_a_write_without_an_answer_is_not_taken_for_another_writer(queue: Queue) -> None:
    """The lease is renewed before the relay finds out what became of it. One behind it is another writer."""
    partition = await queue.open()
    keys, seen = keys_of(partition), partition.seen
    queue.place.hold = lambda name: "/log/" in name
    with pytest.raises(StoreError, match="no answer"):
        await keys.apply(WriteBatch(Position(seen.epoch, seen.last.number + 1), Write({b"a": b"1"})))
    queue.place.hold = lambda name: False
    assert await queue.place.land() == [True]
    await keys.renew()
    await queue.open("of another")
    with pytest.raises(FencedError):
        await keys.renew()


async def test_an_entry_without_an_answer_is_not_taken_for_another_writer(queue: Queue) -> None:
    partition = await queue.open()
    keys = keys_of(partition)
    queue.place.hold = lambda name: "/log/" in name
    with pytest.raises(StoreError, match="no answer"):
        await keys.enter(partition.seen.writer, mark="again")
    with pytest.raises(StoreError) as found:
        await keys.renew()
    assert not isinstance(found.value, FencedError)
    queue.place.hold = lambda name: False
    await queue.place.land()
    await keys.enter(partition.seen.writer, mark="again")
    await keys.renew()


async def test_a_log_that_is_shorter_than_the_last_beat_says_is_an_error(queue: Queue) -> None:
    """A listing that lags behind, or objects that somebody removed, do not pass for the end of the log."""
    partition = await queue.open()
    for number in range(20):
        await partition.write(Write({b"a": b"%d" % number}))
    await partition.close()
    for slot in range(5, 30):
        (queue.directory / "queue/nodes/0/log" / f"{slot:016d}").unlink(missing_ok=True)
    with pytest.raises(StoreError, match="is missing, but later entries exist"):
        await queue.open("new index")


async def test_many_values_cost_one_request_each_and_one_for_the_batch(tmp_path: Path) -> None:
    settings = S3Settings(
        bucket=BUCKET, prefix=f"{tmp_path.name}/", endpoint_url=shared_moto().url, access_key=KEY
    )
    place = Bucket(settings, lambda: SECRET)
    engine = ObjectEngine(place, tmp_path, clock=SystemClock(), lease=30.0)
    partition = await open_partition(engine, 0, token="x", clock=SystemClock())
    made: list[str] = []
    create = place.create

    async def counted(name: str, data: bytes, **more: Any) -> bool:  # Any: as it is
        made.append(name)
        return await create(name, data, **more)

    place.create = counted  # type: ignore[method-assign]
    sizes = [1000] * 18 + [30_000] * 2
    await asyncio.gather(*(partition.write(Write({b"%d" % n: bytes(size)})) for n, size in enumerate(sizes)))
    assert len(made) <= 2 + 2
    await partition.close()
    await engine.close()


async def test_a_reader_whose_next_entry_is_replaced_by_a_snapshot_finds_what_is_there(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing entry looked like the end of the log: the reader found nothing."""
    monkeypatch.setattr(objects, "LEAST_LOG", 300)
    monkeypatch.setattr(objects, "SHARE", 0)
    partition = await queue.open()
    await partition.write(Write({b"001": b"first"}))
    second = f"{2:016d}"

    class OvertakenPlace(DirectoryPlace):
        async def read(self, name: str) -> bytes | None:
            if name.endswith(f"log/{second}"):
                while second in queue.files("log"):
                    await partition.write(Write({b"002": b"x" * 400}))
            return await super().read(name)

    place = OvertakenPlace(queue.directory / "queue")
    keeper = ObjectEngine(place, queue.directory / "other", clock=SystemClock(), lease=30.0).keeper(0)
    try:
        async with asyncio.timeout(30):
            assert [key for key, _ in (await keeper.page(b"000", b"999")).rows] == [b"001", b"002"]
    finally:
        await keeper.close()


async def test_readers_beside_a_writer_that_snapshots_all_the_time_find_what_is_there(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects, entries and snapshots vanish between two of their requests."""
    monkeypatch.setattr(objects, "LEAST_LOG", 300)
    monkeypatch.setattr(objects, "SHARE", 0)
    monkeypatch.setattr(index, "PIECE_ROWS", 10)
    choose = random.Random(5)

    class FarPlace(DirectoryPlace):
        async def read(self, name: str) -> bytes | None:
            await asyncio.sleep(choose.random() * 0.01)
            return await super().read(name)

        async def names(self, prefix: str) -> AsyncIterator[list[str]]:
            async for names in super().names(prefix):
                await asyncio.sleep(choose.random() * 0.01)
                yield names

    partition = await queue.open()
    keys = [b"%03d" % number for number in range(40)]
    await partition.write(Write({key: key for key in keys}))
    engine = ObjectEngine(
        FarPlace(queue.directory / "queue"), queue.directory / "other", clock=SystemClock(), lease=30.0
    )
    rounds = 0

    async def read(keeper: ObjectKeys) -> None:
        nonlocal rounds
        while not writing.done():
            page = await keeper.page(b"000", b"999")
            assert [key for key, _ in page.rows] == keys
            for key, value in zip(keys, await keeper.get(keys), strict=True):
                assert value is not None
                assert value[:3] == key
            assert await keeper.last_key(b"000", b"999") == keys[-1]
            rounds += 1

    async def read_anew(number: int) -> None:
        while not writing.done():
            fresh = ObjectEngine(
                engine.place, queue.directory / f"fresh {number}", clock=SystemClock(), lease=30.0
            )
            keeper = fresh.keeper(0)
            try:
                assert [key for key, _ in (await keeper.page(b"000", b"999", values=False)).rows] == keys
            finally:
                await keeper.close()

    async def write() -> None:
        for _ in range(300):
            some = choose.sample(keys, 3)
            await partition.write(
                Write({key: key + choose.randbytes(choose.choice([9, 20_000])) for key in some})
            )

    writing = asyncio.create_task(write())
    keeper = engine.keeper(0)
    try:
        await asyncio.gather(writing, read(keeper), read(keeper), read(keeper), *map(read_anew, range(3)))
    finally:
        writing.cancel()
        await keeper.close()
    assert rounds
