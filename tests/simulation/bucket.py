"""An object store with conditional writes, shared by the nodes of a simulated relay.

It replaces `zonerelay.store.objects.s3.Bucket`. A request takes time, and its answer may be lost: then
the caller gets `UnknownResultError`, and the write has happened, or happens some seconds later, or never.
"""

import asyncio
import contextlib
import contextvars
from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from sortedcontainers import SortedDict

from tests.simulation.loop import PROCESS, Process
from zonerelay.config.settings import S3Settings
from zonerelay.store.context import ReadSecret
from zonerelay.store.contract import StoreError
from zonerelay.store.objects.engine import Heartbeat, LogEntry, unpacked
from zonerelay.store.objects.s3 import Bucket, ConflictError, MissingError, UnknownResultError

T = TypeVar("T")

SLOWEST = 0.03
"""Seconds that a request takes at most on its way, and on its way back."""
LEASE = 10.0
"""Seconds for which the lease of a node is good once it has written it."""


class ObjectStore:
    """What all nodes see. `lost` is asked with every request whether its answer is lost; `renewed` has when a
    process wrote its lease last. `at_write` is called when a process is about to write a message.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.objects: SortedDict[str, bytes] = SortedDict()
        self._rows: defaultdict[str, set[bytes]] = defaultdict(set)
        self.lost: Callable[[], bool] = lambda: False
        self.renewed: dict[str, float] = {}
        self.lapsed: dict[str, float] = {}
        """When a process got a lease again that had ended."""
        self.living: dict[str, str] = {}
        """Each lease that is in force, and whose it is: it was not given back, and nobody has ended it."""
        self.at_write: Callable[[Process | None], None] = lambda process: None

    def write(self, key: str, data: bytes, new: bool, process: Process | None) -> None:
        if new and key in self.objects:
            raise ConflictError(f"{key}: 412")
        self.objects[key] = data
        if "/beats/" in key and process is not None:
            self.living.pop(key, None)
            if not unpacked(data, Heartbeat, key).is_left:
                now = asyncio.get_running_loop().time()
                if self.renewed.get(process.name, now) < now - LEASE:
                    self.lapsed[process.name] = now
                self.renewed[process.name] = now
                self.living[key] = process.name
        if "/log/" in key:
            entry, rows = unpacked(data, LogEntry, key), self._rows[key.partition("/log/")[0]]
            for row, value in entry.changes:
                (rows.discard if value is None else rows.add)(row)

    def rows(self) -> set[bytes]:
        """The keys that all logs together have left."""
        return set().union(*self._rows.values())


class SimBucket(Bucket):
    """One node's client."""

    objects: ObjectStore

    def __init__(self, settings: S3Settings, read_secret_key: ReadSecret) -> None:
        super().__init__(settings, read_secret_key)
        self._all = type(self).objects

    async def close(self) -> None:
        """There is no connection."""

    async def _request(self, act: Callable[[], T], *, writes: bool = False) -> T:
        store = self._all
        await asyncio.sleep(store.random.uniform(0.001, SLOWEST))
        if store.lost():
            fate = store.random.random()
            if writes and fate < 0.6:
                late = 0.0 if fate < 0.3 else store.random.uniform(0.1, 1.5)
                asyncio.get_running_loop().call_later(late, _quietly, act, context=contextvars.Context())
            await asyncio.sleep(1.0)
            raise UnknownResultError("the answer was lost")
        result = act()
        if writes:  # for a read, one wait is as good as two
            await asyncio.sleep(store.random.uniform(0.001, SLOWEST))
        return result

    async def _ask(self, verb: str, **what: Any) -> dict[str, Any]:
        objects, process, key = self._all.objects, PROCESS.get(), what.get("Key", "")

        def read() -> dict[str, Any]:
            data = objects.get(key)
            if data is None:
                raise MissingError(f"{key}: 404")
            first, _, last = what.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            return {"Body": data[int(first) : int(last) + 1 if last else None]}

        def listed() -> dict[str, Any]:
            start = what["Prefix"]
            return {"Contents": [{"Key": each} for each in objects.irange(start, start + "\U0010ffff")]}

        def write() -> None:
            self._all.write(key, bytes(what["Body"]), "IfNoneMatch" in what, process)

        match verb:
            case "get_object":
                return await self._request(read)
            case "list_objects_v2":
                return await self._request(listed)
            case "put_object":
                if "/log/" in key:
                    self._all.at_write(process)
                await self._request(write, writes=True)
            case "delete_object":
                await self._request(lambda: objects.pop(key, None), writes=True)
        return {}


def _quietly(act: Callable[[], Any]) -> None:
    """Nobody learns of its result."""
    with contextlib.suppress(StoreError):
        act()
