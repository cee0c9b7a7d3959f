"""Waiting for what happens in the background."""

import asyncio
from collections.abc import Callable

PATIENCE = 20.0


async def until(condition: Callable[[], object], *, seconds: float = PATIENCE, every: float = 0.002) -> None:
    """Ask again and again; raises TimeoutError if it does not happen."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(every)
