"""Backups that older releases have made are restored, and this release's are made in the same way."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.store.spools import Spool
from tests.upgrades import backup, fixtures, mail
from tests.upgrades.engines import unpack_tar
from tests.upgrades.test_fixtures import compare
from zonerelay.cli.main import main
from zonerelay.config.credentials import identities
from zonerelay.history.reader import Histories
from zonerelay.queue.operator.journal import Act, Journal, JournalEntry
from zonerelay.queue.orders.order import Order
from zonerelay.store.contract import StoredKey

FILES = sorted(fixtures.DIRECTORY.glob(f"*/{backup.FILE}"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_a_backup_of_an_older_release_is_restored(path: Path, tmp_path: Path) -> None:
    unpack_tar(path.read_bytes(), tmp_path / "backup")
    home = tmp_path / "home"
    config = backup.configured(home)
    assert main(["spool", "restore", str(tmp_path / "backup"), "--config", str(config)]) == 0

    async def read() -> tuple[mail.Expected, list[tuple[str, StoredKey]]]:
        async with Spool(home / "spool") as spool:
            return await mail.read_queue(spool.store), list((await spool.store.kept_keys())[0])

    expected, (found, keys) = fixtures.expected(path.parent.name), asyncio.run(read())
    assert found.keys() == expected.keys()
    assert mail.lacking(expected, found) == []
    assert (home / "redact.key").read_bytes() == b"k" * 32
    assert (home / "mta-sts" / "example.com.json").exists()
    assert len((home / "imported").read_text()) == 33
    if fixtures.age(path.parent.name) >= (0, 2, 0):
        assert identities.read(home / "identities.json") == (backup.TOKEN,)
        orders = (home / "orders" / "orders.json").read_bytes()
        assert msgspec.json.decode(orders, type=list[Order]) == backup.ORDERS
        act, entries = asyncio.run(_noted(home / "acts" / "00"))
        assert (act.verb, act.who, act.reason, act.changed) == ("hold", "root", "a look", 1)
        assert entries == [backup.held()]
        with Histories(home / "history", None) as history:
            told = history.records("18bcfe5680000100")
        assert [(each.at, each.name, each.fields) for each in told] == backup.EVENTS
        assert keys == mail.KEYS
        kept = backup.captured(home).read("18bcfe5680000100", mark=False)
        assert kept is not None
        assert (kept[0].recipients, kept[1]) == (["one@example.net"], backup.CAPTURED)
        assert asyncio.run(_used(home)) == [1, 2, 300]


async def _used(home: Path) -> list[int]:
    quotas = backup.quotas(home)
    try:
        return [level.used for level in (await quotas.usage("shop")).levels(backup.RAILS)]
    finally:
        await quotas.close()


async def _noted(directory: Path) -> tuple[Act, list[JournalEntry]]:
    journal = Journal(directory, mail.clock())
    noted = [entry async for piece in journal.entries(backup.ACT.id) for entry in piece]
    return await journal.find(backup.ACT.id), noted


def test_a_backup_is_made_as_in_the_newest_fixture(tmp_path: Path) -> None:
    made = backup.make(tmp_path / "home")
    unpack_tar((fixtures.newest() / backup.FILE).read_bytes(), tmp_path / "before")
    compare("backup", backup.records(tmp_path / "before"), backup.records(made))
