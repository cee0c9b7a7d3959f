"""Checks a LevelDB spool: every block's checksum, every record, and the records against each other.

The check reads a snapshot (`snapshot`), for LevelDB writes when it opens a database. So it works beside a
running relay, and on a file system that is mounted read-only, and it leaves every octet and time of the
spool as it was.

One walk in key order reads every block. Memory holds eight octets for each delivery, and sixteen for each
message in part delivered; the index of due times is compared by a sum of hashes, and by look-ups only where
that differs.
"""

from __future__ import annotations

import hashlib
import heapq
import shutil
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.model.queue_name import QueueName
from zonerelay.store.check import Contents, Examination, Fault
from zonerelay.store.common import records
from zonerelay.store.contract import CHUNK_SIZE, StoreCorruptError, StoreOpenError
from zonerelay.store.leveldb.damage.directory import DamagedSpoolError
from zonerelay.store.leveldb.damage.format import named_in
from zonerelay.store.leveldb.damage.table import damaged_blocks, has_index
from zonerelay.store.leveldb.engine import Row
from zonerelay.store.leveldb.snapshot import take_snapshot
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.leveldb.write_plan import due_time

WRITE_BUFFER = 4 * 1024 * 1024
_TELL_EVERY = 1024 * 1024
_OPEN_COUNTS = b"meta open "


def check(spool: Path, examination: Examination) -> Contents:
    """Blocks. Raises StoreError, or OSError, when the spool cannot be read at all."""
    scratch = examination.scratch
    try:
        take_snapshot(spool, scratch)
        return _check_snapshot(spool, examination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_snapshot(spool: Path, examination: Examination) -> Contents:
    scratch, findings = examination.scratch, examination.findings

    def damaged(text: str) -> None:
        findings.add(Fault.UNREADABLE, str(spool), text.replace(str(scratch), str(spool)))

    octets = sum(path.stat().st_size for path in scratch.iterdir())
    if not any(scratch.iterdir()):
        return Contents(0, 0, 0)  # no relay has been started here yet
    tables = sorted(path for path in scratch.iterdir() if path.suffix in (".ldb", ".sst"))
    db = LevelDb(scratch, write_buffer=WRITE_BUFFER)
    met: list[str] = []
    db.on_damage = met.append
    try:
        db.open()
    except StoreOpenError as error:
        damaged(error.finding if isinstance(error, DamagedSpoolError) else str(error))
        return Contents(0, 0, octets)
    try:
        for loss in db.losses.open:  # what the opening has mended in the snapshot
            named = f"; they name {', '.join(loss.messages[:3])}" if loss.messages else ""
            damaged(f"{loss.what}{named}")
        return Records(db, examination, octets).check()
    finally:
        db.close()
        if met and not _name_blocks(spool, tables, examination):
            for text in dict.fromkeys(met):
                damaged(text)


def _name_blocks(spool: Path, tables: list[Path], examination: Examination) -> bool:
    """LevelDB has met damage and does not say where. False when it is in no table that can be read."""
    before = examination.findings.counts[Fault.UNREADABLE]
    for path in filter(Path.exists, tables):  # the check's own LevelDB may have replaced some that are whole
        examination.tell(0, 0)
        where = str(spool / path.name)
        try:
            raw = path.read_bytes()
        except OSError as error:
            examination.findings.add(Fault.UNREADABLE, where, f"it cannot be read: {error.strerror}")
            continue
        if not has_index(raw):
            examination.findings.add(Fault.UNREADABLE, where, "its index or its end is damaged")
            continue
        for start, end in damaged_blocks(raw):
            text = f"octets {start:,} to {end:,} are damaged{named_in(raw[start:end])}"
            examination.findings.add(Fault.UNREADABLE, where, text)
    return examination.findings.counts[Fault.UNREADABLE] > before


class Records:
    """One walk over all rows of an open spool that is not written to."""

    def __init__(self, db: LevelDb, examination: Examination, octets: int) -> None:
        self._db = db
        self._findings = examination.findings
        self._tell = examination.tell
        self._total = octets
        self._octets = self._told = 0
        self._index_sum = 0
        self._ids: dict[QueueName, array[int]] = {}
        """The message ids of the deliveries of each queue, in order."""
        self._partly: tuple[array[int], array[int]] = (array("Q"), array("Q"))
        """Messages that have fewer deliveries than recipients, in order, and how many they have."""
        self._deliveries = self._messages = 0

    def check(self) -> Contents:
        """Raises StoreError when LevelDB fails otherwise than by damage."""
        for key, value in self._rows(b"", records.MESSAGE_PREFIX):
            self._check_delivery(key, value)
        if self._index_sum:
            self._compare_index()
        self._check_messages()
        self._check_meta()
        self._tell(self._total, self._total)
        return Contents(self._messages, self._deliveries, self._octets)

    def _rows(self, start: bytes, stop: bytes | None) -> Iterator[Row]:
        for key, value in self._db.rows(start, stop, limit=sys.maxsize):
            self._octets += len(key) + len(value)
            if self._octets - self._told >= _TELL_EVERY:
                self._told = self._octets
                self._tell(min(self._octets, self._total), self._total)
            yield key, value

    # --- deliveries and their index

    def _check_delivery(self, key: bytes, value: bytes) -> None:
        """A row in front of the messages: a delivery, or an entry of an index."""
        try:
            named = records.parse_delivery_key(key)
            if key.startswith(records.DEFERRED_PREFIX):
                self._note_index(key, 1)
            elif key.startswith((records.DELIVERY_PREFIX, records.WEBHOOK_PREFIX)):
                self._note_delivery(key, named, value)
            elif not key.startswith(records.DOMAIN_PREFIX):  # those are hints, and stray ones are nothing
                self._bad(key, "no record of a spool has such a key")
        except StoreCorruptError as error:
            self._bad(key, str(error))

    def _note_delivery(self, key: bytes, named: DeliveryKey, value: bytes) -> None:
        if not is_message_id(named.message_id):
            self._bad(key, "its message id is none")
            return
        self._deliveries += 1
        self._ids.setdefault(named.queue, array("Q")).append(int(named.message_id, 16))
        delivery = records.decode_record(named, value)
        if due := due_time(delivery):
            self._note_index(records.deferred_key(named, due), -1)

    def _note_index(self, key: bytes, sign: int) -> None:
        """Entries and what they should be add up to 0; two that differ do so by chance once in 2^64."""
        digest = hashlib.blake2b(key, digest_size=8).digest()
        self._index_sum = (self._index_sum + sign * int.from_bytes(digest, "big")) % (1 << 64)

    def _compare_index(self) -> None:
        """Names the entries that are missing, and those that are stray."""
        deferred = records.DEFERRED_PREFIX
        for key, _ in self._db.rows(deferred, records.after(deferred), limit=sys.maxsize):
            try:
                named = records.parse_delivery_key(key)
                (value,) = self._db.get_each([records.delivery_key(named)])
                if not isinstance(value, bytes):
                    self._add(Fault.INDEX_STRAY, key, "there is no such delivery", named.message_id)
                elif records.deferred_key(named, due_time(records.decode_record(named, value))) != key:
                    self._add(Fault.INDEX_STRAY, key, "the delivery is due at another time", named.message_id)
            except StoreCorruptError:
                continue  # told by the walk
        first, end = records.WEBHOOK_PREFIX, records.after(records.DELIVERY_PREFIX)
        for key, value in self._db.rows(first, end, limit=sys.maxsize):
            try:
                named = records.parse_delivery_key(key)
                due = due_time(records.decode_record(named, value))
            except StoreCorruptError:
                continue
            if due and not isinstance(self._db.get_each([records.deferred_key(named, due)])[0], bytes):
                self._add(Fault.INDEX_MISSING, key, "it is deferred, and in no index", named.message_id)

    # --- messages, their bodies and counts

    def _check_messages(self) -> None:
        owed = _Counted(heapq.merge(*self._ids.values()))
        current, rows = b"", list[Row]()
        for key, value in self._rows(records.MESSAGE_PREFIX, records.after(records.MESSAGE_PREFIX)):
            identity, _, part = key[len(records.MESSAGE_PREFIX) :].partition(b" ")
            if identity != current:
                self._check_message(current, rows, owed)
                current, rows = identity, []
            # Of a chunk only the size is of interest, and a body may be large.
            rows.append((part, b"%d" % len(value) if part.isdigit() else value))
        self._check_message(current, rows, owed)
        self._alone(owed.until(1 << 64))

    def _alone(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            identity = f"{number:016x}"
            self._findings.add(
                Fault.DELIVERY_ALONE, f"delivery-zone … {identity} …", "its message has no record", identity
            )

    def _check_message(self, raw: bytes, rows: list[Row], owed: _Counted) -> None:
        identity = raw.decode("ascii", "replace")
        if not rows:
            return
        if not is_message_id(identity):
            self._bad(records.MESSAGE_PREFIX + raw, "its message id is none")
            return
        self._alone(owed.until(int(identity, 16)))
        deliveries = owed.count(int(identity, 16))
        parts = dict(rows)
        metadata, exists = parts.pop(b"*", None), parts.pop(b"#", None)
        for part in [each for each in parts if not each.isdigit()]:
            self._bad(
                records.message_prefix(MessageId(identity)) + part, "no record has such a key", identity
            )
            del parts[part]
        key = records.metadata_key(MessageId(identity))
        if metadata is None and exists is None:
            self._add(Fault.CHUNKS_ALONE, key[:-1], f"{len(parts):,} chunks of a body", identity)
        elif metadata is None or exists is None:
            self._bad(key[:-1], f"there is no {'*' if metadata is None else '#'}", identity)
        else:
            self._messages += 1
            try:
                message = records.decode_message(MessageId(identity), metadata)
                self._check_body(message, {number: int(size) for number, size in parts.items()})
                if deliveries != len(message.envelope.recipients):
                    self._partly[0].append(int(identity, 16))
                    self._partly[1].append(deliveries)
            except StoreCorruptError as error:
                self._bad(key, str(error), identity)
        if not deliveries and (metadata is not None or exists is not None):
            self._add(Fault.MESSAGE_ALONE, key[:-1], "no delivery belongs to it", identity)
        elif deliveries and metadata is None and exists is None:
            self._alone(iter([int(identity, 16)]))

    def _check_body(self, message: Message, sizes: dict[bytes, int]) -> None:
        where = records.message_prefix(message.id)
        missing = [number for number in range(1, message.chunks + 1) if b"%06d" % number not in sizes]
        if missing:
            shown = ", ".join(map(str, missing[:5]))
            self._add(Fault.CHUNK_MISSING, where, f"of {message.chunks:,}: {shown}", message.id)
        elif len(sizes) > message.chunks:
            self._add(Fault.WRONG_SIZE, where, f"{len(sizes):,} chunks, not {message.chunks:,}", message.id)
        elif (octets := sum(sizes.values())) != message.size or any(
            size != CHUNK_SIZE for number, size in sizes.items() if int(number) < message.chunks
        ):
            self._add(
                Fault.WRONG_SIZE,
                where,
                f"its chunks have {octets:,} octets, not {message.size:,}",
                message.id,
            )

    def _check_meta(self) -> None:
        """The counts of open deliveries, both in order of their messages."""
        partly = iter(zip(*self._partly, strict=True))
        expected = next(partly, None)
        for key, value in self._rows(records.after(records.MESSAGE_PREFIX), None):
            if not key.startswith(_OPEN_COUNTS):
                if not key.startswith(b"meta "):
                    self._bad(key, "no record of a spool has such a key")
                continue
            identity = key[len(_OPEN_COUNTS) :].decode("ascii", "replace")
            if not is_message_id(identity):
                self._bad(key, "its message id is none")
                continue
            while expected is not None and expected[0] < int(identity, 16):
                self._no_count(*expected)
                expected = next(partly, None)
            if expected is not None and expected[0] == int(identity, 16):
                self._compare_count(key, value, expected[1], identity)
                expected = next(partly, None)
            elif (stored := self._recipients(identity)) is None or value != b"%d" % stored:
                self._add(
                    Fault.WRONG_COUNT, key, f"it says {value[:20]!r} of a message that has all", identity
                )
        while expected is not None:
            self._no_count(*expected)
            expected = next(partly, None)

    def _recipients(self, identity: str) -> int | None:
        """How many the message has; None when there is no such message."""
        (raw,) = self._db.get_each([records.metadata_key(MessageId(identity))])
        try:
            message = records.decode_message(MessageId(identity), raw) if isinstance(raw, bytes) else None
        except StoreCorruptError:
            return None
        return None if message is None else len(message.envelope.recipients)

    def _compare_count(self, key: bytes, value: bytes, deliveries: int, identity: str) -> None:
        if value != b"%d" % deliveries:
            said = value[:20].decode("ascii", "replace")
            self._add(Fault.WRONG_COUNT, key, f"it says {said}, there are {deliveries:,}", identity)

    def _no_count(self, number: int, deliveries: int) -> None:
        identity = f"{number:016x}"
        if deliveries:  # a message without deliveries is told as such
            key = records.open_count_key(MessageId(identity))
            self._add(Fault.WRONG_COUNT, key, f"it is not there, there are {deliveries:,}", identity)

    def _add(self, fault: Fault, where: bytes, what: str, identity: str) -> None:
        self._findings.add(fault, where.decode("ascii", "replace").rstrip(), what, identity)

    def _bad(self, key: bytes, what: str, identity: str = "") -> None:
        self._add(Fault.BAD_RECORD, key, what, identity)


class _Counted:
    """Numbers in order, each with how often it comes."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._next = next(numbers, None)

    def until(self, number: int) -> Iterator[int]:
        """Those below, once each."""
        while self._next is not None and self._next < number:
            found = self._next
            self.count(found)
            yield found

    def count(self, number: int) -> int:
        """How often the number comes; it must not be behind the next one."""
        found = 0
        while self._next == number:
            found += 1
            self._next = next(self._numbers, None)
        return found
