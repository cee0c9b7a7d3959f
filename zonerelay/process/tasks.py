"""Implements background tasks that end with their owner, work in time slices, alarms, and components whose
start is retried.

Failure: the loop's exception handler reports an exception that no caller awaits, unless `Tasks` has an
`on_error`.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Step = TypeVar("Step")


class Tasks:
    """The background tasks of one component, on one event loop. Unlike in a TaskGroup, the other tasks
    continue when one fails. `on_error` reports the error of a task.
    """

    def __init__(self, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[Any]] = set()  # Any: tasks may have any result

    def __len__(self) -> int:
        return len(self._running)

    # Any: the types that a coroutine sends do not matter here
    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task, which is not cancelled with its caller. A caller that may be cancelled
        and awaits the task must shield it.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if self._on_error is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until no task is running, including tasks that are started in the meantime. Return false after
        `timeout` seconds. Exceptions of the tasks are not raised.
        """
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while self._running:
            left = None if deadline is None else deadline - loop.time()
            if left is not None and left <= 0:
                return False
            ended, _ = await asyncio.wait(self._running, timeout=left)
            # The loop runs no iteration, and so no callbacks, if all tasks had ended already.
            self._running -= ended
        return True

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until none is running."""
        while self._running:
            ended = set(self._running)
            await cancel_all(*ended)
            self._running -= ended


class RepeatedWork(ABC):
    """Work that is repeated on request, one run at a time. `begin` during a run causes another run
    after it.
    """

    _task: asyncio.Task[None] | None = None
    _again = False

    def begin(self) -> None:
        self._again = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._repeat())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _repeat(self) -> None:
        while self._again:
            self._again = False
            await self._run()

    @abstractmethod
    async def _run(self) -> None: ...


SLICE = 0.005
"""Seconds of work on the event loop before other tasks get their turn. A longer step is a slice of
its own.
"""


class NextIteration:
    """Calls a function once in the next iteration of the event loop, even if that is requested
    several times.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._asked = False

    def ask(self) -> None:
        if not self._asked:
            self._asked = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._asked = False
        self._call()


class Slices:
    """Time slices for long work on the event loop: at most `SLICE` seconds per iteration for all tasks that
    share this object.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._is_open = False
        self._until = 0.0

    async def next(self) -> None:
        """Wait for the next loop iteration if the time slice of this one is used up. Call it before each step
        of the work.
        """
        while self._is_open and self._monotonic() >= self._until:  # noqa: ASYNC110 - for a round of the loop, not an event
            await asyncio.sleep(0)
        if not self._is_open:
            self._is_open = True
            self._until = self._monotonic() + SLICE
            asyncio.get_running_loop().call_soon(self._close)

    def _close(self) -> None:
        """End the time slice, because the event loop has started a new iteration."""
        self._is_open = False


async def in_slices(steps: Iterable[Step], monotonic: Callable[[], float]) -> AsyncIterator[Step]:
    """Yield the results of the steps, with a pause for other tasks after each `SLICE` seconds. The time that
    the caller spends on a result counts towards the slice.

    The data that the steps work on may change between two slices.
    """
    slices = Slices(monotonic)
    for step in steps:
        await slices.next()
        yield step


LONGEST_TIMER = 60.0
"""Seconds after which the clock is read again, because the wall clock may have been set in the meantime."""


class Alarm:
    """Calls `call` at the earliest requested time, according to the clock `now`."""

    def __init__(self, now: Callable[[], float], call: Callable[[], object]) -> None:
        self._now = now
        self._call = call
        self._when: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, when: float) -> None:
        if self._when is None or when < self._when:
            self._when = when
            self._arm()

    def cancel(self) -> None:
        self._when = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._when is not None:
            delay = min(max(0.0, self._when - self._now()), LONGEST_TIMER)
            self._timer = asyncio.get_running_loop().call_later(delay, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._when is not None and self._now() < self._when:
            self._arm()
            return
        self._when = None
        self._call()


async def cancel_all(*tasks: asyncio.Task[Any] | None) -> None:  # Any: tasks may have any result
    """Cancel the tasks and wait until they have ended. Their exceptions are not raised."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def completed(work: Coroutine[Any, Any, T]) -> T:  # Any: the types that a coroutine sends
    """Run a coroutine to its end even if the caller is cancelled, and raise CancelledError afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise


async def ended(task: asyncio.Future[Any]) -> None:  # Any: tasks may have any result
    """Wait until a task has ended, even if the caller is cancelled. Its exception is not raised."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # otherwise the loop would report it


async def gathered(work: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all awaitables and return their results. The first error is raised only after all of them have
    ended.
    """
    results = await asyncio.gather(*work, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


# Parts that a relay opens in addition to the mail path: if one cannot be opened, mail is still delivered, and
# the part is retried. Once, a program that used port 8025 at the moment of a restart stopped all mail.

RETRY = 5.0
"""Seconds between two attempts."""


class Component(Protocol):
    """Interface: a component that can be started and closed."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class RetriedComponents:
    """Components whose start is retried until it succeeds or they are closed. `restored` is called with the
    name of a component in the log when a later attempt succeeds.
    """

    def __init__(
        self, on_error: Callable[[str, BaseException], None], restored: Callable[[str], None]
    ) -> None:
        self._on_error, self._restored = on_error, restored
        self._parts: list[Component] = []
        self._errors: dict[str, str] = {}
        self._retries = Tasks()

    def problems(self) -> tuple[str, ...]:
        later = f"(mail is not affected; retrying every {RETRY:g} seconds)"
        return tuple(f"{what}: {error} {later}" for what, error in self._errors.items())

    async def open(
        self,
        what: str,
        where: str,
        part: Component,
        failure: type[Exception],
        *,
        final: tuple[type[Exception], ...] = (),
    ) -> None:
        """Start a component, and retry in the background until `close`. `what` is its name in problems, and
        `where` in the log. `failure` is the type of the error that `start` raises with a message for the
        operator. Errors of the types in `final` are raised.
        """

        async def is_started(final: tuple[type[Exception], ...] = ()) -> bool:
            try:
                await part.start()
            except final:
                raise
            except failure as error:
                if str(error) != self._errors.get(what):  # each reason is logged once
                    self._errors[what] = str(error)
                    self._on_error(where, error)
                return False
            self._errors.pop(what, None)
            return True

        async def retry() -> None:
            while True:
                await asyncio.sleep(RETRY)
                if await is_started():
                    self._restored(where)
                    return

        self._parts.append(part)
        if not await is_started(final):
            self._retries.start(retry())

    async def close(self) -> None:
        """Close the started components in reverse order."""
        await self._retries.cancel()
        for each in reversed(self._parts):
            await each.close()
