"""A power cut straight after a command has exited with 0: everything that it said is there.

Each test makes what the command starts from durable first, and looks at what the disk has at that moment.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.store.builders import store_message
from tests.support.crew import run
from tests.support.power import Disk, needs_a_disk
from tests.support.process import RelayProcess
from tests.transfer.migrations import configured, contents, queue
from zonerelay.cli.main import main
from zonerelay.config.credentials import identities
from zonerelay.config.credentials.file import parse
from zonerelay.history.database import insert, open_for_reading, open_for_writing
from zonerelay.queue.orders.order import SUSPEND, Order

pytestmark = needs_a_disk
MESSAGES = 5
OWNER = 12345
ORDER = Order(id="2620552a", effect=SUSPEND, reason="ticket 42", who="ann", since=1.0, everything=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with Disk(tmp_path / "power").plugged_in() as disk:
        yield disk


def relay_home(home: Path) -> Path:
    """Configuration of a relay that is stopped, with mail and one of everything that lies beside a spool."""
    config = configured(home, "leveldb")
    write_beside(home)

    async def fill() -> None:
        async with queue(config) as store:
            for number in range(1, MESSAGES + 1):
                await store_message(store, number * 256, f"to-{number}@example.net")

    asyncio.run(fill())
    return config


def write_beside(home: Path) -> None:
    for name in ("orders", "acts", "mta-sts", "refresh-tokens"):
        (home / name).mkdir()
    (home / "orders" / "orders.json").write_bytes(msgspec.json.encode([ORDER]))
    (home / "acts" / "0000000a.json").write_text("{}")
    (home / "mta-sts" / "a.example.json").write_text("{}")
    (home / "refresh-tokens" / "account.json").write_text("secret")
    (home / "redact.key").write_text("ab" * 32 + "\n")
    (home / "imported").write_text("ab" * 16 + "\n")
    with contextlib.closing(open_for_writing(home / "history" / "00.db")) as database:
        insert(database, 1, [(1.0, "accepted", {"id": "00"})])


def check_beside(home: Path) -> None:
    assert msgspec.json.decode((home / "orders" / "orders.json").read_bytes(), type=list[Order]) == [ORDER]
    assert (home / "acts" / "0000000a.json").read_text() == "{}"
    assert (home / "mta-sts" / "a.example.json").read_text() == "{}"
    assert (home / "refresh-tokens" / "account.json").read_text() == "secret"
    assert (home / "redact.key").read_text() == "ab" * 32 + "\n"
    assert (home / "imported").read_text() == "ab" * 16 + "\n"
    with contextlib.closing(open_for_reading(home / "history" / "00.db")) as database:
        assert database.execute("SELECT count(*) FROM block").fetchone() == (1,)


def spool(config: Path, *words: str) -> int:
    return main(["spool", *words, "--config", str(config)])


def check_moved(config: Path) -> None:
    check_beside(config.parent)
    assert len(asyncio.run(contents(config))) == MESSAGES


def test_migrate(tmp_path: Path, disk: Disk) -> None:
    source = relay_home(tmp_path / "old")
    target = configured(disk.place / "new", "leveldb")
    os.sync()
    assert spool(source, "migrate", "--to", str(target)) == 0
    with disk.cut():
        check_moved(target)


def test_backup_and_restore(tmp_path: Path, disk: Disk) -> None:
    source = relay_home(tmp_path / "old")
    target = configured(disk.place / "new", "leveldb")
    os.sync()
    assert spool(source, "backup", str(disk.place / "deep" / "backup")) == 0
    with disk.cut():
        elsewhere = configured(tmp_path / "elsewhere", "leveldb")
        assert spool(elsewhere, "restore", str(disk.place / "deep" / "backup")) == 0
        check_moved(elsewhere)
    assert spool(target, "restore", str(disk.place / "deep" / "backup")) == 0
    with disk.cut():
        check_moved(target)
        assert not list(target.parent.glob("restore-*"))


@pytest.mark.parametrize("verb", ["migrate", "restore"])
def test_what_root_has_made_is_the_relay_s_own(tmp_path: Path, disk: Disk, verb: str) -> None:
    """A relay of another user could not read it, and would not start."""
    source = relay_home(tmp_path / "old")
    target = configured(disk.place / "new", "leveldb")
    os.chown(target.parent, OWNER, OWNER)
    assert spool(source, "backup", str(tmp_path / "backup")) == 0
    os.sync()
    if verb == "migrate":
        assert spool(source, verb, "--to", str(target)) == 0
    else:
        assert spool(target, verb, str(tmp_path / "backup")) == 0
    with disk.cut():
        check_moved(target)
        places = [target.parent / name for name in ("orders", "acts", "mta-sts", "refresh-tokens", "history")]
        made = [
            target.parent / "redact.key",
            *places,
            *(each for place in places for each in place.iterdir()),
        ]
        assert {str(each): each.stat().st_uid for each in made} == {str(each): OWNER for each in made}


def test_export_and_import(tmp_path: Path, disk: Disk) -> None:
    source = relay_home(tmp_path / "old")
    target = configured(disk.place / "new", "leveldb")
    os.sync()
    for name in ("mail", "mail.tar"):
        assert spool(source, "export", str(disk.place / name)) == 0
        with disk.cut():
            assert (
                spool(configured(tmp_path / f"of-{name}", "leveldb"), "import", str(disk.place / name)) == 0
            )
    assert spool(target, "import", str(disk.place / "mail")) == 0
    with disk.cut():
        assert len(asyncio.run(contents(target))) == MESSAGES
        assert len((target.parent / "imported").read_bytes()) == MESSAGES * 33


def test_users_and_tokens(disk: Disk) -> None:
    config = configured(disk.place / "home", "leveldb")
    users = disk.place / "home" / "users"
    os.sync()
    assert main(["user", "add", "ann", "--file", str(users), "--generate"]) == 0
    with disk.cut():
        assert "ann" in parse(users.read_text(), "users")
    assert main(["token", "add", "reader", "--scope", "read", "--config", str(config)]) == 0
    with disk.cut():
        assert [each.name for each in identities.read(identities.identities_file(config.parent))] == [
            "reader"
        ]


@pytest.mark.parametrize("command", ["cert", "dkim", "init"])
def test_what_setup_makes(disk: Disk, command: str) -> None:
    place = disk.place / "deep" / "place"
    words = {
        "cert": ["cert", "self-signed", "--name", "localhost", "--out", str(place)],
        "dkim": ["dkim", "new", "--domain", "example.org", "--selector", "s", "--out", str(place / "s.key")],
        "init": ["init", str(place)],
    }
    os.sync()
    assert main(words[command]) == 0
    made = {path.relative_to(place): path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert made
    with disk.cut():
        assert {name: (place / name).read_bytes() for name in made} == made


def test_an_order_and_the_first_mail_of_a_relay(disk: Disk) -> None:
    """The directories of the relay are as new as its mail."""
    home = disk.place / "deep" / "home"
    with RelayProcess(home.parent / "config", spool={"path": str(home / "spool")}) as relay:
        suspended = run(relay, "suspend", "--all", "--reason", "ticket 42", "--json")
        assert suspended.returncode == 0, suspended.stderr
        with disk.cut():
            given = json.loads(suspended.stdout)["order"]["id"]
            orders = msgspec.json.decode((home / "orders" / "orders.json").read_bytes(), type=list[Order])
            assert [each.id for each in orders] == [given]
            assert len((home / "redact.key").read_text()) == 65
        relay.send("to@example.net")
        with disk.cut():
            assert list((home / "spool").glob("*.log")), "the spool"
