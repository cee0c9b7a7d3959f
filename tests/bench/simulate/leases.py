"""One set of limits for all nodes of a simulation: the relay's own table, keepers and allowances.

It is as on one machine with a supervisor: the table is in memory, each node asks it over a way that takes
time, and a node that dies has nothing any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from tests.bench.simulate.figures import Figures
from tests.support.limits import MemoryAuthority
from zonerelay.limits.authority import LimitAnswer, LimitRequest, LimitTable
from zonerelay.telemetry.events.events import LimitEvents

ONE_WAY = (0.0003, 0.003)
"""Seconds, from–to: between a socket of the machine and a server beside it that syncs each write."""


class DistantAuthority:
    """A table that is asked from afar."""

    name = "the table of the simulation"
    lease = None

    def __init__(self, table: LimitTable, owner: str, random: Random) -> None:
        self._near = MemoryAuthority(table, owner)
        self._random = random

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        loop = asyncio.get_running_loop()

        def tell(zone: str) -> None:
            loop.call_later(self._way(), news, zone)

        await self._near.start(tell, back, gone)

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        await asyncio.sleep(self._way())
        answer = await self._near.exchange(zone, request)
        await asyncio.sleep(self._way())
        return answer

    async def close(self) -> None:
        await self._near.close()

    def _way(self) -> float:
        least, most = ONE_WAY
        return least + (most - least) * self._random.random()


class KeeperEvents(LimitEvents, frozen=True):
    """What a node's keeper tells of."""

    figures: Figures

    def waited(self, seconds: float) -> None:
        self.figures.leases.add(seconds)

    def lost(self, authority: str, reason: str) -> None:
        self.figures.fault(f"{authority} is out of reach: {reason}")
