"""Sends requests from one process of the relay to another over a Unix socket, and reads the responses.

A worker's socket takes calls as lines of JSON. The control socket takes HTTP: each connection has one
HTTP/1.0 request, so that the response consists of lines of JSON until the connection ends. A busy process
sends a sign of life every second, so one that is silent for `silence` seconds counts as not answering. Frames
are read only as fast as the caller takes them, because a list is as long as a queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from zonerelay.control.client import LINES, TIMEOUT, failure, written
from zonerelay.control.runner import ResponseStream
from zonerelay.operations.answers import EndFrame, ErrorFrame, Frame, LineSplitter, decode_frame, encode
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError, UnavailableError, error_of
from zonerelay.operations.requests import Request

SILENCE = 5.0
_PIECE = 64 * 1024


class NoResponseError(Exception):
    """The process did not respond, or its response was incomplete. The message names the reason, not the
    process.
    """


async def frames(
    path: Path, call: OperationCall | Request, *, silence: float = SILENCE
) -> AsyncGenerator[Frame, None]:
    """Yield every frame of the response, `EndFrame` last. A call is sent as a line, and a request over HTTP.
    Raise ControlError (from the other process) and NoResponseError.
    """
    try:
        async with asyncio.timeout(silence):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_PIECE)
    except (OSError, TimeoutError) as error:
        raise NoResponseError(_words(error)) from error
    try:
        lines = _LineReader(reader, silence)
        if isinstance(call, OperationCall):
            writer.write(encode(call))
        else:
            writer.write(_request(call))
            await _read_head(lines)
        while True:
            try:
                frame = decode_frame(await lines.next())
            except ControlError as error:
                raise NoResponseError(str(error)) from error
            if isinstance(frame, ErrorFrame):
                raise error_of(frame.code, frame.detail, frame.pointer)
            yield frame
            if isinstance(frame, EndFrame):
                return
    finally:
        writer.close()


class _LineReader:
    """Reads the lines of a stream. Only one chunk is read ahead."""

    def __init__(self, reader: asyncio.StreamReader, silence: float) -> None:
        self._reader = reader
        self._silence = silence
        self._whole: deque[bytes] = deque()
        self._splitter = LineSplitter()

    async def next(self) -> bytes:
        """Return the next line. Raise NoResponseError if there is none, ControlError if it is too long."""
        while not self._whole:
            try:
                async with asyncio.timeout(self._silence):
                    piece = await self._reader.read(_PIECE)
            except (OSError, TimeoutError) as error:
                raise NoResponseError(_words(error)) from error
            if not piece:
                raise NoResponseError("it closed the connection before the end of its response")
            self._whole.extend(self._splitter.take(piece))
        return self._whole.popleft()


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not respond"
    return f"it is unreachable: {error.strerror or error}"


def _request(request: Request) -> bytes:
    method, target, body = written(request)
    fields = [f"{method} {target} HTTP/1.0", "Host: localhost", f"Accept: {LINES}"]
    if body is not None:
        fields += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*fields, "", ""]).encode("ascii") + (body or b"")


async def _read_head(lines: _LineReader) -> None:
    """Read the head of an HTTP response. Raise ControlError if the request has failed."""
    status = (await lines.next()).partition(b" ")[2][:3].decode("latin-1")
    while (await lines.next()).strip():
        pass  # a header field
    if status != "200":
        raise failure(status, await lines.next())


class RelayHandler:
    """Implements `Handler` by requests to the relay. `path` is the control socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        """Forward a request. Raise ControlError if it fails, ClientDisconnected if the client has gone."""
        try:
            async with aclosing(frames(self._path, request, silence=TIMEOUT)) as answered:
                async for frame in answered:
                    if isinstance(frame, EndFrame):
                        return frame
                    await answer.send(frame)
        except NoResponseError as error:
            raise UnavailableError(f"the relay at {self._path} does not answer: {error}") from error
        raise AssertionError("the last frame is an EndFrame")
