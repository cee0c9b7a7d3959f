"""The bounded buffer between what happens and one operator who reads along.

A reader that is slow loses what does not fit, and is told how much; the writer never waits. Threads may
write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """`put` items anywhere, `take` them on the event loop that made the stream."""

    def __init__(self, room: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[T] = deque()
        self._room = room
        self._missed = 0
        self._some = asyncio.Event()
        self._told = False  # the reader will look
        self.why = ""
        """The reason why nothing more comes."""

    def put(self, item: T) -> None:
        if self.why:
            return
        if len(self._items) >= self._room:
            self._missed += 1
            return
        self._items.append(item)
        if not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._some.set)

    def close(self, why: str) -> None:
        """On the event loop: the reader takes what is here, and is told why that is all."""
        self.why = self.why or why
        self._some.set()

    async def take(self) -> tuple[list[T], int]:
        """Waits for items. Returns them, and how many are missing behind them; nothing after `close`."""
        self._told = False
        while not self._items and not self.why:
            self._some.clear()
            await self._some.wait()
            self._told = False
        taken = [self._items.popleft() for _ in range(len(self._items))]  # a thread may add more meanwhile
        missed, self._missed = self._missed, 0
        return taken, missed
