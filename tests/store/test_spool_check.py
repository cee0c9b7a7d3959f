"""A check of a spool finds what is wrong with it, and changes no octet and no time of it."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from tests.store.builders import NOW, delivery_for, envelope_for, flip, message_id, store_message
from tests.store.spools import Spool
from tests.store.test_leveldb_damage import body, filled, recipient
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import queue_of
from zonerelay.store import records
from zonerelay.store.check import DamageKind, Findings, RepairResult, SalvagedMessage, SpoolContents
from zonerelay.store.contract import CHUNK_SIZE, Finish, Postpone, QueueStore, Store, StoredKey
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.offline import check_spool, repair_spool

LOCAL = (Backend.LEVELDB, Backend.DISK)
SHARED = (Backend.REDIS, Backend.POSTGRES, Backend.S3)


async def checked(spool: Spool, tmp_path: Path) -> tuple[SpoolContents, Findings]:
    findings = Findings()
    contents = await check_spool(
        spool.all_settings,
        0,
        findings,
        lambda done, total: None,
        environment=spool.environment,
        place=tmp_path,
    )
    assert not list(tmp_path.glob(".zonerelay-*"))
    return contents, findings


Salvages = dict[str, tuple[SalvagedMessage, bytes]]
"""By message id, with the bodies."""


async def repaired(spool: Spool, *, carry_out: bool = True) -> tuple[RepairResult, Salvages]:
    found: Salvages = {}

    def salvage(each: SalvagedMessage) -> None:
        found[each.message_id] = each, b"".join(each.body())

    done = await repair_spool(
        spool.all_settings,
        0,
        salvage,
        lambda done, total: None,
        carry_out=carry_out,
        environment=spool.environment,
    )
    return done, found


def state_of(directory: Path) -> dict[Path, tuple[int, int, bytes]]:
    """A link that comes and goes shows in a file's ctime, and in nothing else."""
    return {
        path: (stat.st_mtime_ns, stat.st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted((directory, *directory.rglob("*")))
        if (stat := path.stat())
    }


async def mixed(store: QueueStore) -> None:
    """A body of three chunks, one that is empty, deliveries that are held, deferred, and gone."""
    await store_message(store, 1, "a@one.example", "b@two.example", body=b"x" * (2 * CHUNK_SIZE + 5))
    await store_message(store, 2, "c@one.example", body=b"")
    await store_message(store, 3, "d@one.example")
    envelope = envelope_for(message_id(4), *(f"e{number}@late.example" for number in range(10)))
    deliveries = [
        delivery_for(envelope, each.address, next_attempt=NOW + 60, held=number == 3, zone="other zone")
        for number, each in enumerate(envelope.recipients)
    ]
    async with store.begin(envelope) as writer:
        await writer.write(b"Subject: four\r\n\r\n")
        await writer.commit(deliveries)
    await store.settle([Finish(each) for each in deliveries[:4]])


async def with_large(spool: Spool) -> None:
    await mixed(spool.store)
    await store_message(spool.store, 5, "f@one.example", body=b"x" * (300 * 1024))


@pytest.mark.parametrize("backend", LOCAL + SHARED)
async def test_a_sound_spool_is_clean_beside_a_relay_and_after_it(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "spool").mkdir()
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        assert await checked(spool, tmp_path) == (SpoolContents(0, 0, 0), Findings())
        await mixed(spool.store)
        await spool.store.claim(queue_of("default"), 2, now=NOW)
        contents, findings = await checked(spool, tmp_path)
        assert findings == Findings()
        assert (contents.messages, contents.deliveries) == (4, 10)
        assert contents.octets > 2 * CHUNK_SIZE
    before = state_of(tmp_path / "spool")
    assert await checked(spool, tmp_path) == (contents, findings)
    assert state_of(tmp_path / "spool") == before


@pytest.mark.parametrize("backend", LOCAL)
async def test_a_spool_that_was_never_started_has_nothing_in_it(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "spool").mkdir()
    spool = Spool(tmp_path / "spool", backend=backend)
    assert await checked(spool, tmp_path) == (SpoolContents(0, 0, 0), Findings())


@pytest.mark.parametrize("backend", LOCAL)
async def test_a_running_relay_is_checked_while_it_writes(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend, write_buffer=64 * 1024) as spool:
        await mixed(spool.store)

        async def feed(numbers: range) -> None:
            """Every third message leaves again."""
            for number in numbers:
                stored = await store_message(spool.store, 100 + number, recipient(number), body=body(number))
                if number % 3 == 0:
                    await spool.store.settle([Finish(each) for each in stored])

        seen: list[int] = []
        for begins in range(0, 12 * 30, 30):  # a writer that never pauses may be faster than the check
            feeding = asyncio.create_task(feed(range(begins, begins + 30)))
            contents, findings = await checked(spool, tmp_path)
            assert set(findings.counts) <= {DamageKind.CHUNKS_ALONE}, findings.kept
            seen.append(contents.messages)
            await feeding
        assert seen[0] < seen[-1]


@pytest.mark.parametrize("backend", SHARED)
async def test_relays_that_work_make_no_finding(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        done = False

        async def work(worker: int) -> int:
            """Stores small and large mail, and sends, defers and removes it."""
            number = worker * 1_000_000 + 1
            while not done:
                await asyncio.sleep(0.1)  # a check reads all that there is: it must be able to catch up
                big = 5 * CHUNK_SIZE if number % 5 == 0 else 10
                await store_message(spool.store, number, "a@one.example", "b@two.example", body=b"x" * big)
                number += 1
                for delivery in await spool.store.claim(
                    queue_of("default"), 3, now=NOW, skip_domains={"two.example"}
                ):
                    later = delivery.attempts == 0 and number % 2
                    change = (
                        Postpone(structs.replace(delivery, next_attempt=NOW + 60, attempts=1))
                        if later
                        else Finish(delivery)
                    )
                    await spool.store.settle([change])
                for delivery in await spool.store.claim(
                    queue_of("default"), 2, now=NOW, domain="two.example"
                ):
                    await spool.store.settle([Finish(delivery)])
            return number - worker * 1_000_000

        workers = [asyncio.create_task(work(each)) for each in range(4)]
        for _ in range(5):
            contents, findings = await checked(spool, tmp_path)
            assert findings == Findings()
            await asyncio.sleep(0.3)
        done = True
        assert min(await asyncio.gather(*workers)) > 3
        assert contents.deliveries
    assert (await checked(spool, tmp_path))[1] == Findings()


Change = Callable[[Sequence[bytes]], Mapping[bytes, bytes | None]]
"""What becomes of which keys, from all keys in order."""


def _first(keys: Sequence[bytes], start: bytes) -> bytes:
    return next(key for key in keys if key.startswith(start))


def remove(*starts: bytes) -> Change:
    return lambda keys: {_first(keys, start): None for start in starts}


def put(start: bytes, value: bytes, *, behind: bytes = b"") -> Change:
    return lambda keys: {_first(keys, start) + behind: value}


def put_new(key: bytes, value: bytes = b"") -> Change:
    return lambda keys: {key: value}


ONE, TWO, THREE, FOUR = (b"%016x" % number for number in range(1, 5))

CASES: dict[str, tuple[Change, dict[DamageKind, int], int]] = {
    # What is changed, what the check finds, and how many deliveries of 11 a repair keeps.
    "a chunk is gone": (remove(b"message %b 000002" % ONE), {DamageKind.CHUNK_MISSING: 1}, 9),
    "a chunk is short": (put(b"message %b 000002" % ONE, b"xx"), {DamageKind.WRONG_SIZE: 1}, 9),
    "a chunk too many": (put(b"message %b 000003" % ONE, b"", behind=b"4"), {DamageKind.WRONG_SIZE: 1}, 9),
    "no metadata": (remove(b"message %b *" % ONE), {DamageKind.BAD_RECORD: 1}, 9),
    "it does not exist": (remove(b"message %b #" % ONE), {DamageKind.BAD_RECORD: 1}, 11),
    "chunks alone": (
        remove(b"message %b *" % ONE, b"message %b #" % ONE),
        {DamageKind.CHUNKS_ALONE: 1, DamageKind.DELIVERY_ALONE: 1},
        9,
    ),
    "no message": (
        remove(*(b"message %b %b" % (THREE, part) for part in (b"#", b"*", b"000001"))),
        {DamageKind.DELIVERY_ALONE: 1},
        10,
    ),
    "no delivery": (remove(b"delivery-zone default %b" % TWO), {DamageKind.MESSAGE_ALONE: 1}, 10),
    "one delivery fewer": (
        remove(b"delivery-zone other%%20zone %b e9" % FOUR),
        {DamageKind.WRONG_COUNT: 1, DamageKind.INDEX_STRAY: 1},
        10,
    ),
    "a count is gone": (remove(b"meta open %b" % FOUR), {DamageKind.WRONG_COUNT: 1}, 11),
    "a count is wrong": (put(b"meta open %b" % FOUR, b"5"), {DamageKind.WRONG_COUNT: 1}, 11),
    "a count of nothing": (put(b"meta open %b" % FOUR, b"1", behind=b"x"), {DamageKind.BAD_RECORD: 1}, 11),
    "a count of no message": (put_new(b"meta open 00000000000000ff", b"3"), {DamageKind.WRONG_COUNT: 1}, 11),
    "an index is gone": (remove(b"deferred-zone other%20zone "), {DamageKind.INDEX_MISSING: 1}, 11),
    "an index is stray": (
        put(b"deferred-zone other%20zone ", b"", behind=b"x"),
        {DamageKind.INDEX_STRAY: 1},
        11,
    ),
    "a record has no sense": (put(b"delivery-zone default %b a" % ONE, b"{"), {DamageKind.BAD_RECORD: 1}, 10),
    "metadata has no sense": (put(b"message %b *" % ONE, b"[]"), {DamageKind.BAD_RECORD: 1}, 9),
    "an unknown key": (put_new(b"meta formats"), {}, 11),
    "a stranger's key": (put_new(b"zz"), {DamageKind.BAD_RECORD: 1}, 11),
    "a key is never forgotten": (remove(records.ONCE_UNTIL_PREFIX), {DamageKind.INDEX_MISSING: 1}, 11),
    "a key is forgotten that is not there": (remove(records.ONCE_PREFIX), {DamageKind.INDEX_STRAY: 1}, 11),
}


async def mixed_with_key(store: Store) -> None:
    """Also a fifth message, and an idempotency key."""
    await mixed(store)
    await store_message(store, 5, "f@one.example")
    await store.keep_keys([("a" * 64, StoredKey(message_id(5), "digest", NOW + 60))])


@pytest.mark.parametrize("name", CASES)
async def test_each_fault_of_the_records_is_found_and_named(tmp_path: Path, name: str) -> None:
    async with Spool(tmp_path / "spool") as spool:
        await mixed_with_key(spool.store)
    change, expected, _ = CASES[name]
    db = plyvel.DB(str(tmp_path / "spool"))
    for key, value in change([key for key, _ in db]).items():
        db.delete(key) if value is None else db.put(key, value)
    db.close()
    (tmp_path / "spool" / "synced").unlink()
    _, findings = await checked(spool, tmp_path)
    assert findings.counts == expected
    assert findings.is_damaged == bool(expected)


async def test_a_damaged_block_is_found_wherever_it_is(tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool") as spool:
        await filled(spool)
    tables = sorted((tmp_path / "spool").glob("*.ldb"))
    assert tables  # how many depends on when LevelDB compacts
    for table in tables:
        whole = table.read_bytes()
        for at in range(50, len(whole), len(whole) // 3):
            flip(table, at)
            _, findings = await checked(spool, tmp_path)
            assert findings.counts[DamageKind.UNREADABLE] == 1, (table, at, findings.kept)
            assert str(table) in {each.where for each in findings.kept}
            table.write_bytes(whole)
    assert not (await checked(spool, tmp_path))[1].counts


async def test_a_hole_in_the_log_is_found(tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool", write_buffer=4 * 1024 * 1024) as spool:
        for number in range(1, 30):
            await store_message(spool.store, number, recipient(number), body=body(number))
    (log,) = (tmp_path / "spool").glob("*.log")
    before = log.read_bytes()
    flip(log, len(before) // 2)
    damaged = log.read_bytes()
    _, findings = await checked(spool, tmp_path)
    assert findings.counts[DamageKind.UNREADABLE] == 1
    assert log.name in findings.kept[0].what
    assert log.read_bytes() == damaged
    assert not (tmp_path / "spool" / "lost").exists()
