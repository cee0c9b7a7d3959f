"""What engines write and read: records, and LevelDB's tables."""

import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.model.envelope import Mailbox, MessageId, Notify
from zonerelay.model.reply import Attempt, Reply
from zonerelay.store import records
from zonerelay.store.leveldb.damage import format
from zonerelay.store.leveldb.damage.format import as_batch, has_index, read_log, write_log
from zonerelay.store.leveldb.engine import plyvel

texts = st.text(st.characters(codec="utf-8"), max_size=20)
times = st.floats(1e9, 4e9)


@given(texts)
def test_field_survives_and_is_printable_ascii_without_spaces(text: str) -> None:
    raw = records.field(text)
    assert records.unfield(raw) == text
    assert all(0x21 <= octet <= 0x7E for octet in raw)


@given(texts, texts, times)
def test_keys_give_back_what_they_were_made_of(zone: str, recipient: str, when: float) -> None:
    key = DeliveryKey(queue_of(zone), MessageId("0123456789abcdef"), Mailbox(recipient))
    for raw in (
        records.delivery_key(key),
        records.deferred_key(key, when),
        records.domain_key(key, recipient),
    ):
        assert records.parse_delivery_key(raw) == key
    assert records.parse_due(records.deferred_key(key, when)) == when


@given(texts, texts)
def test_one_zones_keys_never_lie_in_anothers_range(zone: str, other: str) -> None:
    key = records.delivery_key(DeliveryKey(queue_of(other), MessageId("0123456789abcdef"), Mailbox("~")))
    prefix = records.queue_prefix(queue_of(zone))
    assert (prefix <= key < records.after(prefix)) == (zone == other)


@given(times, times)
def test_due_times_sort_as_text_like_numbers(one: float, other: float) -> None:
    assert (records.due_field(one) < records.due_field(other)) == (one < other)


@given(
    attempts=st.integers(0, 1000),
    when=times,
    flags=st.tuples(st.booleans(), st.booleans()),
    notify=st.integers(0, 15),
    text=texts,
)
def test_mail_survives(attempts: int, when: float, flags: tuple[bool, bool], notify: int, text: str) -> None:
    delivery = Delivery(
        queue=queue_of("default"),
        message_id=MessageId("0123456789abcdef"),
        recipient=Mailbox(f"x@{text}"),
        created=when,
        attempts=attempts,
        next_attempt=when,
        held=flags[0],
        warned=flags[1],
        notify=Notify(notify),
        orcpt=text,
        last=Attempt(at=when, reply=Reply(450, "1.1", text), host=text, local=flags[0], in_doubt=flags[1]),
    )
    raw = records.encode_delivery(delivery)
    assert records.decode_delivery(records.delivery_key(delivery.key), raw) == delivery
    status = records.decode_status(b"", raw)
    assert (status.next_attempt, status.held) == (when, flags[0])


def test_what_a_newer_version_has_added_is_kept_through_a_deferral() -> None:
    key = DeliveryKey(queue_of("default"), MessageId("0123456789abcdef"), Mailbox("to@example.net"))
    raw = b'{"created":1700000000.0,"attempts":1,"tomorrow":{"why":["not"]},"warned":true}'
    delivery = records.decode_record(key, raw)
    later = delivery.deferred(1700000060.0, Attempt(1700000000.0, Reply(451, "2.0", "later")))
    again = records.decode_record(key, records.encode_delivery(later))
    assert again == later
    assert again.unknown == b'{"tomorrow":{"why":["not"]}}'
    assert (again.attempts, again.warned, again.next_attempt) == (2, True, 1700000060.0)


def test_a_record_of_another_spelling_has_nothing_unknown() -> None:
    key = DeliveryKey(queue_of("default"), MessageId("0123456789abcdef"), Mailbox("to@example.net"))
    assert records.decode_record(key, b'{ "created": 1700000000, "held": false }').unknown == b""


# Tables that LevelDB has written, read block by block without their index


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


Version = tuple[int, bytes, bytes | None]
"""The number of a write, its key and its value."""


def versions_of(raw: bytes) -> list[Version]:
    batches = chain.from_iterable(block.batches for block in format.data_blocks(raw))
    return [(format.sequence_of(each)[0], *row) for each in batches for row in format.operations_of(each)]


@settings(max_examples=12, deadline=None)
@given(TABLES, st.sampled_from(["snappy", None]), st.sampled_from([0, 10]))
def test_every_row_is_read_whatever_is_in_it(
    rows: dict[bytes, bytes], compression: str | None, bloom_filter_bits: int
) -> None:
    found: list[Version] = []
    for raw in tables_of(rows, compression, bloom_filter_bits):
        assert has_index(raw)
        without = raw[:-48] + bytes(48)
        assert not has_index(without)
        assert versions_of(without) == versions_of(raw)
        found += versions_of(raw)
    assert [(key, value) for _, key, value in found] == sorted(rows.items())
    assert len({sequence for sequence, _, _ in found}) == len(rows)


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
    trailer = 77 << 8 | (value is not None)
    made = as_batch(b"k" * 300 + trailer.to_bytes(8, "little"), value or b"")
    assert made is not None
    (batch,) = read_log(write_log([made])).records
    assert batch[:8] == (77).to_bytes(8, "little")
    assert list(format.operations_of(batch)) == [(b"k" * 300, value)]
