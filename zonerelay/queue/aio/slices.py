"""Long work on the event loop in slices: a few milliseconds in each turn of the loop, shared by all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

SLICE = 0.005
"""Seconds. A piece of work that takes longer is a slice of its own."""

_Step = TypeVar("_Step")


class Slices:
    """One slice in each turn of the loop, for all tasks that share this."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._is_open = False
        self._until = 0.0

    async def next(self) -> None:
        """Before each piece of work: waits for the next turn of the loop when this one's slice is used up."""
        while self._is_open and self._monotonic() >= self._until:  # noqa: ASYNC110 - for a turn, not an event
            await asyncio.sleep(0)
        if not self._is_open:
            self._is_open = True
            self._until = self._monotonic() + SLICE
            asyncio.get_running_loop().call_soon(self._close)

    def _close(self) -> None:
        """The loop has come round."""
        self._is_open = False


async def in_slices(steps: Iterable[_Step], monotonic: Callable[[], float]) -> AsyncIterator[_Step]:
    """Each step's result; whoever takes them does its part of the work within the slice.

    What the work is about may change between two slices.
    """
    slices = Slices(monotonic)
    for step in steps:
        await slices.next()
        yield step
