"""Pauses between fetching what waits in the store for suspended destinations: one timer for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.queue.destination.destinations import Destination


class Rests:
    """`rested(destination)` is called when the time is over for which nothing was to be fetched."""

    def __init__(self, rested: Callable[[Destination], None]) -> None:
        self._rested = rested
        self._timers: dict[Destination, asyncio.TimerHandle] = {}

    def begin(self, destination: Destination, seconds: float) -> None:
        self.end(destination)
        self._timers[destination] = asyncio.get_running_loop().call_later(seconds, self._over, destination)

    def end(self, destination: Destination) -> None:
        """It need not rest any longer."""
        running = self._timers.pop(destination, None)
        if running is not None:
            running.cancel()

    def cancel(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _over(self, destination: Destination) -> None:
        del self._timers[destination]
        self._rested(destination)
