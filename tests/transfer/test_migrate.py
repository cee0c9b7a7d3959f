"""`zonerelay spool migrate`: between all engines, killed and resumed, beside relays that run."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import time
from pathlib import Path

import pytest

from tests.store.builders import delivery_for, envelope_for, message_id, store_message
from tests.transfer import migrations
from tests.transfer.migrations import configured, contents, fill, queue
from zonerelay.history.database import insert, open_for_reading, open_for_writing
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.store import records
from zonerelay.store.contract import Finish, IdempotencyKey, StoredBeforeError, StoredKey
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.transfer.files import TransferError
from zonerelay.transfer.migration import MigrationJournal


def migrate(source: Path, target: Path, *more: str) -> int:
    return migrations.spool(source, "migrate", "--to", str(target), *more)


def test_a_queue_goes_round_all_engines_and_comes_back_as_it_was(tmp_path: Path) -> None:
    configs = [configured(tmp_path / each, each) for each in migrations.ENGINES]
    asyncio.run(fill(configs[0], 40))
    before = asyncio.run(contents(configs[0]))
    for source, target in itertools.pairwise([*configs, configs[0]]):
        assert migrate(source, target) == 0
        assert asyncio.run(contents(source)) == {}
        assert asyncio.run(contents(target)) == before


def test_what_lies_beside_the_spool_goes_along_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = configured(tmp_path / "one", "leveldb"), configured(tmp_path / "other", "disk")
    asyncio.run(fill(source, 1))
    home, there = tmp_path / "one", tmp_path / "other"
    (home / "redact.key").write_bytes(b"k" * 32)
    (there / "redact.key").write_bytes(b"o" * 32)
    with contextlib.closing(open_for_writing(home / "history" / "00.db")) as database:
        insert(database, 1, [(1.0, "accepted", {"id": "00"})])
    assert migrate(source, target) == 0
    assert (there / "redact.key").read_bytes() == b"o" * 32
    with contextlib.closing(open_for_reading(there / "history" / "00.db")) as database:
        assert database.execute("SELECT count(*) FROM block").fetchone() == (1,)
    printed = capsys.readouterr().out
    assert "Other files copied: history." in printed
    assert "Not copied, because the target already has them: redact.key." in printed


@pytest.mark.parametrize("pair", migrations.PAIRS, ids="-".join)
def test_wherever_it_is_killed_nothing_is_lost_or_sent_twice(pair: tuple[str, str], tmp_path: Path) -> None:
    """A few kills at steps; `python -m tests.transfer.migrations` does fifty, and at moments too."""
    migrations.tell(pair, 1 if "s3" in pair else 3, tmp_path, seed=migrations.PAIRS.index(pair))


def test_the_configurations_are_looked_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = configured(tmp_path / "a", "leveldb")
    asyncio.run(fill(source, 3))
    for target, why in (
        (source, "both configurations store the queue in leveldb"),
        (configured(tmp_path / "m", "memory"), "stores no queue that can be migrated"),
        (
            configured(tmp_path / "b", "leveldb", min_free_space="1 TB"),
            "requires 12 KB, but only 0 B are free",
        ),
    ):
        assert migrate(source, target) == 2
        assert why in capsys.readouterr().err
    assert sorted(each.name for each in (tmp_path / "a").iterdir() if "migration" in each.name) == []
    assert len(asyncio.run(contents(source))) == 6
    assert not (tmp_path / "b" / "spool").exists()


def test_what_cannot_be_read_or_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = configured(tmp_path / "a", "leveldb"), configured(tmp_path / "b", "disk")
    asyncio.run(fill(source, 12))
    before = asyncio.run(contents(source))
    damaged, twin, other = (message_id(number * 256) for number in (11, 4, 5))
    db = plyvel.DB(str(tmp_path / "a" / "spool"))
    db.delete(records.chunk_key(damaged, 2))
    db.close()

    async def prepare() -> None:
        async with queue(target) as store:
            await migrations.commit(store, [row for row in before.values() if row[0].id == twin])
            await store_message(store, int(other, 16), "mine@example.net")

    asyncio.run(prepare())
    assert migrate(source, target, "--json") == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["unusable"] == 2
    assert f"{damaged}: not moved: " in told.err
    assert f"{twin}: not moved: the target already contains" in told.err
    stays = [row[1] for row in before.values() if row[0].id in (damaged, twin)]
    assert asyncio.run(states(source)) == sorted(stays, key=lambda each: each.recipient), "and not held"
    after = asyncio.run(contents(target))
    assert after["mine@example.net"][0].id == other
    moved = next(row for recipient, row in after.items() if recipient.startswith("0-5@"))
    assert moved[0].id != other
    assert moved[2] == before["0-5@example.org"][2]

    # The migration is not over: what the source shows once more is removed there, and never sent again.
    asyncio.run(show_again(source, [row for row in before.values() if row[0].id == message_id(256)]))
    assert migrate(source, target, "--json") == 1
    assert json.loads(capsys.readouterr().out)["already"] == 1
    assert asyncio.run(contents(target)) == after
    elsewhere = configured(tmp_path / "c", "leveldb")
    assert migrate(source, elsewhere) == 2
    assert "is not finished" in capsys.readouterr().err


KEPT = 4e9
"""Valid until 2096: a migration leaves what has expired."""


@pytest.mark.parametrize(
    "pair", [("leveldb", "disk"), ("disk", "redis"), ("redis", "postgres")], ids="-".join
)
def test_keys_go_along_also_of_mail_that_has_left(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = (configured(tmp_path / each, each) for each in pair)
    queued, left = (IdempotencyKey(f"{number:032x}", "d" * 32, KEPT) for number in (1, 2))

    async def submit(config: Path, number: int, once: IdempotencyKey) -> None:
        async with queue(config) as store:
            envelope = envelope_for(message_id(number * 256), "to@example.net")
            async with store.begin(envelope) as writer:
                await writer.write(b"Subject: x\r\n\r\n")
                await writer.commit([delivery_for(envelope, "to@example.net")], once=once)

    async def prepare() -> None:
        await submit(source, 2, left)
        async with queue(source) as store:
            (claimed,) = await store.claim(queue_of("default"), 1, now=time.time())
            await store.settle([Finish(claimed)])
            if pair[0] != "redis":  # which has removed it
                await store.keep_keys([("e" * 32, StoredKey(message_id(7), "d" * 32, time.time() - 60))])
        await submit(source, 1, queued)

    asyncio.run(prepare())
    assert migrate(source, target, "--json") == 0
    assert json.loads(capsys.readouterr().out)["keys"] == 2
    for number, once in ((1, queued), (2, left)):
        with pytest.raises(StoredBeforeError) as repeated:
            asyncio.run(submit(target, 3, once))
        assert repeated.value.message_id == message_id(number * 256)
    assert asyncio.run(contents(target)).keys() == {"to@example.net"}


async def states(config: Path) -> list[Delivery]:
    async with queue(config) as store:
        return sorted([each async for each in store.scan()], key=lambda each: each.recipient)


async def show_again(config: Path, rows: list[migrations.Row]) -> None:
    async with queue(config) as store:
        await migrations.commit(store, rows)


def test_a_wrong_copy_is_never_the_only_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The target loses a body between the copy and the look at it: the source still has it."""
    source, target = configured(tmp_path / "a", "leveldb"), configured(tmp_path / "b", "disk")
    story = migrations.Story(source, target, random.Random(1))
    story.start(8)
    assert story.is_killed(14), "all are copied, and the journal says so"
    copies = sorted((tmp_path / "b" / "spool" / "messages").glob("message-*"))
    assert len(copies) == 8
    content = bytearray(copies[3].read_bytes())
    content[1] ^= 1
    copies[3].write_bytes(content)
    assert migrate(source, target) == 1
    assert "its copy in the target differs" in capsys.readouterr().err
    assert not story.is_killed(0)
    story.check()


def test_all_workers_mail_moves_to_all_workers(tmp_path: Path) -> None:
    source, target = configured(tmp_path / "a", "leveldb"), configured(tmp_path / "b", "disk")
    target.write_text("workers = 3\n" + target.read_text())
    asyncio.run(fill(source, 12))
    before = asyncio.run(contents(source))

    async def more() -> None:
        async with queue(source, 5) as store:
            await store_message(store, 0x1305, "of-another-worker@example.net")

    asyncio.run(more())
    before |= asyncio.run(contents(source, 5))
    assert migrate(source, target) == 0
    after = [asyncio.run(contents(target, worker)) for worker in range(3)]
    assert all(after)
    assert after[0] | after[1] | after[2] == before
    assert asyncio.run(contents(source, 5)) == asyncio.run(contents(source)) == {}


def test_the_journal_is_one_process_s_and_is_not_replaced_when_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "migration"
    journal = MigrationJournal(path, "one", "other")
    with pytest.raises(TransferError, match="it is used by another"):
        MigrationJournal(path, "one", "other")
    journal.close()
    assert not path.exists(), "nothing was begun"
    path.write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(TransferError, match="is damaged"):
        MigrationJournal(path, "one", "other")
    assert path.stat().st_size == 5016


PAGE = Path(__file__).parents[2] / "docs" / "store" / "changing-engines.md"


def test_page_shows_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both configurations have one home, as on the page: a copy of the file with another backend."""
    config = configured(tmp_path / "relay", "leveldb")
    other = tmp_path / "relay" / "other.toml"
    text = configured(tmp_path / "other", "postgres").read_text()
    other.write_text(text.replace(f"{tmp_path}/other/spool", f"{tmp_path}/relay/spool"))

    async def prepare() -> None:
        async with queue(config) as store:
            for number in (1, 2, 3):
                await store_message(store, number, f"{number}@example.net", held=number == 3)

    asyncio.run(prepare())
    before = asyncio.run(contents(config))
    assert migrate(config, other) == 0
    printed = re.sub(r"in \d+\.\d s", "in 0.4 s", capsys.readouterr().out)
    assert "".join(f"       {line.rstrip()}\n" for line in printed.splitlines()) in PAGE.read_text()
    assert asyncio.run(contents(other)) == before
