"""Asking a worker over its control socket: one request, frames as they come. asyncio's side of the client.

A worker at work sends a sign of life every second, so one that is silent for `SILENCE` is not waited for.
An answer is read no further than it is asked for: a list is as long as a queue.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from zonerelay.control.messages import answers as messages
from zonerelay.control.messages.answers import End, Failure, Frame
from zonerelay.control.messages.requests import Request
from zonerelay.control.socket.errors import ControlError, NotFoundError

SILENCE = 5.0
_PIECE = 64 * 1024

F = TypeVar("F")


class UnansweredError(Exception):
    """The worker did not answer, or not to the end. The text names the reason, not the worker."""


async def frames(path: Path, request: Request, *, silence: float = SILENCE) -> AsyncGenerator[Frame, None]:
    """Every frame of the answer, `End` last. Raises ControlError (the worker's) and UnansweredError."""
    try:
        async with asyncio.timeout(silence):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_PIECE)
    except (OSError, TimeoutError) as error:
        raise UnansweredError(_words(error)) from error
    try:
        writer.write(messages.encode(request))
        lines = _Lines(reader, silence)
        while True:
            frame = await _next(lines)
            if isinstance(frame, Failure):
                raise (NotFoundError if frame.not_found else ControlError)(frame.text)
            yield frame
            if isinstance(frame, End):
                return
    finally:
        writer.close()


class _Lines:
    """Of a stream: one may be `MAX_FRAME` long, and yet no more than a piece is read ahead."""

    def __init__(self, reader: asyncio.StreamReader, silence: float) -> None:
        self._reader = reader
        self._silence = silence
        self._whole: deque[bytes] = deque()
        self._begun: list[bytes] = []

    async def next(self) -> bytes:
        """Raises OSError, TimeoutError and UnansweredError."""
        while not self._whole:
            async with asyncio.timeout(self._silence):
                piece = await self._reader.read(_PIECE)
            if not piece:
                raise UnansweredError("it ended before its answer was complete")
            self._take(piece)
        return self._whole.popleft()

    def _take(self, piece: bytes) -> None:
        first, *others = piece.split(b"\n")
        self._begun.append(first)
        if others:
            self._whole.append(b"".join(self._begun))
            self._begun = [others.pop()]
            self._whole.extend(others)
        elif sum(map(len, self._begun)) > messages.MAX_FRAME:
            raise UnansweredError("its answer is longer than any is")


async def _next(lines: _Lines) -> Frame:
    try:
        return messages.decode_frame(await lines.next())
    except (OSError, TimeoutError, ValueError, messages.RequestError) as error:
        raise UnansweredError(_words(error)) from error


async def ask(path: Path, request: Request, answer: type[F], *, silence: float = SILENCE) -> F:
    """The one frame that answers a simple question."""
    found: F | None = None
    async with aclosing(frames(path, request, silence=silence)) as answered:
        async for frame in answered:
            if isinstance(frame, answer):
                found = frame
    if found is None:
        raise UnansweredError("its answer is not understood")
    return found


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return f"it cannot be asked: {error.strerror or error}" if isinstance(error, OSError) else str(error)
