"""Writes and reads the format of the disk queue's files. No I/O.

`<id>.env` never changes: a line that names the format, the body as it is (so that an operator can read
it), one line of JSON with the message, the first state of its deliveries and a checksum per chunk, and a
last line that says where that JSON begins. `<id>.meta` is one line of JSON with the state of the
deliveries that are still open. A file that cannot be read back raises StoreCorruptError; nothing is guessed.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import LENGTH, MessageId
from zonerelay.model.queue_name import parse_queue
from zonerelay.store.common.records import DeliveryRecord, delivery_of, encode_delivery, encoded
from zonerelay.store.contract import Kept, Once, StoreCorruptError

HEAD = b"zonerelay-env 1\n"
"""The first octets of an `.env` file; the body begins behind them."""
FOOT_SIZE = 33
"""Octets of the last line: length and checksum of the JSON before it."""
SMALLEST = len(HEAD) + FOOT_SIZE
"""No whole `.env` file is smaller."""

_FOOT = re.compile(rb"([0-9a-f]{9}) ([0-9a-f]{8}) zonerelay-end\n")
_RECORD = re.compile(rb'\{"zone":')
_KEY_NAME = re.compile(rf"([0-9a-f]+)-(\d+)-([0-9a-f]{{{LENGTH}}})-([0-9a-f]+)\.once")
_NAME = re.compile(rf"([0-9a-f]{{{LENGTH}}})\.(env|meta)")


class _Whose(msgspec.Struct, frozen=True, gc=False):
    """What is a key elsewhere; the id is the file's name."""

    zone: str
    recipient: str


class _WholeRecord(DeliveryRecord, kw_only=True, frozen=True, gc=False):
    """A delivery as it is read back."""

    zone: str
    recipient: str


class IndexRecord(msgspec.Struct, frozen=True, gc=False):
    """What the index in memory keeps of a delivery; the rest is skipped."""

    zone: str
    recipient: str
    created: float
    next_attempt: float = 0.0
    held: bool = False


class _Meta(msgspec.Struct, frozen=True):
    deliveries: list[_WholeRecord]


class _IndexMeta(msgspec.Struct, frozen=True):
    deliveries: list[IndexRecord]


class _Tail(msgspec.Struct, frozen=True):
    message: Message
    deliveries: list[_WholeRecord]
    checksums: list[int]


class StoredMessage(NamedTuple):
    """The message that an `.env` file describes behind the body."""

    message: Message
    deliveries: list[Delivery]
    checksums: list[int]


class Foot(NamedTuple):
    """The position of the JSON in an `.env` file."""

    offset: int
    length: int
    checksum: int


_encode = msgspec.json.Encoder().encode
_decode_tail = msgspec.json.Decoder(_Tail).decode
_decode_whole = msgspec.json.Decoder(_WholeRecord).decode
_decode_meta = msgspec.json.Decoder(_Meta).decode
_decode_index = msgspec.json.Decoder(_IndexMeta).decode


def parse_name(name: str) -> tuple[MessageId, str] | None:
    """The id and the kind (`env` or `meta`) that a file's name says, `None` for a foreign file."""
    match = _NAME.fullmatch(name)
    return None if match is None else (MessageId(match[1]), match[2])


# --- .once


def key_name(once: Once, message_id: MessageId) -> str:
    """An empty file whose name says all that is remembered of an idempotency key."""
    return f"{once.identity}-{math.ceil(once.until)}-{message_id}-{once.digest}.once"


def parse_key_name(name: str) -> tuple[str, Kept] | None:
    match = _KEY_NAME.fullmatch(name)
    return None if match is None else (match[1], Kept(MessageId(match[3]), match[4], float(match[2])))


# --- .meta


def encode_record(delivery: Delivery) -> bytes:
    """One delivery as it stands in both kinds of file."""
    whose = encoded(f"delivery {delivery.message_id}", _Whose(delivery.queue.text, delivery.recipient))
    return b"%b,%b" % (whose[:-1], encode_delivery(delivery)[1:])


def join_meta(records: Iterable[bytes]) -> bytes:
    """An `.meta` file of encoded records."""
    return b'{"deliveries":[%b]}\n' % b",".join(records)


def decode_meta(message_id: MessageId, raw: bytes) -> list[Delivery]:
    try:
        return _deliveries(message_id, _decode_meta(raw).deliveries)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"{message_id}.meta is unreadable: {error}") from error


def decode_index(message_id: MessageId, raw: bytes) -> list[IndexRecord]:
    """The deliveries of an `.meta` file, as far as the index wants them."""
    try:
        return _decode_index(raw).deliveries
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"{message_id}.meta is unreadable: {error}") from error


def readable_records(message_id: MessageId, raw: bytes) -> list[Delivery]:
    """Those records of an `.meta` file that cannot be read as a whole which stand in it from end to end."""
    records: list[_WholeRecord] = []
    for found in _RECORD.finditer(raw):
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            records.append(_decode_whole(_object_at(raw, found.start())))
    return _deliveries(message_id, records)


def _object_at(raw: bytes, start: int) -> bytes:
    text = raw[start:].decode("utf-8", "replace")
    _, end = json.JSONDecoder().raw_decode(text)
    return text[:end].encode()


def _deliveries(message_id: MessageId, records: Iterable[_WholeRecord]) -> list[Delivery]:
    return [
        delivery_of(DeliveryKey(parse_queue(record.zone), message_id, Mailbox(record.recipient)), record)
        for record in records
    ]


def key_of(message_id: MessageId, record: IndexRecord) -> DeliveryKey:
    return DeliveryKey(parse_queue(record.zone), message_id, Mailbox(record.recipient))


# --- .env


def join_tail(message: bytes, records: Iterable[bytes], checksums: Sequence[int]) -> bytes:
    """Both lines that stand behind the body."""
    tail = b'\n{"message":%b,"deliveries":[%b],"checksums":%b}\n' % (
        message,
        b",".join(records),
        _encode(checksums),
    )
    return b"%b%09x %08x zonerelay-end\n" % (tail, len(tail), zlib.crc32(tail))


def parse_foot(message_id: MessageId, raw: bytes, size: int) -> Foot:
    """`raw` are the last octets of a file of `size` octets."""
    match = _FOOT.fullmatch(raw[-FOOT_SIZE:])
    if match is None:
        raise StoreCorruptError(f"{message_id}.env has no end")
    length = int(match[1], 16)
    offset = size - FOOT_SIZE - length
    if offset < len(HEAD):
        raise StoreCorruptError(f"{message_id}.env is too short")
    return Foot(offset, length, int(match[2], 16))


def decode_tail(message_id: MessageId, foot: Foot, raw: bytes) -> StoredMessage:
    """`raw` is what stands where the foot says."""
    if len(raw) != foot.length or zlib.crc32(raw) != foot.checksum:
        raise StoreCorruptError(f"{message_id}.env is damaged behind the body")
    try:
        tail = _decode_tail(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        raise StoreCorruptError(f"{message_id}.env is unreadable behind the body: {error}") from error
    message = tail.message
    if message.id != message_id or foot.offset != len(HEAD) + message.size:
        raise StoreCorruptError(f"{message_id}.env does not describe its body")
    if len(tail.checksums) != message.chunks:
        raise StoreCorruptError(f"{message_id}.env does not describe its chunks")
    return StoredMessage(message, _deliveries(message_id, tail.deliveries), tail.checksums)
