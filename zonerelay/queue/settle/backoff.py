"""Runs an operator's back-off function where it can hurt nobody.

The function runs in one thread of its own, so that a slow one does not stop the event loop.
Promises: `delay` returns within `TIMEOUT` and raises only CancelledError. While a call hangs the
function is not called again (one thread is lost at most); every delivery gets the fallback delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from zonerelay.model.envelope import Envelope
from zonerelay.telemetry.events.events import Events

TIMEOUT = 5.0

_Function = Callable[[Envelope, int], float | None]
_Job = tuple[Envelope, int, asyncio.AbstractEventLoop, "asyncio.Future[float | None]"]


class IsolatedBackoff:
    """One function, its thread, and what to answer when it fails."""

    def __init__(
        self, function: _Function, fallback: float, events: Events, *, timeout: float = TIMEOUT
    ) -> None:
        self._function = function
        self._fallback = fallback
        self._events = events
        self._timeout = timeout
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hanging: asyncio.Future[float | None] | None = None

    async def delay(self, envelope: Envelope, attempts: int) -> float | None:
        if self._hanging is not None and not self._hanging.done():
            return self._fallback
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[float | None] = loop.create_future()
        answer.add_done_callback(_retrieve)  # nobody may be left to look at it
        self._start()
        self._jobs.put((envelope, attempts, loop, answer))
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.shield(answer)
        except TimeoutError as error:
            self._hanging = answer
            self._events.trouble("retry.backoff", error, message_id=envelope.id)
        except Exception as error:  # noqa: BLE001 - a stranger's function may raise anything
            self._events.trouble("retry.backoff", error, message_id=envelope.id)
        return self._fallback

    def _start(self) -> None:
        if self._thread is None:
            # A daemon: a function that hangs for ever must not keep the process from leaving.
            self._thread = threading.Thread(target=self._run, name="backoff", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            envelope, attempts, loop, answer = self._jobs.get()
            try:
                delay = self._function(envelope, attempts)
            except BaseException as error:  # noqa: BLE001 - the thread must outlive it
                self._reply(loop, answer, None, error)
            else:
                self._reply(loop, answer, delay, None)

    @staticmethod
    def _reply(
        loop: asyncio.AbstractEventLoop,
        answer: asyncio.Future[float | None],
        delay: float | None,
        error: BaseException | None,
    ) -> None:
        # A closed loop means that nobody waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, answer, delay, error)


def _resolve(answer: asyncio.Future[float | None], delay: float | None, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(delay)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        answer.set_exception(error)
    else:
        # SystemExit in a stranger's function is not ours to obey, and futures refuse StopIteration.
        answer.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def _retrieve(answer: asyncio.Future[float | None]) -> None:
    """Look at a late answer's exception: asyncio complains about those that nobody saw."""
    if not answer.cancelled():
        answer.exception()
