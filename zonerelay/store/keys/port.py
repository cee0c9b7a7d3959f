"""The port: what an engine of ordered keys promises.

A **partition** is an ordered map of bytes to bytes that survives power cuts and has one writer. A shared
engine holds one partition for each node. Keys compare byte by byte.

Who may write
    The writer holds an **epoch**. `Keeper.enter` takes the next epoch and thereby fences every earlier
    writer: a batch of an earlier epoch is refused with FencedError, however late it arrives. The fence is in
    the data, in the same atomic step as the batch. It is never a session, a lock of the server or a clock.

    A shared engine also keeps a **lease**. The lease decides when another node may take over, the fence
    decides who is right, so a clock that is wrong can cost a delivery that is made twice, and no mail. A
    writer that knows the token of the former writer (`writer`, kept by `seen_file`) is the successor of a
    process that has died, and enters without waiting for the lease.

What is durable
    `Keeper.apply` makes one batch durable, whole, before it returns. Batches carry the numbers 1, 2, 3, …,
    which go on over epochs. Each batch stores its own **position** (epoch and number) in the same atomic
    step.

    After any error but FencedError a batch may have happened, may not have happened, or may yet happen.
    Nothing else can be said about a connection that broke, a log whose sync failed, or a PUT that a proxy
    holds. The position ends the doubt: `enter` first (the late batch is fenced from then on), then compare
    the stored position with that of the batch. `Partition` does this. No engine repeats a batch by itself.

What an older state is
    A former primary, a file that was cut, a restored snapshot and an emptied server all answer as if nothing
    were wrong. The writer remembers the position of its last batch, in memory and in a file beside the mark.
    A store with a lower position is refused with OlderStateError before anything is written to it. The
    **mark** is the random name of a store. A store with another mark, or none, is refused with
    StrangeStoreError.

What is read
    A reader sees every batch that `apply` has returned for, or sees it in a later read when the reader
    belongs to another node. A page is one moment; two pages of one walk may be two moments. Memory is bounded
    by PAGE_OCTETS.

Room
    StoreFullError means that there is no room. A batch in which every write `makes_room` (outcomes, removals)
    is accepted longer than new mail, as far as the engine can. `room` returns how much is left.

Limits: keys up to MAX_KEY bytes (an index row of PostgreSQL ends at 2,704) that do not begin with NUL, values
up to MAX_VALUE, and MAX_NODES partitions. A range in a batch is meant for the keys of one message.
`Partition.clear` removes large ranges in many batches.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from zonerelay.store.contract import StoreError, StoreOpenError

MAX_KEY = 2048
MAX_VALUE = 16 * 1024 * 1024
MAX_NODES = 256
PAGE_ROWS = 1000
PAGE_OCTETS = 1024 * 1024

Row = tuple[bytes, bytes]


class FencedError(StoreError):
    """Another writer has the partition. Nothing of this call was written, and nothing ever will be by this
    writer.
    """


class StrangeStoreError(StoreOpenError):
    """The store has lost the queue, or is another one."""


class OlderStateError(StoreOpenError):
    """The store holds an older state than this machine has seen. Nothing was written."""


class NodeTakenError(StoreOpenError):
    """Another process is the writer of the partition, and its lease has not ended."""


class KeyRange(NamedTuple):
    """The keys from `start` up to and without `end`."""

    start: bytes
    end: bytes

    @classmethod
    def of_prefix(cls, prefix: bytes) -> KeyRange:
        """Return the range of all keys that begin with `prefix`."""
        stem = prefix.rstrip(b"\xff")
        if not stem:
            raise ValueError("no key ends this range")
        return cls(prefix, stem[:-1] + bytes([stem[-1] + 1]))

    def holds(self, key: bytes) -> bool:
        return self.start <= key < self.end


@dataclass(frozen=True, slots=True)
class Write:
    """Changes that are made together or not at all: first `ranges` are emptied, then `changes` are made,
    where None removes a key.
    """

    changes: Mapping[bytes, bytes | None] = field(default_factory=dict)
    ranges: Sequence[KeyRange] = ()
    makes_room: bool = False

    def check(self) -> int:
        """Return the bytes of all keys and values. Raises ValueError for what no engine takes."""
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
    """Return one write that does what these do one after the other."""
    changes: dict[bytes, bytes | None] = {}
    ranges: list[KeyRange] = []
    makes_room = True
    for write in writes:
        for emptied in write.ranges:
            for key in [key for key in changes if emptied.holds(key)]:
                del changes[key]
            ranges.append(emptied)
        changes.update(write.changes)
        makes_room = makes_room and write.makes_room
    return Write(changes, ranges, makes_room)


class Position(NamedTuple):
    """The last batch of a partition: the epoch of its writer, and its number."""

    epoch: int = 0
    number: int = 0


NOTHING = Position()
"""No batch was ever written."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One write as an engine receives it, and about how many bytes it has. `position` is stored with it; the
    batch before has the number before.
    """

    position: Position
    write: Write
    size: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """What a store says about a partition: the mark of the store, the epoch and the token of the partition's
    writer, and the position of its last batch.
    """

    mark: str
    epoch: int
    writer: str
    last: Position


@dataclass(frozen=True, slots=True)
class Peer:
    """A partition as others see it. `writer` is the token of its last writer. `is_left`: its writer has
    closed it. `is_over`: no writer holds it now, so that it may be adopted.
    """

    node: int
    epoch: int
    writer: str
    is_left: bool
    is_over: bool


class KeyPage(NamedTuple):
    """Rows in the order of their keys. `cursor` is where the next page starts; None: this was the last
    one.
    """

    rows: list[Row]
    cursor: bytes | None


class KeyReader(Protocol):
    """Reads of one partition. Every method raises StoreError."""

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of the keys; None where there is no such key."""

    async def page(self, start: bytes, end: bytes, *, rows: int = PAGE_ROWS, values: bool = True) -> KeyPage:
        """Return the first rows of the range: at most `rows`, and about PAGE_OCTETS of keys and values, but
        one row at least. Without `values` they are empty.
        """

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        """Return the highest key of the range."""


class Keeper(KeyReader, Protocol):
    """One partition as an engine keeps it. Calls of `enter`, `apply`, `leave` and `close` come one at a
    time.
    """

    async def look(self) -> State | None:
        """Return what the store says, and change nothing. None: it has no mark. A partition that does not
        exist has epoch 0.
        """

    async def enter(self, writer: str, *, mark: str) -> State:
        """Become the writer in a new epoch. Makes the partition, and gives a store without a mark `mark`.

        Returns the state with the new epoch; `last` is the position of the last batch that any writer has
        made durable, and no batch of an earlier epoch becomes durable from here on. Raises NodeTakenError
        while another `writer` holds the lease, and StoreOpenError when the store cannot be used at all.
        """

    async def apply(self, batch: Batch) -> None:
        """Make the batch durable. Raises FencedError; after every other StoreError its fate is not known."""

    async def renew(self) -> None:
        """Extend the lease. Raises FencedError when another writer has the partition."""

    async def leave(self) -> None:
        """Give up the lease, so that no heir has to wait. Raises FencedError."""

    async def room(self) -> int | None:
        """Return how many bytes may still be written, or None when the engine does not know."""

    async def close(self) -> None:
        """Release connections, files and threads. Raises nothing."""


@runtime_checkable
class StagingKeeper(Keeper, Protocol):
    """A partition that can take large values ahead of the batch that makes them exist."""

    async def stage(self, rows: Mapping[bytes, bytes]) -> None:
        """Store rows of new keys. They exist, durably, when the next batch that is applied does; a batch that
        removes one of them takes it back. Several calls may run at a time, beside `apply`.
        """


class Engine(Protocol):
    """A store with its partitions. `lease` is in seconds; 0 when no other process can take a partition
    over.
    """

    @property
    def lease(self) -> float: ...

    def keeper(self, node: int) -> Keeper:
        """Return the partition of a node, which is neither opened nor entered yet."""

    async def peers(self) -> list[Peer]:
        """Return every partition of the store. Call it again and again: an engine without a clock of its own
        finds out that a lease is over by seeing that it does not change.
        """

    async def close(self) -> None: ...


@runtime_checkable
class SharedEngine(Engine, Protocol):
    """An engine whose partitions are those of several nodes."""

    async def reserve(self, key: bytes, value: bytes, until: float) -> bytes | None:
        """Store a value under a key of the whole store, outside of all partitions, if there is none yet.
        Return None when it was stored, else the value that is there; storing the same value again returns it.
        The key expires at the Unix time `until`, or some time later.
        """

    async def unreserve(self, key: bytes, value: bytes) -> None:
        """Remove a reserved key if it has this value."""


async def pages(
    reader: KeyReader, start: bytes, end: bytes, *, rows: int = PAGE_ROWS, values: bool = True
) -> AsyncIterator[list[Row]]:
    """Walk a range page by page."""
    cursor: bytes | None = start
    while cursor is not None:
        found, cursor = await reader.page(cursor, end, rows=rows, values=values)
        if found:
            yield found


def after(key: bytes) -> bytes:
    """Return the first key that may follow `key`."""
    return key + b"\0"


def page_of(found: Iterable[Row], rows: int) -> KeyPage:
    """Return a page of the rows that are found in a range, one more than `rows` if there are so many."""
    taken: list[Row] = []
    left = PAGE_OCTETS
    for key, value in found:
        if len(taken) == rows or left <= 0:
            return KeyPage(taken, after(taken[-1][0]))
        taken.append((key, value))
        left -= len(key) + len(value)
    return KeyPage(taken, None)
