"""Upgrades tables to a version in numbered steps, one process at a time.

Versions may be mixed during a rolling upgrade. Each step records the `oldest` version that can work with its
result, and an older one refuses the tables. A step waits for a locked table at most `LOCK_PATIENCE` seconds
at a time, because all other statements would wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import BusyError, Fetch, Link

LOCK_PATIENCE = 2.0
TRIES = 10
"""The number of attempts. The pause between two of them is as long as the wait for the lock."""


class Migration(NamedTuple):
    """One migration step of a schema. `oldest` is the lowest version that a relay must know to work with its
    result.
    """

    statements: str
    oldest: int


def check_version(what: str, version: int, *, oldest: int, known: int) -> None:
    """Raise StoreOpenError if this relay knows no version that can work with these tables."""
    if oldest > known:
        raise StoreOpenError(
            f"{what} has version {version}, which relays must know at least version {oldest} for, and this"
            f" zonerelay knows {known}: a newer zonerelay has been here; start that one"
        )


async def run_alone(link: Link, lock: str, work: Callable[[Fetch], Awaitable[None]], busy: str) -> None:
    """Call `work` in one transaction under the advisory lock `lock`, so that only one relay at a time does
    it.

    Waits for a locked table at most `LOCK_PATIENCE` seconds at a time. Raises StoreOpenError with the text
    `busy` after `TRIES` attempts.
    """
    for left in reversed(range(TRIES)):
        try:
            async with link.transaction() as fetch:
                await fetch(f"SET LOCAL lock_timeout = '{LOCK_PATIENCE:g}s'")
                await fetch("SELECT pg_advisory_xact_lock(hashtext($1))", lock)
                await work(fetch)
                return
        except BusyError as error:
            if not left:
                raise StoreOpenError(busy) from error
        await asyncio.sleep(LOCK_PATIENCE)
