"""An authority over shared limits in the process of its holders."""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.limits.authority import LimitTable
from zonerelay.limits.values import Answer, Request


class MemoryAuthority:
    """The authority for holders in the process of the table."""

    name = "this process"
    lease = None

    def __init__(self, table: LimitTable, holder: str) -> None:
        self._table = table
        self._holder = holder

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        del back, gone  # never out of reach
        self._table.enter(self._holder, news)

    async def exchange(self, zone: str, request: Request) -> Answer:
        return self._table.exchange(self._holder, zone, request)

    async def close(self) -> None:
        self._table.leave(self._holder)
