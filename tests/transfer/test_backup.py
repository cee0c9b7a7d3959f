"""`zonerelay spool backup` and `restore` as an operator calls them, beside a relay that goes on."""

import asyncio
import json
import tarfile
from dataclasses import fields
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool
from tests.support.redis_server import shared_server
from tests.support.s3_server import SECRET
from tests.transfer.migrations import configured, spool
from tests.transfer.queues import rows
from tests.transfer.test_exchange import fill
from zonerelay.config.settings import Backend
from zonerelay.model.delivery import queue_of
from zonerelay.store.contract import Finish, StoredKey
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
def test_a_backup_is_restored_exactly_to_any_engine(tmp_path: Path, source: Backend, target: Backend) -> None:
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
    assert after > before + 3, "the relay waited for the backup"


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


def test_the_mail_of_the_hundredth_spool_is_restored_too(tmp_path: Path) -> None:
    """A relay may have 128 workers, and so a backup parts with numbers of three digits."""
    one, other = configured(tmp_path / "one"), configured(tmp_path / "other")
    backup = tmp_path / "backup"

    async def filled() -> None:
        async with Spool(tmp_path / "one" / "spool") as opened:
            await store_message(opened.store, 1)
            await opened.store.keep_keys(KEYS)

    async def restored() -> int:
        async with Spool(tmp_path / "other" / "spool") as opened:
            assert list((await opened.store.kept_keys())[0]) == KEYS
            return len(await rows(opened.store))

    asyncio.run(filled())
    assert spool(one, "backup", str(backup)) == 0
    sheet = json.loads((backup / "backup.json").read_text())
    for name in ("00.tar", "00.keys"):
        (backup / name).rename(backup / f"1{name}")
        sheet["files"][f"1{name}"] = sheet["files"].pop(name)
    (backup / "backup.json").write_text(json.dumps(sheet))
    assert spool(other, "restore", str(backup)) == 0
    assert asyncio.run(restored()) == 1
    (backup / "backup.json").write_bytes(b'{"hostname": "\xff"}')
    assert spool(other, "restore", str(backup)) == 2


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


def test_a_damaged_backup_restores_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


# ---- of a shared store: it joins no queue, and what is in it is whole, whatever the relays do ----------


SHARED = [Backend.REDIS, Backend.POSTGRES, Backend.S3]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)


def configuration_of(opened: Spool) -> Path:
    """The configuration file of a relay on the store."""
    home = opened.settings.path.parent
    home.mkdir(exist_ok=True)
    path = home / "zonerelay.toml"
    text = f'[spool]\nbackend = "{opened.settings.backend.value}"\npath = "{opened.settings.path}"\n'
    for name in ("redis", "postgres", "s3"):
        settings = getattr(opened, name)
        if settings is None:
            continue
        text += f"[{name}]\n"
        for each in fields(settings):
            value = getattr(settings, each.name)
            if isinstance(value, str) and value:
                text += f"{each.name} = {json.dumps(value)}\n"
    path.write_text(text)
    return path


@pytest.mark.parametrize("backend", SHARED)
def test_a_backup_beside_a_relay_is_restored_exactly(tmp_path: Path, backend: Backend) -> None:
    one = Spool(tmp_path / "one" / "spool", backend=backend)
    other = Spool(tmp_path / "other" / "spool", backend=backend)
    config = configuration_of(one)

    async def made() -> object:
        async with one:
            await fill(one.store)
            await one.store.claim(queue_of("default"), 1, now=NOW)
            stored = await rows(one.store)
            node = one.store.node
            assert await asyncio.to_thread(spool, config, "backup", str(tmp_path / "backup")) == 0
            assert (one.store.node, one.store.unhealthy()) == (node, None)
            return stored

    async def restored() -> object:
        async with other:
            return await rows(other.store)

    stored = asyncio.run(made())
    assert spool(configuration_of(other), "restore", str(tmp_path / "backup")) == 0
    assert asyncio.run(restored()) == stored


def saved(backup: Path) -> dict[int, bytes]:
    """Each message of a backup with its body."""
    found = {}
    with tarfile.open(backup / "00.tar") as tar:
        for member in tar.getmembers():
            if member.name.endswith(".eml"):
                body = tar.extractfile(member)
                assert body is not None
                found[int(member.name[-20:-4], 16)] = body.read()
    return found


def body(number: int) -> bytes:
    return b"%09d" % number * (9000 if number % 7 == 0 else 300)


STAYING, PASSING = 60, 40


@pytest.mark.parametrize("backend", SHARED)
def test_what_stays_is_in_it_and_each_message_is_whole(tmp_path: Path, backend: Backend) -> None:
    """Forty messages are there at a time, of which the oldest leaves when one comes in."""
    one = Spool(tmp_path / "one" / "spool", backend=backend)
    config = configuration_of(one)

    async def run() -> tuple[int, int]:
        async with one:
            waiting = []
            for number in range(1, STAYING + PASSING + 1):
                made = await store_message(one.store, number, body=body(number))
                waiting += made if number > STAYING else []
            working = asyncio.create_task(
                asyncio.to_thread(spool, config, "backup", str(tmp_path / "backup"))
            )
            number = STAYING + PASSING
            while not working.done():
                number += 1
                waiting += await store_message(one.store, number, body=body(number))
                await one.store.settle([Finish(waiting.pop(0))])
            return await working, number

    status, last = asyncio.run(run())
    assert status == 0
    assert last > STAYING + PASSING + 10, "the relay waited for the backup"
    found = saved(tmp_path / "backup")
    assert found.keys() >= set(range(1, STAYING + 1))
    assert all(octets == body(number) for number, octets in found.items())


def test_a_message_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = Spool(tmp_path / "one" / "spool", backend=Backend.REDIS)
    config = configuration_of(one)

    async def filled() -> None:
        async with one:
            await fill(one.store)

    asyncio.run(filled())
    assert one.redis is not None
    chunk = f"message {message_id(2)} 000003"
    assert shared_server().ask("HDEL", f"{one.redis.prefix}values:0", chunk) == b":1\r\n"
    shared_server().ask("ZREM", f"{one.redis.prefix}keys:0", chunk)
    assert spool(config, "backup", str(tmp_path / "backup"), "--json") == 1
    assert json.loads(capsys.readouterr().out)["unusable"] == 1
    assert saved(tmp_path / "backup").keys() == {1}
