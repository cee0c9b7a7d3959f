"""Manages idempotency keys over all nodes: a key is reserved in the engine before its message is stored.

The partitions are authoritative: the key becomes durable in the batch of its message (`StoredKey`). The
engine's reservation names the node that has stored, or is about to store, a message with the key, so that no
second node does. It expires with the key.

On failure: a node that dies between reservation and batch leaves a reservation without a message. Other nodes
take it over once the lease of the node's partition has ended or the partition is adopted, because no batch of
that node can become durable then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import msgspec

from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import IdempotencyKey, KeyReservation, StoredKey
from zonerelay.store.keys.port import SharedEngine
from zonerelay.store.leveldb.reads import QueueReads


class _ReservedId(msgspec.Struct, array_like=True):
    """A key that this node has reserved, with its message."""

    node: int
    message_id: MessageId
    digest: str
    until: float


@dataclass(eq=False, repr=False)
class NodeRegister:
    """Reserves idempotency keys in the engine for one node (implements `KeyRegister`). `node` returns its
    current number, and `reads_of` the reads of a node's partition. `is_over` returns whether no process of a
    node can still store data in its partition.
    """

    problem = ""

    engine: SharedEngine
    node: Callable[[], int]
    reads_of: Callable[[int], Awaitable[QueueReads]]
    is_over: Callable[[int], bool]

    def __post_init__(self) -> None:
        self._values: dict[str, bytes] = {}
        """The reservations of this node, including those of its earlier process that it has found."""

    @property
    def worker(self) -> int:
        return self.node()

    def start(self, page: object, settle: object) -> None:
        """Do nothing. The partition holds its keys, and reservations of an earlier process are found when
        their keys are used again.
        """

    async def reserve(self, once: IdempotencyKey, message_id: MessageId, now: float) -> KeyReservation | None:
        key = once.identity.encode("ascii")
        node = self.node()
        value = msgspec.msgpack.encode(_ReservedId(node, message_id, once.digest, once.until))
        while True:
            found = await self.engine.reserve(key, value, once.until)
            if found is None:
                self._values[once.identity] = value
                return None
            other = msgspec.msgpack.decode(found, type=_ReservedId)
            kept = await (await self.reads_of(other.node)).kept(once.identity)
            if kept is not None and kept.message_id == other.message_id:
                return KeyReservation(kept, other.node, is_pending=False)
            if other.node == node:
                self._values[once.identity] = found
            elif other.until <= now or self.is_over(other.node):
                await self.engine.unreserve(key, found)
                continue
            return KeyReservation(
                StoredKey(other.message_id, other.digest, other.until), other.node, is_pending=True
            )

    async def take_over(self, keys: Collection[tuple[str, StoredKey]]) -> None:
        """Reserve keys that were imported with a queue, so that all nodes know them."""
        for identity, kept in keys:
            value = _ReservedId(self.node(), kept.message_id, kept.digest, kept.until)
            await self.engine.reserve(identity.encode("ascii"), msgspec.msgpack.encode(value), kept.until)

    async def settle(self, identity: str, message_id: MessageId, is_kept: bool) -> None:
        value = self._values.pop(identity, None)
        if value is not None and not is_kept:
            await self.engine.unreserve(identity.encode("ascii"), value)

    async def forget(self, now: float, most: int) -> None:
        """Do nothing, because the engine removes expired reservations."""

    async def close(self) -> None:
        """Do nothing, because the owner of the engine closes it."""
