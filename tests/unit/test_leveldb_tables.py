"""Tables that LevelDB has written, read block by block without their index."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.store.leveldb.damage.format import operations_of, read_log, write_log
from zonerelay.store.leveldb.damage.table import KeyVersion, as_batch, data_blocks, has_index
from zonerelay.store.leveldb.engine import plyvel

KEYS = st.binary(min_size=1, max_size=40)
# Short ones and long ones, and such as shrink: a block of 4 KiB holds one or dozens, and copies reach far.
VALUES = st.one_of(
    st.binary(max_size=60),
    st.binary(min_size=1, max_size=8).map(lambda octets: octets * 3000),
    st.integers(0, 255).map(lambda number: bytes((number * at * at >> 3) & 0xFF for at in range(9000))),
)
TABLES = st.dictionaries(KEYS, VALUES, min_size=1, max_size=60)


def tables_of(rows: dict[bytes, bytes], compression: str | None, bloom_filter_bits: int) -> Iterator[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        db = plyvel.DB(
            directory, create_if_missing=True, compression=compression, bloom_filter_bits=bloom_filter_bits
        )
        for key, value in rows.items():
            db.put(key, value)
        db.compact_range()
        db.close()
        for path in Path(directory).glob("*.ldb"):
            yield path.read_bytes()


def versions_of(raw: bytes) -> list[KeyVersion]:
    return list(chain.from_iterable(block.versions for block in data_blocks(raw)))


@settings(max_examples=12, deadline=None)
@given(TABLES, st.sampled_from(["snappy", None]), st.sampled_from([0, 10]))
def test_every_row_is_read_whatever_is_in_it(
    rows: dict[bytes, bytes], compression: str | None, bloom_filter_bits: int
) -> None:
    found: list[KeyVersion] = []
    for raw in tables_of(rows, compression, bloom_filter_bits):
        assert has_index(raw)
        without = raw[:-48] + bytes(48)
        assert not has_index(without)
        assert versions_of(without) == versions_of(raw)
        found += versions_of(raw)
    assert [(each.key, each.value) for each in found] == sorted(rows.items())
    assert len({each.sequence for each in found}) == len(rows)


@settings(max_examples=25, deadline=None)
@given(
    TABLES, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=4), st.data()
)
def test_damaged_octets_give_fewer_rows_and_never_an_error(
    rows: dict[bytes, bytes], flips: list[tuple[float, int]], data: st.DataObject
) -> None:
    for raw in tables_of(rows, "snappy", 10):
        octets = bytearray(raw)
        for where, change in flips:
            octets[int(where * len(raw))] ^= change
        damaged = bytes(octets[: data.draw(st.integers(0, len(raw)))])
        has_index(damaged)
        assert set(versions_of(damaged)) <= set(versions_of(raw))


@pytest.mark.parametrize("value", [b"v" * 70_000, b"", None])
def test_a_version_is_the_same_write_in_a_log(value: bytes | None) -> None:
    (batch,) = read_log(write_log([as_batch(KeyVersion(b"k" * 300, 77, value))])).records
    assert batch[:8] == (77).to_bytes(8, "little")
    assert list(operations_of(batch)) == [(b"k" * 300, value)]
