"""Tracks whether a store is usable, and why not. Reasons name no internals, because clients and `/readyz`
show them.

A refusal means that no operation is possible at present; every caller receives it. A cause without a refusal
(little space, little memory, damage) refuses new mail while the queue is drained.

`problems` is for the operator: the details of each cause, and notes, which do not refuse mail.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable

from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, Unhealthy

INTERVAL = 1.0
"""Seconds between two checks of the free space."""
_log = logging.getLogger("zonerelay.store")


class Health:
    """The health of a store, with the reasons why it is unusable. Damage takes precedence over all others,
    then the first cause. `on_change` is called with every new reason, and with None when there is none.
    """

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self._causes: dict[str, Unhealthy] = {}
        self._texts: dict[str, str] = {}
        self._closed = False
        self._changed = asyncio.Event()
        self.refusal: StoreError | None = None
        self.reason: Unhealthy | None = None

    def refuse(self, refusal: StoreError | None) -> None:
        """Refuse every operation, or none any longer."""
        self.refusal = refusal
        self._tell()

    async def usable(self) -> bool:
        """Wait until the store is usable. Return whether there was one."""
        was_refused = self.refusal is not None
        while self.refusal is not None:
            await self._changed.wait()
        return was_refused

    def _tell(self) -> None:
        # A caller that begins to wait now waits for the next change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def check_usable(self) -> None:
        """Raise StoreError if the store has failed or is closed."""
        if self.refusal is not None:
            # A new exception for each caller, because raising one again adds a traceback to it.
            raise type(self.refusal)(*self.refusal.args)

    def check_writable(self) -> None:
        """Raise StoreError as `check_usable` does, StoreFullError if there is too little space for new mail,
        or StoreCorruptError if the store is damaged.
        """
        if self.reason is not None:
            self.check_usable()
            raise (StoreCorruptError if self.reason is Unhealthy.DAMAGED else StoreFullError)(self.reason)

    def problems(self) -> tuple[str, ...]:
        return tuple(self._texts.values())

    def note(self, cause: str, text: str | None) -> None:
        """Set or clear a note, a problem that does not refuse mail."""
        if text is None:
            self._texts.pop(cause, None)
        else:
            self._texts[cause] = text

    def set(self, cause: str, reason: Unhealthy | None, text: str = "") -> None:
        """Set or clear the reason of a cause. `text` is shown to the operator in place of the reason."""
        if self._closed:
            return
        before = self.reason
        if reason is None:
            self._causes.pop(cause, None)
        else:
            self._causes[cause] = reason
        self.note(cause, None if reason is None else text or reason)
        reasons = self._causes.values()
        self.reason = Unhealthy.DAMAGED if Unhealthy.DAMAGED in reasons else next(iter(reasons), None)
        if self.reason != before:
            self._on_change(self.reason)
        self._tell()

    def close(self) -> None:
        """Mark the store as closed on purpose. `on_change` is no longer called."""
        self._closed = True
        self.reason = Unhealthy.CLOSED


class SpaceWatch:
    """Checks the free space every `INTERVAL`, and earlier after many bytes were written. Each byte counts
    `copies` times. With less than `least` bytes new mail is refused; outcomes are still stored. `look` must
    call `note`.
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
