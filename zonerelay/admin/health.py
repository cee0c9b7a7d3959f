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

from zonerelay.model.clock import Clock
from zonerelay.store.contract import StoreError

PROBE_TIMEOUT = 5.0
FRESH_FOR = 1.0


def readiness(
    *, draining: bool, accepting: bool, unhealthy: str | None, probe_failure: str | None
) -> tuple[str, ...]:
    """Return every reason why the relay is not ready, those that an operator caused first. Return none if it
    is ready.

    Reasons are for the operator and contain no addresses.
    """
    reasons = []
    if draining:
        reasons.append("the relay is shutting down")
    elif not accepting:
        reasons.append("no listener accepts connections")
    if unhealthy is not None:
        reasons.append(unhealthy)
    if probe_failure is not None and probe_failure != unhealthy:
        reasons.append(probe_failure)
    return tuple(reasons)


class ReadinessCheck:
    """Collects the reasons why workers are not ready. `probe` writes and syncs a test record
    (`QueueStore.probe`).
    """

    def __init__(
        self,
        *,
        probe: Callable[[], Awaitable[None]],
        unhealthy: Callable[[], str | None],
        accepting: Callable[[], bool],
        draining: Callable[[], bool],
        clock: Clock,
        timeout: float = PROBE_TIMEOUT,
        fresh_for: float = FRESH_FOR,
    ) -> None:
        self._probe = SharedProbe(probe, clock, timeout=timeout, fresh_for=fresh_for)
        self._unhealthy = unhealthy
        self._accepting = accepting
        self._draining = draining

    async def __call__(self) -> tuple[str, ...]:
        failure = await self._probe.failure()
        return readiness(
            draining=self._draining(),
            accepting=self._accepting(),
            unhealthy=self._unhealthy(),
            probe_failure=failure,
        )

    async def close(self) -> None:
        """Cancel a test that hangs. Call this before the store is closed."""
        await self._probe.close()


class SharedProbe:
    """Runs one test at a time, and caches its result for a short time."""

    def __init__(
        self, probe: Callable[[], Awaitable[None]], clock: Clock, *, timeout: float, fresh_for: float
    ) -> None:
        self._probe = probe
        self._clock = clock
        self._timeout = timeout
        self._fresh_for = fresh_for
        self._running: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._tried: float | None = None

    async def failure(self) -> str | None:
        """Return the reason why the spool cannot be written and synced now, or None."""
        if self._running is None and self._is_fresh():
            return self._failure
        trial = self._running
        if trial is None:
            trial = self._running = asyncio.create_task(self._try())
        # wait() does not cancel the test at the timeout, because a sync cannot be interrupted.
        done, _ = await asyncio.wait({trial}, timeout=self._timeout)
        if not done:
            return f"the spool did not complete a synced write within {self._timeout:.0f} seconds"
        return self._failure

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    def _is_fresh(self) -> bool:
        return self._tried is not None and self._clock.monotonic() - self._tried < self._fresh_for

    async def _try(self) -> None:
        try:
            await self._probe()
            self._failure = None
        except StoreError as error:
            self._failure = str(error)
        except Exception as error:  # noqa: BLE001 - an unknown trouble is a reason like any other
            self._failure = f"the spool probe failed with an unexpected {type(error).__name__}"
        finally:
            self._tried = self._clock.monotonic()
            self._running = None
