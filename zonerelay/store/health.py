"""Whether a store may be used, and why not. Bland reasons: they may reach clients and `/readyz`.

Two things are kept apart. A refusal means that nothing can be done now, and is what every caller gets. A
cause without one (little space, little memory) keeps new mail out while the queue is drained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from zonerelay.store.base import StoreError, StoreFullError

NO_SPACE = "insufficient disk space"
WRITE_FAILED = "the spool cannot be written"
CLOSED = "the spool is closed"


class Health:
    """Causes with their reasons; the first one counts. `on_change` hears of every new reason and of None."""

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self._causes: dict[str, str] = {}
        self._closed = False
        self._changed = asyncio.Event()
        self._refusal: StoreError | None = None
        self.reason: str | None = None

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
        # Who begins to wait now waits for the next change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def check_usable(self) -> None:
        """Raises StoreError while the store is failed or closed."""
        if self.refusal is not None:
            # A new one for each: an exception that is raised again grows by a traceback.
            raise type(self.refusal)(str(self.refusal))

    def check_writable(self) -> None:
        """Also raises StoreFullError when there is too little room for new mail."""
        if self.reason is not None:
            self.check_usable()
            raise StoreFullError(self.reason)

    def unhealthy(self) -> str | None:
        return self.reason

    def set(self, cause: str, reason: str | None) -> None:
        if self._closed:
            return
        before = self.reason
        if reason is None:
            self._causes.pop(cause, None)
        else:
            self._causes[cause] = reason
        self.reason = next(iter(self._causes.values()), None)
        if self.reason != before:
            self._on_change(self.reason)
        self._tell()

    def close(self) -> None:
        """The store is being closed, as it was told: nobody has to hear of that, or of what comes after."""
        self._closed = True
        self.reason = CLOSED
