"""Throttles mail that has waited before, while new mail needs the processor. `BacklogThrottle` is pure.

The order of lines (`order.py`) is of no use where the processor is short: a message of a backlog for many
hosts, with look-ups and a connection of its own, takes five times as much of it as one that comes in and
leaves for a known host, and goes while new mail is being accepted. With 100,000 of them other mail was taken
at a third of its rate. So while the event loop is busy (`BUSY`) and fresh mail
starts at a quarter of the other's rate or more (`SHARE`), the other is given a rate, which is lowered step by
step, to one start for `FRESH_STARTS` of fresh mail (or `LEAST`), and raised when the loop has time again. A
trickle of new mail changes nothing, and without any there is no rate.

That is for bursts. Where it lasts, the other has more and more, after `PATIENCE` seconds as much as it has in
the order of lines: or deferred mail would never leave a relay that has too much to do all day.

There is one throttle for all zones of a worker, which share its processor. It is looked at every `LOOK`
seconds while mail that has waited is being sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from zonerelay.queue.destination.order import FRESH_WEIGHT

LOOK = 0.1
"""Seconds."""
BUSY = 0.8
"""Of the time the loop's thread runs or waits for a processor. What is missing to 1 are waits for the
interpreter and the disk: a loop that has no time shows 0.85 to 0.95."""
SHARE = 4
FRESH_STARTS = 30
FRESH_STARTS_AT_LAST = FRESH_WEIGHT
PATIENCE = 300.0
LEAST = 50.0
"""Starts a second, whatever comes: new mail would hardly feel it if they were fewer, and it may be other
programs that keep the processors busy.
"""
LOWER = 0.5
RAISE = 1.2
RAISE_BY = 10.0
"""Starts a second, besides."""
MEMORY = 0.2
"""Weight of the last look in a rate: about half a second is remembered."""


class BacklogThrottle:
    """Counts what starts. `is_used_up`: nothing that has waited before may start until the next look."""

    def __init__(self, begun: Callable[[], None] = lambda: None) -> None:
        self.begun = begun
        """Called when mail that has waited starts and no timer of `look` runs."""
        self.rate = math.inf
        """Starts a second that the other mail may have."""
        self.is_used_up = False
        self.is_looked_at = False
        self._left = math.inf
        self._lasted = 0.0
        self._fresh = self._other = 0
        self._fresh_rate = self._other_rate = 0.0

    def started(self, *, is_fresh: bool) -> None:
        """A batch of fresh mail, or of mail that was put off or is backlog."""
        if is_fresh:
            self._fresh += 1
            return
        if not self.is_looked_at:
            # What started without a timer says nothing.
            self.is_looked_at = True
            self._fresh = self._other = 0
            self._fresh_rate = self._other_rate = 0.0
            self.begun()
        self._other += 1
        self._left -= 1
        self.is_used_up = self._left <= 0

    def look(self, seconds: float, busy: float) -> None:
        """So long after the last look, or the beginning, of which the loop was busy for a part."""
        self.is_looked_at = self._other > 0 or self.rate < math.inf
        self._fresh_rate += (self._fresh / seconds - self._fresh_rate) * MEMORY
        self._other_rate += (self._other / seconds - self._other_rate) * MEMORY
        self._fresh = self._other = 0
        more = seconds if self.rate < math.inf else -seconds
        self._lasted = min(max(0.0, self._lasted + more), PATIENCE)
        self.rate = self._next_rate(busy)
        self._left = self.rate * seconds
        self.is_used_up = False

    def _next_rate(self, busy: float) -> float:
        fresh, other = self._fresh_rate, self._other_rate
        if fresh < 1 or fresh * SHARE < other:
            return math.inf
        if busy >= BUSY:
            less = (FRESH_STARTS - FRESH_STARTS_AT_LAST) * self._lasted / PATIENCE
            return max(LEAST, fresh / (FRESH_STARTS - less), min(self.rate, other) * LOWER)
        rate = self.rate * RAISE + RAISE_BY
        return math.inf if rate > (fresh + other) * SHARE else rate


class ThrottleTimer:
    """Looks in time. `busy` says what part of the time since it was last asked the loop's thread needed a
    processor; `refilled` is called when something may start that might not before.
    """

    def __init__(self, busy: Callable[[], float], refilled: Callable[[], None]) -> None:
        self.throttle = BacklogThrottle(self._begin)
        self._busy = busy
        self._refilled = refilled
        self.seconds = 0.0
        """During which there was a rate."""
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        self._busy()
        self._arm(asyncio.get_running_loop())

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        self._looked_at = loop.time()
        if not self._stopped:
            self._timer = loop.call_later(LOOK, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        was_used_up = self.throttle.is_used_up
        passed = max(loop.time() - self._looked_at, LOOK / 2)
        if self.throttle.rate < math.inf:
            self.seconds += passed
        self.throttle.look(passed, self._busy())
        if self.throttle.is_looked_at:
            self._arm(loop)
        if was_used_up:
            self._refilled()
