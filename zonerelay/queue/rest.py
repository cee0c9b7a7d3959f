"""Pauses between fetching what was passed over for suspended destinations: one timer for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.queue.destinations import Destination
from zonerelay.queue.suspension import PUT_OFF_RATE


class Rests:
    """`rested(destination)` is called when as much time has passed as what was put off is worth."""

    def __init__(self, rested: Callable[[Destination], None]) -> None:
        self._rested = rested
        self._timers: dict[Destination, asyncio.TimerHandle] = {}

    def begin(self, destination: Destination, put_off: int) -> None:
        """`put_off` deliveries of it were just put off."""
        running = self._timers.get(destination)
        if running is not None:
            running.cancel()
        seconds = max(put_off, 1) / PUT_OFF_RATE
        self._timers[destination] = asyncio.get_running_loop().call_later(seconds, self._end, destination)

    def cancel(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _end(self, destination: Destination) -> None:
        del self._timers[destination]
        self._rested(destination)
