"""Checks whether the relay is ready to accept mail, for `/readyz`.

Ready means that the relay accepts connections, is not shutting down, and its spool can be written and synced
*now*. The last condition is tested by a write, because a disk that hangs shows only when it is used. The
result of one test is used for all requests during the test and for `FRESH_FOR` seconds after it, so frequent
requests cost little, and a test that hangs is never followed by a second one. Nothing in this module raises
an exception.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

from zonerelay.model.clock import Clock
from zonerelay.process.tasks import cancel_all
from zonerelay.store.contract import StoreError

PROBE_TIMEOUT = 5.0
FRESH_FOR = 1.0


@dataclass(eq=False, repr=False)
class ReadinessCheck:
    """Collects the reasons why a worker is not ready. `probe` writes and syncs a test record
    (`QueueStore.probe`). One test runs at a time, and its result is used for a short time.
    """

    _: KW_ONLY
    probe: Callable[[], Awaitable[None]]
    unhealthy: Callable[[], str | None]
    accepting: Callable[[], bool]
    draining: Callable[[], bool]
    clock: Clock
    timeout: float = PROBE_TIMEOUT

    def __post_init__(self) -> None:
        self._running: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._tried: float | None = None

    async def __call__(self) -> tuple[str, ...]:
        """Return every reason why the relay is not ready, those that an operator caused first. Return none if
        it is ready.

        Reasons are for the operator and contain no addresses.
        """
        failure = await self._probe_failure()
        stopped = "" if self.accepting() else "no listener accepts connections"
        if self.draining():
            stopped = "the relay is shutting down"
        return tuple(dict.fromkeys(filter(None, (stopped, self.unhealthy(), failure))))

    async def _probe_failure(self) -> str | None:
        """Return the reason why the spool cannot be written and synced now, or None."""
        is_fresh = self._tried is not None and self.clock.monotonic() - self._tried < FRESH_FOR
        if self._running is None and is_fresh:
            return self._failure
        trial = self._running
        if trial is None:
            trial = self._running = asyncio.create_task(self._try())
        # wait() does not cancel the test at the timeout, because a sync cannot be interrupted.
        done, _ = await asyncio.wait({trial}, timeout=self.timeout)
        if not done:
            return f"the spool did not complete a synced write within {self.timeout:.0f} seconds"
        return self._failure

    async def close(self) -> None:
        """Cancel a test that hangs. Call this before the store is closed."""
        await cancel_all(self._running)

    async def _try(self) -> None:
        try:
            await self.probe()
            self._failure = None
        except StoreError as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001 - an unknown trouble is a reason like any other
            self._failure = f"the spool probe failed with an unexpected {type(error).__name__}"
        finally:
            self._tried = self.clock.monotonic()
            self._running = None
