"""An authority over shared limits in the process of its owners."""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.limits.authority import LimitAnswer, LimitRequest, LimitTable


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
