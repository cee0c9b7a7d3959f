"""A check of a spool finds what is wrong with it, and changes no octet and no time of it."""

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from tests.store.builders import NOW, body_of, delivery_for, envelope_for, flip, message_id, store_message
from tests.store.spools import Spool, s3_settings
from tests.store.test_leveldb_damage import body, filled, recipient
from tests.support.s3_server import shared_moto
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store import records
from zonerelay.store.check import DamageKind, Findings, RepairResult, SalvagedMessage, SpoolContents
from zonerelay.store.contract import (
    CHUNK_SIZE,
    Change,
    Finish,
    Postpone,
    QueueStore,
    Store,
    StoredKey,
    StoreError,
)
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.keys.port import Write, pages
from zonerelay.store.leveldb.damage.directory import MARK_NAME
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.offline import check_spool, opened_engine, repair_spool

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
    for carry_out in (False, True):
        done, salvaged = await repaired(spool, carry_out=carry_out)
        assert (structs.replace(done, kept=[]), salvaged) == (RepairResult(before=10, after=10), {})


@pytest.mark.parametrize("backend", LOCAL)
async def test_a_spool_that_was_never_started_has_nothing_in_it(tmp_path: Path, backend: Backend) -> None:
    (tmp_path / "spool").mkdir()
    spool = Spool(tmp_path / "spool", backend=backend)
    assert await checked(spool, tmp_path) == (SpoolContents(0, 0, 0), Findings())


@pytest.mark.parametrize("backend", LOCAL + SHARED)
async def test_relays_that_work_make_no_finding(tmp_path: Path, backend: Backend) -> None:
    # The copy of a local spool may end in the middle of an upload.
    allowed = {DamageKind.CHUNKS_ALONE} if backend in LOCAL else set()
    async with Spool(tmp_path / "spool", backend=backend, write_buffer=64 * 1024) as spool:
        done = False

        async def work(worker: int) -> int:
            """Stores small and large mail, and sends, defers and removes it."""
            number = worker * 1_000_000 + 1
            while not done:
                await asyncio.sleep(0.1)  # a check reads all that there is: it must be able to catch up
                big = 5 * CHUNK_SIZE if number % 5 == 0 else 10
                await store_message(spool.store, number, "a@one.example", "b@two.example", body=b"x" * big)
                number += 1
                claim = functools.partial(spool.store.claim, queue_of("default"), now=NOW)
                for delivery in await claim(3, skip_domains={"two.example"}):
                    change: Change = Finish(delivery)
                    if delivery.attempts == 0 and number % 2:
                        change = Postpone(structs.replace(delivery, next_attempt=NOW + 60, attempts=1))
                    await spool.store.settle([change])
                for delivery in await claim(2, domain="two.example"):
                    await spool.store.settle([Finish(delivery)])
            return number - worker * 1_000_000

        workers = [asyncio.create_task(work(each)) for each in range(4)]
        for _ in range(5):
            contents, findings = await checked(spool, tmp_path)
            assert findings.counts.keys() <= allowed, findings.kept
            await asyncio.sleep(0.3)
        done = True
        assert min(await asyncio.gather(*workers)) > 3
        assert contents.deliveries
    assert (await checked(spool, tmp_path))[1] == Findings()


@pytest.mark.parametrize("backend", LOCAL + SHARED)
async def test_a_spool_in_use_is_not_repaired(tmp_path: Path, backend: Backend) -> None:
    # A service without a clock is watched for longer than a lease.
    s3 = s3_settings(shared_moto().url, lease=2.0) if backend is Backend.S3 else None
    async with Spool(tmp_path / "spool", backend=backend, s3=s3) as spool:
        await mixed(spool.store)
        for carry_out in (False, True):
            with pytest.raises(StoreError, match=r"is in use by relays|another zonerelay has"):
                await repaired(spool, carry_out=carry_out)
    assert (await repaired(spool))[0].after == 10


KeyChange = Callable[[Sequence[bytes]], Mapping[bytes, bytes | None]]
"""What becomes of which keys, from all keys in order."""


def _first(keys: Sequence[bytes], start: bytes) -> bytes:
    return next(key for key in keys if key.startswith(start))


def remove(*starts: bytes) -> KeyChange:
    return lambda keys: {_first(keys, start): None for start in starts}


def put(start: bytes, value: bytes, *, behind: bytes = b"") -> KeyChange:
    return lambda keys: {_first(keys, start) + behind: value}


def put_new(key: bytes, value: bytes = b"") -> KeyChange:
    return lambda keys: {key: value}


ONE, TWO, THREE, FOUR = (b"%016x" % number for number in range(1, 5))

CASES: dict[str, tuple[KeyChange, dict[DamageKind, int], int]] = {
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


async def change_keys(spool: Spool, *changes: KeyChange) -> None:
    """Change what a closed spool has stored."""
    if spool.settings.backend is Backend.LEVELDB:
        with contextlib.closing(plyvel.DB(str(spool.settings.path))) as db:
            for change in changes:
                for key, value in change([key for key, _ in db]).items():
                    db.delete(key) if value is None else db.put(key, value)
        (spool.settings.path / MARK_NAME).unlink()
        return
    async with opened_engine(spool.all_settings, spool.environment, writes=True) as engine:
        partition = await open_partition(engine, 0, token="change", clock=SystemClock(), wait=10.0)
        for change in changes:
            keys = [key async for rows in pages(partition, b"\x01", b"\xff", values=False) for key, _ in rows]
            await partition.write(Write(dict(change(keys))))
        await partition.close()


@pytest.mark.parametrize("backend", LOCAL + SHARED)
@pytest.mark.parametrize("name", CASES)
async def test_each_fault_of_the_records_is_found_and_mended(
    tmp_path: Path, name: str, backend: Backend
) -> None:
    change, expected, left = CASES[name]
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        await mixed_with_key(spool.store)
    await change_keys(spool, change)
    _, findings = await checked(spool, tmp_path)
    assert findings.counts == expected
    assert findings.is_damaged == bool(expected)
    looked, none = await repaired(spool, carry_out=False)
    assert not none or backend is Backend.LEVELDB
    assert (await checked(spool, tmp_path))[1] == findings
    done, _ = await repaired(spool)
    assert (done.lost, done.before, done.after) == (looked.lost, looked.before, looked.after)
    assert (done.before - done.after > 0) <= bool(done.lost)
    assert done.after == left
    assert (await checked(spool, tmp_path))[1] == Findings()


@pytest.mark.parametrize("backend", LOCAL + SHARED)
async def test_what_can_be_read_stays_and_the_rest_is_salvaged(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        await mixed(spool.store)
    await change_keys(
        spool,
        remove(b"message %b 000002" % ONE, b"delivery-zone default %b" % TWO),
        put(b"delivery-zone other%%20zone %b e9" % FOUR, b"{"),
    )
    looked, none = await repaired(spool, carry_out=False)
    done, salvaged = await repaired(spool)
    assert not none or backend is Backend.LEVELDB
    assert (looked.kept, (done.before, done.after)) == ([], (10, 6))
    one, octets = salvaged[message_id(1)]
    assert (one.is_whole, len(octets)) == (False, CHUNK_SIZE + 5)
    two, octets = salvaged[message_id(2)]
    assert (two.is_whole, two.unknown, octets) == (True, ("c@one.example",), b"")
    four, octets = salvaged[message_id(4)]
    assert (four.is_whole, four.unknown, octets) == (True, ("e9@late.example",), b"Subject: four\r\n\r\n")
    if backend is not Backend.LEVELDB:
        kept = [json.loads(line)["where"] for line in Path(*done.kept).read_text().splitlines()]
        assert set(salvaged) <= {each.split()[-2] for each in kept}
    async with spool:
        claimed = await spool.store.claim(queue_of("default"), 10, now=NOW)
        assert [each.recipient for each in claimed] == ["d@one.example"]
        assert await body_of(spool.store, message_id(3))
        assert len(await spool.store.claim(queue_of("other zone"), 10, now=NOW + 100)) == 5


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
