"""Brings tables to a version by numbered steps, one process at a time.

Versions may be mixed while a fleet is upgraded one by one. Each step says the `oldest` version that can work
on with what it makes, and an older one refuses it. A step waits for a table no longer than `LOCK_PATIENCE` at
a time: a statement that waits for one makes all others wait behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import BusyError, Fetch, Link

LOCK_PATIENCE = 2.0
TRIES = 10
"""With a pause between that is as long as the wait."""


class Migration(NamedTuple):
    """A migration. `oldest`: the version that a relay must know to work with what this step makes."""

    statements: str
    oldest: int


def check_version(what: str, version: int, *, oldest: int, known: int) -> None:
    """Raises StoreOpenError when this relay knows no version that can work with these tables."""
    if oldest > known:
        raise StoreOpenError(
            f"{what} has version {version}, which relays must know at least version {oldest} for, and this"
            f" zonerelay knows {known}: a newer zonerelay has been here; start that one"
        )


async def run_alone(link: Link, lock: str, work: Callable[[Fetch], Awaitable[None]], busy: str) -> None:
    """Does `work` in one transaction under the advisory lock of that name, so one relay at a time does it.

    Waits for a locked table no longer than `LOCK_PATIENCE` seconds at a time. Raises StoreOpenError with the
    text `busy` after `TRIES`.
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
