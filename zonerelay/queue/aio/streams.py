"""Leaving a store's stream early without leaving its generator behind."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

_Item = TypeVar("_Item")


@asynccontextmanager
async def closing(stream: AsyncIterator[_Item]) -> AsyncIterator[AsyncIterator[_Item]]:
    """Stores promise iterators; most are generators, which hold a snapshot until they are closed."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()
