"""Implements group commit: combines concurrent writes into batches, each of which is synced once.

Submissions that arrive while the event loop is busy are written together. The next batch gathers while the
current one is synced. Submissions are applied strictly in order, because a later one may have been computed
from an earlier one. Lazy submissions (outcomes of delivered mail) join the next batch, or form their own
after `LAZY_DELAY` at most.

When to stop gathering: a submission waits as long as the loop is busy without a pause, because more
submissions are likely then, and writing would compete with them for the interpreter. It also waits while
fewer than half of the usual number have arrived, lazy ones not counted. Workers that share two cores with
their clients are often idle for a moment; without this wait each batch had a third of its possible size,
which cost a tenth more CPU per message. `GATHER_LIMIT` ends both waits. On an idle relay the write starts in
the next iteration of the loop.

If a batch fails, everything submitted after it fails for the same reason, and so does every later submission
until `resume`. `applied` callbacks run on the event loop as soon as the write is durable, even if the
submitter no longer waits. If a callback raises, the store fails after this batch: all of the batch stays
durable and is applied.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from zonerelay.model.clock import Clock
from zonerelay.store.contract import StoreError


def refuse(waiting: asyncio.Future[Any], error: BaseException) -> None:  # Any: any result
    """Fail a caller's future with a StoreError, a new one for each caller because raising it adds a
    traceback. The caller may no longer wait. An error that is not a StoreError is wrapped in one.
    """
    if not waiting.done():
        refusal = type(error)(*error.args) if isinstance(error, StoreError) else StoreError(repr(error))
        refusal.__cause__ = error
        waiting.set_exception(refusal)
        waiting.exception()  # without a caller the loop must not complain


# `WriterThread` runs a thread that does one job after the other and reports each to the event loop. A
# `ThreadPoolExecutor` would work, but its futures, locks and chained callbacks cost as much time as the
# hand-over itself, twice per synced write. Here a job costs one queue item and one callback.

J = TypeVar("J")
R = TypeVar("R")


class JobFailure(NamedTuple):
    """The exception that `work(job)` raised in a writer thread."""

    error: BaseException


class WriterThread(Generic[J, R]):
    """A thread that runs `work(job)` for each job, and reports each result to `tell` on the event loop."""

    def __init__(self, name: str, work: Callable[[J], R], tell: Callable[[R | JobFailure], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._work = work
        self._tell = tell
        self._jobs: SimpleQueue[J | None] = SimpleQueue()
        self.put: Callable[[J], None] = self._jobs.put
        # A daemon thread: a process that ends without `stop` has crashed and must not wait for it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the jobs that are already queued, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        get, call_soon, tell = self._jobs.get, self._loop.call_soon_threadsafe, self._tell
        while (job := get()) is not None:
            result = self._do(job)
            try:
                call_soon(tell, result)
            except RuntimeError:  # the loop was closed: no listener is left
                return
            # A batch may have megabytes. It must not stay in memory until the next one.
            del job, result

    def _do(self, job: J) -> R | JobFailure:
        try:
            return self._work(job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the loop has to hear of it
            return JobFailure(error)


LAZY_DELAY = 0.04
"""This stays below the 50 ms that a crash may repeat, with a margin for the write itself (DESIGN rule 2)."""
MAX_LAZY = 250
"""The number of lazy submissions that are written without waiting for more."""
MAX_BATCH = 4 * 1024 * 1024
"""The largest size of a batch in bytes. Small messages must not wait until a hundred bodies are synced."""
GATHER_LIMIT = 0.008
"""Seconds that a submission may wait for others."""
COMPANY_PAUSE, COMPANY_PAUSES = 0.001, 7
BUSY_TURN = 0.00005
"""A loop iteration that takes longer than this, in seconds, did some work."""
GATHER_OCTETS = 512 * 1024
"""The size of a batch, in bytes, from which the sync is the smaller part of the write, so waiting would not
make it cheaper.
"""

Change = TypeVar("Change")
P = TypeVar("P")


class SubmittedChanges(msgspec.Struct, Generic[Change], eq=False):
    """The changes that one caller has submitted for one atomic write."""

    ops: Change
    size: int
    applied: Callable[[], None] | None
    done: asyncio.Future[None]


class GroupCommitter(Generic[Change, P]):
    """Combines the changes that are submitted on one event loop into batches, and writes them in order.
    `Change` is the type of one submission's.
    """

    def __init__(
        self,
        prepare: Callable[[Sequence[SubmittedChanges[Change]], int], P],
        write: Callable[[P], None],
        *,
        clock: Clock,
        observe: Callable[[float], None],
        failed: Callable[[StoreError], None],
    ) -> None:
        """Create a group committer for one writer. `prepare(submissions, size)` is called on the event loop
        with the size in bytes; its result is passed to `write`, which writes it in the background and then
        calls `written` on the loop with the duration in seconds or a `JobFailure`. Durations go to `observe`.
        `failed` is called with a failure before any submitter receives it.
        """
        self._loop = asyncio.get_running_loop()
        self._now = clock.monotonic
        self._prepare = prepare
        self._observe = observe
        self._failed = failed
        self._write = write
        self._pending: list[SubmittedChanges[Change]] = []
        self._pending_size = 0
        self._urgent = 0
        self._writing: list[SubmittedChanges[Change]] = []
        self._gathering = False
        self._usual = 0.0
        """The recent average number of submissions that wait for their batch, without the lazy ones."""
        self._pauses = 0
        self._gather_until = 0.0
        self._last_turn = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: StoreError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(
        self, ops: Change, *, size: int = 0, lazy: bool = False, applied: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Queue `ops` for one atomic write. The future is done when the write is durable or has failed."""
        done: asyncio.Future[None] = self._loop.create_future()
        if self._refusal is not None:
            refuse(done, self._refusal)
            return done
        self._pending.append(SubmittedChanges(ops, size, applied, done))
        self._pending_size += size
        if not lazy:
            self._urgent += 1
        if not self._writing and not self._gathering:
            self._schedule()
        return done

    async def drain(self) -> None:
        """Write all pending submissions without delay, and wait for them."""
        while self._pending or self._writing:
            if not self._writing:
                self._start()
            await self._idle.wait()

    def resume(self) -> None:
        """Accept submissions again after a failed write."""
        self._refusal = None

    def refuse(self, reason: StoreError) -> None:
        """Fail every later submission."""
        self._refusal = reason

    def _schedule(self) -> None:
        """Schedule the next write. Submissions are pending and no write is active."""
        if self._urgent or len(self._pending) >= MAX_LAZY:
            self._gathering = True
            self._pauses = 0
            self._last_turn = now = self._now()
            self._gather_until = now + GATHER_LIMIT
            self._loop.call_soon(self._turned)
        elif self._timer is None:
            self._timer = self._loop.call_later(LAZY_DELAY, self._start)

    def _turned(self) -> None:
        """Start the write if the last loop iteration was idle or enough submissions have gathered."""
        now = self._now()
        if not self._gathering:
            return
        if now >= self._gather_until or self._pending_size >= GATHER_OCTETS:
            self._start()
        elif now - self._last_turn > BUSY_TURN:
            self._last_turn = now
            self._loop.call_soon(self._turned)
        elif 2 * self._urgent < self._usual and self._pauses < COMPANY_PAUSES:
            self._pauses += 1
            self._loop.call_later(COMPANY_PAUSE, self._turned)
        else:
            self._start()

    def _start(self) -> None:
        self._gathering = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing or not self._pending:
            return
        size = self._take_batch()
        self._idle.clear()
        try:
            job = self._prepare(self._writing, size)
        except Exception as error:  # noqa: BLE001 - whatever it is, the submitters have to hear of it
            self._loop.call_soon(self.written, JobFailure(error))
        else:
            self._write(job)

    def _take_batch(self) -> int:
        """Select the pending submissions for the next write, and return their size in bytes."""
        pending = self._pending
        if self._pending_size <= MAX_BATCH:
            size, count = self._pending_size, len(pending)
        else:
            size, count = pending[0].size, 1
            while count < len(pending) and size + pending[count].size <= MAX_BATCH:
                size += pending[count].size
                count += 1
        self._writing = pending[:count]
        self._pending = pending[count:]
        self._pending_size -= size
        if self._urgent:
            self._usual += (self._urgent - self._usual) / 4
        self._urgent = len(self._pending)
        return size

    def written(self, result: float | JobFailure) -> None:
        """Report the result of the current write to its submitters, and start or schedule the next one."""
        batch, self._writing = self._writing, []
        try:
            if isinstance(result, JobFailure):
                self._fail(batch, result.error)
            else:
                self._observe(result)
                self._succeed(batch)
        finally:
            self._idle.set()
            if self._pending and not self._gathering:
                self._schedule()

    def _succeed(self, batch: list[SubmittedChanges[Change]]) -> None:
        for submission in batch:
            if not submission.done.done():
                submission.done.set_result(None)
        # This runs before any submitter continues, because callbacks of futures run in a later iteration of
        # the loop.
        broken: Exception | None = None
        for submission in batch:
            if submission.applied is not None:
                try:
                    submission.applied()
                except Exception as error:  # noqa: BLE001 - the other submissions are durable as well
                    broken = error
        if broken is not None:
            # The state in memory may differ from the disk. The store reads it again, as after a failed write.
            self._fail([], broken)

    def _fail(self, batch: list[SubmittedChanges[Change]], error: BaseException) -> None:
        if isinstance(error, StoreError):
            refusal = error
        else:
            refusal = StoreError(f"the spool could not be written: {error!r}")
            refusal.__cause__ = error
        self._refusal = refusal
        for submission in batch:
            refuse(submission.done, refusal)
        self.refuse_pending(refusal)
        self._failed(refusal)

    def refuse_pending(self, error: StoreError) -> None:
        """Fail the submissions that are not being written yet, because an earlier one was refused."""
        pending, self._pending = self._pending, []
        self._pending_size = self._urgent = 0
        for submission in pending:
            refuse(submission.done, error)
