"""Asks the relay's handler from within its process, as HTTP does: requests in, frames out, no socket.

Promises as the control socket does: an asker that is slow holds a bounded number of frames; a handler that
fails is reported through `trouble` and answered in words (ControlError). A question is dropped when its
asker leaves; a change to the queue is carried out to its end all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from zonerelay.control.messages.answers import End, Frame, Progress
from zonerelay.control.messages.requests import QueueChange, Request, Resume, Suspend, Undo
from zonerelay.control.socket.errors import ControlError
from zonerelay.control.socket.server import Answer, ClientGone, Handler, Trouble

MAX_ASKED = 96
WINDOW = 64
"""Frames that wait for the asker."""

_TO_THE_END = QueueChange | Undo | Suspend | Resume
"""Half of a bulk verb is worse than either."""

F = TypeVar("F")


class UnexpectedError(ControlError):
    """The handler failed in a way that it has no words for; `trouble` has heard of it."""


class BusyAskingError(ControlError):
    """As many requests are being answered as may be."""


class _Frames(Answer):
    """The frames of one answer on their way to the asker; an error is the last of them."""

    def __init__(self, caller: str) -> None:
        super().__init__(caller)
        self.queue = asyncio.Queue[Frame | Exception](WINDOW)
        self._left = False

    @property
    def unheard(self) -> bool:
        return self._left

    async def send(self, frame: Frame) -> None:
        if self._left:
            raise ClientGone
        await self.queue.put(frame)

    async def flush(self) -> None:
        if self._left:
            raise ClientGone

    def leave(self) -> None:
        """The asker takes no more; a handler that waits for room goes on."""
        self._left = True
        while not self.queue.empty():
            self.queue.get_nowait()


class Asking:
    """One per process that serves HTTP. `close` before the handler's parts are closed."""

    def __init__(self, handler: Handler, trouble: Trouble) -> None:
        self._handler = handler
        self._trouble = trouble
        self._running: set[asyncio.Task[None]] = set()

    async def frames(
        self, request: Request, caller: str, *, beat: float | None = None
    ) -> AsyncGenerator[Frame, None]:
        """Yields the frames of the answer, `End` last; close it with `aclosing`. With `beat` a Progress frame
        comes after so many seconds without another. Raises ControlError.
        """
        if len(self._running) >= MAX_ASKED:
            raise BusyAskingError(f"{MAX_ASKED} other requests are being answered: try again")
        answer = _Frames(caller)
        work = asyncio.create_task(self._run(request, answer))
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        try:
            while True:
                try:
                    async with asyncio.timeout(beat):
                        item = await answer.queue.get()
                except TimeoutError:
                    item = Progress(done=answer.done, total=answer.total)
                if isinstance(item, Exception):
                    raise item
                yield item
                if isinstance(item, End):
                    return
        finally:
            answer.leave()
            if not isinstance(request, _TO_THE_END):
                work.cancel()
                await asyncio.wait({work})

    async def all(self, request: Request, answer: type[F], caller: str) -> tuple[tuple[F, ...], End]:
        """Returns the frames of one kind, few enough to be in memory, and the end. Raises ControlError."""
        found: list[F] = []
        end = End()
        async with aclosing(self.frames(request, caller)) as frames:
            async for frame in frames:
                if isinstance(frame, answer):
                    found.append(frame)
                elif isinstance(frame, End):
                    end = frame
        return tuple(found), end

    async def one(self, request: Request, answer: type[F], caller: str) -> F:
        """Returns the one frame that answers a simple request. Raises ControlError."""
        found, _ = await self.all(request, answer, caller)
        if not found:
            raise UnexpectedError(f"the answer holds no {answer.__name__}")
        return found[-1]

    async def close(self) -> None:
        for work in self._running:
            work.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, request: Request, answer: _Frames) -> None:
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
