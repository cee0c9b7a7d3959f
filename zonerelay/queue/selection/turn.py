"""The turns of a batch under a rate: the courier waits for one before each transaction.

The scheduler starts a batch when a turn is due, but only when its connection stands is it known when MAIL is
written; connections that come late and together would else bring their mail together. So the turn is taken
there. Waiting is the exception: the batch has started when a turn was due.

The first turn is waited for up to `LONGEST_FIRST`: few batches wait (`rates.HORIZON`), and longer than that
only where a reload has made the rate much slower meanwhile. A further one, for recipients that the peer wants
in another transaction or for another try elsewhere, only for `PATIENCE`, because the lane keeps a connection
meanwhile; what is left is tried again later.
"""

from __future__ import annotations

import asyncio

from zonerelay.model.clock import Clock
from zonerelay.queue.destination.rates import Ticket

PATIENCE = 5.0
LONGEST_FIRST = 120.0
"""Seconds; servers hang up on clients that are silent for five minutes (RFC 5321 4.5.3.2.7)."""


class BatchTurns:
    """The turns of one batch."""

    __slots__ = ("_clock", "_ticket")

    def __init__(self, ticket: Ticket, clock: Clock) -> None:
        self._ticket = ticket
        self._clock = clock

    async def take(self) -> bool:
        """Wait until a transaction may begin; false when it would be too long. It must begin at once."""
        ticket = self._ticket
        if not ticket.taken:
            ticket.arrived(self._clock.monotonic())
        # Looked at again after each sleep: others may have been faster, and the rate may have changed.
        while (wait := ticket.due - self._clock.monotonic()) > 0:
            if wait > (PATIENCE if ticket.taken else LONGEST_FIRST):
                return False
            await self._wait(min(wait, PATIENCE))
        ticket.take(self._clock.monotonic())
        return True

    async def _wait(self, seconds: float) -> None:
        """Waits `seconds`, or until there are new turns."""
        turns = self._ticket.leased
        if turns is None:
            await asyncio.sleep(seconds)
            return
        woken = asyncio.Event()
        turns.watch(woken.set, further=self._ticket.taken)
        try:
            async with asyncio.timeout(seconds):
                await woken.wait()
        except TimeoutError:
            return
        finally:
            turns.unwatch(woken.set)
