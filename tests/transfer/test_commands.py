"""`zonerelay spool export` and `import` as an operator calls them."""

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.builders import message_id, store_message
from tests.store.spools import Spool
from tests.support import slimta, zonemta
from tests.support.command import PROGRAM
from tests.support.ports import free_port, wait_until
from tests.transfer.migrations import configured, spool
from zonerelay.cli.main import main
from zonerelay.store.contract import Finish


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a stopped relay with three messages in its spool."""
    config = configured(tmp_path / "home")
    asyncio.run(_fill(tmp_path / "home" / "spool"))
    return config


async def _fill(path: Path) -> None:
    async with Spool(path) as spool:
        for number in (1, 2, 3):
            await store_message(spool.store, number, f"to@{number}.example.net", held=number == 3)


def test_a_stopped_relay_renders_mail(config: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def cat(number: int, *words: str) -> tuple[int, bytes, bytes]:
        status = main(["queue", "cat", message_id(number), *words, "--config", str(config)])
        return status, *capsysbinary.readouterr()

    assert cat(2) == (0, b"Subject: x\r\n\r\nhello\r\n", b"")
    config.write_text(config.read_text() + '[[zone]]\nname = "default"\nheader_add = ["X-Sent: yes"]\n')
    status, sent, said = cat(2, "--as-sent")
    assert (status, sent) == (0, b"X-Sent: yes\r\nSubject: x\r\n\r\nhello\r\n")
    assert said.startswith(b"As sent by zone default with the envelope sender ")
    status, sent, said = cat(9)
    assert (status, sent) == (1, b"")
    assert b"is not in the queue" in said


def test_what_cannot_be_read_is_told_in_words(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There were numbers of errors in brackets, and of a server only that a call failed."""
    assert spool(config, "restore", "/no/such") == 2
    place = "/no/such is not a zonerelay backup: /no/such/backup.json"
    assert capsys.readouterr().err == f"zonerelay: {place}: No such file or directory\n"
    assert spool(config, "backup", f"{config}/backup") == 2
    told = capsys.readouterr().err
    assert told.startswith("zonerelay: the backup failed: /")
    assert told.endswith(": Not a directory\n")
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert spool(config, "import", "--from", "slimta-redis", url) == 2
    assert capsys.readouterr().err == f"zonerelay: {url}: Connection refused\n"


def test_mail_moves_to_other_relay(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "mail.tar")
    assert spool(config, "export", target, "--state", "held") == 0
    assert capsys.readouterr().out == f"1 message with 1 delivery in {target}.\n"
    other = configured(tmp_path / "b")
    assert spool(other, "import", target) == 0
    assert capsys.readouterr().out == "1 message with 1 delivery imported.\n"
    assert spool(other, "import", target, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "messages": 0, "deliveries": 0, "already": 1, "unusable": 0,
    }  # fmt: skip


PAGE = Path(__file__).parents[2] / "docs" / "start" / "moving-in.md"


def test_page_shows_what_is_printed(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the systems that need neither root nor a server; the others were carried out by hand."""
    (tmp_path / "slimta").mkdir()
    with slimta.fill_queue("disk", str(tmp_path / "slimta")) as filling:
        assert filling.wait(60) == 0
    with zonemta.fill_queue(tmp_path / "zonemta") as filling:
        assert filling.wait(60) == 0
    for system, shown, place in (
        ("slimta-disk", "/var/spool/slimta/queue", "slimta"),
        ("zonemta", "./data/queue", "zonemta"),
    ):
        assert spool(config, "import", "--from", system, str(tmp_path / place)) == 0
        printed = f"    $ zonerelay spool import --from {system} {shown}\n    {capsys.readouterr().out}"
        assert printed in PAGE.read_text()


def test_a_relay_that_runs_is_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(config.parent / "control.sock"))
        control.listen()
        assert spool(config, "export", str(tmp_path / "mail")) == 2
    assert f"running as process {os.getpid()}" in capsys.readouterr().err
    assert not (tmp_path / "mail").exists()


def test_workers_left_are_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (config.parent / "supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()]
        ) as left:
            assert spool(config, "export", str(tmp_path / "mail")) == 2
            assert str(left.pid) in capsys.readouterr().err
            left.kill()


def test_a_killed_import_adds_everything_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And again, when all of it has been delivered."""
    count = 1500
    config, other = (configured(tmp_path / name) for name in ("home", "other"))
    asyncio.run(_fill_with(tmp_path / "home" / "spool", count))
    target = tmp_path / "mail"
    assert spool(config, "export", str(target)) == 0
    command = [sys.executable, "-c", PROGRAM]
    register = tmp_path / "other" / "imported"
    for lines in (0, 1, 100, 400, 700):  # that it has when the import is killed
        with subprocess.Popen([*command, "spool", "import", str(target), "--config", str(other)]) as process:
            assert wait_until(
                lambda lines=lines: register.exists() and register.stat().st_size >= 33 * lines,  # type: ignore[misc]
                timeout=30,
                interval=0.001,
            )
            process.kill()
        assert register.stat().st_size < 33 * count
    assert spool(other, "import", str(target)) == 0
    assert asyncio.run(_take(tmp_path / "other" / "spool")) == count
    capsys.readouterr()
    assert spool(other, "import", str(target)) == 0
    assert capsys.readouterr().out.startswith("0 messages")


async def _fill_with(path: Path, count: int) -> None:
    async with Spool(path) as opened:
        await asyncio.gather(*(store_message(opened.store, number) for number in range(1, count + 1)))


async def _take(path: Path) -> int:
    """Deliver all mail, and count it by its ids."""
    async with Spool(path) as opened:
        found = [each async for each in opened.store.scan()]
        await opened.store.settle([Finish(each) for each in found])
    assert len({each.message_id for each in found}) == len(found)
    return len(found)


def test_the_spool_stays_the_relays_own(config: Path, tmp_path: Path) -> None:
    """Root imports for it, where the source is root's."""
    target = tmp_path / "mail"
    assert spool(config, "export", str(target)) == 0
    home = tmp_path / "other"
    other = configured(home)
    if os.geteuid() == 0:
        os.chown(home, 1, 1)
    assert spool(other, "import", str(target)) == 0
    made = [each for each in home.rglob("*") if each != other]
    assert len(made) > 5
    assert {each.stat().st_uid for each in made} == {home.stat().st_uid}
    assert {each.stat().st_mode & 0o077 for each in target.iterdir()} == {0}


def test_room_is_looked_at_first(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "mail")
    assert spool(config, "export", target) == 0
    other = configured(tmp_path / "b", min_free_space="1 TB")
    capsys.readouterr()
    assert spool(other, "import", target) == 2
    assert "requires 12 KB, but only 0 B are free" in capsys.readouterr().err
    assert not (tmp_path / "b" / "spool").exists()
