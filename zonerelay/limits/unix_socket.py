"""Leases limits from the supervisor to its workers over a Unix socket: frames, server and client.

The supervisor runs `LimitServer` with the table in memory. Each worker connects to it through
`SocketAuthority`. A frame is a MessagePack value after its length (4 bytes, big-endian). Answers are sent in
the order of the requests. The lease of a worker ends with its connection.

Failure: the server disconnects a worker that sends a malformed frame or does not read, and the table frees
its slots as if the worker had died. While the supervisor is unreachable, every exchange of a worker fails at
once, and the worker continues with the slots it holds. After each reconnection `back` is called, and the
worker declares what it holds.
"""

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from zonerelay.limits.authority import AuthorityError, LimitAnswer, LimitRequest, LimitTable
from zonerelay.process.sockets import bound_path
from zonerelay.process.tasks import Tasks, cancel_all

MAX_FRAME = 16 * 1024 * 1024
"""Bytes. The largest frames declare everything: a hundred bytes for each destination that has slots."""

_LENGTH = struct.Struct(">I")


RequestFrame = tuple[str, str, LimitRequest]
"""The worker, whose name is the same in all requests of a connection, the zone, and the request."""

ServerFrame = LimitAnswer | str
"""An answer, or the name of a zone about which the worker should send a request."""

_Any = TypeVar("_Any")


def _encode(frame: RequestFrame | ServerFrame) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(data)) + data


async def _read_frame(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[_Any]) -> _Any:
    """Read one frame. Raise AuthorityError if the connection has ended or the frame is invalid."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise AuthorityError(f"the frame is too long: {length} bytes")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise AuthorityError("the connection was closed") from error
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise AuthorityError(str(error) or type(error).__name__) from error


MAX_UNREAD = 32 * 1024 * 1024
"""Bytes. The server disconnects a worker that leaves more unread, and a worker sends no more to a server."""
_SOCKET_MODE = 0o600


class LimitServer:
    """Serves limits to workers over a Unix socket. Call `start` once, then `close` once."""

    def __init__(self, path: Path, table: LimitTable) -> None:
        self._path = path
        self._table = table
        self._server: asyncio.Server | None = None
        self._tasks = Tasks()

    async def start(self) -> None:
        """Start to accept connections from workers. Raise OSError if another server answers at the path, or
        the socket cannot be created.
        """
        listener = bound_path(self._path, _SOCKET_MODE)
        self._server = await asyncio.start_unix_server(
            lambda reader, writer: self._tasks.start(self._serve(reader, writer)), sock=listener
        )

    async def close(self) -> None:
        """Close all connections. The workers continue with the slots they hold."""
        if self._server is not None:
            self._server.close()
        await self._tasks.cancel()
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(AuthorityError, asyncio.CancelledError):
                await self._converse(reader, writer)
        finally:
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder(RequestFrame)
        news = partial(self._write, writer)
        owner, zone, request = await _read_frame(reader, decoder)
        self._table.register(owner, news)
        try:
            while True:
                self._write(writer, self._table.exchange(owner, zone, request))
                _, zone, request = await _read_frame(reader, decoder)
        finally:
            self._table.unregister(owner, news)

    def _write(self, writer: asyncio.StreamWriter, frame: ServerFrame) -> None:
        if writer.transport.get_write_buffer_size() > MAX_UNREAD:
            writer.transport.abort()
        elif not writer.is_closing():
            writer.write(_encode(frame))


RETRY_AFTER = 0.25
"""Seconds between two attempts to connect."""

TIMEOUT = 5.0
"""Seconds for one answer, which comes from memory."""


class SocketAuthority:
    """A limit authority that requests limits from the supervisor over a Unix socket. `owner` is a name of
    this worker that no other process has had.
    """

    lease = None

    def __init__(self, path: Path, owner: str) -> None:
        self.name = f"the supervisor at {path}"
        self._path = path
        self._owner = owner
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: deque[asyncio.Future[LimitAnswer]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        self._task = asyncio.get_running_loop().create_task(self._stay_connected(news, back, gone))

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        writer = self._writer
        if writer is None or writer.transport.get_write_buffer_size() > MAX_UNREAD:
            raise AuthorityError(f"{self.name} does not respond")
        answer: asyncio.Future[LimitAnswer] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        writer.write(_encode((self._owner, zone, request)))
        try:
            return await asyncio.wait_for(answer, TIMEOUT)
        except TimeoutError as error:
            # The connection is kept: closing it would free all slots that we hold for others.
            raise AuthorityError(f"{self.name} did not respond in time") from error

    async def close(self) -> None:
        await cancel_all(self._task)

    async def _stay_connected(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                back()
                await self._listen(reader, news)
            except AuthorityError as error:
                reason = str(error)
            except OSError as error:
                reason = error.strerror or str(error)
            finally:
                self._disconnect()
            gone(reason)
            await asyncio.sleep(RETRY_AFTER)

    async def _listen(self, reader: asyncio.StreamReader, news: Callable[[str], None]) -> None:
        decoder: msgspec.msgpack.Decoder[ServerFrame] = msgspec.msgpack.Decoder(ServerFrame)
        while True:
            frame = await _read_frame(reader, decoder)
            if isinstance(frame, str):
                news(frame)
            elif self._waiting:
                answer = self._waiting.popleft()
                if not answer.done():
                    answer.set_result(frame)

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        waiting, self._waiting = self._waiting, deque()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(AuthorityError(f"{self.name} closed the connection"))
                answer.exception()  # the caller may have ended, too
