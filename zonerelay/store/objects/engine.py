"""Stores keys as immutable objects in a directory or a bucket: a log of batches, snapshots, and large values.

    mark                              the name of this store
    once/HASH                         a key that is reserved over all nodes
    nodes/N/log/SLOT                  one entry: a batch, or the beginning of an epoch
    nodes/N/values/KEY.EPOCH-BATCH-I  large values of neighbouring keys, one after the other
    nodes/N/snapshot/SLOT/PIECE       the keys as of that entry; `end` is created last
    beats/N                           a heartbeat: the writer replaces it repeatedly with its position

Large values are created before the batch that refers to them, unencoded. Their checksums are in the batch.

An object is only created if its name does not exist. The process that creates the next entry of a log is its
writer. A node that takes over creates an entry that begins an epoch, and the former writer's next batch
conflicts with it. Such entries are never removed: a writer that was stopped for days must find one at its
next slot, and not a free slot below a snapshot. All other objects below the last complete snapshot are
removed.

A place without conditional creation is for one writer at a time. There the name of an entry also contains its
epoch and that of the entry before it, so an entry that arrives late is not part of the log. The log consists
of the entries that lead back from the highest slot.

Reads use an index, a local LevelDB that is not synced. It is rebuilt from the last snapshot and the log
whenever it may be wrong: after a power cut, after a failed write, or if it belongs to another log. Listings
may be outdated, so entries are searched with them only in a place without conditions.

The lease of another node has ended if its heartbeat did not change for `lease` seconds of this machine's
clock. On failure: an entry without a response may exist, so `enter` first reads the log to its end. A gap in
the log that no snapshot covers, or a log that is shorter than the heartbeat states, is an error, and nothing
is written.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import msgspec
from msgspec.structs import replace

from zonerelay.model.clock import Clock
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import STORE
from zonerelay.store.contract import StoreCorruptError, StoreError
from zonerelay.store.directories import ReaderThreads
from zonerelay.store.keys import port
from zonerelay.store.objects.index import LogState, ObjectIndex, ValueLocation, large, name_of, small, span_of

LARGE_VALUE = 16 * 1024
SWEEP = 24 * 3600.0
"""Seconds between two searches for unused objects."""
SETTLING = 0.2
"""Seconds after which a heartbeat without conditions is read once more. The process that wrote last is the
writer.
"""
AHEAD = 8
"""The number of objects that are read or created at once."""
LEAST_LOG = 8 * 1024 * 1024
"""The smallest size of a log, in bytes, that is replaced by a snapshot."""
SHARE = 2
"""A snapshot is made when the log has this many times the size of the live data. So each byte is written at
most twice more.
"""
MOST_OBJECT = 1024 * 1024
"""The largest total size, in bytes, of the values in one object."""

_NUMBER = re.compile("[-/]")
_UNFIT = re.compile(r"[^A-Za-z0-9]+")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_log = logging.getLogger("zonerelay.store")


Object = tuple[str, Sequence[bytes]]
"""A name, and its content in chunks."""


class ObjectPlace(Protocol):
    """Interface: a directory or bucket that stores immutable objects. Every method raises StoreError. After
    an error of `create` the object may exist.
    """

    is_conditional: bool
    """Whether `create` detects an existing object. Otherwise it replaces it, and there must be only one
    writer.
    """

    async def create(
        self, name: str, data: bytes, *, values: Sequence[Object] = (), makes_room: bool = False
    ) -> bool:
        """Create a durable object, and return false if it exists already. The `values` are durable before it
        exists. With `makes_room` reserved space may be used.
        """

    async def store(self, values: Sequence[Object]) -> None:
        """Create objects under unused names; they become durable with the next `create`. After an error each
        of them may exist, but none is still being created.
        """

    async def replace(self, name: str, data: bytes) -> None:
        """Create or replace an object."""

    async def read(self, name: str) -> bytes | None: ...

    async def read_values(self, name: str, spans: Sequence[ValueLocation]) -> list[bytes] | None:
        """Return consecutive values in an object, checked as in `checked_values`, or None if the object does
        not exist.
        """

    def names(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield the names that begin with `prefix`, in any order. Very new objects may be missing."""

    async def remove(self, names: Sequence[str]) -> None:
        """Remove objects, which need not exist."""

    async def room(self) -> int | None: ...

    async def close(self) -> None: ...


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """An entry of a partition's log. With a `writer` it begins an epoch, otherwise it is a batch of
    changes.
    """

    epoch: int
    number: int = 0
    writer: str = ""
    changes: list[tuple[bytes, bytes | None]] = []


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """A heartbeat of a partition's writer, which extends its lease. `slot` is the last entry of the log at
    that time, and `snapshot` that of its last snapshot.
    """

    epoch: int = 0
    writer: str = ""
    count: int = 0
    is_left: bool = False
    slot: int = 0
    snapshot: int = 0


class ReservedKey(msgspec.Struct, frozen=True, array_like=True):
    """A reserved idempotency key, as stored in an object."""

    value: bytes
    until: float


class SnapshotEnd(msgspec.Struct, frozen=True, array_like=True):
    """The last object of a snapshot, which describes its other objects."""

    pieces: int
    state: LogState
    beginnings: list[int]


def is_large(key: bytes, value: bytes) -> bool:
    return len(value) > LARGE_VALUE


@dataclass(eq=False, repr=False)
class ObjectEngine:
    """The engine that stores partitions as objects. `index` is the local directory for the indexes of this
    process. `is_apart` returns whether a value is stored in a separate object. `forgive` is for repairs: it
    is called with each damaged or missing entry of a log, which then counts as empty.
    """

    place: ObjectPlace
    index: Path
    _: KW_ONLY
    clock: Clock
    lease: float
    is_apart: Callable[[bytes, bytes], bool] = is_large
    forgive: Callable[[str, str], None] | None = None

    def __post_init__(self) -> None:
        self.indexes: set[Path] = set()
        """The directories that are in use."""
        self.fresh_for = 0.0
        """Seconds in which reads of other nodes' partitions may use the last known state."""
        self._seen: dict[int, tuple[Heartbeat, float]] = {}

    def keeper(self, node: int) -> "ObjectKeys":
        return ObjectKeys(self, node)

    def take_index(self, node: int) -> Path:
        """Return an unused directory for an index of a node's partition. The first one is the same after a
        restart.
        """
        number = 0
        while (path := self.index / (f"{node}.{number}" if number else f"{node}")) in self.indexes:
            number += 1
        self.indexes.add(path)
        return path

    async def peers(self) -> list[port.PeerPartition]:
        found: set[int] = set()
        async for names in self.place.names("beats/"):
            found |= {int(name.rpartition("/")[2]) for name in names}
        return list(await asyncio.gather(*map(self._peer, sorted(found))))

    async def _peer(self, node: int) -> port.PeerPartition:
        beat = await self.beat_of(node)
        return port.PeerPartition(node, beat.epoch, beat.writer, beat.is_left, self.is_over(node, beat))

    async def beat_of(self, node: int) -> Heartbeat:
        data = await self.place.read(f"beats/{node}")
        return Heartbeat() if data is None else unpacked(data, Heartbeat, f"beats/{node}")

    async def reserve(self, key: bytes, value: bytes, until: float) -> bytes | None:
        """Reserve an idempotency key with this value until `until` (Unix time), unless it is reserved
        already. Return the existing value, or None. The reservation is durable. An expired object gets a
        successor, which only one node can create.
        """
        name = _once(key)
        while True:
            held = await self._reserved(name)
            if held is None:
                if await self.place.create(name, packed(ReservedKey(value, until))):
                    return None
            elif held.until > self.clock.now():
                return held.value
            else:
                name = f"{name}-{held.until:.6f}"

    async def unreserve(self, key: bytes, value: bytes) -> None:
        """Remove the reservation of a key if it has this value."""
        name = _once(key)
        while (held := await self._reserved(name)) is not None:
            if held.value == value and held.until > self.clock.now():
                await self.place.remove([name])
                return
            name = f"{name}-{held.until:.6f}"

    async def _reserved(self, name: str) -> ReservedKey | None:
        data = await self.place.read(name)
        return None if data is None else unpacked(data, ReservedKey, name)

    async def forget_reserved(self) -> None:
        """Remove the objects of expired idempotency keys. Raises StoreError."""
        async for names in self.place.names("once/"):
            for first in range(0, len(names), AHEAD):
                some = sorted(names[first : first + AHEAD])
                found = await asyncio.gather(*map(self._reserved, some))
                held = {
                    _stem(name)
                    for name, each in zip(some, found, strict=True)
                    if each and each.until > self.clock.now()
                }
                await self.place.remove([name for name in some if _stem(name) not in held])

    def is_over(self, node: int, beat: Heartbeat) -> bool:
        """Return whether the lease of a node has ended, judging by the heartbeats that this process has
        seen.
        """
        now = self.clock.boottime()
        seen, since = self._seen.get(node, (None, 0.0))
        if seen != beat:
            self._seen[node] = (beat, since := now)
        return beat.is_left or now - since >= self.lease

    async def close(self) -> None:
        await self.place.close()


class ObjectKeys:
    """A partition stored as a log of objects. Before it is entered, each read first updates the index."""

    def __init__(self, engine: ObjectEngine, node: int) -> None:
        self._engine = engine
        self._place = engine.place
        self._node = node
        self._base = f"nodes/{node}/"
        self._index = ObjectIndex(engine.take_index(node))
        self._threads = ReaderThreads(self._index, "keys-index")
        self._turn = asyncio.Lock()
        self._tasks = Tasks()
        self._state = LogState()
        self._is_open = self._is_suspect = False
        self._fresh_until = 0.0
        self._epoch = 0
        self._tried = 0
        self._beats = 0
        self._next_sweep = 0.0
        self._snapshot_slot = 0
        self._snapshot: asyncio.Task[None] | None = None
        self._stages = 0
        self._staged: dict[bytes, bytes] = {}
        """Rows for the next batch whose values are stored."""
        self._being_staged: set[str] = set()
        self._in_doubt: list[str] = []
        """Objects of failed batches. They are removed unless the batch was stored after all."""

    # --- reading

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found = await self._ask(ObjectIndex.get_many, keys)
        return await self._whole(list(zip(keys, found, strict=True)))

    async def page(
        self, start: bytes, end: bytes, *, rows: int = port.PAGE_ROWS, values: bool = True
    ) -> port.KeyPage:
        page = await self._ask(ObjectIndex.page, start, end, rows, values)
        if not values:
            return page
        whole = await self._whole(page.rows)
        found = [(key, value) for (key, _), value in zip(page.rows, whole, strict=True) if value is not None]
        return port.KeyPage(found, page.cursor)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        return await self._ask(ObjectIndex.last_key, start, end)

    async def _ask(self, function: Callable[[ObjectIndex, *Ts], T], *args: *Ts) -> T:
        """Call `function` with the up-to-date index and return its result. A reader updates it first, and no
        other caller may rebuild it during the query.
        """
        if self._epoch:
            return await self._threads.read(function, *args)
        async with self._turn:
            if self._engine.clock.monotonic() >= self._fresh_until:
                await self._catch_up()
                self._fresh_until = self._engine.clock.monotonic() + self._engine.fresh_for
            return await self._threads.read(function, *args)

    async def _whole(self, rows: Sequence[tuple[bytes, bytes | None]]) -> list[bytes | None]:
        """Return the values of index rows, after reading those that are stored in objects."""
        found: list[bytes | None] = []
        for first in range(0, len(rows), AHEAD):
            runs = _runs(rows[first : first + AHEAD])
            for values in await asyncio.gather(*map(self._values, runs)):
                found += values
        return found

    async def _values(self, rows: Sequence[tuple[bytes, bytes | None]]) -> list[bytes | None]:
        """Return the values of one index row, or of several rows whose values are consecutive in one
        object.
        """
        spans = [span for _, stored in rows if stored is not None and (span := span_of(stored))]
        if not spans:
            return [None if stored is None else stored[1:] for _, stored in rows]
        name = f"{self._base}values/{spans[0].name}"
        found = await self._place.read_values(name, spans)
        if found is not None:
            return list(found)
        # Either it was removed after the index was queried, or it is lost.
        self._fresh_until = 0.0
        now = await self._ask(ObjectIndex.get_many, [key for key, _ in rows])
        if any(each is not None and each == stored for each, (_, stored) in zip(now, rows, strict=True)):
            raise StoreCorruptError(f"the object {name} is missing")
        return await self._whole([(key, each) for (key, _), each in zip(rows, now, strict=True)])

    # --- entering

    async def look(self) -> port.PartitionState | None:
        mark = await self._place.read("mark")
        if mark is None:
            return None
        async with self._turn:
            await self._catch_up()
            return self._as_state(mark)

    def _as_state(self, mark: bytes) -> port.PartitionState:
        state = self._state
        try:
            name = mark.decode()
        except UnicodeDecodeError as error:
            raise StoreCorruptError("the object mark is damaged") from error
        last = port.Position(state.batch_epoch, state.batch)
        return port.PartitionState(state.writer, name, state.epoch, last)

    async def enter(self, writer: str, *, mark: str) -> port.PartitionState:
        async with self._turn:
            return await self._enter(writer, mark)

    async def _enter(self, writer: str, mark: str) -> port.PartitionState:
        stored = await self._place.read("mark")
        if stored is None:
            await self._place.create("mark", mark.encode())
            stored = await self._place.read("mark")
        if stored is None:
            raise StoreError("the mark of the queue was created but is missing")
        was_entered = bool(self._epoch)
        self._epoch = 0
        while True:
            await self._catch_up(AHEAD)
            state = self._state
            is_free = state.writer in ("", writer)
            if not is_free and not self._engine.is_over(self._node, await self._engine.beat_of(self._node)):
                raise port.NodeTakenError(
                    f"another relay uses node number {self._node}, and its lease has not expired"
                )
            self._tried = max(state.epoch, 0 if self._place.is_conditional else self._tried) + 1
            entry = LogEntry(self._tried, writer=writer)
            data = packed(entry)
            if await self._place.create(self._next(entry.epoch), data, makes_room=True):
                break
        await self._apply_to_index(entry, data)
        self._epoch = entry.epoch
        await self._beat()
        if not (self._place.is_conditional or was_entered):
            await asyncio.sleep(SETTLING)
            await self._check_fence()
        in_doubt, self._in_doubt = self._in_doubt, []
        self._tasks.start(self._tidy(in_doubt, sweeps=not was_entered))
        return self._as_state(stored)

    async def _catch_up(self, ahead: int = 1) -> None:
        """Update the index to the end of the log, and read up to `ahead` entries at once. Raises StoreError.
        While a writer is active, objects that a snapshot has replaced disappear between two requests. The
        heartbeat names that snapshot before, so an error is only final if the heartbeat still names the same
        snapshot.
        """
        while True:
            beat = await self._engine.beat_of(self._node)
            try:
                await self._follow(beat, ahead)
            except StoreError:
                now = await self._engine.beat_of(self._node)
                if now.snapshot == beat.snapshot:
                    raise
                continue
            # An entry that a snapshot has just replaced looks like the end of the log.
            now = await self._engine.beat_of(self._node)
            if now.snapshot <= max(beat.snapshot, self._state.slot + 1):
                return

    async def _follow(self, beat: Heartbeat, ahead: int) -> None:
        if not self._is_open or self._is_suspect:
            self._state = await self._threads.read(ObjectIndex.open, self._is_suspect)
            self._is_open, self._is_suspect = True, False
            if self._state.slot == 0 or not await self._fits():
                await self._rebuild(await self._last_snapshot())
        if beat.snapshot > self._state.slot + 1:
            await self._rebuild(await self._last_snapshot(beat.snapshot))
        await self._read_on(ahead)
        if beat.slot > self._state.slot:
            if self._engine.forgive is None:
                raise self._gap()
            self._engine.forgive(self._slot(self._state.slot + 1), "it is missing")
        self._snapshot_slot = max(self._snapshot_slot, beat.snapshot)

    def _gap(self) -> StoreError:
        return StoreError(f"the entry {self._slot(self._state.slot + 1)} is missing, but later entries exist")

    async def _read_on(self, ahead: int) -> None:
        while names := await self._following(ahead):
            first = self._state.slot
            found = await asyncio.gather(*map(self._place.read, names))
            for name, data in zip(names, found, strict=True):
                if data is None:
                    break
                await self._apply_to_index(self._entry(data, name), data)
            count = self._state.slot - first
            if count == len(names):
                ahead = AHEAD
                continue
            forgive = self._engine.forgive
            missing = range(0) if forgive is None else await self._missing()
            if not missing and not any(found[count:]):
                return
            if await self._place.read(names[count]) is not None:
                continue  # it was created while the others were read
            beat = await self._engine.beat_of(self._node)
            if forgive is None or not missing or beat.snapshot > self._state.slot + 1:
                raise self._gap()
            for slot in missing:
                forgive(self._slot(slot), "it is missing")
                await self._apply_to_index(LogEntry(self._state.batch_epoch, self._state.batch), b"")

    async def _following(self, ahead: int) -> list[str]:
        """Return the names of the log entries that may follow the last applied one."""
        slot, epoch = self._state.slot, self._state.epoch
        if self._place.is_conditional:
            return [self._slot(each) for each in range(slot + 1, slot + 1 + ahead)]
        found = {parts[:2]: parts[2] async for parts in self._entries(f"{self._base}log/") if parts[0] > slot}
        chain: list[str] = []
        at = max(found, default=(slot, epoch))
        while at in found:
            before = at[0] - 1, found[at]
            chain.insert(0, self._slot(*at, before[1]))
            at = before
        if at != (slot, epoch):
            raise StoreError(f"the entry {self._slot(*at)} is missing, but later entries exist")
        # A listing may lack very new objects.
        return chain[:ahead] or [self._slot(slot + 1, epoch, epoch)]

    async def _entries(self, prefix: str) -> AsyncIterator[tuple[int, int, int]]:
        """Yield slot, epoch and previous epoch from the names of log entries in a place without conditional
        writes.
        """
        async for names in self._place.names(prefix):
            for name in names:
                slot, epoch, before = map(int, name.rpartition("/")[2].split("-"))
                yield slot, epoch, before

    def _entry(self, data: bytes, name: str) -> LogEntry:
        try:
            return unpacked(data, LogEntry, name)
        except StoreCorruptError as error:
            if self._engine.forgive is None:
                raise
            self._engine.forgive(name, str(error))
            return LogEntry(self._state.batch_epoch, self._state.batch)

    async def _missing(self) -> range:
        """Return the slot numbers of missing log entries, which are between the last applied and the next
        existing one.
        """
        behind: list[int] = []
        async for names in self._place.names(f"{self._base}log/"):
            numbers = (int(_NUMBER.split(name.rpartition("/")[2])[0]) for name in names)
            behind += (slot for slot in numbers if slot > self._state.slot)
        return range(self._state.slot + 1, min(behind, default=0))

    async def _fits(self) -> bool:
        """Return whether the index belongs to this log, because the log has its last entry or a snapshot of
        it.
        """
        name = self._slot(self._state.slot)
        if not self._place.is_conditional:
            async for parts in self._entries(f"{name}-{self._state.epoch:06d}-"):
                name = self._slot(*parts)
        data = await self._place.read(name)
        return data is not None and zlib.crc32(data) == self._state.checksum

    async def _last_snapshot(self, slot: int = 0) -> SnapshotEnd | None:
        """Return the end of the newest snapshot: the newest listed one, or that of `slot`, which is known to
        exist.
        """
        async for names in self._place.names(f"{self._base}snapshot/"):
            slots = [int(name.split("/")[-2]) for name in names if name.endswith("/end")]
            slot = max((slot, *slots))
        name = f"{self._snapshot_of(slot)}end"
        data = await self._place.read(name) if slot else None
        return None if data is None else unpacked(data, SnapshotEnd, name)

    async def _rebuild(self, end: SnapshotEnd | None) -> None:
        """Rebuild the index from a snapshot."""
        await self._threads.read(ObjectIndex.clear)
        self._state = LogState()
        if end is None:
            return
        self._is_suspect = True
        for number in range(1, end.pieces + 1):
            name = f"{self._snapshot_of(end.state.slot)}{number:06d}"
            data = await self._place.read(name)
            if data is None:
                raise StoreCorruptError(f"the object {name} is missing")
            await self._threads.read(ObjectIndex.load, unpacked(data, list[tuple[bytes, bytes]], name))
        await self._threads.read(ObjectIndex.begin, end.state, end.beginnings)
        self._state, self._snapshot_slot, self._is_suspect = end.state, end.state.slot, False

    async def _apply_to_index(self, entry: LogEntry, data: bytes) -> list[str]:
        """Apply an entry to the index, and return the names of the values that no row refers to any more."""
        old, is_beginning = self._state, bool(entry.writer)
        state = LogState(
            old.slot + 1,
            entry.epoch,
            entry.writer or old.writer,
            old.batch_epoch if is_beginning else entry.epoch,
            old.batch if is_beginning else entry.number,
            zlib.crc32(data),
            old.log + len(data),
            old.live,
        )
        try:
            self._state, dropped = await self._threads.read(
                ObjectIndex.apply, entry.changes, state, is_beginning
            )
        except StoreError:
            # It is rebuilt by the next `look` or `enter`, or by the first query that waits for its turn.
            self._epoch, self._fresh_until = 0, 0.0
            self._is_open, self._is_suspect = False, True
            await self._threads.read(ObjectIndex.close)
            raise
        return dropped

    # --- writing

    async def apply(self, batch: port.WriteBatch) -> None:
        async with self._turn:
            if batch.position.epoch != self._epoch or not self._is_open:
                raise port.FencedError(
                    f"node {self._node} has epoch {self._epoch}, but the writer has {batch.position.epoch}"
                )
            await self._apply(batch)

    async def _apply(self, batch: port.WriteBatch) -> None:
        write = batch.write
        rows, values = self._split(write.changes, f"{batch.position.epoch:06d}-{batch.position.number:012d}")
        staged = {key: row for key, row in self._staged.items() if key not in rows}
        withdrawn = self._staged.keys() - staged.keys()
        named = {name_of(row) for row in staged.values()}
        unnamed = {name_of(self._staged[key]) for key in withdrawn} - named
        changes = [*staged.items(), *rows.items()]
        entry = LogEntry(*batch.position, changes=changes)
        data = packed(entry)
        try:
            is_ours = await self._place.create(
                self._next(batch.position.epoch), data, values=values, makes_room=write.makes_room
            )
        except StoreError:
            self._in_doubt += (name for name, _ in values)
            raise
        if not is_ours:
            self._epoch = 0
            raise port.FencedError(
                f"another writer has created entry {self._state.slot + 1} of node {self._node}"
            )
        try:
            dropped = [*await self._apply_to_index(entry, data), *unnamed]
        finally:  # not earlier, because a sweep searches names here and then in the index
            for key in staged.keys() | withdrawn:
                del self._staged[key]
        if dropped:
            self._tasks.start(self._remove([f"{self._base}values/{name}" for name in dropped]))
        state = self._state
        if state.log > max(LEAST_LOG, SHARE * state.live) and (
            self._snapshot is None or self._snapshot.done()
        ):
            self._snapshot = self._tasks.start(self._make_snapshot())

    async def stage(self, rows: Mapping[bytes, bytes]) -> None:
        self._stages += 1
        stored, values = self._split(rows, f"{self._epoch:06d}-s{self._stages:011d}")
        names = {name.rpartition("/")[2] for name, _ in values}
        self._being_staged |= names
        try:
            await self._place.store(values)
            self._staged.update((key, row) for key, row in stored.items() if row is not None)
        except StoreError:
            self._tasks.start(self._remove([name for name, _ in values]))
            raise
        finally:
            self._being_staged -= names

    def _split(
        self, given: Mapping[bytes, bytes | None], number: str
    ) -> tuple[dict[bytes, bytes | None], list[Object]]:
        """Split changes into index rows for the log, and objects with the large values to which the rows
        refer.
        """
        rows: dict[bytes, bytes | None] = {}
        objects: list[tuple[str, list[bytes]]] = []
        is_apart, stem, size = self._engine.is_apart, b"", 0
        for key, value in given.items():
            if value is None or not is_apart(key, value):
                rows[key] = None if value is None else small(value)
                continue
            if not objects or key.rpartition(b" ")[0] != stem or size + len(value) > MOST_OBJECT:
                stem, size = key.rpartition(b" ")[0], 0
                text = _UNFIT.sub("-", key[:60].decode("ascii", "replace"))
                objects.append((f"{text}.{number}-{len(objects)}", []))
            name, values = objects[-1]
            rows[key] = large(ValueLocation(name, size, len(value), zlib.crc32(value)))
            values.append(value)
            size += len(value)
        return rows, [(f"{self._base}values/{name}", values) for name, values in objects]

    async def renew(self) -> None:
        async with self._turn:
            await self._check_fence()
            await self._beat()
        if self._engine.clock.monotonic() >= self._next_sweep:
            self._tasks.start(self._tidy([], sweeps=True))

    async def leave(self) -> None:
        async with self._turn:
            await self._check_fence()
            await self._beat(is_left=True)

    async def _check_fence(self) -> None:
        if not self._epoch:
            raise StoreError(f"node {self._node} has not been reopened yet")
        if await self._is_fenced():
            self._epoch = 0
            raise port.FencedError(f"another writer owns node {self._node}")

    async def _is_fenced(self) -> bool:
        if self._place.is_conditional:
            slot = self._state.slot + 1
            while (data := await self._place.read(self._slot(slot))) is not None:
                if self._entry(data, self._slot(slot)).epoch != self._epoch:
                    return True
                slot += 1  # an entry of this writer whose answer was lost
            return False
        beat = await self._engine.beat_of(self._node)
        own = (self._epoch, self._state.writer)
        return beat.epoch > own[0] or (beat.epoch == own[0] and beat.writer != own[1])

    async def _beat(self, *, is_left: bool = False) -> None:
        self._beats += 1
        state = self._state
        beat = Heartbeat(self._epoch, state.writer, self._beats, is_left, state.slot, self._snapshot_slot)
        await self._place.replace(f"beats/{self._node}", packed(beat))

    async def room(self) -> int | None:
        return await self._place.room()

    async def close(self) -> None:
        await self._tasks.cancel()
        await STORE.run(self._threads.stop)
        await STORE.run(self._index.close)
        self._engine.indexes.discard(self._index.path)

    # --- maintenance of the objects

    async def _make_snapshot(self) -> None:
        """Write a snapshot of the live keys, and remove the objects that it replaces."""
        try:
            await self.compact()
        except StoreError as error:
            _log.warning("the log of node %d could not be replaced by a snapshot: %s", self._node, error)

    async def compact(self) -> None:
        """Replace the log by a snapshot now. Raises StoreError."""
        async with self._turn:
            state = self._state
            view = await self._threads.read(ObjectIndex.snapshot)
            beginnings = await self._threads.read(ObjectIndex.beginnings)
        try:
            base = self._snapshot_of(state.slot)
            number = 0
            cursor: bytes | None = b"\x01"
            while cursor:
                number += 1
                rows, cursor = await self._threads.read(ObjectIndex.piece, cursor, view)
                await self._place.create(f"{base}{number:06d}", packed(rows))
            end = SnapshotEnd(number, replace(state, log=0), beginnings)
            await self._place.create(f"{base}end", packed(end))
        finally:
            await STORE.run(view.close)
        async with self._turn:
            self._state = replace(self._state, log=self._state.log - state.log)
            self._snapshot_slot = state.slot
            if self._epoch:
                await self._beat()  # readers of the log must know this before it is removed
        await self._remove_before(state.slot, frozenset(beginnings))

    async def _remove_before(self, slot: int, kept: frozenset[int]) -> None:
        for kind in ("log/", "snapshot/"):
            async for names in self._place.names(f"{self._base}{kind}"):
                numbers = [int(_NUMBER.split(name.removeprefix(f"{self._base}{kind}"))[0]) for name in names]
                # The entry of the snapshot itself stays, because it shows whether an index belongs to this
                # log.
                gone = [
                    name
                    for name, number in zip(names, numbers, strict=True)
                    if number < slot and (kind == "snapshot/" or number not in kept)
                ]
                await self._remove(gone)

    async def _sweep(self) -> None:
        """Remove values of earlier epochs to which no row refers, because their batches were never stored."""
        async for names in self._place.names(f"{self._base}values/"):
            await self._remove_unnamed([name for name in names if -1 < epoch_of(name) < self._epoch])

    async def _remove_unnamed(self, names: Sequence[str]) -> None:
        own = [each.rpartition("/")[2] for each in names]
        # A batch is about to refer to staged objects, in an earlier epoch too. The index is queried
        # afterwards, because objects that are no longer staged are in it.
        kept = self._being_staged | {name_of(row) for row in self._staged.values()}
        is_named = await self._ask(ObjectIndex.are_named, own)
        gone = zip(names, own, is_named, strict=True)
        await self._remove([name for name, short, named in gone if not named and short not in kept])

    async def _tidy(self, in_doubt: Sequence[str], *, sweeps: bool) -> None:
        try:
            await self._remove_unnamed(in_doubt)
            if sweeps:
                self._next_sweep = self._engine.clock.monotonic() + SWEEP
                await self._sweep()
                await self._engine.forget_reserved()
        except StoreError as error:
            _log.warning("unreferenced objects could not be removed: %s", error)

    async def _remove(self, names: Sequence[str]) -> None:
        with contextlib.suppress(StoreError):  # a later sweep removes the rest
            await self._place.remove(names)

    def _slot(self, *parts: int) -> str:
        """Return the name of a log entry, which contains its slot and, without conditional writes, its epoch
        and the previous one.
        """
        if self._place.is_conditional:
            return f"{self._base}log/{parts[0]:016d}"
        return f"{self._base}log/{parts[0]:016d}" + "".join(f"-{part:06d}" for part in parts[1:])

    def _next(self, epoch: int) -> str:
        return self._slot(self._state.slot + 1, epoch, self._state.epoch)

    def _snapshot_of(self, slot: int) -> str:
        return f"{self._base}snapshot/{slot:016d}/"


def checked_values(values: Sequence[bytes], spans: Sequence[ValueLocation], name: str) -> list[bytes]:
    """Return values that were read from these spans of an object, after checking them. Raises
    StoreCorruptError if a checksum is wrong.
    """
    for value, span in zip(values, spans, strict=True):
        if zlib.crc32(value) != span.checksum:
            raise StoreCorruptError(f"the object {name} is damaged")
    return list(values)


def _runs(rows: Sequence[tuple[bytes, bytes | None]]) -> list[list[tuple[bytes, bytes | None]]]:
    """Group the index rows whose values are consecutive in one object. The order of the rows stays."""
    runs: list[list[tuple[bytes, bytes | None]]] = []
    follows: tuple[str, int] | None = None
    for key, stored in rows:
        span = None if stored is None else span_of(stored)
        if span is not None and (span.name, span.first) == follows:
            runs[-1].append((key, stored))
        else:
            runs.append([(key, stored)])
        follows = None if span is None else (span.name, span.first + span.size)
    return runs


def epoch_of(name: str) -> int:
    """Return the epoch in the name of a value's object, or -1 if the name has another form."""
    number = name.rpartition(".")[2].partition("-")[0]
    return int(number) if number.isdigit() else -1


def _once(key: bytes) -> str:
    return f"once/{hashlib.sha256(key).hexdigest()}"


def _stem(name: str) -> str:
    return name.partition("-")[0]


def packed(content: object) -> bytes:
    """Encode the content of an object as a checksum followed by the data."""
    data = msgspec.msgpack.encode(content)
    return zlib.crc32(data).to_bytes(4, "big") + data


def unpacked(data: bytes, kind: type[T], name: str) -> T:
    """Verify the checksum of an object and decode its data. Raises StoreCorruptError."""
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise StoreCorruptError(f"the object {name} is damaged")
    try:
        return msgspec.msgpack.decode(data[4:], type=kind)
    except msgspec.MsgspecError as error:
        raise StoreCorruptError(f"the object {name} is invalid: {error}") from error
