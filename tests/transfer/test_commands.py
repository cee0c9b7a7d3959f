"""`zonerelay spool export` and `import` as an operator calls them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.builders import store_message
from tests.store.spools import Spool
from zonerelay.cli.main import main


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a stopped relay with three messages in its spool."""
    home = tmp_path / "home"
    home.mkdir()
    path = home / "zonerelay.toml"
    path.write_text(f'[spool]\npath = "{home}/spool"\nmin_free_space = "0"\n')
    asyncio.run(_fill(home / "spool"))
    return path


async def _fill(path: Path) -> None:
    async with Spool(path) as spool:
        for number in (1, 2, 3):
            await store_message(spool.store, number, f"to@{number}.example.net", held=number == 3)


def spool(config: Path, *words: str) -> int:
    return main(["spool", *words, "--config", str(config)])


def test_mail_moves_to_another_relay(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "mail.tar")
    assert spool(config, "export", target, "--state", "held") == 0
    assert capsys.readouterr().out == f"1 message with 1 delivery in {target}.\n"
    other = tmp_path / "other.toml"
    other.write_text(f'[spool]\npath = "{tmp_path}/b/spool"\nmin_free_space = "0"\n')
    assert spool(other, "import", target) == 0
    assert capsys.readouterr().out == "1 message with 1 delivery imported.\n"
    assert spool(other, "import", target, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "messages": 0, "deliveries": 0, "already": 1, "unusable": 0,
    }  # fmt: skip


def test_a_relay_that_runs_is_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(config.parent / "control.sock"))
        control.listen()
        assert spool(config, "export", str(tmp_path / "mail")) == 2
    assert f"running as process {os.getpid()}" in capsys.readouterr().err
    assert not (tmp_path / "mail").exists()


def test_workers_that_are_left_are_named(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (config.parent / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]
        ) as left:
            assert spool(config, "export", str(tmp_path / "mail")) == 2
            assert str(left.pid) in capsys.readouterr().err
            left.kill()


def test_the_room_is_looked_at_first(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "mail")
    assert spool(config, "export", target) == 0
    other = tmp_path / "other.toml"
    other.write_text(f'[spool]\npath = "{tmp_path}/b/spool"\nmin_free_space = "1 TB"\n')
    capsys.readouterr()
    assert spool(other, "import", target) == 2
    assert "needs 12 KB, 0 B free" in capsys.readouterr().err
    assert not (tmp_path / "b" / "spool").exists()
