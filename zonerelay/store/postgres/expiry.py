"""What ends with a node: its session, its claims, the bodies that were arriving there."""

from __future__ import annotations

from zonerelay.store.postgres import sql
from zonerelay.store.postgres.driver import Link
from zonerelay.store.postgres.rows import unword

PAGE = 1000
"""Claims that are freed in one transaction."""
LONGEST_LEASE = 3600.0
"""Seconds that a node's lease may last from now on, as others see it. A longer one was written before the
server's clock was set back, and would keep a dead node's mail for as long as that was ahead."""


class Reaper:
    """Any node does it for any other. What is locked just now is done the next time."""

    def __init__(self, link: Link, channel: str, lease: float) -> None:
        """`lease` is our own, in seconds: other nodes may have one as long."""
        self._link = link
        self._channel = channel
        self._longest = max(LONGEST_LEASE, 4 * lease)

    async def reap(self, session: int) -> tuple[set[str], bool]:
        """Zones with deliveries that were freed, and whether a node has been found dead."""
        await self._link.fetch(sql.BOUND, self._longest)
        dead = await self._link.fetch(sql.REAP, session)
        zones: set[str] = set()
        for (orphan,) in await self._link.fetch(sql.ORPHANS):
            zones |= await self._free(orphan)
        await self._link.fetch(sql.DROP_DEAD_UPLOADS)
        if zones:
            await self._tell([f"{session} {zone}" for zone in zones])
        if dead:
            await self._tell([f"{session} "])
        return {unword(zone) for zone in zones}, bool(dead)

    async def leave(self, session: int, last_id: int) -> None:
        """End our own session in good order."""
        await self._link.fetch(sql.RETIRE, session, last_id)
        await self._free(session)
        await self._link.fetch(sql.DROP_DEAD_UPLOADS)
        await self._tell([f"{session} "])

    async def _free(self, session: int) -> set[str]:
        zones: set[str] = set()
        while rows := await self._link.fetch(sql.FREE, session, PAGE):
            zones |= {row[0] for row in rows}
        return zones

    async def _tell(self, payloads: list[str]) -> None:
        await self._link.fetch(sql.TELL, self._channel, payloads)
