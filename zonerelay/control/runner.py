"""Runs operators' requests, which arrive over HTTP, over a worker's socket or from the same process.

Promises: a slow client holds a bounded number of frames. An exception in a handler is reported through
`on_error` and answered with UnexpectedError. When the client disconnects, an operation that `completes` runs
to its end, because half of a bulk change is worse than all or nothing of it; other operations are cancelled.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec

from zonerelay.model.delivery import DeliveryState
from zonerelay.operations.answers import EndFrame, Frame, Progress
from zonerelay.operations.catalogue import OperationCall, operation_of
from zonerelay.operations.errors import BusyError, ControlError, InvalidError, UnexpectedError
from zonerelay.operations.requests import Drop, QueueChange, QueueCount, Request
from zonerelay.process.tasks import Tasks, cancel_all

MAX_RUNNING = 96
WINDOW = 64
"""Frames that wait for the client."""

OnError = Callable[[str, BaseException], None]

F = TypeVar("F")


class ClientDisconnected(Exception):
    """The client has disconnected, so the response is not needed."""


class ResponseStream:
    """Sends the frames of one response to the client; an error is the last frame. Progress frames report
    `done` and `total`.
    """

    def __init__(self, call: OperationCall) -> None:
        self.call = call
        self.done = 0
        self.total = 0
        self.queue = asyncio.Queue[Frame | Exception](WINDOW)
        self.unheard = False

    @property
    def caller(self) -> str:
        return self.call.caller

    async def send(self, frame: Frame) -> None:
        """Send a frame, after waiting if the client has not read earlier frames. Raise ClientDisconnected if
        it has disconnected.
        """
        if self.unheard:
            raise ClientDisconnected
        await self.queue.put(frame)

    def leave(self) -> None:
        """Mark the client as disconnected, and wake a handler that waits to send."""
        self.unheard = True
        while not self.queue.empty():
            self.queue.get_nowait()


class Handler(Protocol):
    """The interface of objects that handle operators' requests. ControlError is sent to the client; any other
    exception is reported as a bug.
    """

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame: ...


class Runner:
    """Runs operators' requests concurrently, at most `most` at a time. Call `close` before closing the
    handler.
    """

    def __init__(self, handler: Handler, on_error: OnError, *, most: int = MAX_RUNNING) -> None:
        self._handler = handler
        self._on_error = on_error
        self._most = most
        self._running = Tasks()

    async def batches(
        self, call: OperationCall, *, beat: float | None = None
    ) -> AsyncGenerator[list[Frame], None]:
        """Yield the frames of the response as they are produced, `EndFrame` last; close the generator with
        `aclosing`. With `beat`, a Progress frame is sent after so many seconds without another frame. Raise
        ControlError if the request fails.
        """
        if len(self._running) >= self._most:
            raise BusyError(f"the limit of {self._most} concurrent requests is reached; try again")
        call = _previewed(call)
        answer = ResponseStream(call)
        work = self._running.start(self._run(call.request, answer))
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
                if isinstance(found[-1], EndFrame):
                    return
        finally:
            answer.leave()
            if not operation_of(call.request).completes:
                await cancel_all(work)

    async def frames(self, call: OperationCall, *, beat: float | None = None) -> AsyncGenerator[Frame, None]:
        """Yield the frames of the response one by one, like `batches`."""
        async with aclosing(self.batches(call, beat=beat)) as batches:
            async for batch in batches:
                for frame in batch:
                    yield frame

    async def all(self, request: Request, answer: type[F], caller: str) -> tuple[tuple[F, ...], EndFrame]:
        """Handle a request in this process, and return its response frames of one type, which must fit in
        memory, and the final `EndFrame`. Raise ControlError if the request fails.
        """
        found: list[F] = []
        end = EndFrame()
        async with aclosing(self.frames(OperationCall(request=request, caller=caller))) as frames:
            async for frame in frames:
                if isinstance(frame, answer):
                    found.append(frame)
                elif isinstance(frame, EndFrame):
                    end = frame
        return tuple(found), end

    async def one(self, request: Request, answer: type[F], caller: str) -> F:
        """Handle a request in this process, and return its response, which is a single frame. Raise
        ControlError if the request fails.
        """
        found, _ = await self.all(request, answer, caller)
        if not found:
            raise UnexpectedError(f"the response contains no {answer.__name__}")
        return found[-1]

    async def close(self) -> None:
        await self._running.cancel()

    async def _run(self, request: Request, answer: ResponseStream) -> None:
        last: Frame | Exception
        try:
            last = await self._handler.handle(request, answer)
        except ClientDisconnected:
            return
        except ControlError as error:
            last = error
        except Exception as error:  # noqa: BLE001 - whatever it is, the relay and its mail go on
            self._on_error("control", error)
            last = UnexpectedError(
                f"the relay failed with an unexpected {type(error).__name__}; see `trouble` in its log"
            )
        if not answer.unheard:
            await answer.queue.put(last)


def _previewed(call: OperationCall) -> OperationCall:
    """Return the call, or for the preview of a change, a call that only counts matching deliveries."""
    request = call.request
    if not isinstance(request, QueueChange):
        return call
    if request.is_everything and not request.everything:
        text = "no deliveries selected: specify message ids, a filter, or everything (--all)"
        raise InvalidError(text, pointer="/filter")
    is_purge = isinstance(request, Drop) and request.purge
    if request.filter.state is DeliveryState.DROPPED and not is_purge:
        raise InvalidError(
            "dropped mail cannot be changed: `zonerelay undo` restores it, `queue drop --purge` destroys it",
            pointer="/filter/state",
        )
    if not request.dry_run:
        return call
    count = QueueCount(
        filter=request.filter, message_ids=request.message_ids, sample=request.sample, in_bin=is_purge
    )
    return msgspec.structs.replace(call, request=count)
