"""The socket on which a worker answers its supervisor: one call per connection as a line of JSON, answered
with the lines of its frames.

Promises: a slow, silent or vanished client costs one bounded buffer and one task, and is let go after a named
time.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from pathlib import Path

from zonerelay.control.runner import ClientGone, Handler, Runner, Trouble
from zonerelay.control.socket.socket_file import bind, identity
from zonerelay.operations.answers import Progress, encode, problem_of
from zonerelay.operations.catalogue import MAX_CALL, Call, decode_call
from zonerelay.operations.errors import ControlError, InvalidError

MAX_CLIENTS = 32
REQUEST_TIMEOUT = 10.0
STALL_TIMEOUT = 600.0
"""Long, because `zonerelay queue list | less` reads only as fast as a person."""
HEARTBEAT = 1.0
_BACKLOG = 16


class WorkerSocket:
    def __init__(self, path: Path, handler: Handler, *, trouble: Trouble) -> None:
        self._path = path
        self._runner = Runner(handler, trouble, most=MAX_CLIENTS)
        self._server: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises ControlError with what to do when that cannot be."""
        listener = bind(self._path)
        self._identity = identity(self._path)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=MAX_CALL, backlog=_BACKLOG
        )

    async def close(self) -> None:
        """Stop listening, drop the clients, and remove the socket file if it is still ours."""
        if self._server is None:
            return
        if identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        self._server.close()
        self._server = None
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._runner.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            call = await _received(reader)
            async with aclosing(self._runner.batches(call, beat=HEARTBEAT)) as batches:
                async for frames in batches:
                    is_beat = len(frames) == 1 and isinstance(frames[0], Progress)
                    if not (is_beat and writer.transport.get_write_buffer_size()):
                        await _send(writer, b"".join(map(encode, frames)))
        except ControlError as error:
            with contextlib.suppress(ClientGone):
                await _send(writer, encode(problem_of(error)))
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if self._server is not None:
                raise
            # By `close`. Streams of Python 3.12.1 and before report a cancelled task as trouble.
        finally:
            self._clients.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _received(reader: asyncio.StreamReader) -> Call:
    """Raises InvalidError and ClientGone."""
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT):
            return decode_call(await reader.readline())
    except (TimeoutError, ConnectionError) as error:
        raise ClientGone from error
    except ValueError as error:
        raise InvalidError(f"a request is at most {MAX_CALL} bytes long") from error


async def _send(writer: asyncio.StreamWriter, octets: bytes) -> None:
    """Raises ClientGone."""
    if writer.is_closing():  # uvloop's transports do not take what is written after their end
        raise ClientGone
    writer.write(octets)
    try:
        async with asyncio.timeout(STALL_TIMEOUT):
            await writer.drain()
    except (ConnectionError, TimeoutError) as error:
        raise ClientGone from error
