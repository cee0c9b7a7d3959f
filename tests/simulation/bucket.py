"""An object store with conditional writes, shared by the nodes of a simulated relay.

It replaces `zonerelay.store.s3.client.Bucket`. A request takes time, and its answer may be lost: then the
caller gets `UnsureError`, and the write has happened, or happens some seconds later, or never.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

from sortedcontainers import SortedDict

from tests.simulation.loop import PROCESS, Process
from zonerelay.store.contract import StoreError
from zonerelay.store.s3.client import ConflictError, Fetched, Listed, MissingError, UnsureError

LEASE = 10.0
"""Seconds for which the lease of a node is good once it has written it."""


class ObjectStore:
    """What all nodes see. `lost` is asked with every request whether its answer is lost; `renewed` has when a
    process wrote its lease last. `at_write` is called when a process is about to write a message.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.objects: SortedDict[str, tuple[bytes, str]] = SortedDict()
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lost: Callable[[], bool] = lambda: False
        self.slowest = 0.03
        self.renewed: dict[str, float] = {}
        self.living: dict[str, str] = {}
        """Each lease that is in force, and whose it is: it was not given back, and nobody has ended it."""
        self.at_write: Callable[[Process | None], None] = lambda process: None
        self._version = 0

    def write(self, key: str, data: bytes, match: str, new: bool) -> str:
        found = self.objects.get(key)
        if (new and found is not None) or (match and (found is None or found[1] != match)):
            raise ConflictError(f"{key}: 412")
        self._version += 1
        etag = f'"{self._version:032x}"'
        self.objects[key] = data, etag
        return etag

    def remove(self, key: str, match: str) -> None:
        found = self.objects.get(key)
        if match and found is None:
            raise MissingError(key)
        if match and found is not None and found[1] != match:
            raise ConflictError(f"{key}: 412")
        self.objects.pop(key, None)


class SimBucket:
    """One node's client."""

    store: ObjectStore

    def __init__(self, settings: Any, secret_key: str) -> None:
        self.trouble: Callable[[StoreError], None] = lambda _: None
        self._all = type(self).store

    async def open(self) -> None:
        """There is nothing to connect to."""

    close = open

    async def _ask(self, act: Callable[[], Any], *, writes: bool = False) -> Any:
        store = self._all
        await asyncio.sleep(store.random.uniform(0.001, store.slowest))
        if store.lost():
            fate = store.random.random()
            if writes and fate < 0.6:
                late = 0.0 if fate < 0.3 else store.random.uniform(0.1, 1.5)
                asyncio.get_running_loop().call_later(late, _quietly, act, context=_NOBODY())
            await asyncio.sleep(1.0)
            error = UnsureError("the answer was lost")
            self.trouble(error)
            raise error
        result = act()
        await asyncio.sleep(store.random.uniform(0.001, store.slowest))
        return result

    async def put(self, key: str, data: bytes, *, match: str = "", new: bool = False) -> str:
        process = PROCESS.get()
        if "/queue/" in key:
            self._all.at_write(process)

        def act() -> str:
            etag = self._all.write(key, bytes(data), match, new)
            if "/nodes/" in key and process is not None:
                self._all.living.pop(key, None)
                if b'"state"' not in data:
                    self._all.renewed[process.name] = asyncio.get_running_loop().time()
                    self._all.living[key] = process.name
            return etag

        return str(await self._ask(act, writes=True))

    async def get(self, key: str, first: int = 0, length: int = 0) -> Fetched:
        def act() -> Fetched:
            if key not in self._all.objects:
                raise MissingError(key)
            data, etag = self._all.objects[key]
            return Fetched(data[first : first + length] if length else data[first:], etag, len(data))

        found: Fetched = await self._ask(act)
        return found

    async def delete(self, key: str, *, match: str = "") -> None:
        await self._ask(lambda: self._all.remove(key, match), writes=True)

    async def pages(self, prefix: str, after: str = "") -> AsyncIterator[list[Listed]]:
        def act() -> list[Listed]:
            keys = self._all.objects.irange(max(prefix, after), prefix + "\U0010ffff")
            return [Listed(key, self._all.objects[key][1]) for key in keys if key > after]

        yield await self._ask(act)

    async def start_upload(self, key: str) -> str:
        def act() -> str:
            name = f"{key}?{len(self._all.parts)}"
            self._all.parts[name] = {}
            return name

        return str(await self._ask(act))

    async def put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        def act() -> str:
            self._all.parts[upload][number] = bytes(data)
            return f"part {number}"

        return str(await self._ask(act))

    async def finish_upload(self, key: str, upload: str, etags: list[str]) -> None:
        def act() -> None:
            if upload not in self._all.parts:
                raise MissingError(upload)
            parts = self._all.parts.pop(upload)
            self._all.write(key, b"".join(parts[number] for number in sorted(parts)), "", False)

        await self._ask(act, writes=True)

    async def abort_upload(self, key: str, upload: str) -> None:
        await self._ask(lambda: self._all.parts.pop(upload, None))

    async def uploads(self, prefix: str) -> list[tuple[str, str]]:
        return [(*tuple(name.split("?")[:1]), name) for name in self._all.parts]  # type: ignore[misc]


def _quietly(act: Callable[[], Any]) -> None:
    try:
        act()
    except StoreError:
        """Nobody learns of its result."""


def _NOBODY() -> Any:  # noqa: N802
    context = contextvars.copy_context()
    context.run(PROCESS.set, None)
    return context
