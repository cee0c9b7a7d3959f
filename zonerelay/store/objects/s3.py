"""Keeps objects in a bucket, by PUT with If-None-Match. The service must take conditional writes.

The client never sends a change twice (`store/s3/client`). A PUT without an answer may land later; the log's
sequence decides what becomes of it. A versioned bucket keeps a version and a marker for each object that is
removed, until a lifecycle rule expires them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from zonerelay.config.settings import S3Settings
from zonerelay.store.objects.index import Span
from zonerelay.store.objects.objects import AHEAD, Object, checked_values
from zonerelay.store.s3.client import Bucket, ConflictError, MissingError
from zonerelay.store.surroundings import ReadSecret


class BucketPlace:
    """The objects with one prefix in a bucket. Opened at the first request."""

    def __init__(self, settings: S3Settings, read_secret_key: ReadSecret) -> None:
        self._bucket = Bucket(settings, read_secret_key)
        self._prefix = settings.prefix
        self._opening: asyncio.Lock = asyncio.Lock()
        self._is_open = False

    async def _opened(self) -> Bucket:
        async with self._opening:
            if not self._is_open:
                await self._bucket.open()
                self._is_open = True
        return self._bucket

    async def create(
        self, name: str, data: bytes, *, values: Sequence[Object] = (), makes_room: bool = False
    ) -> bool:
        bucket = await self._opened()
        await self.store(values)
        try:
            await bucket.put(self._prefix + name, data, new=True)
        except ConflictError:
            return False
        return True

    async def store(self, values: Sequence[Object]) -> None:
        await _all(lambda name, pieces: self.create(name, b"".join(pieces)), values)

    async def replace(self, name: str, data: bytes) -> None:
        await (await self._opened()).put(self._prefix + name, data)

    async def read(self, name: str) -> bytes | None:
        return await self._read(name)

    async def _read(self, name: str, first: int = 0, length: int = 0) -> bytes | None:
        bucket = await self._opened()
        try:
            return (await bucket.get(self._prefix + name, first, length)).data
        except MissingError:
            return None

    async def read_values(self, name: str, spans: Sequence[Span]) -> list[bytes] | None:
        start, end = spans[0].first, spans[-1].first + spans[-1].size
        data = await self._read(name, start, end - start)
        if data is None:
            return None
        values = [data[each.first - start : each.first - start + each.size] for each in spans]
        return checked_values(values, spans, name)

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        bucket = await self._opened()
        async for rows in bucket.pages(self._prefix + prefix):
            yield [row.key.removeprefix(self._prefix) for row in rows]

    async def remove(self, names: Sequence[str]) -> None:
        bucket = await self._opened()
        await _all(lambda name: bucket.delete(self._prefix + name), [(name,) for name in names])

    async def room(self) -> int | None:
        return None

    async def close(self) -> None:
        await self._bucket.close()


async def _all(act: Callable[..., Awaitable[object]], wanted: Sequence[tuple[object, ...]]) -> None:
    """Act on all, some at a time. Raises the first error when none is under way any more."""
    for first in range(0, len(wanted), AHEAD):
        some = wanted[first : first + AHEAD]
        for each in await asyncio.gather(*(act(*one) for one in some), return_exceptions=True):
            if isinstance(each, BaseException):
                raise each
