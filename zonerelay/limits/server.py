"""The limits of one machine's workers, over a Unix socket: what the supervisor runs.

A worker's lease ends with its socket.

Failure: a worker that says what makes no sense, or does not read, is cut off, as if it had died.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import msgspec

from zonerelay.limits import frames
from zonerelay.limits.authority.table import LimitTable
from zonerelay.limits.values import AuthorityError

MOST_UNREAD = 32 * 1024 * 1024
_SOCKET_MODE = 0o600


class LimitServer:
    """`start`, then `close` once."""

    def __init__(self, path: Path, table: LimitTable) -> None:
        self._path = path
        self._table = table
        self._server: asyncio.Server | None = None
        self._workers: dict[str, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises OSError: another server answers there, or there can be no socket."""
        remove_stale(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(str(self._path))
            self._path.chmod(_SOCKET_MODE)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener)
        except OSError:
            listener.close()
            raise

    async def close(self) -> None:
        """Workers go on with what they hold."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    @property
    def holders(self) -> tuple[str, ...]:
        return tuple(self._workers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            with contextlib.suppress(AuthorityError, asyncio.CancelledError):
                await self._converse(reader, writer)
        finally:
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder: msgspec.msgpack.Decoder[frames.Said] = msgspec.msgpack.Decoder(frames.Said)
        hello = await frames.read(reader, decoder)
        if not isinstance(hello, frames.Hello):
            raise AuthorityError("the first frame must say who asks")
        holder = hello.holder
        self._workers[holder] = writer
        self._table.enter(holder, lambda zone: self._write(writer, frames.News(zone)))
        try:
            while True:
                ask = await frames.read(reader, decoder)
                if not isinstance(ask, frames.Ask):
                    raise AuthorityError("a second greeting")
                self._write(writer, frames.Told(self._table.exchange(holder, ask.zone, ask.request)))
        finally:
            # Not when it has come back over another socket meanwhile.
            if self._workers.get(holder) is writer:
                del self._workers[holder]
                self._table.leave(holder)

    def _write(self, writer: asyncio.StreamWriter, frame: frames.Heard) -> None:
        if writer.transport.get_write_buffer_size() > MOST_UNREAD:
            writer.transport.abort()
        elif not writer.is_closing():
            writer.write(frames.encode(frame))


def remove_stale(path: Path) -> None:
    """What a crash has left. Raises OSError when somebody answers there."""
    if not path.is_socket():
        return  # bind() says what is wrong, if anything is
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise FileExistsError(f"another server of limits answers at {path}")
