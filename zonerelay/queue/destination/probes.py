"""Which destinations that have failed may wait for the probe that ends their trouble. Pure.

When thousands of domains have died together, the suspensions of many are over while few connections are for
such (`probation.py`). What is claimed for them would fill the window with mail that cannot go. So once the
window is half full no more of them begin to wait than can hold a quarter of it; the suspension of the others
begins again, and costs no connection. Promise: who waits already goes on waiting and has its turn.
"""

from __future__ import annotations

from zonerelay.queue.destination.destinations import Destination


class Probes:
    """Of one zone."""

    def __init__(self, window: int) -> None:
        # Each may hold a sixty-fourth of a window that is half full (`window.py`).
        self._most = max(1, window // 256)
        self._waiting: set[Destination] = set()
        """Begun since the window was half full; some may have had their probe."""

    def may_wait(self, destination: Destination, *, is_half_full: bool) -> bool:
        """Its suspension, if it had one, is over, and something waits for it."""
        if not is_half_full or destination.is_queued or destination.active:
            return True
        if not destination.suspension.is_troubled:
            return True
        if len(self._waiting) >= self._most:
            self._waiting = {each for each in self._waiting if each.is_queued and each.suspension.is_troubled}
            if len(self._waiting) >= self._most:
                return False
        self._waiting.add(destination)
        return True
