"""Runs the relay's handler for everybody who asks: over HTTP, over the socket of a worker, from within the
process.

Promises: a client that is slow holds a bounded number of frames; a handler that fails is reported through
`trouble` and answered with UnexpectedError. When its client leaves, an operation that `completes` runs to its
end, because half of a bulk change is worse than either, and every other one is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec

from zonerelay.operations.answers import End, Frame, Progress
from zonerelay.operations.catalogue import Call, operation_of
from zonerelay.operations.errors import BusyError, ControlError, InvalidError, UnexpectedError
from zonerelay.operations.requests import QueueChange, QueueCount, Request

MAX_RUNNING = 96
WINDOW = 64
"""Frames that wait for the client."""

Trouble = Callable[[str, BaseException], None]

F = TypeVar("F")


class ClientGone(Exception):
    """The client has left, so the rest of the answer has no reader."""


class Answer:
    """The frames of one answer on their way to the client; an error is the last of them. `done` and `total`
    are what progress frames report meanwhile.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.done = 0
        self.total = 0
        self.queue = asyncio.Queue[Frame | Exception](WINDOW)
        self.unheard = False

    @property
    def caller(self) -> str:
        return self.call.caller

    async def send(self, frame: Frame) -> None:
        """Wait while the client is behind. Raises ClientGone."""
        if self.unheard:
            raise ClientGone
        await self.queue.put(frame)

    def leave(self) -> None:
        """The client takes no more; a handler that waits for room goes on."""
        self.unheard = True
        while not self.queue.empty():
            self.queue.get_nowait()


class Handler(Protocol):
    """Answers requests. ControlError is for the client to read; anything else is trouble."""

    async def handle(self, request: Request, answer: Answer) -> End: ...


class Runner:
    """A runner. `close` it before the handler. At most `most` requests are answered at once."""

    def __init__(self, handler: Handler, trouble: Trouble, *, most: int = MAX_RUNNING) -> None:
        self._handler = handler
        self._trouble = trouble
        self._most = most
        self._running: set[asyncio.Task[None]] = set()

    async def batches(self, call: Call, *, beat: float | None = None) -> AsyncGenerator[list[Frame], None]:
        """Yield the frames of the answer as they come, `End` last; close it with `aclosing`. With `beat` a
        Progress frame comes after so many seconds without another. Raises ControlError.
        """
        if len(self._running) >= self._most:
            raise BusyError(f"{self._most} other requests are being answered: try again")
        call = _previewed(call)
        answer = Answer(call)
        work = asyncio.create_task(self._run(call.request, answer))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            while True:
                try:
                    async with asyncio.timeout(beat):
                        found = [await answer.queue.get()]
                except TimeoutError:
                    found = [Progress(done=answer.done, total=answer.total)]
                while not answer.queue.empty():
                    found.append(answer.queue.get_nowait())
                frames = [each for each in found if not isinstance(each, Exception)]
                if frames:
                    yield frames
                if isinstance(found[-1], Exception):
                    raise found[-1]
                if isinstance(found[-1], End):
                    return
        finally:
            answer.leave()
            if not operation_of(call.request).completes:
                work.cancel()
                await asyncio.wait({work})

    async def frames(self, call: Call, *, beat: float | None = None) -> AsyncGenerator[Frame, None]:
        """Yield the frames of `batches` one by one."""
        async with aclosing(self.batches(call, beat=beat)) as batches:
            async for batch in batches:
                for frame in batch:
                    yield frame

    async def all(self, request: Request, answer: type[F], caller: str) -> tuple[tuple[F, ...], End]:
        """Return the frames of one kind, few enough to be in memory, and the end. Raises ControlError."""
        found: list[F] = []
        end = End()
        async with aclosing(self.frames(Call(request=request, caller=caller))) as frames:
            async for frame in frames:
                if isinstance(frame, answer):
                    found.append(frame)
                elif isinstance(frame, End):
                    end = frame
        return tuple(found), end

    async def one(self, request: Request, answer: type[F], caller: str) -> F:
        """Return the one frame that answers a simple request. Raises ControlError."""
        found, _ = await self.all(request, answer, caller)
        if not found:
            raise UnexpectedError(f"the answer holds no {answer.__name__}")
        return found[-1]

    async def close(self) -> None:
        for work in self._running:
            work.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, request: Request, answer: Answer) -> None:
        last: Frame | Exception
        try:
            last = await self._handler.handle(request, answer)
        except ClientGone:
            return
        except ControlError as error:
            last = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the relay and its mail go on
            self._trouble("control", error)
            last = UnexpectedError(
                f"the relay met an unexpected {type(error).__name__}; its log has it as `trouble`"
            )
        if not answer.unheard:
            await answer.queue.put(last)


def _previewed(call: Call) -> Call:
    """A change counts its matches instead, where that is all that is asked for."""
    request = call.request
    if not isinstance(request, QueueChange):
        return call
    if request.filter.is_everything and not request.everything:
        raise InvalidError("no filter, and not everything either: which deliveries?", pointer="/filter")
    if not request.dry_run:
        return call
    return msgspec.structs.replace(call, request=QueueCount(filter=request.filter, sample=request.sample))
