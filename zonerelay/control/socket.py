"""Sends requests from one process of the relay to another over a Unix socket, and manages the files of these
sockets and of the control socket.

A supervisor calls its workers, and a worker with an HTTP listener calls its supervisor. Each connection has
one call, a line of JSON, which is answered with one line per frame. A slow, silent or vanished client costs
one bounded buffer and one task, and is disconnected after a fixed time. A busy server sends a progress frame
every second, so a server that is silent for `silence` seconds counts as unresponsive. Frames are read only as
fast as the caller takes them, because a list is as long as a queue.

The module also defines where the control socket is, and how its file is created and removed. Every refusal is
a ControlError whose message says what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.control.client import TIMEOUT
from zonerelay.control.runner import ClientDisconnected, Handler, OnError, ResponseStream, Runner
from zonerelay.operations import errors
from zonerelay.operations.answers import (
    EndFrame,
    ErrorFrame,
    Frame,
    LineSplitter,
    Progress,
    decode_frame,
    encode,
    problem_of,
)
from zonerelay.operations.catalogue import MAX_CALL, OperationCall, decode_call
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Request
from zonerelay.process.files import identity
from zonerelay.process.sockets import answers, bound_path
from zonerelay.process.tasks import Tasks

if TYPE_CHECKING:
    from zonerelay.config.settings import Settings  # commands that query a relay do not need it
SOCKET_MODE = 0o600
"""Only root and the relay's own user operate the queue."""


def bind(path: Path) -> socket.socket:
    """Create and bind a Unix socket that does not listen yet. Raise ControlError if it cannot be created."""
    try:
        return bound_path(path, SOCKET_MODE)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            refuse_live(path)
        raise ControlError(_explained(path, error)) from error


def refuse_live(path: Path) -> None:
    """Raise ControlError if a relay responds at the socket."""
    if path.is_socket() and answers(path):
        raise errors.AnotherRelayError(
            f"another relay is listening at {path}; stop it, or set another [admin] socket for this one"
        )


def _explained(path: Path, error: OSError) -> str:
    match error:
        case FileExistsError():
            return f"{path} exists and is not a socket, so the control socket cannot be created"
        case FileNotFoundError():
            return (
                f"the directory {path.parent} of the control socket does not exist; create it, or set "
                "[admin] socket"
            )
        case PermissionError():
            return (
                f"no permission to create the control socket {path} as user {os.getuid()}; give the "
                "directory to the relay's user, or set [admin] socket"
            )
    return f"cannot create the control socket {path}: {error.strerror or error}"


MAX_SOCKET_PATH = 107
"""Linux unix(7): `sun_path` holds 108 bytes, the last of which is a NUL."""

SOCKET_NAME = "control.sock"
LIMITS_NAME = "limits.sock"
RELAY_NAME = "relay.sock"


def control_socket_path(settings: Settings, worker: int | None = None) -> Path:
    """Return the path of the control socket: `[admin] socket`, or `control.sock` next to the spool; a
    worker's is `control-01.sock`. Raise ControlError if the path is too long.
    """
    path = (settings.admin.socket or settings.spool.path.parent / SOCKET_NAME).absolute()
    if worker is not None:
        path = path.with_name(f"{path.stem}-{worker:02d}{path.suffix}")
    length = len(bytes(path))
    if length > MAX_SOCKET_PATH:
        raise ControlError(
            f"the path of the control socket has {length} bytes, but the system allows "
            f"only {MAX_SOCKET_PATH}; set [admin] socket to a shorter path than {path}"
        )
    return path


def submission_socket_path(settings: Settings, worker: int) -> Path:
    """Return the path of the socket on which a worker accepts mail from the supervisor's HTTP server, next to
    its control socket. Raise ControlError if the path is too long.
    """
    return control_socket_path(settings, worker).with_name(f"http-{worker:02d}.sock")


def limits_socket_path(settings: Settings) -> Path:
    """Return the path of the socket on which workers share their limits, next to the control socket."""
    return control_socket_path(settings, 0).with_name(LIMITS_NAME)


def relay_socket_path(settings: Settings) -> Path:
    """Return the path of the socket on which a supervisor handles requests of its workers for the whole
    relay.
    """
    return control_socket_path(settings, 0).with_name(RELAY_NAME)


MAX_CLIENTS = 32
REQUEST_TIMEOUT = 10.0
STALL_TIMEOUT = 600.0
"""Long, because `zonerelay queue list | less` reads only as fast as a person."""
HEARTBEAT = 1.0
_BACKLOG = 16


class CallSocket:
    """The Unix socket on which a process handles requests of the relay's other processes."""

    def __init__(self, path: Path, handler: Handler, *, on_error: OnError) -> None:
        self._path = path
        self._runner = Runner(handler, on_error, most=MAX_CLIENTS)
        self._server: asyncio.Server | None = None
        self._identity: tuple[int, int] | None = None
        self._clients = Tasks()

    async def start(self) -> None:
        """Create the socket and listen. Raise ControlError with what to do if that is not possible."""
        listener = bind(self._path)
        self._identity = identity(self._path)
        self._server = await asyncio.start_unix_server(
            lambda reader, writer: self._clients.start(self._serve(reader, writer)),
            sock=listener,
            limit=MAX_CALL,
            backlog=_BACKLOG,
        )

    async def close(self) -> None:
        """Stop listening, disconnect the clients, and remove the socket file unless it was replaced."""
        if self._server is None:
            return
        if identity(self._path) == self._identity:
            self._path.unlink(missing_ok=True)
        self._server.close()
        self._server = None
        await self._clients.cancel()
        await self._runner.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            call = await _received(reader)
            async with aclosing(self._runner.batches(call, beat=HEARTBEAT)) as batches:
                async for frames in batches:
                    is_beat = len(frames) == 1 and isinstance(frames[0], Progress)
                    if not (is_beat and writer.transport.get_write_buffer_size()):
                        await _send(writer, b"".join(map(encode, frames)))
        except ControlError as error:
            with contextlib.suppress(ClientDisconnected):
                await _send(writer, encode(problem_of(error)))
        except ClientDisconnected:
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _received(reader: asyncio.StreamReader) -> OperationCall:
    """Read a request from the client. Raise InvalidError if it is not valid, and ClientDisconnected if the
    client has disconnected.
    """
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT):
            return decode_call(await reader.readline())
    except (TimeoutError, ConnectionError) as error:
        raise ClientDisconnected from error
    except ValueError as error:
        raise errors.InvalidError(f"a request may have at most {MAX_CALL} bytes") from error


async def _send(writer: asyncio.StreamWriter, octets: bytes) -> None:
    """Send bytes to the client. Raise ClientDisconnected if it has disconnected."""
    if writer.is_closing():  # transports of uvloop do not accept data after they are closed
        raise ClientDisconnected
    writer.write(octets)
    try:
        async with asyncio.timeout(STALL_TIMEOUT):
            await writer.drain()
    except (ConnectionError, TimeoutError) as error:
        raise ClientDisconnected from error


# The other end of the connection

SILENCE = 5.0
_PIECE = 64 * 1024


class NoResponseError(Exception):
    """The process did not respond, or its response was incomplete. The message names the reason, not the
    process.
    """


async def frames(path: Path, call: OperationCall, *, silence: float = SILENCE) -> AsyncGenerator[Frame, None]:
    """Send a request to another process, and yield the frames of the response, `EndFrame` last. Raise
    ControlError (from the other process) and NoResponseError.
    """
    try:
        async with asyncio.timeout(silence):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_PIECE)
    except (OSError, TimeoutError) as error:
        raise NoResponseError(_words(error)) from error
    try:
        writer.write(encode(call))
        lines = LineSplitter()
        while True:
            for frame in await _next_frames(reader, lines, silence):
                if isinstance(frame, ErrorFrame):
                    raise errors.error_of(frame.code, frame.detail, frame.pointer)
                yield frame
                if isinstance(frame, EndFrame):
                    return
    finally:
        writer.close()


async def _next_frames(reader: asyncio.StreamReader, lines: LineSplitter, silence: float) -> list[Frame]:
    """Wait for more bytes, and return the frames that are complete. Raise NoResponseError if none come."""
    try:
        async with asyncio.timeout(silence):
            piece = await reader.read(_PIECE)
        if piece:
            return [decode_frame(line) for line in lines.take(piece)]
    except (OSError, TimeoutError) as error:
        raise NoResponseError(_words(error)) from error
    except ControlError as error:
        raise NoResponseError(str(error)) from error
    raise NoResponseError("it closed the connection before the end of its response")


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not respond"
    return f"it is unreachable: {error.strerror or error}"


class RelayHandler:
    """Handles requests in a worker by forwarding them to the supervisor, whose socket is at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        """Forward the request to the supervisor. Raise ControlError if it fails, ClientDisconnected if the
        client has gone.
        """
        try:
            async with aclosing(frames(self._path, answer.call, silence=TIMEOUT)) as answered:
                async for frame in answered:
                    if isinstance(frame, EndFrame):
                        return frame
                    await answer.send(frame)
        except NoResponseError as error:
            raise errors.UnavailableError(f"the relay at {self._path} does not answer: {error}") from error
        raise AssertionError("the last frame is an EndFrame")
