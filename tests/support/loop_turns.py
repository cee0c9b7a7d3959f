"""Counts the iterations of the event loop while something runs, to show that it lets other tasks run."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def loop_turns(work: Coroutine[Any, Any, object]) -> int:
    """Await `work`, and return how often another task ran meanwhile."""
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(other_work())
    try:
        await work
    finally:
        other.cancel()
    return turns
