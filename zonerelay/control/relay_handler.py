"""Forwards requests from one process of the relay to the relay's handler, over the control socket.

Each connection has one HTTP/1.0 request, so the answer consists of lines of JSON until the connection ends.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from zonerelay.control.client import LINES, TIMEOUT, failure, written
from zonerelay.control.runner import ResponseStream
from zonerelay.operations.answers import MAX_FRAME, EndFrame, ErrorFrame, decode_frame
from zonerelay.operations.errors import UnavailableError, error_of
from zonerelay.operations.requests import Request


class RelayHandler:
    """Implements `Handler` by requests to the relay. `path` is the control socket."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        """Forward a request. Raise ControlError if it fails, ClientDisconnected if the client has gone."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(self._path), limit=MAX_FRAME)
        except OSError as error:
            raise UnavailableError(f"the relay does not respond at {self._path}: {error.strerror}") from error
        try:
            writer.write(_request(request))
            return await self._answer(reader, answer)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise UnavailableError(
                f"the relay at {self._path} closed the connection before the end of its response"
            ) from error
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, answer: ResponseStream) -> EndFrame:
        status = int((await _line(reader)).partition(b" ")[2][:3])
        while (await _line(reader)).strip():
            pass  # a header field
        if status != 200:
            raise failure(status, await reader.read(MAX_FRAME))
        while True:
            frame = decode_frame(await _line(reader))
            if isinstance(frame, ErrorFrame):
                raise error_of(frame.code, frame.detail, frame.pointer)
            if isinstance(frame, EndFrame):
                return frame
            await answer.send(frame)


def _request(request: Request) -> bytes:
    method, target, body = written(request)
    fields = [f"{method} {target} HTTP/1.0", "Host: localhost", f"Accept: {LINES}"]
    if body is not None:
        fields += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*fields, "", ""]).encode("ascii") + (body or b"")


async def _line(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(TIMEOUT):
        return await reader.readuntil()
