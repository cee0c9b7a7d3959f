"""The relay's end of the control socket: one request per connection, answered by a handler.

Promises to the rest of the worker: a slow, silent or vanished client costs one bounded buffer and one
task, and is let go after a named time; a handler that fails answers in words, is reported through
`trouble`, and never ends the server. A question whose client has gone is dropped; a change to the queue
is carried out to its end all the same, because half of a bulk verb is worse than either.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import pwd
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from zonerelay.control.messages import answers as messages
from zonerelay.control.messages.answers import End, Failure, Frame, Progress
from zonerelay.control.messages.requests import MAX_REQUEST, QueueChange, Request, Undo
from zonerelay.control.socket.errors import ControlError, NotFoundError
from zonerelay.control.socket.socket_file import bind, identity

MAX_CLIENTS = 32
REQUEST_TIMEOUT = 10.0
STALL_TIMEOUT = 600.0
"""Long, because `zonerelay queue list | less` reads only as fast as a person."""
HEARTBEAT = 1.0
_BATCH = 32 * 1024
_BACKLOG = 16
_NO_LOGIN = 2**32 - 1
"""Linux's loginuid of a process that no log-in has started."""

Trouble = Callable[[str, BaseException], None]


class ClientGone(Exception):
    """The client left or stopped reading, so the rest of the answer has no reader."""


class Answer(abc.ABC):
    """Takes the frames of one answer. `done` and `total` are what progress frames report meanwhile. `caller`
    is the person who asks, for the log.
    """

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.done = 0
        self.total = 0

    @property
    @abc.abstractmethod
    def unheard(self) -> bool:
        """The client has gone."""

    @abc.abstractmethod
    async def send(self, frame: Frame) -> None:
        """Queue a frame; waits while the client is behind. Raises ClientGone."""

    @abc.abstractmethod
    async def flush(self) -> None:
        """Let the client have what was sent. Raises ClientGone."""


class SocketAnswer(Answer):
    """`caller` is `root`, or `root (alice)` after sudo."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        super().__init__(_caller(writer.get_extra_info("socket")))
        self._writer = writer
        self._buffer = bytearray()

    @property
    def unheard(self) -> bool:
        return self._writer.is_closing()

    async def send(self, frame: Frame) -> None:
        self._buffer += messages.encode(frame)
        if len(self._buffer) >= _BATCH:
            await self.flush()

    async def flush(self) -> None:
        if self.unheard:  # uvloop's transports do not take what is written after their end
            raise ClientGone
        self._writer.write(bytes(self._buffer))
        self._buffer.clear()
        try:
            async with asyncio.timeout(STALL_TIMEOUT):
                await self._writer.drain()
        except (ConnectionError, TimeoutError) as error:
            raise ClientGone from error
        # A client that reads fast would otherwise keep the loop to itself for a whole queue.
        await asyncio.sleep(0)

    def heartbeat(self) -> None:
        """Say that the relay is at work, unless the client has unread frames to look at anyway."""
        if not self.unheard and self._writer.transport.get_write_buffer_size() == 0:
            self._buffer += messages.encode(Progress(done=self.done, total=self.total))
            # With what was found so far: a person may be waiting for the first line.
            self._writer.write(bytes(self._buffer))
            self._buffer.clear()


def _caller(connection: socket.socket) -> str:
    """The kernel's word: the user of the process, and the one who logged in, where that is another."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    login = uid
    with contextlib.suppress(OSError, ValueError):
        login = int(Path(f"/proc/{pid}/loginuid").read_text())
    known = login not in (uid, _NO_LOGIN)
    return f"{_user(uid)} ({_user(login)})" if known else _user(uid)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class Handler(Protocol):
    """Answers requests. ControlError is for the client to read; anything else is trouble."""

    async def handle(self, request: Request, answer: Answer) -> End: ...


class ControlServer:
    def __init__(self, path: Path, handler: Handler, *, trouble: Trouble) -> None:
        self._path = path
        self._handler = handler
        self._trouble = trouble
        self._server: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises ControlError with what to do when that cannot be."""
        listener = bind(self._path)
        self._identity = identity(self._path)
        self._server = await asyncio.start_unix_server(
            self._serve, sock=listener, limit=MAX_REQUEST, backlog=_BACKLOG
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

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        answer = SocketAnswer(writer)
        try:
            await answer.send(await self._converse(reader, answer))
            await answer.flush()
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

    async def _converse(self, reader: asyncio.StreamReader, answer: SocketAnswer) -> Frame:
        """Read the request and run it; returns the frame that ends the answer."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT):
                line = await reader.readline()
            request = messages.decode_request(line)
        except (TimeoutError, ConnectionError) as error:
            raise ClientGone from error
        except ValueError:
            return Failure(text=f"a request is at most {MAX_REQUEST} bytes long")
        except messages.RequestError as error:
            return Failure(text=str(error))
        if len(self._clients) > MAX_CLIENTS:
            return Failure(text=f"{MAX_CLIENTS} other commands are talking to the relay: try again")
        return await self._run(request, answer)

    async def _run(self, request: Request, answer: SocketAnswer) -> Frame:
        try:
            return await self._attended(request, answer)
        except ControlError as error:
            return Failure(text=str(error), not_found=isinstance(error, NotFoundError))
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the worker and its mail go on
            self._trouble("control", error)
            return Failure(
                text=f"the relay met an unexpected {type(error).__name__}; its log has it as `trouble`"
            )

    async def _attended(self, request: Request, answer: SocketAnswer) -> End:
        """Run the handler, with a sign of life to the client while it has nothing to send."""
        work = asyncio.ensure_future(self._handler.handle(request, answer))
        try:
            while not (await asyncio.wait({work}, timeout=HEARTBEAT))[0]:
                answer.heartbeat()
                if answer.unheard and not isinstance(request, QueueChange | Undo):
                    raise ClientGone
        finally:
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()  # seen: asyncio would complain about one that was never looked at
        return work.result()
