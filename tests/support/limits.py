"""Authorities over shared limits: one in the process of its owners, and one that has forgotten everything."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest.mock import patch

from zonerelay.limits.authority import LimitAnswer, LimitRequest, LimitTable, SlotAllocator, ZoneLimits
from zonerelay.model.clock import Clock


class MemoryAuthority:
    """The authority for owners in the process of the table."""

    name = "this process"
    lease = None

    def __init__(self, table: LimitTable, owner: str) -> None:
        self._table = table
        self._owner = owner

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        del back, gone  # never out of reach
        self._news = news
        self._table.register(self._owner, news)

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        return self._table.exchange(self._owner, zone, request)

    async def close(self) -> None:
        self._table.unregister(self._owner, self._news)


@contextmanager
def nothing_assigned() -> Iterator[None]:
    """While owners say what they have to an authority that has forgotten it."""
    with patch.object(SlotAllocator, "_allocate"), patch.object(ZoneLimits, "_turns", lambda *_: ()):
        yield


class QuietTable(LimitTable):
    """Assigns nothing in the `quiet` seconds after its start. No relay needs that, because a supervisor
    starts after the last worker of another one has ended. It stands for a server of several machines that has
    lost its records.
    """

    def __init__(self, clock: Clock, quiet: float) -> None:
        super().__init__(clock)
        self._quiet_until = clock.monotonic() + quiet

    def exchange(self, owner: str, zone: str, request: LimitRequest) -> LimitAnswer:
        with self._quiet():
            return super().exchange(owner, zone, request)

    def unregister(self, owner: str, news: Callable[[str], None]) -> None:
        with self._quiet():
            super().unregister(owner, news)

    def _quiet(self) -> AbstractContextManager[None]:
        return nothing_assigned() if self._clock.monotonic() < self._quiet_until else nullcontext()
