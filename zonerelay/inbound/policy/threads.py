"""The threads that run an operator's code, so that it can block neither the event loop nor the process's
exit.

`def` methods run in at most `MAX_THREADS` threads, `async def` methods on an event loop in a dedicated
thread. All threads are daemon threads, including those behind `asyncio.to_thread` on that event loop. A
thread that hangs forever does not prevent the process from exiting.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import enum
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, ParamSpec, Protocol, TypeVar

from zonerelay.inbound.policy.api import ACCEPT, Changes, Decision

# One call of an operator's code, and its result.
#
# It runs in the operator's threads. `run` and `run_async` raise no exception of that code, not even
# SystemExit and KeyboardInterrupt. They also check the result, because even that may run the operator's code.

MAX_DETAIL = 500


class FailureKind(enum.StrEnum):
    """The kind of a failure, as a metric label. The list is fixed."""

    TIMEOUT = "timeout"
    ERROR = "error"
    BUSY = "busy"
    BAD_DECISION = "bad-decision"


@dataclass(frozen=True, slots=True)
class PolicyFailure:
    """A policy call failed or returned an unusable result. `detail` is for the operator."""

    kind: FailureKind
    detail: str


Result = Decision | PolicyFailure
_RESULTS = (Decision, Changes, PolicyFailure)  # exactly these classes: a subclass is an operator's code


class PolicyCall:
    """A policy call that runs in a thread. `answer` is a future of the caller's event loop."""

    __slots__ = ("_loop", "answer", "asked", "given_up", "question", "started", "task")

    def __init__(self, question: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self.question = question
        self.answer: asyncio.Future[Result] = loop.create_future()
        self.asked = loop.time()
        self.started = False
        self.given_up = False  # the caller no longer waits
        self.task: asyncio.Task[None] | None = None
        self._loop = loop

    def run(self) -> None:
        try:
            result = understood(self.question())
        except BaseException as error:  # noqa: BLE001 - the thread must outlive it
            result = PolicyFailure(FailureKind.ERROR, described(error))
        self._reply(result)

    async def run_async(self) -> None:
        try:
            # Only calls of `async def` methods reach this.
            result = understood(await _awaited(self.question()))
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the loop
            result = PolicyFailure(FailureKind.ERROR, described(error))
        self._reply(result)

    def _reply(self, result: Result) -> None:
        # A closed loop means that no caller is waiting.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_resolve, self.answer, result)


def understood(answer: object) -> Result:
    if answer is None:
        return ACCEPT
    if isinstance(answer, Decision | PolicyFailure) and type(answer) in _RESULTS:
        return answer
    hint = ""
    if inspect.iscoroutine(answer):
        answer.close()
        hint = ": write the method as async def"
    kind = type(answer).__name__
    return PolicyFailure(FailureKind.BAD_DECISION, f"returned {kind} instead of a Decision or None{hint}")


def described(error: BaseException) -> str:
    """Return the text of an exception with the innermost line of the operator's code."""
    try:
        text = str(error)[:MAX_DETAIL]
    except BaseException:  # noqa: BLE001 - it is the operator's __str__
        text = "(its text cannot be shown)"
    where = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__"))
        if not module.startswith("zonerelay.") or module.startswith("zonerelay.policies."):
            where = f" at {code.co_filename.rpartition('/')[2]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}{where}"


async def _awaited(answer: object) -> object:
    return await answer if isinstance(answer, Awaitable) else answer


def _resolve(answer: asyncio.Future[Result], result: Result) -> None:
    if not answer.done():  # otherwise it is late and discarded
        answer.set_result(result)


MAX_THREADS = 8
MAX_TASKS = 1000  # on the event loop, including tasks that do not end when they are cancelled
GRACE = 0.5  # seconds that cancelled tasks may take to end

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)


class ThreadWork(Protocol):
    """A call that `Threads` can run. `run` never raises an exception."""

    asked: float
    started: bool
    given_up: bool

    def run(self) -> None: ...


class Threads:
    """A pool of at most `MAX_THREADS` daemon threads, which are created on demand."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ready = threading.Condition()
        self._queue: deque[ThreadWork] = deque()
        self._running: set[ThreadWork] = set()
        self._idle = 0
        self._count = 0
        self._closed = False

    def submit(self, work: ThreadWork) -> None:
        with self._ready:
            self._queue.append(work)
            if self._idle < len(self._queue) and self._count < MAX_THREADS:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._count += 1
            self._ready.notify()

    def give_up(self, work: ThreadWork) -> None:
        """Skip this call if it has not started. A call that has started keeps its thread until it ends."""
        work.given_up = True

    def stuck(self, since: float) -> bool:
        """Return whether every thread runs a call that was submitted before `since`."""
        with self._ready:
            return len(self._running) >= MAX_THREADS and all(work.asked < since for work in self._running)

    def close(self) -> None:
        """End idle threads now, and the others after their call."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work.run()
            with self._ready:
                self._running.discard(work)
            del work  # free its data before waiting for the next call

    def _next(self) -> ThreadWork | None:
        with self._ready:
            while True:
                while self._queue:
                    work = self._queue.popleft()
                    if not work.given_up:
                        work.started = True
                        self._running.add(work)
                        return work
                if self._closed:
                    return None
                self._idle += 1
                self._ready.wait()
                self._idle -= 1


class LoopThread:
    """An event loop that runs in a dedicated daemon thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor = _DaemonExecutor(name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[PolicyCall] = deque()  # submitted calls that the event loop has not started
        self._closing = False
        self._ended: Callable[[], None] = lambda: None

    def submit(self, call: PolicyCall) -> None:
        self._waiting.append(call)
        self._running_loop().call_soon_threadsafe(self._begin, call)

    def give_up(self, call: PolicyCall) -> None:
        call.given_up = True
        with contextlib.suppress(RuntimeError):  # the loop was closed, and everything cancelled
            self._running_loop().call_soon_threadsafe(self._cancel, call)

    def stuck(self, since: float) -> bool:
        """Return whether the loop is blocked: it has too many tasks, or has not begun a call from before
        `since`.
        """
        try:
            return len(self._tasks) >= MAX_TASKS or self._waiting[0].asked < since
        except IndexError:
            return False

    async def close(self, timeout: float) -> None:
        """Cancel all tasks and end the thread, waiting at most `timeout` seconds."""
        loop, self._closing = self._loop, True
        self._executor.shutdown(wait=False)
        if loop is None:
            return
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = partial(_tell, asyncio.get_running_loop(), ended)
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.wait((ended,), timeout=timeout)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            loop = asyncio.new_event_loop()
            loop.set_default_executor(self._executor)
            threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True).start()
            self._loop = loop
        return self._loop

    # ---- in the thread -----------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closing:
            try:
                loop.run_forever()
            except BaseException as error:  # noqa: BLE001 - a task of the policy's own asked to exit
                _log.error("a policy's background task: %s", described(error))
        with contextlib.suppress(BaseException):
            _cancel_all(loop)
        loop.close()
        self._ended()

    def _begin(self, call: PolicyCall) -> None:
        call.task = task = asyncio.get_running_loop().create_task(self._perform(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform(self, call: PolicyCall) -> None:
        self._waiting.popleft()  # tasks begin in the order of submission
        if not call.given_up:
            call.started = True
            await call.run_async()

    @staticmethod
    def _cancel(call: PolicyCall) -> None:
        if call.task is not None and call.started:
            call.task.cancel()


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """The executor for `asyncio.to_thread`. Unlike the base class, it does not join its threads at exit."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1)
        self._daemons = Threads(f"{name}-executor")

    def submit(
        self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> concurrent.futures.Future[T]:
        job = _Job(partial(function, *args, **kwargs))
        self._daemons.submit(job)
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures
        self._daemons.close()


class _Job(Generic[T]):
    """A job of the thread pool."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.asked = 0.0
        self.started = self.given_up = False

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - handed to the waiting caller
            self.future.set_exception(error)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE))
    loop.run_until_complete(loop.shutdown_asyncgens())


def _tell(loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_finish, ended)


def _finish(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
