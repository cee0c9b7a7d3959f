"""What a store promises about idempotency keys: every engine, and the workers of one machine."""

import asyncio
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.store.builders import body_of, delivery_for, envelope_for, message_id
from tests.store.conftest import VARIANTS
from tests.store.spools import Spool
from tests.store.test_spool_check import checked
from zonerelay.config.settings import Backend, Settings, SpoolSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import queue_of
from zonerelay.model.envelope import Message
from zonerelay.store import contract, records
from zonerelay.store.context import SiblingWorkers
from zonerelay.store.contract import Finish, IdempotencyKey, Store, StoredBeforeError
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.queue import key_index, reservations
from zonerelay.worker.queue import siblings_of

NOW = time.time()
"""Reservations of shared stores end by the clocks of servers, and the tests may run long after the import."""
WINDOW = 36_000.0
ONCE = IdempotencyKey("5" * 32, "a" * 32, NOW + WINDOW)
SHARED = {"redis", "postgres", "s3"}
"""They go by the server's clock."""


async def submit(
    store: Store, number: int, once: IdempotencyKey | None = ONCE, *, body: bytes = b"Subject: x\r\n\r\n"
) -> Message:
    envelope = envelope_for(message_id(number), "a@example.net")
    async with store.begin(envelope) as writer:
        await writer.write(body)
        return await writer.commit([delivery_for(envelope, "a@example.net")], once=once)


async def answer(
    store: Store, number: int, once: IdempotencyKey = ONCE, *, body: bytes = b"Subject: x\r\n\r\n"
) -> int:
    """The number of the message that the client hears of."""
    try:
        return int((await submit(store, number, once, body=body)).id, 16)
    except StoredBeforeError as before:
        return int(before.message_id, 16)


async def finish_all(store: Store) -> None:
    await store.settle([Finish(each) for each in await store.claim(queue_of("default"), 100, now=NOW)])


async def stored(store: Store) -> list[int]:
    return [int(delivery.message_id, 16) async for delivery in store.scan()]


@pytest.fixture
async def spool(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Spool]:
    backend, paths = VARIANTS[request.param]
    places = {name: tmp_path / name for name in paths}
    async with Spool(tmp_path / "spool", backend=backend, places=places, clock=ManualClock(NOW)) as opened:
        yield opened


def kept_by(names: Iterable[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spool", names, indirect=True)


keeping = kept_by(VARIANTS)


@keeping
@pytest.mark.parametrize("size", [20, 20 * contract.CHUNK_SIZE])
async def test_the_same_key_is_answered_with_the_first_message(spool: Spool, size: int) -> None:
    first, *again = [await answer(spool.store, number, body=b"x" * size) for number in (1, 2, 3)]
    assert again == [first, first]
    assert await stored(spool.store) == [first]
    assert len(await body_of(spool.store, message_id(1))) == size


@keeping
async def test_it_is_still_known_when_the_message_has_left(spool: Spool) -> None:
    first = await answer(spool.store, 1)
    await finish_all(spool.store)
    assert await answer(spool.store, 2) == first
    assert await stored(spool.store) == []


@keeping
async def test_the_first_answer_is_kept_with_the_key(spool: Spool) -> None:
    await submit(spool.store, 1, structs.replace(ONCE, answer="first"))
    with pytest.raises(StoredBeforeError) as before:
        await submit(spool.store, 2, structs.replace(ONCE, answer="second"))
    assert before.value.answer == "first"
    keys, _ = await spool.store.kept_keys()
    assert [kept.answer for _, kept in keys] == ["first"]


@keeping
async def test_a_key_can_be_asked_for_and_nothing_is_stored(spool: Spool) -> None:
    async def ask() -> None:
        async with spool.store.begin(envelope_for(message_id(9), "a@example.net")) as writer:
            await writer.write(b"Subject: x\r\n\r\n" + b"x\r\n" * contract.CHUNK_SIZE)
            await writer.commit((), once=structs.replace(ONCE, asks_only=True))

    with pytest.raises(contract.NotStoredBeforeError):
        await ask()
    assert await answer(spool.store, 1) == 1
    with pytest.raises(StoredBeforeError) as before:
        await ask()
    assert before.value.message_id == message_id(1)
    assert await stored(spool.store) == [1]


@keeping
async def test_other_content_is_refused_and_other_keys_are_other_messages(spool: Spool) -> None:
    await submit(spool.store, 1)
    with pytest.raises(contract.OtherContentError):
        await submit(spool.store, 2, structs.replace(ONCE, digest="b" * 32))
    await submit(spool.store, 3, structs.replace(ONCE, identity="6" * 32))
    await submit(spool.store, 4, None)
    assert await stored(spool.store) == [int(message_id(number), 16) for number in (1, 3, 4)]


@keeping
async def test_of_many_at_once_one_is_stored(spool: Spool) -> None:
    answers = await asyncio.gather(*(answer(spool.store, number) for number in range(1, 9)))
    assert len(set(answers)) == 1
    assert await stored(spool.store) == [answers[0]]


@keeping
async def test_a_client_that_leaves_during_the_commit_changes_nothing(spool: Spool) -> None:
    committing = asyncio.create_task(submit(spool.store, 1))
    while not committing.done() and not await stored(spool.store):
        committing.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(committing, return_exceptions=True)
    first = await answer(spool.store, 2)
    assert await answer(spool.store, 3) == first
    assert await stored(spool.store) == [first]


@kept_by([name for name in VARIANTS if name != "memory"])
async def test_it_survives_a_restart(spool: Spool) -> None:
    first = await answer(spool.store, 1)
    await spool.reopen()
    assert await answer(spool.store, 2) == first


@kept_by([name for name in VARIANTS if name not in SHARED])
async def test_expired_keys_are_removed(spool: Spool) -> None:
    clock = spool.clock
    assert isinstance(clock, ManualClock)
    for number in range(1, 6):
        await submit(spool.store, number, structs.replace(ONCE, identity=f"{number:032x}"))
    clock.advance(WINDOW + 1)
    # The first message with a key after a while looks for them; the key that it uses again stays.
    later = IdempotencyKey(f"{1:032x}", "b" * 32, clock.now() + WINDOW)
    assert await answer(spool.store, 11, later) == 11
    async with asyncio.timeout(20):
        while await kept_in(spool) > 1:
            await asyncio.sleep(0.01)
    if spool.settings.backend is not Backend.MEMORY or spool.settings.shelve:
        await spool.reopen()
    assert await answer(spool.store, 12, later) == 11


@keeping
async def test_keys_are_taken_over_and_are_no_damage(spool: Spool, tmp_path: Path) -> None:
    first = await answer(spool.store, 1)
    page, cursor = await spool.store.kept_keys()
    while cursor:
        more, cursor = await spool.store.kept_keys(cursor)
        page = [*page, *more]
    ((identity, kept),) = page
    assert (identity, kept.digest, int(kept.message_id, 16)) == (ONCE.identity, ONCE.digest, first)
    moved = structs.replace(ONCE, identity="6" * 32)
    await spool.store.keep_keys(
        [(moved.identity, contract.StoredKey(message_id(77), moved.digest, moved.until))]
    )
    assert await answer(spool.store, 2, moved) == 77
    if spool.settings.backend is not Backend.MEMORY:
        _, findings = await checked(spool, tmp_path)
        assert findings.kept == []
    await finish_all(spool.store)
    if spool.settings.backend not in SHARED:
        assert await spool.store.left_over() == "", "keys keep no spool from being removed"


async def test_the_removal_of_expired_keys_begins_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LevelDB would step over all that it has removed."""
    starts: list[bytes] = []
    rows = LevelDb.rows

    def noted(self: LevelDb, start: bytes, *arguments: Any, **more: Any) -> Any:
        if start.startswith(records.ONCE_UNTIL_PREFIX):
            starts.append(start)
        return rows(self, start, *arguments, **more)

    monkeypatch.setattr(LevelDb, "rows", noted)
    async with Spool(tmp_path / "spool", clock=ManualClock(NOW)) as spool:
        store: Any = spool.store
        for number in range(1, 4):
            once = structs.replace(ONCE, identity=f"{number:032x}", until=NOW + number)
            await submit(store, number, once)
            await store._forget_keys(NOW + number + 0.5, 1000, lambda identity: False)
            assert await kept_in(spool) == 0
    assert sorted(set(starts)) == starts
    assert starts[-1] >= records.once_until_key("", NOW + 2)


async def kept_in(spool: Spool) -> int:
    """How many keys the store holds."""
    store: Any = spool.store
    return len(await store._reservations.page(""))


# --- workers, each with a spool of its own


class Workers:
    """Spools of one machine's workers."""

    def __init__(self, home: Path, stack: AsyncExitStack, backend: Backend = Backend.LEVELDB) -> None:
        self.home, self.stack, self.backend = home, stack, backend
        self.run = "1"

    async def start(self, worker: int, count: int = 2) -> Store:
        siblings = SiblingWorkers(
            self.home / "idempotency-register", worker, frozenset(range(count)), self.run
        )
        spool = Spool(
            self.home / f"spool{worker}", backend=self.backend, clock=ManualClock(NOW), siblings=siblings
        )
        await self.stack.enter_async_context(spool)
        return spool.store

    async def start_all(self, *numbers: int) -> list[Store]:
        """Start these, and wait until keys are taken."""
        stores = [await self.start(number) for number in numbers]
        for store in stores:
            await until_known(store)
        return stores


@pytest.fixture
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    async with AsyncExitStack() as stack:
        yield Workers(tmp_path, stack)


@pytest.mark.parametrize("backend", [Backend.LEVELDB, Backend.DISK, Backend.MEMORY])
async def test_workers_answer_for_each_other(tmp_path: Path, backend: Backend) -> None:
    async with AsyncExitStack() as stack:
        workers = Workers(tmp_path, stack, backend)
        one, two = await workers.start_all(0, 1)
        first = await answer(one, 1)
        assert await answer(two, 2) == first
        with pytest.raises(contract.OtherContentError):
            await submit(two, 3, structs.replace(ONCE, digest="b" * 32))
        other = structs.replace(ONCE, identity="6" * 32)
        answers = await asyncio.gather(*(answer((one, two)[n % 2], n, other) for n in range(10, 20)))
        assert len(set(answers)) == 1
        assert len(await stored(one)) + len(await stored(two)) == 2


async def test_no_key_is_taken_before_all_spoke(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await workers.start(0)
    with monkeypatch.context() as impatient:
        impatient.setattr(reservations, "PATIENCE", 0.2)
        with pytest.raises(contract.InProgressError):
            await submit(one, 1)
    waiting = asyncio.create_task(submit(one, 2))
    await asyncio.sleep(0)
    await workers.start(1)
    assert (await waiting).id == message_id(2)


async def test_a_register_is_of_one_run_alone(workers: Workers, tmp_path: Path) -> None:
    """What is in the place of the spool since the last run is asked, and not the register of that run."""
    one, _ = await workers.start_all(0, 1)
    first = await answer(one, 1)
    await workers.stack.aclose()
    (tmp_path / "spool0").rename(tmp_path / "backup")
    workers.run = "2"
    one, two = await workers.start_all(0, 1)
    assert await answer(two, 2) == 2, "the message of the first run is not in the queue any more"
    assert await answer(one, 3) == 2
    await workers.stack.aclose()
    shutil.rmtree(tmp_path / "spool0")
    (tmp_path / "backup").rename(tmp_path / "spool0")
    shutil.rmtree(tmp_path / "spool1")
    workers.run = "3"
    one, two = await workers.start_all(0, 1)
    assert await answer(two, 4) == first
    assert [each.name for each in (tmp_path / "idempotency-register").iterdir()] == ["3"]


async def test_keys_of_a_spool_that_is_gone_stay_in_the_register(workers: Workers, tmp_path: Path) -> None:
    one, _, three = await workers.start_all(0, 1, 2)
    first = await answer(three, 1)
    assert await answer(one, 2) == first, "it is settled"
    await workers.stack.aclose()
    shutil.rmtree(tmp_path / "spool2")
    workers.run = "2"
    one, _ = await workers.start_all(0, 1)
    assert await answer(one, 2) == first


async def test_a_sole_worker_takes_the_keys_of_removed_spools_over(workers: Workers, tmp_path: Path) -> None:
    one, two = await workers.start_all(0, 1)
    first = await answer(two, 1)
    assert await answer(one, 2) == first, "it is settled"
    await workers.stack.aclose()
    shutil.rmtree(tmp_path / "spool1")
    settings = Settings(spool=SpoolSettings(path=tmp_path / "spool0"), workers=1)
    for number in range(2):
        siblings = siblings_of(settings, 0)
        assert (siblings is None) == bool(number), "the second start needs no register"
        async with Spool(settings.spool.path, clock=ManualClock(NOW), siblings=siblings) as spool:
            assert await answer(spool.store, 2) == first
    assert not (tmp_path / "idempotency-register").exists()


@pytest.mark.parametrize("how", ["removed", "another", "damaged"])
async def test_a_lost_register_is_made_of_the_spools(workers: Workers, tmp_path: Path, how: str) -> None:
    one, two = await workers.start_all(0, 1)
    first = await answer(one, 1)
    (file,) = (tmp_path / "idempotency-register").rglob("register.db")
    if how == "removed":
        shutil.rmtree(file.parent, ignore_errors=True)  # SQLite removes its log itself
    elif how == "another":
        for each in file.parent.iterdir():
            each.unlink()
        sqlite3.connect(file).close()
    else:
        for each in file.parent.iterdir():
            each.write_bytes(b"no database " * 1000)
    await until_known(two)
    assert [await answer(each, 2) for each in (one, two)] == [first, first]
    assert (*one.problems(), *two.problems()) == ()


async def test_a_register_that_cannot_be_used_is_a_problem_until_it_can(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_index, "BUSY", 0.1)
    one, _ = await workers.start_all(0, 1)
    (file,) = (tmp_path / "idempotency-register").rglob("register.db")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(contract.StoreError):
        await submit(one, 1)
    (problem,) = one.problems()
    assert (
        "another process has locked it: messages with an idempotency key are rejected temporarily"
    ) in problem
    other.close()
    assert await answer(one, 2) == 2
    assert one.problems() == ()


async def test_an_error_that_ended_the_transaction_is_the_one_that_is_reported(tmp_path: Path) -> None:
    """SQLite rolls back by itself if the disk is full."""
    index = key_index.KeyIndex(SiblingWorkers(tmp_path, 0, frozenset((0, 1)), "run"))

    def fill_the_disk() -> None:
        with index._exclusive() as database:
            database.execute("ROLLBACK")
            raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        fill_the_disk()
    index._end()


async def until_known(store: Store) -> None:
    """Wait until keys are taken."""
    for number in range(500):
        try:
            await answer(store, 900 + number, IdempotencyKey("0" * 31 + "1", "c" * 32, 0.0))
        except contract.InProgressError:
            await asyncio.sleep(0.01)
        else:
            await finish_all(store)
            return
    raise AssertionError("keys are refused all the time")
