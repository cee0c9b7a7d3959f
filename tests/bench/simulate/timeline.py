"""An event loop whose time is not the machine's: when nothing is left to do now, it jumps to the next timer.

asyncio asks its selector to wait until the next timer. Here the selector has nothing to watch, so it moves
the clock by that wait and returns at once. Everything else is asyncio's own: callbacks of one moment run in
the order in which they were scheduled, so a run with the same seed takes the same course.

Failure: when nothing is ready and no timer is set, nobody will ever wake the loop; that is an error at once.
"""

import asyncio

START = 1_700_000_000.0
"""Unix time at which every simulation begins."""


class NothingLeftError(RuntimeError):
    """Everybody waits and nothing will ever happen."""


class _NoSockets:
    """Stands where asyncio keeps its selector."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        if timeout is None:
            raise NothingLeftError("every task waits, and no timer is set")
        if timeout > 0:
            self._loop.now += timeout
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """`now` is in seconds since its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _NoSockets(self)

    def time(self) -> float:
        return self.now

    def _process_events(self, event_list: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No thread ever wakes this loop."""


class VirtualClock:
    """The loop's time for code that is handed a `Clock`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return START + self._loop.now

    def monotonic(self) -> float:
        return self._loop.now

    boottime = monotonic
