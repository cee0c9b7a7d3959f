"""Reads the rows of a LevelDB table with a damaged index or footer, block by block. Pure.

A table consists of data blocks, a filter block, a block that names the filter, the index, and a footer,
without gaps. LevelDB drops all rows of a table whose index it cannot read. But a block ends where its
checksum matches, so the blocks are found one after the other from the first byte on, up to the first damaged
one.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

from zonerelay.store.leveldb.damage.format import BATCH, Decoder, FormatError, crc_steps, masked, masked_crc

_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = struct.Struct("<BI")
_NONE, _SNAPPY = 0, 1
_FILTER = b"filter.leveldb.BuiltinBloomFilter2"
_PUT = 1


class KeyVersion(NamedTuple):
    """One write of a key. A `value` of None is its removal."""

    key: bytes
    sequence: int
    value: bytes | None


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
    """A data block, which ends at the offset `end`."""

    end: int
    versions: list[KeyVersion]


def data_blocks(raw: bytes) -> Iterator[Block]:
    """Yield the data blocks from the first byte up to the first damaged one."""
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
        yield Block(at, [version for entry in entries if (version := _version(*entry)) is not None])


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


def as_batch(version: KeyVersion) -> bytes:
    """Encode the version as a batch of a log, with its original number."""
    key, sequence, value = version
    head = BATCH.pack(sequence, 1) + bytes([0 if value is None else _PUT]) + _number(len(key)) + key
    return head if value is None else head + _number(len(value)) + value


def _number(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _end_of_block(raw: bytes, at: int) -> int | None:
    """Return the offset of the trailer of the block that begins at `at`, or None if the block is damaged."""
    last = len(raw) - _TRAILER.size
    for end, crc in crc_steps(raw, at):
        if end > last:
            return None
        if raw[end] <= _SNAPPY and masked(crc) == int.from_bytes(raw[end + 1 : end + 5], "little"):
            return end
    return None


def _block(raw: bytes, at: int, size: int) -> bytes | None:
    """Return the content of a block, or None if it is damaged."""
    end = at + size
    if end + _TRAILER.size > len(raw):
        return None
    kind, crc = _TRAILER.unpack_from(raw, end)
    if kind > _SNAPPY or masked_crc(raw[at : end + 1]) != crc:
        return None
    return raw[at:end] if kind == _NONE else _decompressed(raw[at:end])


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of a block. Raises FormatError if the block has another content."""
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


def _version(key: bytes, value: bytes) -> KeyVersion | None:
    if len(key) < 8 or key[-8] > _PUT:
        return None
    number = int.from_bytes(key[-8:], "little")
    return KeyVersion(key[:-8], number >> 8, value if number & 0xFF == _PUT else None)


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
