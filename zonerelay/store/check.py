"""Checks and repairs the records of one partition of any engine, for `spool check` and `spool repair`.

Both work without a relay: they claim nothing and send nothing. A check changes no byte and no timestamp in
the spool. A repair keeps the old records in a file, or the engine keeps the old spool. It moves data that
belongs to no record into the salvage directory and never deletes it.

One scan in key order finds the messages with possible faults. Each of them is read again until two readings
agree, and only the last reading counts. So the queue may be in use: pages of a scan show different moments,
and mail that is added or removed between them is not a fault.

With a RecordRepair the same scan repairs the partition. Complete messages stay, with their index entries and
counts; incomplete ones go to the salvage directory. Each message is one atomic write. If a repair is killed,
another one repairs the remaining messages.

Memory: a page, eight bytes for each delivery, sixteen for each partly delivered message, and the rows of one
message without its body. `Findings` counts all findings and keeps the text of the first few of each kind.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import itertools
import os
import tempfile
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from zonerelay import durable
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message, MessageId, is_message_id
from zonerelay.store import records
from zonerelay.store.contract import CHUNK_SIZE, StoreCorruptError, StoreError
from zonerelay.store.keys.port import Apply, KeyReader, Write, get_each, pages
from zonerelay.store.queue.reads import QueueReads

KEPT = 1000
"""The number of findings of one kind that are kept in full. Later ones are only counted."""

Tell = Callable[[int, int], None]
"""`tell(done, total)` reports progress in bytes, any number of times. `total` is 0 while it is unknown."""


class DamageKind(enum.StrEnum):
    """The kinds of spool damage. The texts appear in the table and in `--json`."""

    UNREADABLE = "unreadable"
    """A block, a file or an object has a wrong checksum, or the disk cannot read it."""
    BAD_RECORD = "bad record"
    """A record is readable and invalid."""
    CHUNKS_ALONE = "chunks alone"
    """A body has chunks but no message. They come from an unfinished upload or from a damaged message."""
    DELIVERY_ALONE = "delivery alone"
    """A delivery belongs to a message that has no record."""
    MESSAGE_ALONE = "message alone"
    """A message has no delivery."""
    CHUNK_MISSING = "chunk missing"
    WRONG_SIZE = "wrong size"
    """The chunks of a body do not have the size in the message's record."""
    INDEX_MISSING = "index missing"
    """A delivery is missing from an index."""
    INDEX_STRAY = "index stray"
    """An index entry names a delivery that does not exist."""
    WRONG_COUNT = "wrong count"
    """The stored number of open deliveries differs from the actual number."""
    STRAY_FILE = "stray file"
    """A file or an object does not belong to the spool."""
    BESIDE = "beside the spool"
    """A file of the relay next to the spool, such as the history, cannot be read."""


HARMLESS = frozenset({DamageKind.CHUNKS_ALONE, DamageKind.STRAY_FILE})
"""A crash or an operator may leave these in a valid spool, and the next start cleans them up. They are
reported, but are not damage.
"""


class Finding(msgspec.Struct, frozen=True):
    """A problem that a check of the spool has found. `where` is the key, file, row or object, and `what`
    describes the problem. `message_id` is the message that it belongs to, or "" if that is unknown.
    """

    fault: DamageKind
    where: str
    what: str
    message_id: str = ""


class Findings(msgspec.Struct):
    """The problems that a check of the spool has found: a count for each kind, and the first `KEPT` of
    each.
    """

    counts: Counter[DamageKind] = msgspec.field(default_factory=Counter)
    kept: list[Finding] = msgspec.field(default_factory=list)

    def add(self, fault: DamageKind, where: str, what: str, message_id: str = "") -> None:
        self.counts[fault] += 1
        if self.counts[fault] <= KEPT:
            self.kept.append(Finding(fault, where, what, message_id))

    @property
    def is_damaged(self) -> bool:
        return any(fault not in HARMLESS for fault in self.counts)


class SpoolContents(NamedTuple):
    """The numbers of messages, deliveries and bytes that a check has read."""

    messages: int = 0
    deliveries: int = 0
    octets: int = 0


class SalvagedMessage(msgspec.Struct, frozen=True):
    """A message that a repair cannot restore to the spool. `message` is None if its record is lost.
    `deliveries` are those with records. `unknown` are recipients of the envelope without a record, who were
    delivered to or whose delivery was lost. `body` reads the existing chunks, and `is_whole` is whether no
    chunk is missing.
    """

    message_id: str
    why: str
    message: Message | None
    deliveries: tuple[Delivery, ...]
    unknown: tuple[str, ...]
    body: Callable[[], Iterator[bytes]]
    is_whole: bool


Salvage = Callable[[SalvagedMessage], None]


class RepairResult(msgspec.Struct, kw_only=True):
    """The report of a spool repair: what was restored, salvaged and lost.

    `before` counts the deliveries that are still named anywhere in the damaged spool, and `after` those of
    the repaired one. `lost` describes what could not be saved, a line each, and `more_lost` counts the lines
    beyond a thousand. `repeats` has a line for each message with deliveries in the repaired spool that may
    have left the damaged one. `noted` describes damage without a loss. `salvaged` counts the messages in the
    salvage directory. `kept` has the path of the old spool, unless nothing was changed.
    """

    before: int = 0
    after: int = 0
    lost: list[str] = []
    more_lost: int = 0
    repeats: list[str] = []
    noted: list[str] = []
    salvaged: int = 0
    kept: list[str] = []


_END = 1 << 64
_FEW = 100
_READINGS = 5
"""The largest number of times that a changing message is read."""
_TELL_EVERY = 1024 * 1024
_BATCH = 500
_IN_MEMORY = 1024 * 1024
_META = b"meta "
_OPEN_COUNTS = b"meta open "
PREFIXES = (
    records.ANSWER_PREFIX,
    records.DEFERRED_PREFIX,
    records.DOMAIN_PREFIX,
    records.WEBHOOK_PREFIX,
    records.DELIVERY_PREFIX,
    records.MESSAGE_PREFIX,
    _META,
    records.REQUEST_PREFIX,
)
"""The prefixes in key order. No release has written keys outside of their ranges."""

Value = bytes | StoreCorruptError
FaultReport = tuple[DamageKind, str, str]
"""A fault of a message: its kind, the key, and the description."""


class FoundMessage(msgspec.Struct, kw_only=True):
    """The records of one message that a check or a repair of the spool has found. `parts` has its rows by the
    last field of their keys, with the sizes of chunks in place of their values. `why` describes why its
    record or body is incomplete, or is "" if both are complete. The deliveries are by their keys, and
    `unreadable` are the keys of invalid records. `open` is the stored number of open deliveries. `old` has
    the rows without chunks.
    """

    identity: MessageId
    parts: dict[bytes, Value]
    faults: list[FaultReport] = msgspec.field(default_factory=list)
    message: Message | None = None
    why: str = ""
    deliveries: dict[bytes, Delivery] = msgspec.field(default_factory=dict)
    unreadable: list[bytes] = msgspec.field(default_factory=list)
    open: int | None = None
    old: dict[bytes, bytes] = msgspec.field(default_factory=dict)

    @property
    def strange(self) -> list[bytes]:
        """The fields at the end of the message's keys that belong to no known kind of record."""
        return [part for part in self.parts if not part.isdigit() and part not in (b"#", b"*")]

    @property
    def wanted(self) -> int:
        """The number of recipients in the envelope."""
        return 0 if self.message is None else len(self.message.envelope.recipients)

    @property
    def surplus(self) -> int:
        """The number of delivery records minus the expected number. If it is negative, records are missing.
        If it is positive, removals were lost.
        """
        expected = self.wanted if self.open is None else self.open
        return 0 if self.message is None else len(self.deliveries) + len(self.unreadable) - expected

    @property
    def is_kept(self) -> bool:
        return self.message is not None and not self.why and bool(self.deliveries)


class RecordRepair:
    """Repairs the records of one partition. Without `carry_out` it only counts and describes. With
    `takes_uploads`, chunks without a message may be the rest of one.
    """

    def __init__(
        self, salvage: Salvage, kept: Path | None, *, carry_out: bool, takes_uploads: bool = False
    ) -> None:
        """Prepare to repair one partition. `kept` is the file of old records, or None if they are kept
        elsewhere.
        """
        self.carry_out = carry_out
        self.takes_uploads = takes_uploads
        self._salvage = salvage
        self._kept = kept
        self._file: BinaryIO | None = None
        self._result = RepairResult()

    def lose(self, text: str) -> None:
        if len(self._result.lost) < KEPT:
            self._result.lost.append(text)
        else:
            self._result.more_lost += 1

    def keep(self, old: Mapping[bytes, bytes]) -> None:
        """Append old records unchanged to the file that keeps them, and sync it. Raises OSError."""
        if not self.carry_out or not old or self._kept is None:
            return
        if self._file is None:
            self._file = self._kept.open("ab")
            self._kept.chmod(0o600)
            durable.sync_directory(self._kept.parent)
        for key, record in old.items():
            where = key.decode("utf-8", "replace")
            self._file.write(msgspec.json.encode({"where": where, "base64": record}) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    async def judge(self, found: FoundMessage, pieces: Callable[[], AsyncIterator[bytes]]) -> bool:
        """Write data that cannot be restored to the salvage directory, with the chunks of its body
        (`pieces`). Return true if the message must be removed from the store.

        Raises OSError, and StoreError if the body is unreadable for a reason other than damage.
        """
        identity, deliveries, result = found.identity, tuple(found.deliveries.values()), self._result
        unreadable = tuple(_recipient_in(key) for key in found.unreadable)
        gone = max(-found.surplus, 0)
        repeats = 0 if found.open is None else max(found.surplus, 0)
        result.before += gone
        result.after -= len(unreadable)
        known = {each.recipient for each in deliveries}
        recipients = () if found.message is None else found.message.envelope.recipients
        unknown = tuple(each.address for each in recipients if each.address not in known)
        if found.is_kept:
            if without := (unknown if gone else unreadable):
                count = gone + len(unreadable)
                who = ", ".join(without[:10])
                self.lose(
                    f"{count:,} deliveries of message {identity} have no valid record; recipients: {who}"
                )
                why = "deliveries without a record"
                await self._give(found, pieces, (), without, why, is_whole=True)
            elif repeats and len(result.repeats) < KEPT:
                shown = ", ".join(sorted(known)[:10])
                result.repeats.append(f"{repeats:,} of message {identity}, including those to {shown}")
            self.keep(found.old)
            return False
        result.after -= len(deliveries)
        is_whole = found.message is not None and not found.why
        why = found.why or "its record is missing"
        if is_whole:
            why = (
                "it has no delivery record: it was delivered, or its deliveries are lost; the salvage "
                "contains the whole message"
            )
        elif found.message is None and not deliveries:
            why = f"{why}; it is an unfinished upload, or a part of a message"
        named = [*sorted(known), *unknown, *(each for each in unreadable if each not in unknown)]
        self.lose(f"message {identity} to {', '.join(named[:10]) or 'unknown recipients'}: {why}")
        await self._give(found, pieces, deliveries, unknown, why, is_whole=is_whole)
        self.keep(found.old)
        return True

    async def _give(
        self,
        found: FoundMessage,
        pieces: Callable[[], AsyncIterator[bytes]],
        deliveries: tuple[Delivery, ...],
        unknown: tuple[str, ...],
        why: str,
        *,
        is_whole: bool,
    ) -> None:
        self._result.salvaged += 1
        if not self.carry_out:
            return
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            try:
                async for piece in pieces():
                    file.write(piece)
            except StoreError as error:
                if is_whole:
                    raise
                why = f"{why}; {error}"

            def body() -> Iterator[bytes]:
                file.seek(0)
                while piece := file.read(CHUNK_SIZE):
                    yield piece

            salvaged = SalvagedMessage(
                found.identity, why, found.message, deliveries, unknown, body, is_whole
            )
            self._salvage(salvaged)

    def repaired(self, deliveries: int) -> RepairResult:
        """Return the result of the repair. `deliveries` is the number of records before it."""
        result = self._result
        result.before += deliveries
        result.after += deliveries
        result.kept = [] if self._file is None else [str(self._kept)]
        return result


async def compare(reader: KeyReader, findings: Findings, tell: Tell, *, octets: int = 0) -> SpoolContents:
    """Check the records of a partition and add the problems to `findings`. If the partition's size in bytes
    is passed, it is used for the progress report. Raises StoreError.
    """
    return await _Comparison(reader, findings, tell, octets).run()


async def mend(reader: KeyReader, repair: RecordRepair, tell: Tell, write: Apply | None) -> SpoolContents:
    """Repair the records of a partition that has no other writer. Without `write` only report the changes.
    Return the contents before the repair. Raises StoreError and OSError, after which the repairs made so far
    are durable.
    """
    comparison = _Comparison(reader, Findings(), tell, 0)
    comparison.repair, comparison.write = repair, write
    contents = await comparison.run()
    if write is not None:
        left = Findings()
        await compare(reader, left, tell)
        if left.is_damaged:
            first = next(each for each in left.kept if each.fault not in HARMLESS)
            raise StoreError(f"the repaired spool is invalid: {first}")
    return contents


class _Comparison:
    """Compares the records of one partition with each other, in one scan."""

    def __init__(self, reader: KeyReader, findings: Findings, tell: Tell, octets: int) -> None:
        self._reader = reader
        self._findings = findings
        self._tell = tell
        self._total = octets
        self._octets = self._reported = 0
        self._index_sum = 0
        self._ids: dict[bytes, array[int]] = {}
        """The message ids of the deliveries of each queue, in order, by the prefix of the queue's keys."""
        self._suspects = array("Q")
        self._messages = self._deliveries = 0
        self._changes: dict[bytes, bytes | None] = {}
        self.repair: RecordRepair | None = None
        self.write: Apply | None = None

    async def run(self) -> SpoolContents:
        await self._note_deliveries()
        await self._walk_messages()
        for number, _ in itertools.groupby(sorted(self._suspects)):
            await self._examine_again(MessageId(f"{number:016x}"))
        await self._compare_index()
        await self._compare_once()
        await self._look_between()
        await self._flush()
        self._tell(self._octets, max(self._octets, self._total))
        return SpoolContents(self._messages, self._deliveries, self._octets)

    # --- reading

    async def _pages(self, start: bytes, end: bytes) -> AsyncIterator[list[tuple[bytes, Value]]]:
        """Yield the rows of a key range, page by page. An error takes the place of an unreadable value."""
        cursor: bytes | None = start
        while cursor is not None:
            found: list[tuple[bytes, Value]] = []
            at = cursor
            try:
                rows, cursor = await self._reader.page(at, end)
                found += rows
            except StoreCorruptError:
                rows, cursor = await self._reader.page(at, end, rows=_FEW, values=False)
                for key, _ in rows:
                    if (value := await self._get(key)) is not None:
                        found.append((key, value))
            self._octets += sum(len(key) + len(value) for key, value in rows)
            if self._octets - self._reported >= _TELL_EVERY:
                self._reported = self._octets
                self._tell(self._octets, max(self._octets, self._total))
            if found:
                yield found

    async def _get(self, key: bytes) -> Value | None:
        return (await get_each(self._reader, [key]))[0]

    # --- deliveries

    async def _note_deliveries(self) -> None:
        """Scan the deliveries and their indexes, and find the messages with possible faults."""
        async for keys in self._pages(records.DEFERRED_PREFIX, records.after(records.DEFERRED_PREFIX)):
            for key, _ in keys:
                self._index_sum += _hash(key)
                await self._parsed(key)
        async for keys in self._pages(records.DOMAIN_PREFIX, records.after(records.DOMAIN_PREFIX)):
            for key, _ in keys:
                await self._parsed(key)  # these are hints, so unused ones are harmless
        async for rows in self._pages(records.WEBHOOK_PREFIX, records.after(records.DELIVERY_PREFIX)):
            for key, value in rows:
                if (named := await self._parsed(key)) is None:
                    continue
                number = int(named.message_id, 16)
                self._ids.setdefault(records.queue_prefix(named.queue), array("Q")).append(number)
                try:
                    due = records.due_time(records.decode_record(named, _read(value)))
                except StoreCorruptError:
                    self._suspects.append(number)
                else:
                    self._index_sum -= _hash(records.deferred_key(named, due)) if due else 0

    async def _parsed(self, key: bytes) -> DeliveryKey | None:
        try:
            named = records.parse_delivery_key(key)
        except StoreCorruptError as error:
            await self._remove(key, DamageKind.BAD_RECORD, str(error))
            return None
        if not is_message_id(named.message_id):
            await self._remove(key, DamageKind.BAD_RECORD, "its message id is none")
            return None
        return named

    # --- messages

    async def _walk_messages(self) -> None:
        counts: tuple[array[int], array[int]] = (array("Q"), array("q"))
        async for rows in self._pages(_OPEN_COUNTS, records.after(_OPEN_COUNTS)):
            for key, value in rows:
                identity = key[len(_OPEN_COUNTS) :].decode("ascii", "replace")
                if is_message_id(identity):
                    counts[0].append(int(identity, 16))
                    counts[1].append(_count(value))
                else:
                    await self._remove(key, DamageKind.BAD_RECORD, "its message id is none")
        owed = _SortedMessages(_counted(heapq.merge(*self._ids.values())), self._suspects)
        open_counts = _SortedMessages(zip(*counts, strict=True), self._suspects)
        current, rows_of = b"", list[tuple[bytes, Value]]()
        async for page in self._pages(records.MESSAGE_PREFIX, records.after(records.MESSAGE_PREFIX)):
            for key, value in page:
                identity_of, _, part = key[len(records.MESSAGE_PREFIX) :].partition(b" ")
                if identity_of != current:
                    await self._note_message(current, rows_of, owed, open_counts)
                    current, rows_of = identity_of, []
                rows_of.append((part, _sized(part, value)))
        await self._note_message(current, rows_of, owed, open_counts)
        owed.take(_END)
        open_counts.take(_END)
        self._deliveries = sum(map(len, self._ids.values()))

    async def _note_message(
        self, raw: bytes, rows: list[tuple[bytes, Value]], owed: _SortedMessages, open_counts: _SortedMessages
    ) -> None:
        if not rows:
            return
        identity = raw.decode("ascii", "replace")
        if not is_message_id(identity):
            for part, _ in rows:
                key = b"%b%b%b" % (records.MESSAGE_PREFIX, raw, b" " + part if part else b"")
                await self._remove(key, DamageKind.BAD_RECORD, "its message id is none")
            return
        number = int(identity, 16)
        found = FoundMessage(identity=MessageId(identity), parts=dict(rows), open=open_counts.take(number))
        self._messages += b"#" in found.parts and b"*" in found.parts
        _judge(found, owed.take(number) or 0)
        if found.faults:
            self._suspects.append(number)

    async def _examine_again(self, identity: MessageId) -> None:
        found = await self._examine(identity)
        for _ in range(_READINGS):
            if not found.faults:
                return
            await self._note_new_queues()
            before, found = found, await self._examine(identity)
            if before.faults == found.faults:
                break
        for fault, where, what in found.faults:
            self._findings.add(fault, where, what, identity)
        if self.repair is not None:
            await self._mend(self.repair, found)

    async def _note_new_queues(self) -> None:
        """Note queues in which a running relay has stored deliveries since the deliveries were scanned."""
        for queue in await QueueReads(self._reader).queues():
            self._ids.setdefault(records.queue_prefix(queue), array("Q"))

    async def _examine(self, identity: MessageId) -> FoundMessage:
        """Read all records of one message again and determine its faults."""
        prefix = records.message_prefix(identity)
        parts: dict[bytes, Value] = {}
        old: dict[bytes, bytes] = {}
        async for page in self._pages(prefix, records.after(prefix)):
            for key, value in page:
                part = key[len(prefix) :]
                parts[part] = _sized(part, value)
                if not part.isdigit() and isinstance(value, bytes):
                    old[key] = value
        found = FoundMessage(identity=identity, parts=parts, old=old)
        there = 0
        for queue in sorted(self._ids):
            mine = b"%b%b " % (queue, identity.encode("ascii"))
            async for page in self._pages(mine, records.after(mine)):
                for key, value in page:
                    there += 1
                    old[key] = value if isinstance(value, bytes) else b""
                    try:
                        named = records.parse_delivery_key(key)
                        found.deliveries[key] = records.decode_record(named, _read(value))
                    except StoreCorruptError as error:
                        found.unreadable.append(key)
                        found.faults.append((DamageKind.BAD_RECORD, _shown(key), str(error)))
        count = await self._get(records.open_count_key(identity))
        if count is not None:
            found.open = _count(count)
            old[records.open_count_key(identity)] = count if isinstance(count, bytes) else b""
        _judge(found, there)
        return found

    # --- indexes

    async def _compare_index(self) -> None:
        """Compare the index of due times with the deliveries, if its checksum differs or during a repair. An
        entry and its delivery are read at one moment before a fault is reported.
        """
        if not self._index_sum and self.repair is None:
            return
        async for page in self._pages(records.DEFERRED_PREFIX, records.after(records.DEFERRED_PREFIX)):
            listed = [(key, named) for key, _ in page if (named := _parsed(key)) is not None]
            values = await get_each(self._reader, [records.delivery_key(named) for _, named in listed])
            for (key, named), found in zip(listed, values, strict=True):
                if found is not None and _due(named, found) in (None, key):
                    continue
                entry, value = await get_each(self._reader, [key, records.delivery_key(named)])
                if entry is not None and value is None:
                    what = "the delivery does not exist"
                elif entry is not None and _due(named, value) not in (None, key):
                    what = "the delivery has another due time"
                else:
                    continue
                await self._remove(key, DamageKind.INDEX_STRAY, what, named.message_id, old=False)
        async for page in self._pages(records.WEBHOOK_PREFIX, records.after(records.DELIVERY_PREFIX)):
            named_in = ((named, value) for key, value in page if (named := _parsed(key)) is not None)
            due = [(named, index) for named, value in named_in if (index := _due(named, value))]
            entries = await get_each(self._reader, [key for _, key in due])
            for (named, key), found in zip(due, entries, strict=True):
                if found is None:
                    where = records.delivery_key(named)
                    entry, value = await get_each(self._reader, [key, where])
                    if entry is None and _due(named, value) == key:
                        what = "the deferred delivery has no index entry"
                        self._findings.add(DamageKind.INDEX_MISSING, _shown(where), what, named.message_id)
                        await self._change(key, b"")

    async def _compare_once(self) -> None:
        """Compare the idempotency keys with the index of their expiry. A key that was used again may have
        several index entries, and those of earlier uses are removed when they expire.
        """
        start = len(records.ONCE_PREFIX)
        async for page in self._pages(records.ONCE_PREFIX, records.after(records.ONCE_PREFIX)):
            for key, value in page:
                try:
                    identity = key[start:].decode("ascii", "replace")
                    index = records.once_until_key(identity, records.decode_kept(_read(value)).until)
                except (StoreCorruptError, UnicodeError) as error:
                    await self._remove(key, DamageKind.BAD_RECORD, str(error))
                    continue
                if await self._get(index) is None and await self._get(key) == value:
                    what = "the key has no index entry, so it would never expire"
                    self._findings.add(DamageKind.INDEX_MISSING, _shown(key), what)
                    await self._change(index, b"")
        async for page in self._pages(records.ONCE_UNTIL_PREFIX, records.after(records.ONCE_UNTIL_PREFIX)):
            for key, _ in page:
                entry, once = await get_each(
                    self._reader, [key, records.ONCE_PREFIX + key.rpartition(b" ")[2]]
                )
                if entry is not None and once is None:
                    await self._remove(
                        key, DamageKind.INDEX_STRAY, "the idempotency key does not exist", old=False
                    )

    async def _look_between(self) -> None:
        start = b"\x01"
        for prefix in (*PREFIXES, b"\xff"):
            async for page in pages(self._reader, start, prefix, values=False):
                for key, _ in page:
                    await self._remove(key, DamageKind.BAD_RECORD, "the key is not a valid key of a spool")
            start = records.after(prefix)

    # --- repairing

    async def _mend(self, repair: RecordRepair, found: FoundMessage) -> None:
        """Repair the records of one message, or move the message to the salvage directory."""
        if all(fault in HARMLESS for fault, _, _ in found.faults) and not repair.takes_uploads:
            return  # the next start removes an unfinished upload
        identity, message = found.identity, found.message
        changes: dict[bytes, bytes | None]
        prefix, count = records.message_prefix(identity), records.open_count_key(identity)
        if await repair.judge(found, lambda: self._body(identity)):
            rows = (prefix + part for part in found.parts)
            changes = dict.fromkeys([*found.deliveries, *found.unreadable, count, *rows])
        else:
            assert message is not None
            changes = dict.fromkeys([*found.unreadable, *(prefix + part for part in found.strange)])
            changes[records.exists_key(identity)] = b"%d" % message.envelope.created
            left = len(found.deliveries)
            changes[count] = None if found.wanted == left else b"%d" % left
        if self.write is not None:
            await self.write(Write(changes, makes_room=True))

    async def _body(self, identity: MessageId) -> AsyncIterator[bytes]:
        """Yield the readable chunks of a body."""
        prefix = records.message_prefix(identity)
        async for page in self._pages(prefix + b"0", prefix + b":"):
            for key, value in page:
                if key[len(prefix) :].isdigit() and isinstance(value, bytes):
                    yield value

    async def _remove(
        self, key: bytes, fault: DamageKind, what: str, identity: str = "", *, old: bool = True
    ) -> None:
        self._findings.add(fault, _shown(key), what, identity)
        if self.repair is not None and old:
            value = await self._get(key)
            self.repair.lose(f"{_shown(key)}: {what}")
            self.repair.keep({key: value if isinstance(value, bytes) else b""})
        await self._change(key, None)

    async def _change(self, key: bytes, value: bytes | None) -> None:
        if self.write is not None:
            self._changes[key] = value
            if len(self._changes) >= _BATCH:
                await self._flush()

    async def _flush(self) -> None:
        if self._changes:
            assert self.write is not None
            changes, self._changes = self._changes, {}
            await self.write(Write(changes, makes_room=True))


# --- determining faults


def _judge(found: FoundMessage, there: int) -> None:
    """Add the faults of a message to `found`; `there` is the number of its delivery records."""
    identity = found.identity
    exists, metadata = found.parts.get(b"#"), found.parts.get(b"*")
    sizes = {
        part: int(value) if isinstance(value, bytes) else -1
        for part, value in found.parts.items()
        if part.isdigit()
    }
    prefix = records.message_prefix(identity)
    where = _shown(prefix)

    def add(fault: DamageKind, key: str, what: str) -> None:
        found.faults.append((fault, key, what))

    for part in found.strange:
        add(DamageKind.BAD_RECORD, _shown(prefix + part), "the key is not a valid key of a message")
    if metadata is None and exists is None:
        if sizes:
            add(DamageKind.CHUNKS_ALONE, where, f"{len(sizes):,} chunks of a body without a message")
        if there:
            add(DamageKind.DELIVERY_ALONE, f"delivery-zone … {identity} …", "its message does not exist")
    else:
        if metadata is None or exists is None:
            add(DamageKind.BAD_RECORD, where, f"the record {'*' if metadata is None else '#'} is missing")
        if metadata is not None:
            try:
                found.message = records.decode_message(identity, _read(metadata))
            except StoreCorruptError as error:
                found.why = str(error)
                is_read = isinstance(metadata, bytes)
                add(DamageKind.BAD_RECORD if is_read else DamageKind.UNREADABLE, f"{where} *", found.why)
            else:
                if (fault := _body_fault(found.message, sizes)) is not None:
                    found.why = f"its body is incomplete: {fault[1]}"
                    add(fault[0], where, fault[1])
        if not there:
            add(DamageKind.MESSAGE_ALONE, where, "the message has no delivery")
    if (said := _wrong_count(found, there)) is not None:
        add(DamageKind.WRONG_COUNT, _shown(records.open_count_key(identity)), f"{said}, there are {there:,}")


def _wrong_count(found: FoundMessage, there: int) -> str | None:
    """Describe what is wrong with the stored number of open deliveries, or return None if it is right."""
    wanted = there if found.message is None else found.wanted
    if found.open is None:
        return None if there in (0, wanted) else "it does not exist"
    if found.open == there:
        return None
    return "it is invalid" if found.open < 0 else f"it contains {found.open:,}"


def _body_fault(message: Message, sizes: dict[bytes, int]) -> tuple[DamageKind, str] | None:
    if unreadable := [int(number) for number, size in sizes.items() if size < 0]:
        shown = ", ".join(map(str, unreadable[:5]))
        return DamageKind.UNREADABLE, f"unreadable chunks of {message.chunks:,}: {shown}"
    if missing := [number for number in range(1, message.chunks + 1) if b"%06d" % number not in sizes]:
        shown = ", ".join(map(str, missing[:5]))
        return DamageKind.CHUNK_MISSING, f"missing chunks of {message.chunks:,}: {shown}"
    if len(sizes) > message.chunks:
        return DamageKind.WRONG_SIZE, f"{len(sizes):,} chunks instead of {message.chunks:,}"
    octets = sum(sizes.values())
    full = (size == CHUNK_SIZE for number, size in sizes.items() if int(number) < message.chunks)
    if octets != message.size or not all(full):
        return DamageKind.WRONG_SIZE, f"its chunks have {octets:,} bytes instead of {message.size:,}"
    return None


def _sized(part: bytes, value: Value) -> Value:
    """Replace the value of a chunk by its size, because nothing else is needed and a body may be large."""
    return b"%d" % len(value) if part.isdigit() and isinstance(value, bytes) else value


def _read(value: Value) -> bytes:
    """Return the value, or raise the StoreCorruptError that was found in its place."""
    if isinstance(value, bytes):
        return value
    raise value


def _count(value: Value) -> int:
    """Parse the stored number of open deliveries of a message. Return -1 if it is invalid."""
    return int(value) if isinstance(value, bytes) and value.isdigit() and len(value) < 16 else -1


def _due(named: DeliveryKey, value: Value | None) -> bytes | None:
    """Return the index key that a delivery must have by its due time, b"" if none, or None if it is
    invalid.
    """
    if value is None:
        return None
    try:
        due = records.due_time(records.decode_record(named, _read(value)))
    except StoreCorruptError:
        return None
    return records.deferred_key(named, due) if due else b""


def _parsed(key: bytes) -> DeliveryKey | None:
    try:
        return records.parse_delivery_key(key)
    except StoreCorruptError:
        return None


def _hash(key: bytes) -> int:
    """Return a 64-bit hash of a key, for the checksum of an index. Index entries and expected entries add up
    to 0; different sets do so with a probability of 2^-64.
    """
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")


def _recipient_in(key: bytes) -> str:
    """Return the recipient that the key of a delivery contains, even if the key is invalid."""
    raw = key.rpartition(b" ")[2]
    return records.unfield(raw) if raw.isascii() else raw.decode("utf-8", "replace")


def _shown(key: bytes) -> str:
    return key.decode("ascii", "replace").rstrip()


def _counted(numbers: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield each of the sorted numbers once, with the number of its occurrences."""
    return ((number, sum(1 for _ in found)) for number, found in itertools.groupby(numbers))


class _SortedMessages:
    """The ids of messages in ascending order, each with a number of deliveries (counted or recorded)."""

    def __init__(self, pairs: Iterator[tuple[int, int]], passed: array[int]) -> None:
        self._pairs = pairs
        self._next = next(pairs, None)
        self._passed = passed

    def take(self, message: int) -> int | None:
        """Return the number of deliveries of a message, or None; ids must be passed in ascending order. Ids
        that are skipped are added to `passed`.
        """
        while self._next is not None and self._next[0] < message:
            self._passed.append(self._next[0])
            self._next = next(self._pairs, None)
        if self._next is None or self._next[0] != message:
            return None
        found = self._next[1]
        self._next = next(self._pairs, None)
        return found
