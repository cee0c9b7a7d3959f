"""Defines the interface that every storage engine implements: ordered maps of keys to values.

A **partition** is an ordered map of bytes to bytes that survives power cuts and has one writer. A shared
engine has one partition for each node. Keys are compared byte by byte.

Who may write
    The writer has an **epoch**. `Keeper.enter` starts the next epoch and thereby fences every earlier
    writer: a batch of an earlier epoch is refused with FencedError, however late it arrives. The fence is in
    the data, in the same atomic step as the batch. It is never a session, a lock of the server or a clock.

    A shared engine also has a **lease**. The lease decides when another node may take over, and the fence
    decides which writer is valid. So a wrong clock can cause a duplicate delivery, but no loss of mail. A
    writer that knows the token of the former writer (`writer`, stored by `SeenFile`) is the successor of a
    process that has died, and enters without waiting for the lease.

What is durable
    `Keeper.apply` makes one batch durable, as a whole, before it returns. Batches have the numbers 1, 2, 3,
    …, which continue over epochs. Each batch stores its own **position** (epoch and number) in the same
    atomic step.

    After any error but FencedError a batch may have been stored, may not have been stored, or may still be
    stored later. Nothing else is known after a lost connection, a failed sync of a log, or a PUT that a proxy
    delays. The position resolves the doubt: call `enter` first (from then on the late batch is fenced), then
    compare the stored position with that of the batch. `Partition` does this. No engine repeats a batch by
    itself.

What an older state is
    A former primary, a truncated file, a restored snapshot and an emptied server all respond as if nothing
    were wrong. The writer remembers the position of its last batch, in memory and in a file next to the mark.
    A store with a lower position is refused with OlderStateError before anything is written to it. The
    **mark** is the random name of a store. A store with another mark, or none, is refused with
    WrongStoreError.

What is read
    A reader sees every batch for which `apply` has returned. A reader of another node may see it later. A
    page shows one moment; two pages of one scan may show two moments. PAGE_OCTETS limits memory.

Space
    StoreFullError means that there is no space. A batch in which every write `makes_room` (outcomes,
    removals) is accepted longer than new mail, as far as the engine can. `room` returns the free space.

Limits: keys up to MAX_KEY bytes (an index row of PostgreSQL ends at 2,704) that do not begin with NUL, values
up to MAX_VALUE, and MAX_NODES partitions. `clear` removes large ranges in many batches.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from zonerelay.store.contract import StoreCorruptError, StoreError, StoreOpenError

MAX_KEY = 2048
MAX_VALUE = 16 * 1024 * 1024
MAX_NODES = 256
PAGE_ROWS = 1000
PAGE_OCTETS = 1024 * 1024
CLEAR_ROWS = 500

Row = tuple[bytes, bytes]
Op = tuple[bytes, bytes | None]
"""A key and its new value. `None` removes it."""


class FencedError(StoreError):
    """Another writer has taken over the partition. Nothing of this call was written, and this writer can
    never write again.
    """


class WrongStoreError(StoreOpenError):
    """The store has lost the queue, or contains a different one."""


class OlderStateError(StoreOpenError):
    """The store contains an older state of the queue than this machine has seen. Nothing was written."""


class NodeTakenError(StoreOpenError):
    """Another process is the writer of the partition, and its lease has not expired."""


def first_release(where: str, other: str) -> StoreOpenError:
    """Return the error for a store that contains a queue of zonerelay 0.1.0. `other` is what this release is
    to use instead.
    """
    return StoreOpenError(
        f"{where} contains the queue of zonerelay 0.1.0, which this release does not read. Nothing was "
        "changed. Start 0.1.0 on it until its mail is sent, or export the mail with zonerelay spool export "
        f"of 0.1.0 and import it here; then use {other} for this release"
    )


class Write(msgspec.Struct, frozen=True, gc=False):
    """Changes of keys that are applied together or not at all. A value of None removes a key."""

    changes: Mapping[bytes, bytes | None] = msgspec.field(default_factory=dict)
    makes_room: bool = False

    def check(self) -> int:
        """Check the sizes of all keys and values, and return their sum. Raises ValueError if they exceed the
        limits of engines.
        """
        size = 0
        for key, value in self.changes.items():
            length = len(key)
            if not 0 < length <= MAX_KEY or not key[0]:
                raise ValueError(f"a key of {length} bytes that begins with {key[:1]!r}")
            if value is not None:
                length += len(value)
                if length > MAX_VALUE:
                    raise ValueError(f"a value of {length} bytes")
            size += length
        return size


def merged(writes: Iterable[Write]) -> Write:
    """Combine several writes into one that has the same effect."""
    changes: dict[bytes, bytes | None] = {}
    makes_room = True
    for write in writes:
        changes.update(write.changes)
        makes_room = makes_room and write.makes_room
    return Write(changes, makes_room)


class Position(NamedTuple):
    """Identifies a batch of a partition by the epoch of its writer and by its number."""

    epoch: int = 0
    number: int = 0


NOTHING = Position()
"""The position of a partition without batches."""


class WriteBatch(msgspec.Struct, frozen=True, gc=False):
    """A write with its position, as passed to an engine. `position` is stored with it and follows that of the
    previous batch.
    """

    position: Position
    write: Write


class PartitionState(NamedTuple):
    """The state of a partition: its writer's token and epoch, its store's mark, and the position of the last
    batch. An empty `mark` means that no store has been seen yet.
    """

    writer: str
    mark: str = ""
    epoch: int = 0
    last: Position = NOTHING


class PeerPartition(msgspec.Struct, frozen=True):
    """A partition as seen by other nodes. `writer` is the token of its last writer. `is_left` is whether that
    writer has closed it, and `is_over` whether it has no writer now and may be adopted.
    """

    node: int
    epoch: int
    writer: str
    is_left: bool
    is_over: bool


class KeyPage(NamedTuple):
    """A page of keys with their values, in key order. `cursor` is the start of the next page, or None after
    the last page.
    """

    rows: list[Row]
    cursor: bytes | None


class KeyReader(Protocol):
    """Interface: the read operations of one partition. Every method raises StoreError."""

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of the keys, with None for missing keys."""

    async def page(self, start: bytes, end: bytes, *, rows: int = PAGE_ROWS, values: bool = True) -> KeyPage:
        """Return the first rows of a key range: at least one, at most `rows`, and about PAGE_OCTETS bytes.
        Without `values` the values are empty.
        """

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        """Return the highest existing key in the range, or None."""


class Keeper(KeyReader, Protocol):
    """Interface: access to one partition. Each engine implements it. Calls of `enter`, `apply`, `leave`
    and `close` must not overlap.
    """

    async def look(self) -> PartitionState | None:
        """Return the stored state of the partition without changing it, or None if the store has no mark. A
        partition that does not exist has epoch 0.
        """

    async def enter(self, writer: str, *, mark: str) -> PartitionState:
        """Become the partition's writer, in a new epoch. Create the partition, and give a store without a
        mark `mark`. Return the state with the new epoch. Its `last` is the position of the last durable batch
        of any writer, and no batch of an earlier epoch can become durable from then on. Raises NodeTakenError
        while another `writer` has the lease, and StoreOpenError if the store is unusable.
        """

    async def apply(self, batch: WriteBatch) -> None:
        """Write the batch atomically and durably. Raises FencedError. After any other StoreError its fate is
        unknown.
        """

    async def renew(self) -> None:
        """Extend this writer's lease on the partition. Raises FencedError if another writer has the
        partition.
        """

    async def leave(self) -> None:
        """Release the lease on the partition, so that another node can take over immediately. Raises
        FencedError.
        """

    async def room(self) -> int | None:
        """Return the number of bytes that may still be written, or None if the engine does not know it."""

    async def close(self) -> None:
        """Release connections, files and threads. Raises nothing."""


@runtime_checkable
class StagingKeeper(Keeper, Protocol):
    """Interface: access to a partition that can store large values before the batch that refers to them."""

    async def stage(self, rows: Mapping[bytes, bytes]) -> None:
        """Store new keys with large values ahead of the batch that refers to them. They exist, durably, from
        the next applied batch on. A batch that removes one of them withdraws it. Several calls may run at the
        same time as `apply`.
        """


class Engine(Protocol):
    """Interface: a storage engine and its partitions. `lease` is in seconds, or 0 if no other process can
    take over a partition.
    """

    @property
    def lease(self) -> float: ...

    def keeper(self, node: int) -> Keeper:
        """Return the object that accesses the partition of a node, without opening or changing the
        partition.
        """

    async def peers(self) -> list[PeerPartition]:
        """Return every partition of the store. Call it repeatedly: an engine without its own clock detects
        the end of a lease by the absence of changes.
        """

    async def close(self) -> None: ...


@runtime_checkable
class SharedEngine(Engine, Protocol):
    """Interface: an engine with the partitions of several nodes."""

    async def reserve(self, key: bytes, value: bytes, until: float) -> bytes | None:
        """Store a value under a key that is common to all partitions, unless the key already has a value.
        Return None if it was stored, and otherwise the existing value, even if it is the same. The key
        expires at the Unix time `until` or somewhat later.
        """

    async def unreserve(self, key: bytes, value: bytes) -> None:
        """Remove a key that `reserve` has stored, if it has this value."""


async def pages(
    reader: KeyReader, start: bytes, end: bytes, *, rows: int = PAGE_ROWS, values: bool = True
) -> AsyncIterator[list[Row]]:
    """Yield the rows (keys with values) of a key range, page by page."""
    cursor: bytes | None = start
    while cursor is not None:
        found, cursor = await reader.page(cursor, end, rows=rows, values=values)
        if found:
            yield found


async def get_each(reader: KeyReader, keys: Sequence[bytes]) -> Sequence[bytes | StoreCorruptError | None]:
    """Return the values of the keys, with an error in place of each unreadable one."""
    try:
        return await reader.get(keys)
    except StoreCorruptError as error:
        return [error] if len(keys) == 1 else [(await get_each(reader, [key]))[0] for key in keys]


Apply = Callable[[Write], Awaitable[None]]
"""Applies a write durably and atomically. Raises StoreError."""


async def clear(reader: KeyReader, start: bytes, end: bytes, write: Apply) -> None:
    """Remove all keys of a large range in many batches. After a crash the rest remains."""
    async for rows in pages(reader, start, end, rows=CLEAR_ROWS, values=False):
        await write(Write({key: None for key, _ in rows}, makes_room=True))


def after(key: bytes) -> bytes:
    """Return the smallest key that sorts after `key`."""
    return key + b"\0"


def page_of(found: Iterable[Row], rows: int, size: Callable[[bytes], int] = len) -> KeyPage:
    """Collect rows of a key range into a page of limited size. Pass one more than `rows` if there are that
    many. `size` returns the size of a value.
    """
    taken: list[Row] = []
    left = PAGE_OCTETS
    for key, value in found:
        if len(taken) == rows or left <= 0:
            return KeyPage(taken, after(taken[-1][0]))
        taken.append((key, value))
        left -= len(key) + size(value)
    return KeyPage(taken, None)
