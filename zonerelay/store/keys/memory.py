"""Stores keys in this process's memory, for tests, simulations and temporary queues.

Nothing survives the process, unless `shelf` saves it. The engine fulfils all other promises of the port,
including fences and leases: several partitions of one `MemoryEngine` behave like several nodes of a shared
store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sortedcontainers import SortedDict

from zonerelay.model.clock import Clock
from zonerelay.store.contract import StoreError
from zonerelay.store.keys import port


@dataclass(slots=True, eq=False)
class _PartitionData:
    """The data of one partition in memory."""

    rows: SortedDict[bytes, bytes] = field(default_factory=SortedDict)
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

    def keeper(self, node: int) -> MemoryKeys:
        return MemoryKeys(self, node)

    def partition(self, node: int) -> _PartitionData:
        """Return the partition, and create it if necessary."""
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
        """Keep all data, so that it is there when a partition is opened again."""


class MemoryKeys:
    """A partition in memory."""

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
        return port.PartitionState(engine.mark, there.epoch, there.writer, there.last)

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
        return port.PartitionState(engine.mark, there.epoch, writer, there.last)

    async def apply(self, batch: port.WriteBatch) -> None:
        there = self._held(batch.position.epoch)
        rows = there.rows
        for start, end in batch.write.ranges:
            for key in list(rows.irange(start, end, (True, False))):
                del rows[key]
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
