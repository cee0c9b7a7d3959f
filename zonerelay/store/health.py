"""Why a store takes no new mail now. Bland reasons: they may reach clients and `/readyz`."""

from __future__ import annotations

from collections.abc import Callable

NO_SPACE = "insufficient disk space"
WRITE_FAILED = "the spool cannot be written"
CLOSED = "the spool is closed"


class Health:
    """Causes with their reasons; the first one counts. `on_change` hears of every new reason and of None."""

    def __init__(self, on_change: Callable[[str | None], None]) -> None:
        self._on_change = on_change
        self._causes: dict[str, str] = {}
        self._closed = False
        self.reason: str | None = None

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

    def close(self) -> None:
        """The store is being closed, as it was told: nobody has to hear of that, or of what comes after."""
        self._closed = True
        self.reason = CLOSED
