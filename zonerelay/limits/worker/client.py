"""A worker's way to the limits that the supervisor leases: the authority over a Unix socket.

While the supervisor is away every exchange fails at once, and the worker goes on with what it holds; when it
is there again `back` is called, and the worker says what that is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from zonerelay.limits import frames
from zonerelay.limits.values import Answer, AuthorityError, Request

PAUSE = 0.25
"""Seconds between two attempts to connect; a restarted server waits several times as long for us."""

TIMEOUT = 5.0
"""Seconds for one answer: it comes from memory."""


class SocketAuthority:
    """`holder`: a name of this worker that no other process has had."""

    lease = None

    def __init__(self, path: Path, holder: str) -> None:
        self.name = f"the supervisor at {path}"
        self._path = path
        self._holder = holder
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        self._task = asyncio.get_running_loop().create_task(self._stay_connected(news, back, gone))

    async def exchange(self, zone: str, request: Request) -> Answer:
        writer = self._writer
        if writer is None:
            raise AuthorityError(f"{self.name} does not answer")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        writer.write(frames.encode(frames.Ask(zone, request)))
        try:
            return await asyncio.wait_for(answer, TIMEOUT)
        except TimeoutError as error:
            # Not cut off: all that we hold would be free, and would be given away.
            raise AuthorityError(f"{self.name} does not answer in time") from error

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _stay_connected(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                gone(error.strerror or str(error))
                await asyncio.sleep(PAUSE)
                continue
            try:
                writer.write(frames.encode(frames.Hello(self._holder)))
                self._writer = writer
                back()
                await self._listen(reader, news)
            except AuthorityError as error:
                gone(str(error))
                await asyncio.sleep(PAUSE)
            finally:
                self._cut(writer)

    async def _listen(self, reader: asyncio.StreamReader, news: Callable[[str], None]) -> None:
        decoder: msgspec.msgpack.Decoder[frames.Heard] = msgspec.msgpack.Decoder(frames.Heard)
        while True:
            frame = await frames.read(reader, decoder)
            if isinstance(frame, frames.News):
                news(frame.zone)
            elif self._waiting:
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(frame.answer)

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        if self._writer is writer:
            self._writer = None
            waiting, self._waiting = self._waiting, deque()
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(AuthorityError(f"{self.name} has gone"))
                    answer.exception()  # who asked may have gone as well
