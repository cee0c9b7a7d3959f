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

    @property
    def reason(self) -> str | None:
        return next(iter(self._causes.values()), None)

    def set(self, cause: str, reason: str | None) -> None:
        before = self.reason
        if reason is None:
            self._causes.pop(cause, None)
        else:
            self._causes[cause] = reason
        if self.reason != before:
            self._on_change(self.reason)
