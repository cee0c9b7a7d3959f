"""Parses LevelDB's logs, manifests and tables, including damaged ones. No I/O.

After a damaged record LevelDB drops the rest of the 32 KiB block. It takes a length beyond the end of the
file for the end of the log, and silently skips zeros. `read_log` finds every intact record and the bytes that
belong to none, and distinguishes damage from the incomplete end that a power cut leaves. `write_log` writes a
log of intact records.

A table consists of data blocks, a filter block, a block that names the filter, the index, and a footer,
without gaps. LevelDB drops all rows of a table whose index it cannot read. But a block ends where its
checksum matches, so `data_blocks` finds one after the other from the first byte on, up to the first damaged
one.
"""

import contextlib
import itertools
import re
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")
BATCH = struct.Struct("<QI")
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4

_FAR = 1 << 24
"""The largest difference of the numbers of two records in one log. Bytes in a body may look like a record."""

_IDENTITY = re.compile(
    rb"(?:message |delivery-(?:zone|webhook) [!-~]+ |deferred-zone [!-~]+ [0-9.]+ |meta open )([0-9a-f]{16})"
)


class FormatError(ValueError):
    """The bytes are not in LevelDB's format."""


# --- logs


class LogGap(NamedTuple):
    """A range of bytes in a log that belonged to lost records. `end` may be after the end of the file."""

    start: int
    end: int


class LogContent(msgspec.Struct):
    """The parsed content of a LevelDB log. `end` is the offset after the last intact record. `torn` is the
    offset of an incomplete last record, which was never acknowledged.
    """

    records: list[bytes] = msgspec.field(default_factory=list)
    gaps: list[LogGap] = msgspec.field(default_factory=list)
    torn: int | None = None
    end: int = 0
    writes_missing_behind: int = 0
    """The number of writes that are missing at the end, according to the next log."""

    @property
    def is_clean(self) -> bool:
        return not self.gaps and self.torn is None

    @property
    def sequences(self) -> tuple[int, int] | None:
        """The sequence number of the log's first write, and the number that follows the last one."""
        if not self.records:
            return None
        return sequence_of(self.records[0])[0], sum(sequence_of(self.records[-1]))

    @property
    def writes_missing(self) -> int:
        """The minimum number of missing writes, derived from the sequence numbers of the writes that
        exist.
        """
        missing = self.writes_missing_behind
        for before, after in itertools.pairwise(self.records):
            missing += max(sequence_of(after)[0] - sum(sequence_of(before)), 0)
        return missing


class _LogFragment(NamedTuple):
    """A fragment of a log record, as stored in one block. Kind 0 marks bytes that are not a fragment."""

    start: int
    end: int
    kind: int
    payload: bytes = b""


def read_log(raw: bytes, *, synced: int = 0, verify: bool = True, batches: bool = True) -> LogContent:
    """Parse the content of a log file. Its first `synced` bytes were durable. Without `verify` checksums are
    not compared: that is quick and finds everything that LevelDB itself overlooks, but describes damage
    inexactly. The manifest is a log without `batches`.
    """
    log = LogContent()
    begun: list[_LogFragment] = []
    lost: int | None = None
    last: _LogFragment | None = None
    for piece in _pieces(raw, verify=verify):
        last = piece
        if begun and piece.kind in (0, _FULL, _FIRST):
            lost, begun = begun[0].start if lost is None else lost, []
        if piece.kind == _FIRST or (begun and piece.kind == _MIDDLE):
            begun.append(piece)
            continue
        start = piece.start
        if piece.kind == _FULL or (begun and piece.kind == _LAST):
            whole = [*begun, piece]
            start = whole[0].start
            payload = piece.payload if not begun else b"".join(each.payload for each in whole)
            begun = []
            if not batches or (_follows(log, payload) if verify else len(payload) >= BATCH.size):
                if lost is not None:
                    log.gaps.append(LogGap(lost, start))
                    lost = None
                log.records.append(payload)
                log.end = piece.end
                continue
        lost = start if lost is None else lost
    if lost is None and begun:
        lost = begun[0].start
    if lost is not None and log.end >= synced and last is not None and _is_torn(raw, last):
        log.torn = lost
    elif lost is not None or log.end < synced:
        log.gaps.append(LogGap(log.end if lost is None else lost, max(len(raw), synced)))
    return log


def _is_torn(raw: bytes, last: _LogFragment) -> bool:
    """Return whether the end of the log looks like an interrupted write, or like bytes that the disk did not
    store.
    """
    if last.kind in (_FIRST, _MIDDLE):
        return True
    if last.kind != 0 or last.end != len(raw):
        return False
    if last.end - last.start < _HEADER.size or not raw[-8:].strip(b"\0"):
        return True
    _, length, kind = _HEADER.unpack_from(raw, last.start)
    end = last.start + _HEADER.size + length
    return bool(_FULL <= kind <= _LAST and last.end < end <= last.start - last.start % BLOCK + BLOCK)


def _pieces(raw: bytes, *, verify: bool) -> Iterator[_LogFragment]:
    size = len(raw)
    for block in range(0, size, BLOCK):
        offset, end = block, min(block + BLOCK, size)
        while end - offset >= _HEADER.size:
            piece = _piece(raw, offset, end, verify=verify)
            if piece is None:
                piece = _LogFragment(offset, _next(raw, offset, end) if verify else end, 0)
            yield piece
            offset = piece.end
        if offset < end < block + BLOCK:
            yield _LogFragment(offset, end, 0)  # the beginning of a header, and the end of the file


def _piece(raw: bytes, offset: int, end: int, *, verify: bool) -> _LogFragment | None:
    crc, length, kind = _HEADER.unpack_from(raw, offset)
    stop = offset + _HEADER.size + length
    if not _FULL <= kind <= _LAST or stop > end:
        return None
    if verify and masked_crc(raw[offset + 6 : stop]) != crc:
        return None
    return _LogFragment(offset, stop, kind, raw[offset + _HEADER.size : stop])


def _next(raw: bytes, offset: int, end: int) -> int:
    """Return the offset of the next intact fragment after a damaged one, or `end`, the end of their block."""
    _, length, _ = _HEADER.unpack_from(raw, offset)
    stop = offset + _HEADER.size + int(length)
    if stop == end or (stop + _HEADER.size <= end and _piece(raw, stop, end, verify=True)):
        return stop
    others = range(offset + 1, end - _HEADER.size + 1)
    return next((at for at in others if raw[at + 6] <= _LAST and _piece(raw, at, end, verify=True)), end)


def _follows(log: LogContent, payload: bytes) -> bool:
    """Return whether the payload of a record is a batch whose sequence number can follow the batches already
    read.
    """
    try:
        operations = list(operations_of(payload))
    except FormatError:
        return False
    sequence, count = sequence_of(payload)
    before = log.sequences
    return count == len(operations) and (before is None or before[1] <= sequence < before[1] + _FAR)


def write_log(records: Iterable[bytes]) -> bytes:
    """Encode records as a log in LevelDB's format."""
    out = bytearray()
    for record in records:
        start, first = 0, True
        while first or start < len(record):
            room = BLOCK - len(out) % BLOCK
            if room < _HEADER.size:
                out += bytes(room)
                room = BLOCK
            part = record[start : start + room - _HEADER.size]
            start += len(part)
            last = start == len(record)
            kind = (_FULL if last else _FIRST) if first else (_LAST if last else _MIDDLE)
            out += _HEADER.pack(masked_crc(bytes([kind]) + part), len(part), kind) + part
            first = False
    return bytes(out)


def identities_in(octets: bytes) -> list[str]:
    """Return the distinct message ids in the spool keys that occur in these bytes."""
    return list(dict.fromkeys(found.decode("ascii") for found in _IDENTITY.findall(octets)))


def named_in(octets: bytes) -> str:
    """Return the end of an error message that names the messages to which these bytes refer, or "" if there
    are none.
    """
    named = identities_in(octets)
    more = "" if len(named) <= 10 else f" and {len(named) - 10} more"
    return f"; they refer to the messages {', '.join(named[:10])}{more}" if named else ""


# --- batches


def sequence_of(batch: bytes) -> tuple[int, int]:
    """Return the sequence number of a batch's first write, and the number of its writes. Raises
    FormatError.
    """
    if len(batch) < BATCH.size:
        raise FormatError("a batch is too short")
    sequence, count = BATCH.unpack_from(batch)
    return sequence, count


def operations_of(batch: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the key and the new value of each operation in a batch. The value `None` deletes the key. Raises
    FormatError.
    """
    sequence_of(batch)
    reader = Decoder(batch, BATCH.size)
    while not reader.at_end:
        kind = reader.number()
        if kind not in (0, 1):
            raise FormatError(f"a batch contains an operation of kind {kind}")
        key = reader.text()
        yield key, reader.text() if kind else None


# --- the manifest


class TableFile(NamedTuple):
    """The number of a table file, and its size in bytes according to the manifest."""

    number: int
    size: int


class Manifest(msgspec.Struct):
    """The state of a database according to its manifest: the tables, and the first log that they do not
    include.
    """

    tables: dict[tuple[int, int], TableFile] = msgspec.field(default_factory=dict)  # by level and number
    log: int = 0
    last_sequence: int = 0


def read_manifest(raw: bytes) -> Manifest:
    """Parse a manifest, which lists the tables of a database. Raises FormatError."""
    framed = read_log(raw, verify=False, batches=False)
    if not framed.is_clean:
        framed = read_log(raw, batches=False)
    if framed.gaps:
        raise FormatError(f"bytes {framed.gaps[0].start} to {framed.gaps[0].end} are damaged")
    manifest = Manifest()
    seen = 0
    for record in framed.records:
        reader = Decoder(record)
        while not reader.at_end:
            seen |= 1 << _apply(manifest, reader)
    if seen & _NEEDED != _NEEDED:
        raise FormatError("its end is missing")
    return manifest


_NEEDED = 1 << 2 | 1 << 3 | 1 << 4
"""The fields that LevelDB requires to open a database: log, next file, last sequence."""


def _apply(manifest: Manifest, reader: "Decoder") -> int:
    match field_number := reader.number():
        case 1:
            reader.text()
        case 2:
            manifest.log = reader.number()
        case 3 | 9:
            reader.number()
        case 4:
            manifest.last_sequence = reader.number()
        case 5:
            reader.number()
            reader.text()
        case 6:
            manifest.tables.pop((reader.number(), reader.number()), None)
        case 7:
            level, table = reader.number(), TableFile(reader.number(), reader.number())
            reader.text()
            reader.text()
            manifest.tables[level, table.number] = table
        case _:
            raise FormatError(f"it contains the unknown field {field_number}")
    return field_number


class Decoder:
    """Decodes numbers and strings in LevelDB's encoding. Raises FormatError if one is truncated."""

    def __init__(self, octets: bytes, at: int = 0) -> None:
        self._octets = octets
        self._at = at

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._octets)

    def number(self) -> int:
        value = shift = 0
        while self._at < len(self._octets) and shift < 70:
            octet = self._octets[self._at]
            self._at += 1
            value |= (octet & 0x7F) << shift
            if octet < 0x80:
                return value
            shift += 7
        raise FormatError("a number is truncated")

    def text(self) -> bytes:
        return self.octets(self.number())

    def octets(self, length: int) -> bytes:
        begin, end = self._at, self._at + length
        if end > len(self._octets):
            raise FormatError("a text is truncated")
        self._at = end
        return self._octets[begin:end]


# --- tables

_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = struct.Struct("<BI")
_NONE, _SNAPPY = 0, 1
_FILTER = b"filter.leveldb.BuiltinBloomFilter2"
_PUT = 1


def has_index(raw: bytes) -> bool:
    """Return whether LevelDB can find the blocks of the table."""
    if len(raw) < _FOOTER or raw[-8:] != _MAGIC:
        return False
    try:
        footer = Decoder(raw[-_FOOTER:])
        handles = [(footer.number(), footer.number()) for _ in range(2)]
        return all(_block(raw, at, size) is not None for at, size in handles)
    except FormatError:
        return False


class Block(NamedTuple):
    """A data block of a table, which ends at the offset `end`. Each of its writes is a batch of a log."""

    end: int
    batches: list[bytes]


def data_blocks(raw: bytes) -> Iterator[Block]:
    """Yield the data blocks of a table, from its start up to the first damaged one."""
    at = 0
    while (end := _end_of_block(raw, at)) is not None:
        content = _block(raw, at, end - at)
        at = end + _TRAILER.size
        try:
            entries = list(_entries(content or b""))
        except FormatError:
            continue  # the filter block
        if not entries or entries[0][0] == _FILTER:
            break  # the index comes next, and has keys too
        yield Block(at, [batch for entry in entries if (batch := as_batch(*entry)) is not None])


def damaged_blocks(raw: bytes) -> list[tuple[int, int]]:
    """Return the start and end of each damaged data block of a table that has an index."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(FormatError):
        footer = Decoder(raw[-_FOOTER:])
        _, _, at, size = (footer.number() for _ in range(4))
        for _, handle in _entries(_block(raw, at, size) or b""):
            reader = Decoder(handle)
            start, size = reader.number(), reader.number()
            if _block(raw, start, size) is None:
                found.append((start, start + size + _TRAILER.size))
    return found


def as_batch(entry: bytes, value: bytes) -> bytes | None:
    """Encode an entry of a table as a batch of a log, with its original sequence number. Return None if the
    entry is invalid.
    """
    key, trailer = entry[:-8], int.from_bytes(entry[-8:], "little")
    sequence, kind = trailer >> 8, trailer & 0xFF
    if len(entry) < 8 or kind > _PUT:
        return None
    head = BATCH.pack(sequence, 1) + bytes([kind]) + _number(len(key)) + key
    return head + _number(len(value)) + value if kind == _PUT else head


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _end_of_block(raw: bytes, at: int) -> int | None:
    """Return the offset of the trailer of the block that begins at `at`, or None if the block is damaged."""
    crc, table = 0xFFFFFFFF, _CRC
    for end in range(at, len(raw) - _TRAILER.size + 1):
        crc = table[(crc ^ raw[end]) & 0xFF] ^ (crc >> 8)
        if raw[end] <= _SNAPPY and _masked(crc) == int.from_bytes(raw[end + 1 : end + 5], "little"):
            return end
    return None


def _block(raw: bytes, at: int, size: int) -> bytes | None:
    """Return the decompressed content of a block of a table, or None if it is damaged."""
    end = at + size
    if end + _TRAILER.size > len(raw):
        return None
    kind, crc = _TRAILER.unpack_from(raw, end)
    if kind > _SNAPPY or masked_crc(raw[at : end + 1]) != crc:
        return None
    return raw[at:end] if kind == _NONE else _decompressed(raw[at:end])


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values in the content of a block. Raises FormatError if the block has another
    content.
    """
    if len(block) < 4:
        raise FormatError("a block is too short")
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise FormatError("a block has more restarts than bytes")
    reader, key = Decoder(block[:end]), b""
    while not reader.at_end:
        shared, rest, size = reader.number(), reader.number(), reader.number()
        if shared > len(key):
            raise FormatError("a key shares more bytes than the previous key has")
        key = key[:shared] + reader.octets(rest)
        yield key, reader.octets(size)


def _decompressed(raw: bytes) -> bytes | None:
    """Decompress Snappy's format, which consists of literals and copies. Return None if it is invalid."""
    try:
        reader = Decoder(raw)
        size, out = reader.number(), bytearray()
        while not reader.at_end:
            tag = reader.octets(1)[0]
            if tag & 3 == 0:
                length = tag >> 2
                if length >= 60:
                    length = int.from_bytes(reader.octets(length - 59), "little")
                out += reader.octets(length + 1)
                continue
            if tag & 3 == 1:
                length, back = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | reader.octets(1)[0]
            else:
                length, back = (
                    (tag >> 2) + 1,
                    int.from_bytes(reader.octets(2 if tag & 3 == 2 else 4), "little"),
                )
            if not 0 < back <= len(out):
                return None
            start = len(out) - back
            while length > 0:  # a copy may overlap itself
                piece = out[start : start + length]
                out += piece
                length -= len(piece)
    except FormatError:
        return None
    return bytes(out) if len(out) == size else None


# --- checksums


def _crc_table() -> tuple[int, ...]:
    table = []
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return tuple(table)


_CRC = _crc_table()


def masked_crc(octets: bytes) -> int:
    """Compute CRC-32C as LevelDB stores it. At 10 MB/s it is only used for suspicious data."""
    crc, table = 0xFFFFFFFF, _CRC
    for octet in octets:
        crc = table[(crc ^ octet) & 0xFF] ^ (crc >> 8)
    return _masked(crc)


def _masked(crc: int) -> int:
    """Return a checksum in the masked form in which LevelDB stores it."""
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
