"""Asking a worker over its control socket: one request, frames as they come. asyncio's side of the client.

A worker at work sends a sign of life every second, so one that is silent for `SILENCE` is not waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

from zonerelay.control import messages
from zonerelay.control.errors import ControlError, NotFoundError
from zonerelay.control.messages import End, Failure, Frame, Request

SILENCE = 5.0

F = TypeVar("F")


class UnansweredError(Exception):
    """The worker did not answer, or not to the end. The text names the reason, not the worker."""


async def frames(path: Path, request: Request, *, silence: float = SILENCE) -> AsyncGenerator[Frame, None]:
    """Every frame of the answer, `End` last. Raises ControlError (the worker's) and UnansweredError."""
    try:
        async with asyncio.timeout(silence):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=messages.MAX_FRAME)
    except (OSError, TimeoutError) as error:
        raise UnansweredError(_words(error)) from error
    try:
        writer.write(messages.encode(request))
        while True:
            frame = await _next(reader, silence)
            if isinstance(frame, Failure):
                raise (NotFoundError if frame.not_found else ControlError)(frame.text)
            yield frame
            if isinstance(frame, End):
                return
    finally:
        writer.close()


async def _next(reader: asyncio.StreamReader, silence: float) -> Frame:
    try:
        async with asyncio.timeout(silence):
            line = await reader.readline()
        if not line.endswith(b"\n"):
            raise UnansweredError("it ended before its answer was complete")
        return messages.decode_frame(line)
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
