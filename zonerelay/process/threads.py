"""Thread pools of the process, one for each kind of blocking work.

The loop's default executor is not used (a test checks this for the whole tree), because it is one small pool
for everything: eight slow searches of an operator once filled it, and a login waited 90 s for the credentials
file behind them. Therefore work that mail waits for and work that operators request are never in the same
pool. Threads start with the first call.
"""

import asyncio
import contextvars
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from zonerelay.process.tasks import ended

P = ParamSpec("P")
T = TypeVar("T")


class Closable(Protocol):
    """Interface: an object that holds a file or a lock until it is closed. `close` blocks."""

    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class PoolBusyError(Exception):
    """Too many calls are waiting for a thread."""


class ThreadPool:
    """A bounded thread pool that every event loop of the process can use. `most` limits the calls that run or
    wait; `None` is for work whose callers are limited elsewhere.
    """

    def __init__(self, name: str, threads: int, *, most: int | None = None) -> None:
        self._executor = ThreadPoolExecutor(threads, name)
        self._most = most
        self._lock = threading.Lock()
        self._calls = 0

    async def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in a thread. Raise PoolBusyError at once if the pool is full, and any exception of
        the function.

        If the caller is cancelled, the function continues to run, and counts until it ends.
        """
        with self._lock:
            if self._most is not None and self._calls >= self._most:
                raise PoolBusyError
            self._calls += 1
        context = contextvars.copy_context()
        try:
            future = self._executor.submit(partial(context.run, function, *args, **kwargs))
        except BaseException:
            self._ended()
            raise
        future.add_done_callback(self._ended)
        return await asyncio.wrap_future(future)

    async def open(self, function: Callable[P, C], /, *args: P.args, **kwargs: P.kwargs) -> C:
        """Run a function that opens something in a thread, and return the opened object. If the caller is
        cancelled, wait for the function and close the object.
        """
        opening = asyncio.ensure_future(self.run(function, *args, **kwargs))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            await ended(opening)
            if opening.exception() is None:
                await self.run(opening.result().close)
            raise

    def _ended(self, _: Future[T] | None = None) -> None:
        with self._lock:
            self._calls -= 1


# Work that mail waits for.
ACCESS = ThreadPool("access", 2)
"""The files of users, which a log-in reads."""
USAGE = ThreadPool("usage", 1)
"""What users have sent, in the file that the workers share."""
FILES = ThreadPool("files", 4)
"""Small files beside the spool and of the system."""
STORE = ThreadPool("store", 4)
"""What a store does at its start, at its end and when it is repaired."""
CAPTURE = ThreadPool("capture", 1)
"""Writing of captured mail."""
BODIES = ThreadPool("bodies", 4)
"""Bodies that come over HTTP, and rows of an outbox that are large."""
LOGIN = ThreadPool("login", 2)
"""Salted passwords for smarthosts (SCRAM), which are slow to compute."""
NAMES = ThreadPool("names", 4)
"""Questions to the system's resolver, which may take half a minute."""
DROP = ThreadPool("drop", 1)
"""The drop directory of sendmail(1)."""

# Work that operators and programs request.
STATUS = ThreadPool("status", 2)
"""What `status`, metrics and readiness show of disks."""
OPERATORS = ThreadPool("operators", 4)
"""Pages, changes of the queue, and whatever else is not mail."""
CAPTURED = ThreadPool("captured", 2, most=32)
"""Captured mail that is looked at."""
HISTORY = ThreadPool("history", 2, most=6)
"""Searches of the history, which may read all of it."""
LOOKUPS = ThreadPool("lookups", 2, most=64)
"""What the history has of one message, by its index."""
REPORTS = ThreadPool("reports", 1)
"""The history as a whole: the daily report, and events that are told once more."""


async def addresses_of(host: str) -> Sequence[str]:
    """Return a host's IP addresses according to the system's resolver. Raise OSError if there are none."""
    found = await NAMES.run(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found))
