"""Indexes a log of objects in a local LevelDB, which is not synced and can be deleted at any time.

It contains the keys of one partition after one entry of its log, and the number of that entry. The first byte
of each value shows whether the value follows or is in a separate object. Rows that begin with NUL belong to
the index itself. An index from before the machine's last boot, or an unreadable one, is emptied when it is
opened. Every method blocks.
"""

import contextlib
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay import durable
from zonerelay.store.contract import StoreError
from zonerelay.store.keys.port import KeyPage, Row, page_of
from zonerelay.store.leveldb.engine import FAILURES, AtomicBatch, Database, View, connect

SMALL, LARGE = b"\0", b"\1"
_SPAN = struct.Struct(">QQI")
PIECE_ROWS = 100_000
"""The largest number of rows in one object of a snapshot."""
_WRITE_BUFFER = 4 * 1024 * 1024
_BOOT, _STATE, _BEGINNING, _NAME = b"\0boot", b"\0state", b"\0epoch ", b"\0name "
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LogState(msgspec.Struct, frozen=True, array_like=True):
    """The state of the log after the last applied entry, and its size in bytes since the last snapshot."""

    slot: int = 0
    epoch: int = 0
    writer: str = ""
    batch_epoch: int = 0
    batch: int = 0
    checksum: int = 0
    log: int = 0
    live: int = 0


class ValueLocation(NamedTuple):
    """The location of a value outside of the index: a range of bytes in an object, and their CRC-32."""

    name: str
    first: int
    size: int
    checksum: int


def small(value: bytes) -> bytes:
    """Return the index row of a value that is stored in the index itself."""
    return SMALL + value


def large(span: ValueLocation) -> bytes:
    """Return the index row of a value that is stored in an object."""
    return LARGE + _SPAN.pack(span.first, span.size, span.checksum) + span.name.encode()


def span_of(stored: bytes) -> ValueLocation | None:
    if stored[:1] != LARGE:
        return None
    return ValueLocation(stored[1 + _SPAN.size :].decode(), *_SPAN.unpack_from(stored, 1))


def name_of(stored: bytes) -> str:
    """Return the name of the object that an index row refers to, or "" if the value is in the index."""
    return stored[1 + _SPAN.size :].decode() if stored[:1] == LARGE else ""


def size_of(stored: bytes) -> int:
    return int(_SPAN.unpack_from(stored, 1)[1]) if stored[:1] == LARGE else len(stored) - 1


class ObjectIndex(Database):
    """The index of one partition."""

    def open(self, anew: bool = False) -> LogState:
        """Open the index, and return the state of the log that it represents. Raises StoreError."""
        if not anew:
            with contextlib.suppress(StoreError, *FAILURES, msgspec.MsgspecError, OSError):
                self._db = connect(self.path, write_buffer=_WRITE_BUFFER)
                state = self.get(_STATE)
                if state is not None and self.get(_BOOT) == _BOOT_ID.read_bytes():
                    return msgspec.msgpack.decode(state, type=LogState)
        self.clear()
        return LogState()

    def clear(self) -> None:
        """Delete the index and create an empty one."""
        self._close()
        with self._translated():
            shutil.rmtree(self.path, ignore_errors=True)
            durable.make_directory(self.path)
            self._db = connect(self.path, write_buffer=_WRITE_BUFFER, create=True)
        with self._unsynced() as batch:
            batch.put(_BOOT, _BOOT_ID.read_bytes())

    def close(self) -> None:
        self._close()

    # --- writing

    @contextlib.contextmanager
    def _unsynced(self) -> Iterator[AtomicBatch]:
        with self._translated():
            batch = self._handle().write_batch()
            yield batch
            batch.write()

    def apply(
        self, changes: Sequence[tuple[bytes, bytes | None]], state: LogState, is_beginning: bool
    ) -> tuple[LogState, list[str]]:
        """Apply the changes of one entry of the log. Return the new state, and the names of the objects that
        no row refers to any more.
        """
        live = state.live
        made_names, gone_names = Counter[str](), Counter[str]()
        with self._unsynced() as batch:
            get = self._handle().get
            for key, value in changes:
                if (old := get(key)) is not None:
                    live -= len(key) + len(old)
                    if name := name_of(old):
                        gone_names[name] += 1
                if value is None:
                    batch.delete(key)
                    continue
                batch.put(key, value)
                live += len(key) + len(value)
                if name := name_of(value):
                    made_names[name] += 1
            dropped = self._count_names(batch, made_names, gone_names)
            state = msgspec.structs.replace(state, live=live)
            if is_beginning:
                batch.put(b"%b%016d" % (_BEGINNING, state.slot), b"")
            batch.put(_STATE, msgspec.msgpack.encode(state))
        return state, dropped

    def _count_names(self, batch: AtomicBatch, made: Counter[str], gone: Counter[str]) -> list[str]:
        """Update the number of rows that refer to each object. Return the objects to which no row refers any
        more.
        """
        dropped: list[str] = []
        for name in made.keys() | gone.keys():
            key = _NAME + name.encode()
            left = int(self._handle().get(key) or b"0") + made[name] - gone[name]
            if left > 0:
                batch.put(key, b"%d" % left)
            else:
                batch.delete(key)
                dropped.append(name)
        return dropped

    def load(self, rows: Sequence[Row]) -> None:
        """Add rows of a snapshot to the index."""
        with self._unsynced() as batch:
            for key, value in rows:
                batch.put(key, value)
            names = Counter(name for _, value in rows if (name := name_of(value)))
            self._count_names(batch, names, Counter())

    def begin(self, state: LogState, beginnings: Sequence[int]) -> None:
        """Mark the index as valid after all parts of a snapshot were added."""
        with self._unsynced() as batch:
            for slot in beginnings:
                batch.put(b"%b%016d" % (_BEGINNING, slot), b"")
            batch.put(_STATE, msgspec.msgpack.encode(state))

    # --- reading

    def page(self, start: bytes, end: bytes, rows: int, values: bool) -> KeyPage:
        """Return a page of index rows, whose values may be in objects."""
        return page_of(self.rows(start, end, limit=rows + 1, values=values), rows, size_of)

    def piece(self, start: bytes, view: View) -> KeyPage:
        """Return the next rows for a snapshot that is being written."""
        return page_of(self.rows(start, limit=PIECE_ROWS + 1, view=view), PIECE_ROWS)

    def beginnings(self) -> list[int]:
        """Return the slot numbers of all log entries that begin an epoch."""
        end = _BEGINNING[:-1] + bytes([_BEGINNING[-1] + 1])
        return [int(key[len(_BEGINNING) :]) for key, _ in self.rows(_BEGINNING, end, limit=2**62)]

    def are_named(self, names: Sequence[str]) -> list[bool]:
        """Return, for each object name, whether any index row refers to it."""
        return [self.get(_NAME + name.encode()) is not None for name in names]
