"""Implements partitions on a database server: its connections, and the detection of other writers.

On failure: a lost connection is replaced at the next call. Each new one is compared with the last position
that this process has seen, so that a former primary is not read.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from zonerelay.store.contract import StoreError, StoreOpenError, Unhealthy
from zonerelay.store.keys import port


class Connection(Protocol):
    """Interface: a connection to a database server."""

    @property
    def is_over(self) -> bool: ...

    async def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


class KeptConnection(Generic[C]):
    """A connection to a database server that is opened on first use, and again after it was lost. It may have
    any number of callers. `opened` opens and checks one.
    """

    def __init__(self, opened: Callable[[], Awaitable[C]]) -> None:
        self._opened = opened
        self.connection: C | None = None
        self._is_closed = False
        self._turn = asyncio.Lock()

    async def get(self) -> C:
        """Return the connection, and open it first if necessary. Raises StoreError."""
        async with self._turn:
            if self._is_closed:
                raise StoreError(Unhealthy.CLOSED)
            if self.connection is None or self.connection.is_over:
                await self._hang_up()
                self.connection = await self._opened()
            return self.connection

    async def give_up(self) -> None:
        """Close the connection, so that the next caller gets a new one. Active calls fail."""
        async with self._turn:
            await self._hang_up()

    async def _hang_up(self) -> None:
        if self.connection is not None:
            await self.connection.close()
            self.connection = None

    async def close(self) -> None:
        self._is_closed = True
        await self.give_up()


class ServerKeys(ABC, Generic[C]):
    """A partition on a database server, with two connections: for writes, and for reads and the lease."""

    def __init__(self, node: int, writer: KeptConnection[C], reader: KeptConnection[C]) -> None:
        self._node = node
        self._writer = writer
        self._reader = reader
        self._checked: dict[KeptConnection[C], C] = {}
        self._epoch = 0
        self._last = port.NOTHING

    async def look(self) -> port.PartitionState | None:
        return await self._look(await self._writer.get())

    async def renew(self) -> None:
        try:
            connection = await self._use(self._reader)
            await self._check(connection)
        except StoreOpenError:
            await self._writer.give_up()  # nothing is written until a new connection is known to be safe
            raise
        await self._set_lease(connection, renews=True)

    async def leave(self) -> None:
        await self._set_lease(await self._use(self._writer), renews=False)

    async def room(self) -> int | None:
        return None

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    @abstractmethod
    async def _look(self, connection: C) -> port.PartitionState | None: ...

    @abstractmethod
    async def _check(self, connection: C) -> None:
        """Raise StoreOpenError if the server is no longer suitable for the queue."""

    @abstractmethod
    async def _set_lease(self, connection: C, *, renews: bool) -> None:
        """Extend or release the lease on the partition. Raises FencedError."""

    async def _use(self, kept: KeptConnection[C]) -> C:
        """Return a connection after checking that its server does not have an older state of the queue."""
        connection = await kept.get()
        if self._epoch and self._checked.get(kept) is not connection:
            epoch, last = self._epoch, self._last  # set before the query, because a batch may be active
            state = await self._look(connection)
            if state is None or state.epoch < epoch or state.last.number < last.number:
                await kept.give_up()
                raise port.OlderStateError(f"a new connection returned an older state of the queue: {state}")
            self._checked[kept] = connection
        return connection

    def _entered(self, state: port.PartitionState) -> port.PartitionState:
        self._epoch, self._last = state.epoch, state.last
        return state

    async def _refused(self, connection: C, epoch: int) -> StoreError:
        """Return the error for a batch whose epoch and previous number do not match the partition."""
        state = await self._look(connection)
        if state is not None and state.epoch > epoch:
            return port.FencedError(f"node {self._node} has epoch {state.epoch}, but the writer has {epoch}")
        return StoreError(f"the server does not contain the state written by node {self._node}: {state}")
