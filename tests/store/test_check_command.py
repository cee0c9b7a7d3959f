"""`zonerelay spool check` and `repair` where the file system, the terminal or the relay is not as usual."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.builders import message_id
from tests.store.spools import Spool
from tests.store.test_leveldb_damage import body, flip_content, recipient
from tests.store.test_leveldb_repair import fill
from tests.store.test_spool_check import LOCAL, mixed
from tests.support import mounts
from tests.support.command import PROGRAM
from zonerelay.cli.main import main
from zonerelay.cli.spool import home_files
from zonerelay.cli.terminal import output
from zonerelay.config.settings import Backend
from zonerelay.history.database import insert, open_for_writing


def configured(home: Path, backend: Backend = Backend.LEVELDB) -> Path:
    config = home / "zonerelay.toml"
    config.write_text(f'[spool]\nbackend = "{backend.value}"\npath = "{home}/spool"\nmin_free_space = "0"\n')
    return config


def in_namespace(script: str, *words: str | Path, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, mounts.__file__, "sh", "-ec", script, "sh", *words],
        env={**os.environ, "COLUMNS": str(columns)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


CHECK = f'"$1" -c "{PROGRAM}" spool check --config "$2"'


@pytest.mark.parametrize("backend", LOCAL)
def test_a_spool_on_a_read_only_mount_is_checked(tmp_path: Path, backend: Backend) -> None:
    async def filled() -> None:
        async with Spool(tmp_path / "spool", backend=backend) as spool:
            await mixed(spool.store)

    asyncio.run(filled())
    config, elsewhere = configured(tmp_path, backend), tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = (
        'mount -t tmpfs -o size=50m none "$4"; mount --bind "$3" "$3"; mount -o remount,bind,ro "$3";'
        f' TMPDIR="$4" {CHECK} --json; {CHECK} --tmp "$4" --json; ls -A "$4"'
    )
    # Beneath the mount that turns read-only, and so on a file system of its own.
    ran = in_namespace(script, sys.executable, config, tmp_path / "spool", elsewhere)
    assert ran.returncode == 0, ran.stderr
    found, end = json.JSONDecoder().raw_decode(ran.stdout)
    again, _ = json.JSONDecoder().raw_decode(ran.stdout[end:].lstrip())
    assert found["clean"]
    assert again["clean"]
    assert (found["messages"], found["deliveries"]) == (again["messages"], again["deliveries"]) == (4, 10)
    assert ran.stdout.endswith("}\n"), "something is left in the place for temporary files"


def test_a_copy_without_room_is_not_begun(tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "spool", 300))
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=1m none "$3"; {CHECK} --tmp "$3" || status=$?; ls -A "$3"; exit $status'
    ran = in_namespace(script, sys.executable, configured(tmp_path), small)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"free in {small}/" in ran.stderr
    assert "use a directory on the same file system" in ran.stderr


def test_a_history_that_cannot_be_read_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path)
    asyncio.run(fill(tmp_path / "spool"))
    file = tmp_path / "history" / "00.db"
    with contextlib.closing(open_for_writing(file)) as database:
        insert(database, 1, [(float(each), "accepted", {"id": f"{each:016x}"}) for each in range(5000)])
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    command = ["spool", "check", "--json", "--config", str(config)]
    assert main(command) == 0
    capsys.readouterr()
    middle = file.stat().st_size // 2 // 4096 * 4096
    with file.open("r+b") as opened:
        opened.seek(middle)
        opened.write(os.urandom(4096))
    assert main(command) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["fault"], found["where"]) == ("beside the spool", str(file))
    assert "No mail depends on it" in found["what"]


@pytest.mark.parametrize("command", ["check", "backup"])
@pytest.mark.parametrize("name", ["acts/0001.log", "history/01.db"])
def test_a_file_that_the_relay_removes_meanwhile_is_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
) -> None:
    asyncio.run(fill(tmp_path / "spool", 3))
    gone = tmp_path / name
    gone.parent.mkdir()
    listed = home_files._files

    def and_removed(path: Path) -> list[Path]:
        found = listed(path)
        return [*found, gone] if path == gone.parent else found

    monkeypatch.setattr(home_files, "_files", and_removed)
    words = ["spool", command, *([str(tmp_path / "copy")] if command == "backup" else [])]
    assert main([*words, "--config", str(configured(tmp_path))]) == 0, capsys.readouterr()


def test_a_running_relay_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(fill(tmp_path / "spool", 3))
    config = configured(tmp_path)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control.sock"))
        control.listen()
        assert main(["spool", "repair", "--yes", "--config", str(config)]) == 2
    assert f"the relay is running as process {os.getpid()}" in capsys.readouterr().err


def test_the_tables_fit_into_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PIPE_WIDTH", 80)
    asyncio.run(fill(tmp_path / "spool"))
    flip_content(tmp_path / "spool", body(30)[1000:1100])
    flip_content(tmp_path / "spool", recipient(20).partition("@")[0].encode())
    config = str(configured(tmp_path))
    for words in (["check"], ["repair"], ["repair", "--yes"]):
        assert main(["spool", *words, "--config", config]) == 1
        said = capsys.readouterr().out
        assert message_id(20) in said, words
        lines = [line for line in said.splitlines() if not line.startswith("zonerelay spool import /")]
        assert not [line for line in lines if len(line) > 80]
    assert f"zonerelay spool import {tmp_path}/salvage-" in said


def test_the_shelf_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "zonerelay.toml"
    config.write_text(
        f'[spool]\nbackend = "memory"\npath = "{tmp_path}/spool"\nshelve = "{tmp_path}/shelf"\n'
    )
    for words in (["check"], ["repair"], ["backup", f"{tmp_path}/backup"]):
        assert main(["spool", *words, "--config", str(config)]) == 2
        assert "its shelf is a single file" in capsys.readouterr().err


def test_a_spool_that_is_a_mount_of_its_own_keeps_the_old_files_in_it(tmp_path: Path) -> None:
    asyncio.run(fill(tmp_path / "filled"))
    flip_content(tmp_path / "filled", body(30)[1000:1100])
    (tmp_path / "spool").mkdir()
    script = (
        'mount -t tmpfs -o size=200m none "$4"; cp -a "$3/." "$4";'
        f' "$1" -c "{PROGRAM}" spool repair --yes --json --config "$2" || status=$?; {CHECK}; exit $status'
    )
    ran = in_namespace(script, sys.executable, configured(tmp_path), tmp_path / "filled", tmp_path / "spool")
    assert ran.returncode == 1, ran.stderr
    report, _ = json.JSONDecoder().raw_decode(ran.stdout)
    assert report["done"]
    assert [Path(each).parent for each in report["kept"]] == [tmp_path / "spool"]
    assert "clean" in ran.stdout
