"""Watches the free space of a store. With less than `least` bytes new mail is refused; outcomes are still
stored.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from zonerelay.store.common.keeper.health import Health
from zonerelay.store.contract import StoreError, Unhealthy

INTERVAL = 1.0
"""Seconds between two checks."""

_log = logging.getLogger("zonerelay.store")


def lacks_inodes(path: Path) -> bool:
    """Return whether the file system has no free inodes. Return false if that is unknown or it does not count
    inodes.
    """
    try:
        usage = os.statvfs(path)
    except OSError:
        return False
    return usage.f_files > 0 and usage.f_favail == 0


class SpaceWatch:
    """Checks the free space periodically, and earlier after many bytes were written. Each byte counts
    `copies` times. `look` must call `note`.
    """

    def __init__(
        self, look: Callable[[], Awaitable[object]], *, least: int, health: Health, copies: int = 1
    ) -> None:
        self._look = look
        self._least = least
        self._health = health
        self._copies = copies
        self._may_write = 0
        self._wanted = asyncio.Event()

    def note_written(self, octets: int) -> None:
        self._may_write -= octets
        if self._may_write < 0:
            self._wanted.set()

    def note(self, free: int) -> bool:
        """Update the health with the free space, and return whether there is too little."""
        left = free - self._least
        self._health.set("space", Unhealthy.NO_SPACE if left < 0 else None)
        # Fast writers must not use up the rest before the next check.
        self._may_write = left // (1 + self._copies) if left >= 0 else sys.maxsize
        return left < 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wanted.clear()
            try:
                await self._look()
            except StoreError as error:
                _log.warning("cannot look after the free space of the spool: %s", error)
            timer = loop.call_later(INTERVAL, self._wanted.set)
            await self._wanted.wait()
            timer.cancel()
