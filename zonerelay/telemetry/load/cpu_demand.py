"""What part of the time a thread needs a processor: how near the event loop is to having no time left.

Its CPU time alone would say little where other programs use the machine: time in the kernel's run queue
counts as well (/proc/thread-self/schedstat, in kernels that keep it).
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds: running, and waiting to run; then a count."""


class CpuDemand:
    """Of the thread that calls it."""

    def __init__(self, *, schedstat: Path = SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._at = 0.0
        self._needed = 0.0

    def since_last(self) -> float:
        """0.0 to 1.0, since the last call; 0.0 at the first."""
        now, needed = time.monotonic(), time.thread_time() + self._waited()
        passed, more = now - self._at, needed - self._needed
        is_first, self._at, self._needed = self._at == 0.0, now, needed
        if is_first or passed <= 0:
            return 0.0
        return min(1.0, max(0.0, more / passed))

    def _waited(self) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(self._schedstat.read_bytes().split()[1]) / 1e9
        return 0.0
