"""A repair of a LevelDB spool as an operator calls it: what it changes, and what one cut short leaves."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.builders import body_of, message_id, store_message
from tests.store.damage_worker import database_of
from tests.store.spools import Spool
from tests.store.test_leveldb_damage import body, flip_content, recipient
from tests.store.test_spool_check import mixed, state_of
from tests.support.command import PROGRAM, Ran, ran
from zonerelay import durable
from zonerelay.store import records
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError
from zonerelay.store.leveldb import offline as repair_module
from zonerelay.store.leveldb.damage.directory import MARK_NAME
from zonerelay.store.leveldb.damage.format import identities_in
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.store.leveldb.offline import repair_leveldb

Command = Callable[..., Ran]


@pytest.fixture
def spool_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    config = tmp_path / "zonerelay.toml"
    config.write_text(f'[spool]\npath = "{tmp_path}/spool"\nmin_free_space = "0"\n')
    return lambda *words: ran(capsys, "spool", *words, "--config", str(config))


def text(number: int) -> bytes:
    return body(number) + b"\r\n"


async def fill(path: Path, count: int = 60) -> None:
    async with Spool(path) as spool:
        for number in range(1, count + 1):
            await store_message(spool.store, number, recipient(number), body=text(number))
        await spool.reopen()


def found_in(path: Path) -> dict[int, bytes]:
    """The messages of all deliveries, with their bodies."""

    async def read() -> dict[int, bytes]:
        async with Spool(path) as spool:
            ids = {each.message_id async for each in spool.store.scan()}
            return {int(each, 16): await body_of(spool.store, each) for each in ids}

    return asyncio.run(read())


def test_a_look_changes_nothing_and_the_repair_does_as_said(tmp_path: Path, spool_command: Command) -> None:
    asyncio.run(fill(tmp_path / "spool"))
    flip_content(tmp_path / "spool", body(30)[1000:1100])
    before = state_of(tmp_path / "spool")
    files = database_of(tmp_path / "spool")
    looked = spool_command("repair", "--json")
    assert looked.status == 1
    assert state_of(tmp_path / "spool") == before
    assert not left_beside(tmp_path)
    done = spool_command("repair", "--yes", "--json")
    assert done.status == 1
    meant, report = json.loads(looked.out), json.loads(done.out)
    changing = ("done", "salvage", "kept")
    assert {k: v for k, v in report.items() if k not in changing} == {
        k: v for k, v in meant.items() if k not in changing
    }
    assert (report["before"], report["after"]) == (60, 60 - report["salvaged"])
    (kept,) = map(Path, report["kept"])
    assert database_of(kept) == files
    assert spool_command("check").status == 0
    there = found_in(tmp_path / "spool")
    lost = {int(each, 16) for each in identities_in(" ".join(report["lost"]).encode())}
    assert 30 in lost
    assert len(lost) <= 3
    assert there == {number: text(number) for number in range(1, 61) if number not in lost}
    incomplete = {int(path.stem, 16) for path in Path(report["salvage"], "incomplete").glob("*.eml")}
    assert incomplete == lost


def left_beside(home: Path) -> list[Path]:
    """What a repair or a check may have made there."""
    return [path for name in ("salvage*", "spool?*", ".*") for path in home.glob(name)]


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST-*"])
def test_a_repair_that_put_everything_back_exits_0(tmp_path: Path, spool_command: Command, name: str) -> None:
    asyncio.run(fill(tmp_path / "spool"))
    (path,) = (tmp_path / "spool").glob(name)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert spool_command("check").status == 1
    done = spool_command("repair", "--yes", "--json")
    report = json.loads(done.out)
    assert (report["before"], report["after"], report["lost"], done.status) == (60, 60, [], 0)
    assert len(report["noted"]) == 1
    assert spool_command("check").status == 0
    assert found_in(tmp_path / "spool") == {number: text(number) for number in range(1, 61)}


def test_what_is_whole_in_the_salvage_is_taken_by_an_import(tmp_path: Path, spool_command: Command) -> None:
    """A message that has lost the record of its delivery is not sent: whether it was before is not known."""
    asyncio.run(fill(tmp_path / "spool"))
    flip_content(tmp_path / "spool", recipient(30).partition("@")[0].encode())
    report = json.loads(spool_command("repair", "--yes", "--json").out)
    there, salvage = found_in(tmp_path / "spool"), Path(report["salvage"])
    aside = {int(path.stem, 16): path.read_bytes() for path in salvage.glob("*.eml")}
    assert 30 in aside
    # The record of the first message stands in the block of the last deliveries.
    assert there | aside == {number: text(number) for number in range(2, 61)}
    assert not there.keys() & aside.keys()
    assert spool_command("import", str(salvage)).status == 0
    assert found_in(tmp_path / "spool") == there | aside


def test_a_removal_in_damaged_octets_is_counted_and_named(tmp_path: Path, spool_command: Command) -> None:
    asyncio.run(_mixed(tmp_path / "spool"))
    db = plyvel.DB(str(tmp_path / "spool"))
    four = message_id(4).encode()
    (key, value) = next((k, v) for k, v in db if k.startswith(b"delivery-zone other%20zone " + four))
    # What the damaged removal of a delivery leaves: its record is back, the count says that it has left.
    db.put(key.replace(b"e4@", b"e0@"), value)
    db.close()
    (tmp_path / "spool" / MARK_NAME).unlink()
    report = json.loads(spool_command("repair", "--yes", "--json").out)
    assert (report["before"], report["after"], report["lost"]) == (11, 11, [])
    (repeats,) = report["repeats"]
    assert repeats.startswith(f"1 of message {message_id(4)}, including those to e0@late.example, e4@")
    assert spool_command("check").status == 0


async def _mixed(path: Path) -> None:
    async with Spool(path) as spool:
        await mixed(spool.store)


def test_a_sound_spool_and_one_of_an_older_release_stay_so(tmp_path: Path, spool_command: Command) -> None:
    asyncio.run(_mixed(tmp_path / "spool"))
    (tmp_path / "spool" / MARK_NAME).unlink()  # older releases wrote none
    before = rows_of(tmp_path / "spool", tmp_path / "one")
    done = spool_command("repair", "--yes")
    assert (done.status, done.err) == (0, "")
    assert "10 before, 10 after" in done.out
    assert rows_of(tmp_path / "spool", tmp_path / "other") == before


def rows_of(spool: Path, copy: Path) -> dict[bytes, bytes]:
    shutil.copytree(spool, copy)
    db = plyvel.DB(str(copy))
    rows = {key: value for key, value in db if key != records.META_LAST_ID}
    db.close()
    return rows


def test_the_spools_of_all_workers_are_repaired(tmp_path: Path, spool_command: Command) -> None:
    for name in ("spool", "spool/01", "spool/02"):
        asyncio.run(fill(tmp_path / name))
        flip_content(tmp_path / name, body(30)[1000:1100])
    report = json.loads(spool_command("repair", "--yes", "--json").out)
    assert (report["before"], report["after"]) == (180, 180 - report["salvaged"])
    assert [Path(each).name.partition(".")[0] for each in report["kept"]] == ["spool", "spool-01", "spool-02"]
    assert spool_command("check").status == 0


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        (b"an invoice", b"1", "is not a zonerelay spool: its first key is b'an invoice'"),
        (records.META_FORMAT, b"2", "has format version 2"),
    ],
)
def test_what_is_no_spool_of_this_release_is_left_alone(
    tmp_path: Path, spool_command: Command, key: bytes, value: bytes, text: str
) -> None:
    path = tmp_path / "spool"
    path.mkdir()
    assert spool_command("repair", "--yes").status == 0
    assert not list(path.iterdir())
    db = plyvel.DB(str(path), create_if_missing=True)
    db.put(key, value)
    db.close()
    files = database_of(path)
    refused = spool_command("repair", "--yes")
    assert refused.status == 2
    assert text in refused.err
    assert database_of(path) == files
    assert not (path / ".repair").exists()


def mend(spool: Path, *, carry_out: bool = True) -> None:
    repair_leveldb(spool, spool.parent, lambda _: None, lambda done, total: None, carry_out=carry_out)


# --- cut short


class _Killed(BaseException):
    """As a kill -9 does: nothing is tidied up behind it."""


class _Kills:
    """Kills at one of the steps of the exchange, which it counts."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.step = 0

    def during(self, patched: pytest.MonkeyPatch) -> None:
        patched.setattr(os, "link", self._counted(os.link))
        patched.setattr(Path, "unlink", self._counted(Path.unlink))
        patched.setattr(shutil, "rmtree", self._counted(shutil.rmtree))
        for name in ("sync_directory", "write"):
            patched.setattr(durable, name, self._counted(getattr(durable, name)))

    def _counted(self, function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            self.step += 1
            if self.step > self._at:
                raise _Killed
            return function(*arguments, **named)

        return call


async def test_the_next_repair_ends_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Spool(tmp_path / "spool") as spool:
        for number in range(1, 4):
            await store_message(spool.store, number)
    with monkeypatch.context() as patched:
        patched.setattr(repair_module, "_exchange", _killed)
        with pytest.raises(_Killed):
            mend(tmp_path / "spool")
    at, ended = 0, False
    while not ended:
        path = tmp_path / f"{at}" / "spool"
        shutil.copytree(tmp_path / "spool", path)
        with monkeypatch.context() as patched:
            _Kills(at).during(patched)
            try:
                mend(path)
                ended = True
            except _Killed:
                pass
        await _refused_and_unchanged(path)
        mend(path)
        assert (await asyncio.to_thread(found_in, path)).keys() == {1, 2, 3}, at
        assert not (path / ".repair").exists()
        at += 1
    assert at > 12


def _killed(spool: Path, new: Path) -> None:
    raise _Killed


async def _refused_and_unchanged(path: Path) -> None:
    """A relay that is started in between takes no mail that the exchange would take away."""
    if not (path / ".repair" / "ready").exists():
        return
    before = state_of(path)
    with pytest.raises(StoreOpenError, match=r"a repair of it was interrupted.*spool repair --yes"):
        await Spool(path).open()
    assert state_of(path) == before


def test_mail_after_a_repair_survives_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(fill(tmp_path / "spool", 3))
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", _not_below(tmp_path / "spool" / ".repair"))
        with pytest.raises(_Killed):
            mend(tmp_path / "spool")

    async def more() -> None:
        async with Spool(tmp_path / "spool") as spool:
            await store_message(spool.store, 100)

    asyncio.run(more())
    mend(tmp_path / "spool")
    assert found_in(tmp_path / "spool").keys() == {1, 2, 3, 100}


def _not_below(work: Path) -> Callable[..., None]:
    """Killed with everything in place, while the rest of the repair is removed."""
    remove = shutil.rmtree

    def call(path: Path, *, ignore_errors: bool = False) -> None:
        if path == work and (work / "new").exists():
            remove(work / "old")
            raise _Killed
        remove(path, ignore_errors=ignore_errors)

    return call


def test_a_full_disk_is_known_before_any_write_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(fill(tmp_path / "spool", 3))
    before = state_of(tmp_path / "spool")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(StoreFullError, match="only 977 KB are free"):
        mend(tmp_path / "spool")
    assert state_of(tmp_path / "spool") == before


def test_a_failed_repair_leaves_the_spool_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(fill(tmp_path / "spool", 3))
    before = state_of(tmp_path / "spool")
    monkeypatch.setattr(repair_module, "repair_database", lambda path: "failed with status -6: ")
    with pytest.raises(StoreError, match=r"failed with status -6.*nothing was changed"):
        mend(tmp_path / "spool")
    assert state_of(tmp_path / "spool") == before


@pytest.mark.parametrize("words", [("repair",), ("repair", "--yes"), ("check",)])
def test_control_c_leaves_nothing_behind(tmp_path: Path, spool_command: Command, words: list[str]) -> None:
    asyncio.run(fill(tmp_path / "spool", 800))
    before = state_of(tmp_path / "spool")
    command = [sys.executable, "-c", PROGRAM, "spool", *words, "--config", f"{tmp_path}/zonerelay.toml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        while not (tmp_path / "spool" / ".repair" / "new").exists() and not left_beside(tmp_path):
            assert running.poll() is None
            time.sleep(0.001)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert b"Traceback" not in said
    assert state_of(tmp_path / "spool") == before
    assert not left_beside(tmp_path)


# --- whose it is


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_a_spool_that_root_repairs_stays_its_owners(tmp_path: Path, spool_command: Command) -> None:
    asyncio.run(fill(tmp_path / "spool"))
    flip_content(tmp_path / "spool", body(30)[1000:1100])
    for path in (tmp_path, tmp_path / "spool", *(tmp_path / "spool").rglob("*")):
        os.chown(path, 12345, 12346)
    report = json.loads(spool_command("repair", "--yes", "--json").out)
    (kept,) = map(Path, report["kept"])
    for place in (tmp_path / "spool", kept, Path(report["salvage"])):
        for path in (place, *place.rglob("*")):
            assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346), path
            assert not path.stat().st_mode & 0o007, path
