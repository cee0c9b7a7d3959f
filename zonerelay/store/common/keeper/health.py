"""Says whether a store may be used, and why not. Reasons are bland: they reach clients and `/readyz`.

Two things are kept apart. A refusal means that nothing can be done now, and is what every caller gets. A
cause without one (little space, little memory, damage) keeps new mail out while the queue is drained.

`problems` is what the operator reads: each cause in full, and notes, which keep nothing out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from zonerelay.store.contract import StoreCorruptError, StoreError, StoreFullError, Unhealthy

# Brings a failed store back: it pauses, tries, and pauses for longer after each failure.
#
# This module owns the pauses alone. The engine that failed decides what an attempt does, which errors are
# worth another attempt, and what its memory still knows once an attempt has succeeded.

FIRST_PAUSE = 0.1
"""Seconds from the failure to the first attempt."""
LONGEST_PAUSE = 5.0
"""Seconds between two attempts at most; each pause is twice as long as the one before it."""

Recovered = TypeVar("Recovered")


async def recover(
    attempt: Callable[[], Awaitable[Recovered]],
    failed: Callable[[StoreError], None],
    *,
    first: float,
    longest: float,
) -> Recovered:
    """Repeats `attempt` until it raises no StoreError, and returns its result.

    `first` and `longest` are in seconds. `failed` receives the error of each attempt, before the pause.
    Every other exception ends the loop.
    """
    pause = first
    while True:
        await asyncio.sleep(pause)
        try:
            return await attempt()
        except StoreError as error:
            failed(error)
            pause = min(2 * pause, longest)


class Health:
    """Causes with their reasons; damage counts before all others, then the first one. `on_change` hears of
    every new reason and of None.
    """

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self._causes: dict[str, Unhealthy] = {}
        self._texts: dict[str, str] = {}
        self._closed = False
        self._changed = asyncio.Event()
        self._refusal: StoreError | None = None
        self.reason: Unhealthy | None = None

    @property
    def refusal(self) -> StoreError | None:
        return self._refusal

    @refusal.setter
    def refusal(self, refusal: StoreError | None) -> None:
        self._refusal = refusal
        self._tell()

    async def usable(self) -> bool:
        """Wait until there is no refusal; true when there was one."""
        return await self.wait_while(lambda: self._refusal is not None)

    async def wait_while(self, holds: Callable[[], bool]) -> bool:
        """Until it does not, as seen after each change; true when it did at first."""
        if not holds():
            return False
        while holds():
            await self._changed.wait()
        return True

    def _tell(self) -> None:
        # A caller that begins to wait now waits for the next change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def check_usable(self) -> None:
        """Raises StoreError while the store is failed or closed."""
        if self.refusal is not None:
            # A new one for each: an exception that is raised again grows by a traceback.
            raise type(self.refusal)(*self.refusal.args)

    def check_writable(self) -> None:
        """Also raises StoreFullError when there is too little room for new mail, StoreCorruptError when the
        store is damaged.
        """
        if self.reason is not None:
            self.check_usable()
            raise (StoreCorruptError if self.reason is Unhealthy.DAMAGED else StoreFullError)(self.reason)

    def unhealthy(self) -> Unhealthy | None:
        return self.reason

    def problems(self) -> tuple[str, ...]:
        return tuple(self._texts.values())

    def note(self, cause: str, text: str | None) -> None:
        """A problem that keeps no mail out."""
        if text is None:
            self._texts.pop(cause, None)
        else:
            self._texts[cause] = text

    def set(self, cause: str, reason: Unhealthy | None, text: str = "") -> None:
        """`text` is what the operator reads in place of the bland reason."""
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
        """The store is being closed on purpose: `on_change` hears neither of that nor of later causes."""
        self._closed = True
        self.reason = Unhealthy.CLOSED
