"""What an opening finds lost is kept aside and told until it is acknowledged, and nothing else is lost."""

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.builders import NOW, flip, message_id, store_message
from tests.store.spools import Spool
from tests.store.test_leveldb_open import contents, refusal
from tests.support.waiting import until
from zonerelay import durable
from zonerelay.cli.main import main
from zonerelay.model.delivery import queue_of
from zonerelay.store import records
from zonerelay.store.leveldb.damage.directory import MARK_NAME, newest_log, read_mark
from zonerelay.store.leveldb.damage.format import BLOCK, read_log, write_log
from zonerelay.store.leveldb.damage.losses import DIRECTORY, MAX_KEPT, Loss, Losses
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.queue.store import PartitionStore

MESSAGES = 40


@pytest.fixture
async def filled(tmp_path: Path) -> Path:
    """A spool at rest; everything is in its log."""
    async with Spool(tmp_path / "spool", write_buffer=1024 * 1024) as spool:
        for number in range(1, MESSAGES + 1):
            body = random.Random(number).randbytes(1000).hex().encode()
            await store_message(spool.store, number, body=body)
    return spool.settings.path


def log_of(path: Path) -> Path:
    return path / f"{newest_log(path)[0]:06d}.log"


async def ids_in(spool: Spool) -> set[int]:
    return {int(delivery.message_id, 16) async for delivery in spool.store.scan()}


# --- the formats


def test_a_log_is_read_and_written_as_leveldb_does(tmp_path: Path) -> None:
    choose = random.Random(3)
    db = plyvel.DB(str(tmp_path), create_if_missing=True, write_buffer_size=8 * 1024 * 1024)
    sizes = [0, 1, BLOCK - 40, BLOCK, 3 * BLOCK, *(choose.randrange(9000) for _ in range(60))]
    for number, size in enumerate(sizes):
        db.put(b"message %016x 000001" % number, choose.randbytes(size))
    db.close()
    raw = log_of(tmp_path).read_bytes()
    log = read_log(raw)
    assert log.is_clean
    assert log.end == len(raw)
    assert len(log.records) == len(sizes)
    assert write_log(log.records) == raw
    assert read_log(raw, verify=False).records == log.records


@pytest.mark.parametrize("seed", range(4))
def test_only_damaged_records_are_missing_and_leveldb_takes_the_rest(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    db = plyvel.DB(str(tmp_path / "db"), create_if_missing=True, write_buffer_size=8 * 1024 * 1024)
    for number in range(25):
        db.put(b"message %016x 000001" % number, choose.randbytes(choose.choice([20, 900, 5000, 40_000])))
    db.close()
    log = log_of(tmp_path / "db")
    raw = log.read_bytes()
    whole = read_log(raw).records
    for _ in range(6):
        damaged = bytearray(raw)
        at = choose.randrange(len(raw) - 4)
        damaged[at : at + 4] = bytes(octet ^ 0xFF for octet in damaged[at : at + 4])
        found = read_log(bytes(damaged), synced=len(raw))
        assert len(found.records) == len(whole) - 1
        assert found.gaps
        log.write_bytes(write_log(found.records))
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "db", copy)
        db = plyvel.DB(str(copy), paranoid_checks=True)
        assert len(list(db)) == len(whole) - 1
        db.close()
        shutil.rmtree(copy)


@pytest.mark.parametrize("cut", [1, 6, 7, 100, 1500, BLOCK + 3])
def test_torn_end_is_no_damage_and_a_cut_behind_the_mark_is(cut: int) -> None:
    batches = [
        number.to_bytes(8, "little") + (1).to_bytes(4, "little") + b"\1\1k" + b"\xb8\x17" + b"v" * 3000
        for number in range(1, 40)
    ]
    raw = write_log(batches)
    torn = read_log(raw[:-cut])
    assert not torn.gaps
    assert torn.torn is not None or torn.end == len(raw) - cut
    assert read_log(raw[:-cut], synced=len(raw)).gaps


# --- openings


@pytest.mark.parametrize("verify", [False, True])
def test_a_record_that_is_no_batch_is_damage(verify: bool) -> None:
    """Its numbers are compared with those of the other logs at a start."""
    assert not read_log(write_log([b"short"]), verify=verify).is_clean


async def test_hole_in_the_log_takes_one_message_and_is_told_until_it_is_acknowledged(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of(filled)
    before = log.read_bytes()
    flip(log, len(before) // 2)
    damaged = log.read_bytes()
    async with Spool(filled) as spool:
        lost = set(range(1, MESSAGES + 1)) - await ids_in(spool)
        assert len(lost) == 1, "LevelDB would have dropped the rest of the block"
        (name,) = map(message_id, lost)
        (problem,) = spool.store.problems()
        assert f"they refer to 1 message, of which {name} is not in the spool" in problem
        assert f"message {name} is mentioned in damaged bytes" in caplog.text
        assert spool.store.unhealthy() is None
        assert spool.damage == [problem]
        (kept,) = (filled / DIRECTORY).glob("*.log")
        assert kept.read_bytes() == damaged
        await spool.reopen()
        assert spool.store.problems() == (problem,)
        assert isinstance(spool.store, PartitionStore)
        identity = kept.name.partition("-")[0]
        assert not await spool.store.acknowledge("00000000")
        assert await spool.store.acknowledge(identity)
        assert spool.store.problems() == ()
        await spool.reopen()
        assert spool.store.problems() == ()
        assert kept.exists()


async def test_power_cut_in_the_middle_of_a_write_is_no_loss(filled: Path) -> None:
    log = log_of(filled)
    with log.open("ab") as file:
        file.write(write_log([b"x" * 3000])[:1000])
    async with Spool(filled) as spool:
        assert len(await ids_in(spool)) == MESSAGES
        assert spool.store.problems() == ()
    assert not (filled / DIRECTORY).exists()


async def test_chunks_of_a_message_whose_record_is_lost_stay(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    async with Spool(path, write_buffer=8 * 1024 * 1024) as spool:
        await store_message(spool.store, 1, body=b"k" * 700_000)
        await store_message(spool.store, 2)
    log = log_of(path)
    contained = read_log(log.read_bytes()).records
    (last,) = [n for n, record in enumerate(contained) if b"message %b *" % message_id(1).encode() in record]
    flip(log, len(write_log(contained[:last])) + 20)
    async with Spool(path) as spool:
        assert await ids_in(spool) == {2}
        await until(lambda: not spool.store._keeper._tasks)  # type: ignore[attr-defined]  # the sweep is over
        db = spool.store._keeper._db  # type: ignore[attr-defined]
        chunks = [key for key, _ in db.rows(records.message_prefix(message_id(1)), limit=100)]
        assert len(chunks) > 8


@pytest.mark.parametrize("mends", [False, True])
async def test_a_refusal_undoes_what_a_start_has_mended_and_hides_no_missing_end(
    filled: Path, monkeypatch: pytest.MonkeyPatch, mends: bool
) -> None:
    """The mark alone tells a lost end from an incomplete last write, so it stays when nothing was mended."""
    os.truncate(log_of(filled), 20_000)
    flip(log_of(filled), 10_000)
    before = contents(filled)
    write, is_full = durable.write, not mends
    fsync, synced = os.fsync, set[bytes]()

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        name = Path(f"/proc/self/fd/{descriptor}")
        if name.readlink() == filled / "synced":
            synced.add(name.read_bytes())

    def written(file: Path, content: bytes) -> None:
        if is_full and (mends or file.suffix == ".log"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(file, content)

    def refuse(*arguments: object, **options: object) -> None:
        nonlocal is_full
        is_full = True
        raise plyvel.IOError(f"IO error: {os.strerror(errno.ENOSPC)}")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", written)
        patch.setattr(plyvel, "DB", refuse)
        patch.setattr(os, "fsync", sync)
        assert "is full" in await refusal(filled)
    assert contents(filled) == before
    assert not (filled / DIRECTORY).exists()
    assert not mends or synced == {(filled / "synced").read_bytes()}
    async with Spool(filled) as spool:
        assert "to the end of" in spool.store.problems()[0]


async def test_logs_are_kept_up_to_a_number_and_that_stops_no_start(filled: Path, tmp_path: Path) -> None:
    losses = Losses(filled)
    for number in range(MAX_KEPT):
        (tmp_path / "000001.log").write_bytes(b"%d" % number)
        identity, kept = losses.keep(tmp_path / "000001.log", b"%d" % number)
        assert kept
        losses.note(Loss(id=identity, what="test", kept=kept))
    flip(log_of(filled), 20_000)
    async with Spool(filled) as spool:
        assert len(await ids_in(spool)) == MESSAGES - 1
        assert len(spool.store.problems()) == MAX_KEPT + 1
    assert len(list((filled / DIRECTORY).glob("*.log"))) == MAX_KEPT
    losses.refresh()
    assert losses.acknowledge(losses.open[0].id)
    (tmp_path / "000002.log").write_bytes(b"another")
    assert losses.keep(tmp_path / "000002.log", b"another")[1]
    assert len(list((filled / DIRECTORY).glob("*.log"))) == MAX_KEPT


def test_stopped_spool_is_acknowledged_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "zonerelay.toml"
    config.write_text(f'[spool]\npath = "{tmp_path}/spool"\n')
    second = tmp_path / "spool" / "01"
    second.mkdir(parents=True)
    losses = Losses(second)
    losses.note(Loss(id="0123abcd", what="test"))
    (note,) = (second / DIRECTORY).iterdir()
    relay = 65534 if os.geteuid() == 0 else os.geteuid()
    os.chown(note, relay, -1)
    command = ["spool", "acknowledge", "--config", str(config)]
    assert main([*command, "0123abcd"]) == 0
    assert "0123abcd: acknowledged" in capsys.readouterr().out
    assert note.stat().st_uid == relay, "the relay reads it at its next start"
    losses.refresh()
    assert losses.open == ()
    assert main([*command, "0123abcd"]) == 1
    assert "has no unacknowledged loss 0123abcd" in capsys.readouterr().err


# --- refusals, and what is no reason for one


async def test_without_current_nothing_is_made_and_the_text_says_how_to_go_on(filled: Path) -> None:
    current = (filled / "CURRENT").read_text()
    (filled / "CURRENT").unlink()
    before = contents(filled)
    text = await refusal(filled)
    assert contents(filled) == before
    assert "zonerelay spool repair" in text
    (filled / "CURRENT").write_text(current)
    async with Spool(filled) as spool:
        assert len(await ids_in(spool)) == MESSAGES


async def test_spool_that_was_emptied_with_its_mark_left_is_refused(filled: Path) -> None:
    for each in (each for each in filled.iterdir() if each.name != MARK_NAME):
        each.unlink()
    assert f"remove {filled / MARK_NAME}" in await refusal(filled)
    (filled / MARK_NAME).unlink()
    async with Spool(filled) as spool:
        await store_message(spool.store, 1)


def keep_files(path: Path, *names: str) -> None:
    for each in (each for each in path.iterdir() if not each.name.startswith(names)):
        each.unlink()


@pytest.mark.parametrize(
    "left",
    [
        lambda path: keep_files(path, "LOG", "LOCK"),
        lambda path: (path / "MANIFEST-000001").write_bytes(b""),
        lambda path: (path / "000001.dbtmp").write_bytes(b"MANIFEST-000001\n"),
        lambda path: (path / "000003.log").write_bytes(b""),
        lambda path: (path / "01").mkdir(),
    ],
)
async def test_first_start_cut_short_is_completed(tmp_path: Path, left: Callable[[Path], object]) -> None:
    path = tmp_path / "spool"
    db = plyvel.DB(str(path), create_if_missing=True)
    db.close()
    keep_files(path, "LOG", "LOCK")
    left(path)
    async with Spool(path) as spool:
        await store_message(spool.store, 1)
        await spool.reopen()
        assert await ids_in(spool) == {1}


async def test_emptied_log_is_told_by_the_mark(filled: Path) -> None:
    os.truncate(log_of(filled), 0)
    async with Spool(filled) as spool:
        assert await ids_in(spool) == set()
        assert "bytes 0 to the end of" in spool.store.problems()[0]
        assert await spool.store.claim(queue_of("default"), 1, now=NOW) == []


async def test_log_that_goes_away_while_the_relay_runs_is_told_and_takes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    await spool.open()
    await store_message(spool.store, 1)
    keeper = spool.store._keeper  # type: ignore[attr-defined]  # white box, on purpose
    await until(lambda: (mark := read_mark(path)) is not None and mark.size > 0)
    log_of(path).unlink()
    await until(lambda: spool.store.unhealthy() is not None)
    assert "or its end is missing" in spool.store.problems()[0]
    after = tmp_path / "after"
    await keeper.reader.read(lambda db: shutil.copytree(path, after))
    await spool.store.close()
    async with Spool(after) as copied:
        assert await ids_in(copied) == {1}


async def test_unreadable_last_id_is_made_again_behind_all_that_were_given(tmp_path: Path) -> None:
    path = tmp_path / "spool"
    spool = Spool(path)
    await spool.open()
    (delivery,) = await store_message(spool.store, 9)
    await spool.store.update([delivery.key], lambda _: None)
    db = spool.store._keeper._db  # type: ignore[attr-defined]  # white box, on purpose
    db.write([[(records.META_LAST_ID, b"000")]])
    await spool.reopen()
    last = spool.store.last_message_id()
    assert last is not None
    assert last > message_id(9)
    (problem,) = spool.store.problems()
    assert "the record of the last message id was unreadable" in problem
    await spool.reopen()
    assert spool.store.last_message_id() == last
    assert spool.store.problems() == (problem,)
    await spool.store.close()


async def test_a_note_that_is_no_text_is_told_and_stops_no_start(filled: Path) -> None:
    (filled / DIRECTORY).mkdir()
    (filled / DIRECTORY / "0123abcd.json").write_bytes(b'{"id": "0123abcd", "what": "\xff"}')
    async with Spool(filled) as spool:
        assert "0123abcd.json cannot be read" in spool.store.problems()[0]
