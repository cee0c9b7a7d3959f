"""The loop that brings a failed store back: pause, try, and pause for longer after each failure.

This module owns the pauses alone. The engine that failed decides what an attempt does, which errors are worth
another attempt, and what its memory still knows once an attempt has succeeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from zonerelay.store.contract import StoreError

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
