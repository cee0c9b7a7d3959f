"""`zonerelay spool backup` and `restore` as an operator calls them, beside a relay that goes on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool
from tests.transfer.migrations import configured, spool
from tests.transfer.queues import rows
from tests.transfer.test_exchange import fill
from zonerelay.config.settings import Backend
from zonerelay.store.contract import StoredKey
from zonerelay.transfer import loader

KEYS = [(f"{number:032x}", StoredKey(message_id(number), "d" * 32, NOW + number)) for number in (1, 2)]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Backend.LEVELDB, Backend.LEVELDB),
        (Backend.LEVELDB, Backend.DISK),
        (Backend.DISK, Backend.DISK),
        (Backend.DISK, Backend.LEVELDB),
    ],
)
def test_a_backup_is_restored_exactly_into_any_engine(
    tmp_path: Path, source: Backend, target: Backend
) -> None:
    one = configured(tmp_path / "one", source.value)
    other = configured(tmp_path / "other", target.value)

    async def made() -> object:
        async with Spool(tmp_path / "one" / "spool", backend=source) as opened:
            await fill(opened.store)
            await opened.store.keep_keys(KEYS)
            # The relay runs: the spool is open, and locked.
            assert await asyncio.to_thread(spool, one, "backup", str(tmp_path / "backup")) == 0
            return await rows(opened.store)

    async def restored() -> object:
        async with Spool(tmp_path / "other" / "spool", backend=target) as opened:
            assert list((await opened.store.kept_keys())[0]) == KEYS
            return await rows(opened.store)

    stored = asyncio.run(made())
    sheet = json.loads((tmp_path / "backup" / "backup.json").read_text())
    assert (sheet["messages"], sheet["deliveries"], sheet["unusable"]) == (2, 3, 0)
    assert spool(other, "restore", str(tmp_path / "backup")) == 0
    assert asyncio.run(restored()) == stored


def test_everything_acknowledged_before_is_in_it_while_mail_goes_on(tmp_path: Path) -> None:
    config = configured(tmp_path / "one")
    target = tmp_path / "backup"

    async def run() -> tuple[int, int, int]:
        async with Spool(tmp_path / "one" / "spool", write_buffer=64 * 1024) as opened:
            for number in range(1, 51):
                await store_message(opened.store, number, body=b"x" * 3000)
            working = asyncio.create_task(asyncio.to_thread(spool, config, "backup", str(target)))
            number = 51
            while not working.done():
                await store_message(opened.store, number, body=b"x" * 3000)
                number += 1
            return await working, 50, number

    status, before, after = asyncio.run(run())
    assert status == 0
    found = json.loads((target / "backup.json").read_text())["messages"]
    assert before <= found <= after
    assert after > before + 10, "the relay waited for the backup"


def test_what_lies_beside_the_spool_goes_along(tmp_path: Path) -> None:
    one, other = configured(tmp_path / "one"), configured(tmp_path / "other")
    asyncio.run(_fill(tmp_path / "one" / "spool"))
    home, there = tmp_path / "one", tmp_path / "other"
    (home / "redact.key").write_bytes(b"k" * 32)
    (home / "mta-sts").mkdir()
    (home / "mta-sts" / "a.example.json").write_text("{}")
    (home / "refresh-tokens").mkdir()
    (home / "refresh-tokens" / "account").write_text("secret")
    (there / "redact.key").write_bytes(b"o" * 32)
    assert spool(one, "backup", str(tmp_path / "backup")) == 0
    assert spool(other, "restore", str(tmp_path / "backup")) == 0
    assert (there / "redact.key").read_bytes() == b"k" * 32
    (aside,) = there.glob("redact.key.before-restore-*")
    assert aside.read_bytes() == b"o" * 32
    assert (there / "mta-sts" / "a.example.json").read_text() == "{}"
    assert (there / "refresh-tokens" / "account").read_text() == "secret"
    assert (tmp_path / "backup" / "home").stat().st_mode & 0o077 == 0


async def _fill(path: Path) -> None:
    async with Spool(path) as opened:
        for number in (1, 2, 3):
            await store_message(opened.store, number, f"to@{number}.example.net")


def test_a_restore_that_was_cut_short_goes_on_and_another_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = configured(tmp_path / "one"), configured(tmp_path / "other")
    asyncio.run(_fill(tmp_path / "one" / "spool"))
    assert spool(one, "backup", str(tmp_path / "backup")) == 0
    monkeypatch.setattr(loader, "TOGETHER", 1)
    stored = loader.Loader._write
    calls = 0

    async def fails(self: loader.Loader, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        return await stored(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loader.Loader, "_write", fails)
    assert spool(other, "restore", str(tmp_path / "backup")) == 1
    assert "run the command again" in capsys.readouterr().err
    assert spool(other, "restore", str(tmp_path / "backup")) == 0
    assert "1 message with 1 delivery restored" in capsys.readouterr().out
    assert spool(other, "restore", str(tmp_path / "backup")) == 2
    assert "the spool is not empty" in capsys.readouterr().err
    third = configured(tmp_path / "third")
    assert spool(third, "restore", str(tmp_path / "backup")) == 0
    assert "3 messages with 3 deliveries restored" in capsys.readouterr().out


def test_a_damaged_backup_is_refused_before_anything_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = configured(tmp_path / "one"), configured(tmp_path / "other")
    asyncio.run(_fill(tmp_path / "one" / "spool"))
    assert spool(one, "backup", str(tmp_path / "backup")) == 0
    assert spool(one, "backup", str(tmp_path / "backup")) == 2
    tar = tmp_path / "backup" / "00.tar"
    octets = bytearray(tar.read_bytes())
    octets[600] ^= 1
    tar.write_bytes(octets)
    assert spool(other, "restore", str(tmp_path / "backup")) == 2
    assert f"{tar} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "other" / "spool").exists()


def test_the_temporary_names_are_gone(tmp_path: Path) -> None:
    config = configured(tmp_path / "one")
    asyncio.run(_fill(tmp_path / "one" / "spool"))
    assert spool(config, "backup", str(tmp_path / "backups")) == 0
    names = {path.name for path in (*tmp_path.iterdir(), *(tmp_path / "one").iterdir())}
    assert not {name for name in names if name.startswith(".")}
