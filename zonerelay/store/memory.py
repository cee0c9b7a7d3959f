"""Stores keys in this process's memory, for tests, simulations and temporary queues.

Nothing survives the process, unless a file (the shelf) saves it from an orderly stop to the next start. The
engine fulfils all other promises of the port, including fences and leases: several partitions of one
`MemoryEngine` behave like several nodes of a shared store.

The whole shelf is written at each stop, with a checksum. At a start it is marked as in use. If it still has
that mark at the next start, the relay was not stopped in order, and its content is as old as the stop before.
"""

import logging
import os
import zlib
from collections.abc import MutableMapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from sortedcontainers import SortedDict

from zonerelay import durable
from zonerelay.model.clock import Clock
from zonerelay.process.files import closed_on_failure
from zonerelay.process.threads import STORE
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import StoreError, StoreOpenError
from zonerelay.store.directories import lock_configured
from zonerelay.store.keys import port
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.queue.partition_keeper import open_queue
from zonerelay.store.queue.store import PartitionStore

WARNING = 'the spool is in memory (backend = "memory"): all mail in it is lost at a stop or a crash'
SHELF_WARNING = (
    "the spool is in memory and in a shelf (%s): it survives an orderly restart; a crash loses the mail "
    "accepted since the start and repeats the mail sent since then"
)
_CLOSED, _IN_USE = b"zonerelay shelf 2 closed\n", b"zonerelay shelf 2 in use\n"

_log = logging.getLogger("zonerelay.store")


class _PartitionData(msgspec.Struct, eq=False):
    """The data of one partition in memory."""

    rows: SortedDict[bytes, bytes] = msgspec.field(default_factory=SortedDict)
    epoch: int = 0
    writer: str = ""
    last: port.Position = port.NOTHING
    expires: float = 0.0


class MemoryEngine:
    """An engine that stores partitions in memory. With a `lease` of 0 a partition is free as soon as its
    writer has closed it.
    """

    def __init__(self, clock: Clock, *, lease: float = 0.0) -> None:
        self.lease = lease
        self.clock = clock
        self.mark = ""
        self.partitions: dict[int, _PartitionData] = {}
        self._reserved: dict[bytes, tuple[bytes, float]] = {}

    def keeper(self, node: int) -> "MemoryKeys":
        return MemoryKeys(self, node)

    def partition(self, node: int) -> _PartitionData:
        """Return the data of a node's partition, which is created if necessary."""
        return self.partitions.setdefault(node, _PartitionData())

    async def reserve(self, key: bytes, value: bytes, until: float) -> bytes | None:
        found = self._reserved.get(key)
        if found is not None and found[1] > self.clock.now():
            return found[0]
        self._reserved[key] = (value, until)
        return None

    async def unreserve(self, key: bytes, value: bytes) -> None:
        found = self._reserved.get(key)
        if found is not None and found[0] == value:
            del self._reserved[key]

    async def peers(self) -> list[port.PeerPartition]:
        now = self.clock.boottime()
        return [
            port.PeerPartition(node, each.epoch, each.writer, each.expires == 0, each.expires <= now)
            for node, each in sorted(self.partitions.items())
        ]

    async def close(self) -> None:
        """Do nothing, so that the data is still there when a partition is opened again."""


class MemoryKeys:
    """A partition whose keys are stored in memory."""

    def __init__(self, engine: MemoryEngine, node: int) -> None:
        self._engine = engine
        self._node = node
        self._epoch = 0
        self._is_closed = False

    # --- reading

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        rows = self._rows()
        return [rows.get(key) for key in keys]

    async def page(
        self, start: bytes, end: bytes, *, rows: int = port.PAGE_ROWS, values: bool = True
    ) -> port.KeyPage:
        there = self._rows()
        keys = there.irange(start, end, (True, False))
        return port.page_of(((key, there[key] if values else b"") for key in keys), rows)

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        return next(self._rows().irange(start, end, (True, False), reverse=True), None)

    # --- writing

    async def look(self) -> port.PartitionState | None:
        engine = self._engine
        if not engine.mark:
            return None
        there = engine.partitions.get(self._node, _PartitionData())
        return port.PartitionState(there.writer, engine.mark, there.epoch, there.last)

    async def enter(self, writer: str, *, mark: str) -> port.PartitionState:
        engine = self._engine
        engine.mark = engine.mark or mark
        there = engine.partition(self._node)
        if there.writer != writer and there.expires > engine.clock.boottime():
            raise port.NodeTakenError(f"node {self._node} is in use: another writer holds its lease")
        there.epoch += 1
        there.writer = writer
        self._epoch = there.epoch
        there.expires = self._until()
        return port.PartitionState(writer, engine.mark, there.epoch, there.last)

    async def apply(self, batch: port.WriteBatch) -> None:
        there = self._held(batch.position.epoch)
        rows = there.rows
        for key, value in batch.write.changes.items():
            if value is None:
                rows.pop(key, None)
            else:
                rows[key] = value
        there.last = batch.position

    async def renew(self) -> None:
        self._held(self._epoch).expires = self._until()

    async def leave(self) -> None:
        self._held(self._epoch).expires = 0.0

    async def room(self) -> int | None:
        return None

    async def close(self) -> None:
        there = self._engine.partitions.get(self._node)
        if not self._engine.lease and there is not None and there.epoch == self._epoch:
            there.expires = 0.0
        self._is_closed = True

    def _rows(self) -> SortedDict[bytes, bytes]:
        if self._is_closed:
            raise StoreError("the partition is closed")
        return self._engine.partitions.get(self._node, _PartitionData()).rows

    def _held(self, epoch: int) -> _PartitionData:
        there = self._engine.partitions[self._node]
        if self._is_closed or there.epoch != epoch:
            raise port.FencedError(f"node {self._node} has epoch {there.epoch}, but the writer has {epoch}")
        return there

    def _until(self) -> float:
        return self._engine.clock.boottime() + (self._engine.lease or float("inf"))


async def open_memory(path: Path | None, around: StoreContext) -> PartitionStore:
    """Open a queue in memory. It is saved in the file `path` at a stop, if a path is given. Raises
    StoreOpenError.
    """
    engine = MemoryEngine(around.clock)
    partition = await open_partition(engine, 0, clock=around.clock)
    release = engine.close
    if path is None:
        _log.warning("%s", WARNING)
    else:
        _log.warning(SHELF_WARNING, path)
        shelf = await STORE.open(SavedQueueFile, path)
        rows = engine.partition(0).rows
        rows.update(shelf.rows)
        shelf.rows = rows
        release = partial(STORE.run, shelf.close)
    return await open_queue(partition, around, release=release)


class SavedQueueFile:
    """The file in which a queue in memory is saved between an orderly stop and the next start. Opening and
    closing block.
    """

    rows: MutableMapping[bytes, bytes]
    """The content. `close` saves it."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file, and load the saved queue. Raises StoreOpenError, in which case nothing was
        changed.
        """
        self._path = path
        try:
            durable.make_directory(path.parent)
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = os.fdopen(lock, "rb")
            with closed_on_failure(self._lock):
                lock_configured(lock, path, "shelve")
                self.rows = self._load()
                self._save(_IN_USE)
        except OSError as error:
            raise StoreOpenError(f"[spool] shelve {path} cannot be used: {error}") from error

    def close(self) -> None:
        """Save the rows and unlock the file. If that fails, they are lost, which is logged."""
        try:
            self._save(_CLOSED)
        except OSError as error:
            _log.error(
                "the shelf %s cannot be written, so the queue does not survive this stop: %s",
                self._path,
                error,
            )
        self._lock.close()

    def _load(self) -> dict[bytes, bytes]:
        if any(self._path.with_name(self._path.name + end).exists() for end in (".db", ".dat", ".pag")):
            raise self._refusal("it was written by Python's shelve")
        if not self._path.exists():
            return {}
        head, _, rest = self._path.read_bytes().partition(b"\n")
        data = rest[:-4]
        if head + b"\n" not in (_CLOSED, _IN_USE) or rest[-4:] != _sum(data):
            raise self._refusal("its checksum or its first line is invalid")
        if head + b"\n" == _IN_USE:
            _log.error(
                "the shelf %s was not closed properly: mail accepted since the last orderly stop is"
                " lost, and mail sent since then will be sent again",
                self._path,
            )
        return msgspec.msgpack.decode(data, type=dict[bytes, bytes])

    def _refusal(self, why: str) -> StoreOpenError:
        return StoreOpenError(
            f"the shelf {self._path} is damaged, or was written by another release: {why}. Nothing was "
            "changed. Start the release that wrote it to send the queued mail, or move it away to start "
            "with an empty queue"
        )

    def _save(self, head: bytes) -> None:
        data = msgspec.msgpack.encode(dict(self.rows))
        durable.write(self._path, (head, data, _sum(data)))


def _sum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")
