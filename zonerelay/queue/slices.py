"""Long work on the event loop in slices: between two of them everybody else has a turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

SLICE = 0.005
"""Seconds. A step that takes longer is a slice of its own."""

_Step = TypeVar("_Step")


async def in_slices(steps: Iterable[_Step], monotonic: Callable[[], float]) -> AsyncIterator[_Step]:
    """Each step's result; whoever takes them does its part of the work within the slice.

    What the work is about may change between two slices.
    """
    until = monotonic() + SLICE
    for step in steps:
        yield step
        if monotonic() >= until:
            await asyncio.sleep(0)
            until = monotonic() + SLICE
