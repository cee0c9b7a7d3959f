"""Many keys read by one cursor: as if each were asked for alone."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from zonerelay.store.contract import StoreCorruptError
from zonerelay.store.leveldb.spool import LevelDb

VALUES = {key.encode(): random.Random(key).randbytes(5000) for key in "bdfhj"}
"""Each larger than a block, and not to be made smaller: one block each."""


@pytest.fixture
def db(tmp_path: Path) -> Iterator[LevelDb]:
    db = LevelDb(tmp_path / "spool", write_buffer=1024 * 1024)
    db.open()
    db.write([list(VALUES.items())])
    db.compact(b"a", b"z")
    yield db
    db.close()


def damage(db: LevelDb, key: bytes) -> None:
    """One bit in the table's block that holds the key's value."""
    value = VALUES[key]
    db.close()
    (table,) = [path for path in db.path.glob("*.ldb") if value[100:200] in path.read_bytes()]
    content = bytearray(table.read_bytes())
    content[content.index(value[100:200])] ^= 1
    table.write_bytes(content)
    db.open()


@pytest.mark.parametrize("keys", ["", "b", "bdfhj", "jhfdb", "bb", "abcdefghijk", "kji", "aaj"])
def test_each_key_has_its_value_or_none(db: LevelDb, keys: str) -> None:
    wanted = [key.encode() for key in keys]
    assert db.get_many(wanted) == [VALUES.get(key) for key in wanted]


def test_what_was_removed_is_missing_and_what_is_behind_it_is_not(db: LevelDb) -> None:
    db.write([[(b"d", None), (b"f", b"new")]])
    assert db.get_many([b"b", b"d", b"f", b"h"]) == [VALUES[b"b"], None, b"new", VALUES[b"h"]]


def test_a_snapshot_sees_what_was_there(db: LevelDb) -> None:
    view = db.snapshot()
    try:
        db.write([[(b"d", None), (b"c", b"new")]])
        assert db.get_many([b"b", b"c", b"d"], view) == [VALUES[b"b"], None, VALUES[b"d"]]
    finally:
        view.close()


def test_damage_beside_what_is_asked_for_spoils_nothing(db: LevelDb) -> None:
    damage(db, b"f")
    assert db.get_many([b"b", b"e", b"h"]) == [VALUES[b"b"], None, VALUES[b"h"]]


def test_what_is_damaged_itself_is_never_given_out(db: LevelDb) -> None:
    damage(db, b"f")
    for keys in ([b"f"], [b"b", b"f"], [b"c", b"f", b"h"]):
        with pytest.raises(StoreCorruptError):
            db.get_many(keys)
    with pytest.raises(StoreCorruptError):
        db.get(b"f")
