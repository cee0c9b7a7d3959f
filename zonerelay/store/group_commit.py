"""Group commit: one writer thread, one synced batch at a time, and everybody who waits shares the sync.

What sessions submit in one turn of the event loop is written together; the next batch gathers while
that one is being synced. Submissions are applied strictly in the order in which they were made,
because a later one may have been computed from an earlier one. Lazy submissions (outcomes of
delivered mail) go with the next batch, or with one of their own after `LAZY_DELAY` at most.

On failure of a batch everything submitted behind it fails too, for the same reason, and so does
everything after that until `resume`. `applied` callbacks run on the event loop as soon as the
write is durable, whether or not the submitter still waits: a client that leaves changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, Protocol, TypeVar

from zonerelay.store.base import StoreError
from zonerelay.store.leveldb_engine import Op

LAZY_DELAY = 0.05
MAX_LAZY = 64
"""Lazy submissions that make a batch worth writing without waiting for more."""
MAX_BATCH = 4 * 1024 * 1024
"""Octets in one batch: small messages must not wait for a hundred bodies to be synced."""

Batches = Sequence[Sequence[Op]]
W = TypeVar("W")


class Committer(Protocol):
    """What the rest of the store needs."""

    def submit(
        self,
        ops: Sequence[Op],
        *,
        size: int = 0,
        lazy: bool = False,
        applied: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]: ...


class _Submission:
    __slots__ = ("applied", "done", "ops", "size")

    def __init__(
        self,
        ops: Sequence[Op],
        size: int,
        applied: Callable[[], None] | None,
        done: asyncio.Future[None],
    ) -> None:
        self.ops = ops
        self.size = size
        self.applied = applied
        self.done = done


class GroupCommitter(Generic[W]):
    """Belongs to one event loop. `write` runs in `executor`, which must have one thread."""

    def __init__(
        self,
        write: Callable[[Batches], W],
        executor: Executor,
        *,
        observe: Callable[[W], None],
        failed: Callable[[StoreError], None],
    ) -> None:
        """What `write` returns goes to `observe`; `failed` is told of a failure before any submitter is."""
        self._loop = asyncio.get_running_loop()
        self._write = write
        self._executor = executor
        self._observe = observe
        self._failed = failed
        self._pending: list[_Submission] = []
        self._writing: list[_Submission] = []
        self._gathering = False
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: StoreError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(
        self,
        ops: Sequence[Op],
        *,
        size: int = 0,
        lazy: bool = False,
        applied: Callable[[], None] | None = None,
    ) -> asyncio.Future[None]:
        """Queue `ops` for one atomic write; the future is done when it is durable or has failed."""
        done: asyncio.Future[None] = self._loop.create_future()
        if self._refusal is not None:
            _refuse(done, self._refusal)
            return done
        self._pending.append(_Submission(ops, size, applied, done))
        if not self._writing and not self._gathering:
            if lazy and len(self._pending) < MAX_LAZY:
                if self._timer is None:
                    self._timer = self._loop.call_later(LAZY_DELAY, self._start)
            else:
                self._gathering = True
                self._loop.call_soon(self._start)
        return done

    async def drain(self) -> None:
        """Write what is pending without delay and wait until nothing is."""
        while self._pending or self._writing:
            if not self._writing and not self._gathering:
                self._start()
            await self._idle.wait()

    def resume(self) -> None:
        """Take submissions again after a failure."""
        self._refusal = None

    def refuse(self, reason: StoreError) -> None:
        """Fail every later submission."""
        self._refusal = reason

    def _start(self) -> None:
        self._gathering = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing or not self._pending:
            return
        self._writing = self._next_batch()
        self._idle.clear()
        batches = [submission.ops for submission in self._writing]
        running = self._loop.run_in_executor(self._executor, self._write, batches)
        running.add_done_callback(self._written)

    def _next_batch(self) -> list[_Submission]:
        pending = self._pending
        size = count = 0
        for submission in pending:
            size += submission.size
            if size > MAX_BATCH and count:
                break
            count += 1
        self._pending = pending[count:]
        return pending[:count]

    def _written(self, running: asyncio.Future[W]) -> None:
        batch, self._writing = self._writing, []
        error = running.exception()
        try:
            if error is not None:
                self._fail(batch, error)
            else:
                self._observe(running.result())
                self._succeed(batch)
        finally:
            if self._pending:
                self._start()
            else:
                self._idle.set()

    def _succeed(self, batch: list[_Submission]) -> None:
        for submission in batch:
            if not submission.done.done():
                submission.done.set_result(None)
        # Before any submitter goes on: what waits for the futures runs in a later turn of the loop.
        for submission in batch:
            if submission.applied is not None:
                submission.applied()

    def _fail(self, batch: list[_Submission], error: BaseException) -> None:
        if isinstance(error, StoreError):
            refusal = error
        else:
            refusal = StoreError(f"the spool could not be written: {error!r}")
            refusal.__cause__ = error
        self._refusal = refusal
        batch += self._pending
        self._pending = []
        self._failed(refusal)
        for submission in batch:
            if not submission.done.done():
                _refuse(submission.done, refusal)


def _refuse(done: asyncio.Future[None], reason: StoreError) -> None:
    error = type(reason)(str(reason))
    error.__cause__ = reason
    done.set_exception(error)
    # Nobody may be waiting any more (a lazy removal, a cancelled session): that is no news for the loop.
    done.exception()
