"""Full disks and damaged files: the exit status says it, the message names what is missing, and a second run
completes what the first one left.
"""

import asyncio
import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.test_full_disk import mounted
from tests.store.builders import message_id, store_message
from tests.transfer.migrations import configured, contents, queue, spool
from zonerelay.cli.spool import copies
from zonerelay.cli.spool import migrate as migrate_module
from zonerelay.history.database import insert, open_for_writing
from zonerelay.store import records
from zonerelay.store.leveldb.engine import plyvel

MB = 1024 * 1024
MESSAGES = 5
ROWS = 300
BODY = b"Subject: x\r\n\r\n" + b"0123456789abcde\r\n" * 6000

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root: mounts a small file system")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB."""
    with mounted(tmp_path / "small", 8 * MB) as place:
        yield place


def source_of(home: Path) -> Path:
    """A stopped relay with mail, a history, and 3 MB of captured mail."""
    config = configured(home, "leveldb")
    (home / "captured").mkdir()
    with contextlib.closing(sqlite3.connect(home / "captured" / "captured.db")) as database:
        database.execute("CREATE TABLE mail (octets BLOB)")
        database.executemany("INSERT INTO mail VALUES (?)", [(os.urandom(10_000),)] * ROWS)
        database.commit()
    with contextlib.closing(open_for_writing(home / "history" / "00.db")) as database:
        insert(database, 1, [(1.0, "accepted", {"id": "00"})])

    async def fill() -> None:
        async with queue(config) as store:
            for number in range(1, MESSAGES + 1):
                await store_message(store, number * 256, f"to-{number}@example.net", body=BODY)

    asyncio.run(fill())
    return config


def damage(file: Path) -> None:
    """A page in the middle, which a copy page by page does not notice."""
    octets = bytearray(file.read_bytes())
    middle = len(octets) // 2 // 4096 * 4096
    octets[middle : middle + 4096] = b"\xa5" * 4096
    file.write_bytes(octets)


def fill_up(place: Path) -> Path:
    """Takes the last block of a disk, but one megabyte."""
    file = place / "other"
    free = os.statvfs(place)
    file.write_bytes(bytes(free.f_bavail * free.f_frsize - MB))
    return file


def captured(home: Path) -> int:
    with contextlib.closing(sqlite3.connect(home / "captured" / "captured.db")) as database:
        return int(database.execute("SELECT count(*) FROM mail").fetchone()[0])


def left(home: Path) -> list[str]:
    """Files beside the spool that should not be there."""
    names = (str(each.relative_to(home)) for each in home.rglob("*") if each.is_file())
    return [name for name in names if name.startswith(("captured", "history", "."))]


def without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk becomes full only after the look at it."""
    for module in (copies, migrate_module):
        monkeypatch.setattr(module, "check_rooms", lambda *_: None)
    monkeypatch.setattr(copies, "check_room", lambda *_: None)


def test_a_migration_looks_at_the_room_for_everything_first(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = source_of(tmp_path / "old"), configured(small / "new", "leveldb")
    other = fill_up(small)
    assert spool(source, "migrate", "--to", str(target)) == 2
    assert "requires 3." in capsys.readouterr().err
    assert left(target.parent) == []
    assert len(asyncio.run(contents(source))) == MESSAGES
    other.unlink()
    assert spool(source, "migrate", "--to", str(target)) == 0
    assert captured(target.parent) == ROWS


def test_a_disk_that_fills_up_ends_a_migration_which_goes_on(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = source_of(tmp_path / "old"), configured(small / "new", "disk")
    other = fill_up(small)
    without_check(monkeypatch)
    assert spool(source, "migrate", "--to", str(target)) == 1
    told = capsys.readouterr()
    assert f"{source.parent}/captured/captured.db cannot be copied" in told.err
    assert "Other files copied" not in told.out
    assert not [name for name in left(target.parent) if name.startswith("captured")]
    other.unlink()
    assert spool(source, "migrate", "--to", str(target), "--json") == 0
    assert "captured" in json.loads(capsys.readouterr().out)["copied"]
    assert captured(target.parent) == ROWS
    assert len(asyncio.run(contents(target))) == MESSAGES
    assert not (source.parent / "migration").exists()


@pytest.mark.parametrize("name", ["captured/captured.db", "history/00.db"])
def test_a_damaged_database_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    source, target = source_of(tmp_path / "old"), configured(tmp_path / "new", "leveldb")
    damage(source.parent / name)
    assert spool(source, "backup", str(tmp_path / "backup"), "--json") == 1
    told = capsys.readouterr()
    (missing,) = json.loads(told.out)["missing"]
    assert missing.startswith(f"{source.parent / name}: ")
    assert f"not copied: {missing}" in " ".join(told.err.split())
    assert not (tmp_path / "backup" / "home" / name).exists()

    assert spool(source, "migrate", "--to", str(target), "--json") == 1
    done = json.loads(capsys.readouterr().out)
    assert (done["messages"], done["lost"]) == (MESSAGES, [missing])
    assert name.partition("/")[0] not in done["copied"]
    assert spool(source, "migrate", "--to", str(target)) == 1, "it is still missing"
    (source.parent / name).rename(tmp_path / "moved-away")
    assert spool(source, "migrate", "--to", str(target)) == 0


@pytest.mark.parametrize("name", ["orders/orders.json", "identities.json"])
def test_a_damaged_file_is_left_out_of_a_backup_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A backup with it could not be restored, or would let no token in."""
    source, target = source_of(tmp_path / "old"), configured(tmp_path / "new", "disk")
    (source.parent / name).parent.mkdir(exist_ok=True)
    (source.parent / name).write_bytes(b"")
    (source.parent / name).chmod(0o600)
    assert spool(source, "check") == 1
    assert spool(source, "backup", str(tmp_path / "backup")) == 1
    assert str(source.parent / name) in capsys.readouterr().err
    assert spool(target, "restore", str(tmp_path / "backup")) == 0
    assert not (target.parent / name).exists()


def test_an_empty_directory_of_the_target_is_not_its_own_captured_mail(tmp_path: Path) -> None:
    source, target = source_of(tmp_path / "old"), configured(tmp_path / "new", "leveldb")
    (target.parent / "captured").mkdir()
    assert spool(source, "migrate", "--to", str(target)) == 0
    assert captured(target.parent) == ROWS


@pytest.mark.parametrize("is_looked_at", [True, False], ids=["first", "meanwhile"])
def test_a_backup_to_a_full_disk_is_none(
    tmp_path: Path,
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_looked_at: bool,
) -> None:
    source = source_of(tmp_path / "old")
    other = fill_up(small)
    if not is_looked_at:
        without_check(monkeypatch)
    assert spool(source, "backup", str(small / "backup")) == 2
    assert ("requires " if is_looked_at else "the backup failed: ") in capsys.readouterr().err
    assert list(small.iterdir()) == [other]
    other.unlink()
    monkeypatch.undo()
    assert spool(source, "backup", str(small / "backup")) == 0


@pytest.mark.parametrize("is_looked_at", [True, False], ids=["first", "meanwhile"])
def test_a_restore_to_a_full_disk_goes_on_later(
    tmp_path: Path,
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_looked_at: bool,
) -> None:
    source, target = source_of(tmp_path / "old"), configured(small / "new", "disk")
    assert spool(source, "backup", str(tmp_path / "backup")) == 0
    other = fill_up(small)
    if not is_looked_at:
        without_check(monkeypatch)
    assert spool(target, "restore", str(tmp_path / "backup")) == (2 if is_looked_at else 1)
    assert str(small) in capsys.readouterr().err
    other.unlink()
    assert spool(target, "restore", str(tmp_path / "backup")) == 0
    assert captured(target.parent) == ROWS
    assert len(asyncio.run(contents(target))) == MESSAGES
    assert not list(target.parent.glob("*.before-restore-*")), "what the first run has made was moved aside"
    assert spool(target, "restore", str(tmp_path / "backup")) == 2, "there is mail in it"


def test_an_export_without_a_damaged_message_exits_with_1(
    tmp_path: Path, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = source_of(tmp_path / "old")
    other = fill_up(small)
    other.write_bytes(bytes(8 * MB - 200_000))
    assert spool(source, "export", str(small / "mail")) == 2
    assert "requires" in capsys.readouterr().err
    assert list(small.iterdir()) == [other]
    database = plyvel.DB(str(tmp_path / "old" / "spool"))
    database.delete(records.chunk_key(message_id(2 * 256), 2))
    database.close()
    for target in ("mail", "mail.tar"):
        assert spool(source, "export", str(tmp_path / target), "--json") == 1
        told = capsys.readouterr()
        assert json.loads(told.out) == {
            "messages": MESSAGES - 1,
            "deliveries": MESSAGES - 1,
            "suspended": 0,
            "unusable": 1,
        }
        assert f"{message_id(2 * 256)}: not taken: " in told.err
