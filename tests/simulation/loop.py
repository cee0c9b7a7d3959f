"""A seeded event loop with virtual time, simulated threads, and processes that can be killed or stand still.

Every callback runs in a context; the context names the process that scheduled it. A process that was killed
runs nothing any more, at whatever await its tasks were: their coroutines are kept until the end of the run,
so that no `finally` block of a dead process runs. A process that stands still collects its callbacks and
runs them when it wakes up. Work for threads runs on the loop, some milliseconds later.
"""

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from tests.bench.simulate.timeline import START, NothingLeftError, VirtualLoop

T = TypeVar("T")
PROCESS: "contextvars.ContextVar[Process | None]" = contextvars.ContextVar("process", default=None)


class ProcessDiedError(Exception):
    """The process was killed before it had done what was asked of it."""


class Process:
    """One process of a simulated machine. `wall` is what its wall clock shows in advance of the world's."""

    def __init__(self, name: str, loop: "SimLoop") -> None:
        self.name = name
        self.alive = True
        self.still = False
        self.wall = 0.0
        self.disk: Any = None
        self.asleep = 0.0
        """Seconds that its monotonic clock has missed."""
        self.at_death: list[Callable[[], None]] = []
        self.held: list[_Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self._died = asyncio.Event()
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it to its end. Raises ProcessDiedError, and what the work raises."""
        task = self._loop.create_task(work, context=self.context)
        death = asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait((task, death), return_when=asyncio.FIRST_COMPLETED)
        finally:
            death.cancel()
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if not task.done():
            raise ProcessDiedError(self.name)
        return task.result()

    def kill(self) -> None:
        """As `kill -9`: nothing of it runs any more. The network learns of it."""
        self.alive = False
        self._died.set()
        self._loop.graveyard += self.tasks
        for forget in self.at_death:
            forget()
        self.held.clear()

    def wake_up(self) -> None:
        self.still = False
        held, self.held = self.held, []
        self._loop._ready.extend(held)  # type: ignore[attr-defined]

    # The clock that its code is handed.

    def now(self) -> float:
        return START + self._loop.now + self.wall

    def monotonic(self) -> float:
        return self._loop.now - self.asleep

    def boottime(self) -> float:
        return self._loop.now


class _Handle:
    """A callback, now or at a time."""

    __slots__ = ("args", "callback", "context")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: Any) -> None:
        self.callback = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context

    def cancel(self) -> None:
        self.callback, self.args = None, ()


class SimLoop(VirtualLoop):
    """`failures` collects exceptions that nobody handled; `network` is set by the world."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.failures: list[str] = []
        self.graveyard: list[asyncio.Task[Any]] = []
        self.network: Any = None
        self._timers: list[tuple[float, int, _Handle]] = []
        self._numbers = itertools.count()
        self.started = itertools.count(1)
        self.set_task_factory(_task)

    # What asyncio's do, without its checks for other threads and for debugging.

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        handle = _Handle(callback, args, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        # A delay that is smaller than a step of the clock would never be over.
        when = max(self.now + delay, math.nextafter(self.now, math.inf)) if delay > 0 else self.now
        return self.call_at(when, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        timer = _Handle(callback, args, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _run_once(self) -> None:
        """Run callbacks until `stop` is called, and none of a process that is dead or stands still."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]
        while not self._stopping:  # type: ignore[attr-defined]
            if not ready:
                while timers and timers[0][2].callback is None:
                    heapq.heappop(timers)
                if not timers:
                    raise NothingLeftError("every task waits, and no timer is set")
                self.now = max(self.now, timers[0][0])
            now = self.now
            while timers and timers[0][0] <= now:
                ready.append(heapq.heappop(timers)[2])
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle.callback is None:
                    continue
                process = handle.context.get(PROCESS)
                if process is None or (process.alive and not process.still):
                    try:
                        handle.context.run(handle.callback, *handle.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:
                        self.call_exception_handler({"message": f"in {handle!r}", "exception": error})
                elif process.alive:
                    process.held.append(handle)

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def set_exception_handler(self, handler: Any) -> None:
        """The relay's own would be one for all processes."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")

    def bury(self) -> None:
        """Ends what is left of every process while no loop runs, so that it cannot act in a later run."""
        for task in (*self.graveyard, *asyncio.all_tasks(self)):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            if not task.done():
                with contextlib.suppress(BaseException):
                    task.get_coro().close()
        self.graveyard.clear()
        self._ready.clear()  # type: ignore[attr-defined]
        self._timers.clear()
        self.close()

    # Threads

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        del executor
        done: asyncio.Future[T] = self.create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                result = func(*args)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.call_later(self.random.uniform(0.0001, 0.003), work)
        return done

    # Network

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await self.network.dial(sock, address)

    async def create_connection(self, factory: Any, *args: Any, sock: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        assert not kwargs.get("ssl"), "not simulated"
        return self.network.adopt(sock, factory)

    async def create_server(self, factory: Any, *, sock: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return self.network.listen(factory, sock)

    async def create_unix_server(  # type: ignore[override]
        self, factory: Any, path: Any = None, *, sock: Any = None, **kwargs: Any
    ) -> Any:
        return self.network.listen(factory, sock, path)

    async def create_unix_connection(self, factory: Any, path: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return await self.network.connect(str(path), factory)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        """Nothing that the relay watches outside the network ever becomes readable. The system closes it with
        the process.
        """
        process = PROCESS.get()
        if process is not None and hasattr(fd, "close"):
            process.at_death.append(fd.close)

    def remove_reader(self, fd: Any) -> bool:
        return False


class _Task(asyncio.Task[Any]):
    """A task whose place in a set depends on the run alone, not on its address."""

    def __init__(self, coro: Any, number: int, **given: Any) -> None:
        self.number = number
        super().__init__(coro, **given)

    def __hash__(self) -> int:
        return self.number


def _task(loop: Any, coro: Any, context: Any = None) -> asyncio.Task[Any]:
    task = _Task(coro, next(loop.started), loop=loop, context=context)
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.tasks.append(task)
        if len(process.tasks) > 256:
            process.tasks = [each for each in process.tasks if not each.done()]
    return task
