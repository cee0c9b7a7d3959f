"""Backups that older releases have made are restored, and this release's are made in the same way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.store.spools import Spool
from tests.upgrades import backup, fixtures, mail
from tests.upgrades.engines import unpack_tar
from tests.upgrades.test_guard import compare
from zonerelay.cli.main import main

FILES = sorted(fixtures.DIRECTORY.glob(f"*/{backup.FILE}"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_backup_of_an_older_release_is_restored(path: Path, tmp_path: Path) -> None:
    unpack_tar(path.read_bytes(), tmp_path / "backup")
    home = tmp_path / "home"
    config = backup.configured(home)
    assert main(["spool", "restore", str(tmp_path / "backup"), "--config", str(config)]) == 0

    async def read() -> mail.Expected:
        async with Spool(home / "spool") as spool:
            return await mail.read_queue(spool.store)

    expected, found = fixtures.expected(path.parent.name), asyncio.run(read())
    assert found.keys() == expected.keys()
    assert mail.lacking(expected, found) == []
    assert (home / "redact.key").read_bytes() == b"k" * 32
    assert (home / "mta-sts" / "example.com.json").exists()
    assert len((home / "imported").read_text()) == 33


def test_a_backup_is_made_as_in_the_newest_fixture(tmp_path: Path) -> None:
    made = backup.make(tmp_path / "home")
    unpack_tar((fixtures.newest() / backup.FILE).read_bytes(), tmp_path / "before")
    compare("backup", backup.records(tmp_path / "before"), backup.records(made))
