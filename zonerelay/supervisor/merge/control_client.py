"""The supervisor's client of the workers' control sockets: sends a request to one or all workers and reads
the answers.

A busy worker sends a sign of life every second, so a worker that is silent for `SILENCE` seconds counts as
not answering. Frames are read only as fast as the caller takes them, because a list is as long as a queue.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from zonerelay.operations import answers as messages
from zonerelay.operations.answers import EndFrame, ErrorFrame, Frame, RelayStatus
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError, NotFoundError, UnavailableError, error_of
from zonerelay.operations.requests import Request

SILENCE = 5.0
_PIECE = 64 * 1024

F = TypeVar("F")


class NoResponseError(Exception):
    """The worker did not respond, or its response was incomplete. The message names the reason, not the
    worker.
    """


async def frames(path: Path, call: OperationCall, *, silence: float = SILENCE) -> AsyncGenerator[Frame, None]:
    """Yield every frame of the answer, `EndFrame` last. Raise ControlError (from the worker) and
    NoResponseError.
    """
    try:
        async with asyncio.timeout(silence):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=_PIECE)
    except (OSError, TimeoutError) as error:
        raise NoResponseError(_words(error)) from error
    try:
        writer.write(messages.encode(call))
        lines = _LineReader(reader, silence)
        while True:
            frame = await _next(lines)
            if isinstance(frame, ErrorFrame):
                raise error_of(frame.code, frame.detail, frame.pointer)
            yield frame
            if isinstance(frame, EndFrame):
                return
    finally:
        writer.close()


class _LineReader:
    """Reads the lines of a stream. A line may have `MAX_FRAME` bytes, but only one chunk is read ahead."""

    def __init__(self, reader: asyncio.StreamReader, silence: float) -> None:
        self._reader = reader
        self._silence = silence
        self._whole: deque[bytes] = deque()
        self._begun: list[bytes] = []

    async def next(self) -> bytes:
        """Return the next line. Raise OSError, TimeoutError and NoResponseError."""
        while not self._whole:
            async with asyncio.timeout(self._silence):
                piece = await self._reader.read(_PIECE)
            if not piece:
                raise NoResponseError("it closed the connection before the end of its response")
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
            raise NoResponseError("its response is too long")


async def _next(lines: _LineReader) -> Frame:
    try:
        return messages.decode_frame(await lines.next())
    except (OSError, TimeoutError, ValueError, ControlError) as error:
        raise NoResponseError(_words(error)) from error


async def ask(path: Path, call: OperationCall, answer: type[F], *, silence: float = SILENCE) -> F:
    """Return the only frame of the answer to a simple call. Raise ControlError and NoResponseError."""
    found: F | None = None
    async with aclosing(frames(path, call, silence=silence)) as answered:
        async for frame in answered:
            if isinstance(frame, answer):
                found = frame
    if found is None:
        raise NoResponseError("its response is invalid")
    return found


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not respond"
    return f"it is unreachable: {error.strerror or error}" if isinstance(error, OSError) else str(error)


class Relay(Protocol):
    """The part of `RelayState` that the control client needs."""

    @property
    def shared(self) -> bool:
        """Whether all workers have one queue."""

    def sockets(self) -> Mapping[int, Path]: ...

    def unreachable(self) -> Mapping[int, str]:
        """Return the workers that cannot be reached now, each with the reason."""

    def status(self) -> RelayStatus: ...


class WorkerAnswers:
    """Calls workers and collects their responses. All workers get the same id for what they begin, and the
    same time. `missing` names each worker that did not answer, with the reason.
    """

    def __init__(self, relay: Relay, call: OperationCall) -> None:
        self.call = msgspec.structs.replace(
            call, id=call.id or secrets.token_hex(4), at=call.at or time.time()
        )
        self._sockets = dict(relay.sockets())
        self._unreachable = dict(relay.unreachable())
        self._missed = {} if relay.shared and self._sockets else dict(self._unreachable)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(f"worker {worker}: {why}" for worker, why in sorted(self._missed.items()))

    def missed(self, worker: int) -> bool:
        return worker in self._missed

    def workers(self) -> Sequence[int]:
        return sorted(self._sockets)

    async def of(self, worker: int, request: Request | None = None) -> AsyncGenerator[Frame, None]:
        """Yield the frames of a worker until it stops answering. Raise the ControlError that the worker
        answers with.
        """
        call = self.call if request is None else msgspec.structs.replace(self.call, request=request)
        try:
            async with aclosing(frames(self._sockets[worker], call)) as answered:
                async for frame in answered:
                    if isinstance(frame, EndFrame) and frame.missing:
                        self._missed[worker] = "; ".join(frame.missing)
                    yield frame
        except NoResponseError as error:
            self._missed[worker] = str(error)

    async def by_worker(
        self, answer: type[F], workers: Iterable[int], *, in_turn: bool = False, partial: bool = False
    ) -> dict[int, list[F]]:
        """Call the workers at the same time, or one after the other, and return their frames of one kind.

        A NotFoundError, with `partial` every ControlError, is raised only if no worker has any frame.
        """
        ignored = ControlError if partial else NotFoundError
        refused: dict[int, ControlError] = {}
        found: dict[int, list[F]] = {}

        async def of(worker: int) -> None:
            try:
                async with aclosing(self.of(worker)) as answered:
                    found[worker] = [frame async for frame in answered if isinstance(frame, answer)]
            except ignored as error:
                refused[worker] = error

        if in_turn:
            for worker in workers:
                await of(worker)
        else:
            await asyncio.gather(*map(of, workers))
        # A worker that did not run at that time has not heard of what is asked for.
        errors = {worker: e for worker, e in refused.items() if not isinstance(e, NotFoundError)}
        if refused and not any(found.values()) and not self._missed:
            raise next(iter((errors or refused).values()))
        self._missed |= {worker: str(error) for worker, error in errors.items()}
        return {worker: found[worker] for worker in sorted(found)}

    def some(self, found: Sequence[F]) -> Sequence[F]:
        """Return the answers. Raise UnavailableError if no worker has answered."""
        if not found:
            raise UnavailableError(f"no worker could answer: {'; '.join(self.missing)}")
        return found
