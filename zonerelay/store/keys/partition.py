"""Writes one partition: combines writes into numbered batches, repeats unconfirmed batches, and renews the
lease.

Concurrent writes are combined into one batch (`group_commit`). One batch is written at a time.

If a batch fails, its fate is determined before any caller receives a result. The partition is entered again
in a new epoch, which fences a late batch, and the stored position shows whether the batch was durable. If so,
the callers have succeeded. If not, the batch is written once more, unless there is no space. Then the writes
that free space are written alone. The callers of the others receive StoreFullError, and so do those of writes
that were submitted later, because they may have been computed from the refused ones.

If the store does not respond within `PATIENCE`, the callers receive StoreError and never learn the result.
`on_failure` is called, all later writes are refused, and the partition is entered in the background with
growing pauses. `on_back` is called when the store responds again. Then the owner must read all uncertain
state again. Before that, writes that were refused for good, such as a message whose client has received 451,
are reverted (`undo`).

FencedError and an older or foreign state of the store are reported in the same way. FencedError is final: the
partition belongs to another writer, and the owner's state in memory is void.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec

from zonerelay import durable
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import Tasks, completed
from zonerelay.store import contract
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys import port
from zonerelay.store.keys.group_commit import GroupCommitter, JobFailure, SubmittedChanges, refuse

PATIENCE = 5.0
"""Seconds in which the fate of a batch is determined while its callers wait."""
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 5.0
BEATS = 4
"""Renewals in one lease, of which three may fail."""
_WIDTH = 512
"""The size of the file of the seen state in bytes."""

_log = logging.getLogger("zonerelay.store")

T = TypeVar("T")


class SeenFile:
    """The file in which this machine records the last state of a partition that it has seen. `seen` is its
    content. All methods block for a moment.

    The file answers two questions at a start. Does the store have an older state than this machine has seen?
    Was the last writer a process of this machine that has died? The file is locked while a process uses it,
    so the answer to the second question is certain.

    A record is written after each batch, without a sync, which costs a few microseconds. It survives a kill.
    After a power cut it may be outdated. That weakens the comparison, but never causes a false alarm, because
    the record is written after its batch is durable. A failure to write the file is logged and does not stop
    mail.
    """

    def __init__(self, path: Path, token: str) -> None:
        """Open the file, and create it with `token` as this machine's writer if it does not exist. Raises
        StoreOpenError, and NodeTakenError while another process has the file.
        """
        self._path = path
        try:
            durable.make_directory(path.parent)
            durable.create(path, _packed(port.PartitionState(token)))
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise contract.StoreOpenError(f"{path} cannot be used: {error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.seen = msgspec.json.decode(os.pread(self._file, _WIDTH, 0), type=port.PartitionState)
        except BlockingIOError as error:
            os.close(self._file)
            raise port.NodeTakenError(f"{path} is in use by another process of this machine") from error
        except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            os.close(self._file)
            raise contract.StoreOpenError(
                f"{path} cannot be read: {error}. It contains the last known state of the queue; remove it "
                "to accept the store as it is"
            ) from error

    def note(self, seen: port.PartitionState) -> None:
        """Record a new state of the partition in the file. A new mark is synced."""
        is_new = seen.mark != self.seen.mark
        self.seen = seen
        try:
            os.pwrite(self._file, _packed(seen), 0)
            if is_new:
                os.fsync(self._file)
        except OSError as error:
            _log.warning("%s cannot be written, so an older state may not be detected: %s", self._path, error)

    def forget(self) -> None:
        """Clear the recorded mark and position, so that the next opening accepts the store in any state."""
        self.note(port.PartitionState(self.seen.writer))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


def _packed(seen: port.PartitionState) -> bytes:
    return msgspec.json.encode(seen).ljust(_WIDTH - 1) + b"\n"


Writes = Sequence[SubmittedChanges[port.Write]]


@dataclass(eq=False, repr=False)
class Partition:
    """A partition of which this process is the only writer. `open_partition` opens it. It belongs to one
    event loop. Its owner may replace the functions that it calls on the event loop, which must not raise.
    """

    keeper: port.Keeper
    _: KW_ONLY
    lease: float
    seen: port.PartitionState
    seen_file: SeenFile | None
    clock: Clock
    patience: float = PATIENCE

    def __post_init__(self) -> None:
        self.on_failure: Callable[[StoreError], None] = lambda error: None
        """Called when the partition can no longer be written."""
        self.on_back: Callable[[], None] = lambda: None
        """Called when it can be written again."""
        self.on_refused: Callable[[], None] = lambda: None
        """Called when writes were refused for lack of space, with all that follow them, while others may have
        succeeded.
        """
        self.observe: Callable[[float], None] = lambda seconds: None
        """Receives the duration of each batch in seconds."""
        self.undo: Callable[[port.Write], port.Write | None] = lambda write: None
        """Returns the write that reverts one that may be stored although its caller was told that it is
        not.
        """
        self._has_entered = False
        self._valid_until = float("inf") if not self.lease else float("-inf")
        self._in_doubt: port.WriteBatch | None = None
        self._refused: list[port.Write] = []
        self._full: StoreFullError | None = None
        """Why writes of the current batch were refused."""
        self._turn = asyncio.Lock()
        self.batches = asyncio.Lock()
        """While a caller holds it, no batch is written, and every stored write has been `applied`."""
        self._tasks = Tasks()
        self._is_closing = False
        self._is_fenced = False
        self._committer: GroupCommitter[port.Write, Writes] = GroupCommitter(
            lambda writes, size: writes,
            self._start_commit,
            clock=self.clock,
            observe=lambda seconds: self.observe(seconds),
            failed=self._fail,
        )
        self.room = self.keeper.room

    # --- reading

    async def page(
        self, start: bytes, end: bytes, *, rows: int = port.PAGE_ROWS, values: bool = True
    ) -> port.KeyPage:
        ask = self.keeper.page
        return await self._asked(lambda: ask(start, end, rows=rows, values=values))

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._asked(lambda: self.keeper.get(keys))

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        return await self._asked(lambda: self.keeper.last_key(start, end))

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Send a request to the store by calling `ask`, and repeat it for a limited time after a lost
        connection.
        """
        pauses = self._pauses(self.clock.monotonic() + self.patience)
        while True:
            try:
                return await ask()
            except contract.StoreLostError:
                if (pause := next(pauses, None)) is None:
                    raise
            await asyncio.sleep(pause)

    def _pauses(self, until: float) -> Iterator[float]:
        """Yield increasing retry delays in seconds, as long as they end before `until`."""
        pause = FIRST_PAUSE
        while self.clock.monotonic() + pause <= until and not self._is_closing:
            yield pause
            pause = min(2 * pause, LONGEST_PAUSE)

    # --- writing

    def write(
        self, write: port.Write, *, lazy: bool = False, applied: Callable[[], None] | None = None
    ) -> asyncio.Future[None]:
        """Write changes to the partition durably and atomically. The future need not be awaited. It raises
        StoreFullError (nothing was written), FencedError, and StoreError, after which the owner must read the
        stored state once `on_back` was called.

        With `lazy` the write may wait for others. `applied` is called on the event loop when the write is
        durable, in the order of writes, even if the caller no longer waits.
        """
        return self._committer.submit(write, size=write.check(), lazy=lazy, applied=applied)

    def stage(self, write: port.Write) -> asyncio.Future[None]:
        """Store large values of new keys before the write that refers to them. They exist after the next
        durable write.
        """
        if not isinstance(self.keeper, port.StagingKeeper):
            return self.write(write)
        write.check()
        rows = {key: value for key, value in write.changes.items() if value is not None}
        return self._tasks.start(self.keeper.stage(rows))

    def _start_commit(self, writes: Writes) -> None:
        async def run() -> None:
            started = self.clock.monotonic()
            try:
                await self._commit(writes)
            except BaseException as error:  # noqa: BLE001 - whatever it is, the submitters have to learn of it
                self._committer.written(JobFailure(error))
            else:
                self._committer.written(self.clock.monotonic() - started)
            if full := self._full:
                # The submissions that wait were computed from the refused ones.
                self._full = None
                self._committer.refuse_pending(full)
                self.on_refused()

        self._committing = asyncio.get_running_loop().create_task(run())

    async def _commit(self, writes: Writes) -> None:
        try:
            await self._make_durable(port.merged([each.ops for each in writes]))
        except StoreError as error:
            if not isinstance(error, StoreFullError) or self._in_doubt is not None:
                self._refused += [each.ops for each in writes]
                raise
            frees = [each for each in writes if each.ops.makes_room]
            is_last = len(frees) == len(writes)
            for each in writes:
                if is_last or not each.ops.makes_room:
                    refuse(each.done, error)
                    each.applied = None
            self._full = error
            if frees and not is_last:
                await self._commit(frees)

    async def _make_durable(self, write: port.Write) -> None:
        is_first = True
        async with self.batches:
            while True:
                position = port.Position(self.seen.epoch, self.seen.last.number + 1)
                batch = port.WriteBatch(position, write)
                try:
                    await self.keeper.apply(batch)
                except port.FencedError:
                    raise
                except StoreError as error:
                    self._in_doubt = batch
                    if await self._ask(error):
                        return
                    if isinstance(error, StoreFullError) or not is_first:
                        raise
                    is_first = False
                else:
                    self._note(self.seen._replace(last=position))
                    return

    async def _ask(self, error: StoreError) -> bool:
        """Return whether the batch whose write failed is stored nevertheless. Raises StoreError if that
        cannot be determined now.
        """
        _log.warning("a batch was not confirmed (%s); checking whether it was stored", error)
        pauses = self._pauses(self.clock.monotonic() + self.patience)
        while True:
            try:
                return await self._enter_again()
            except (port.FencedError, port.OlderStateError, port.WrongStoreError):
                raise
            except StoreError as refusal:
                if (pause := next(pauses, None)) is None:
                    kind = StoreFullError if isinstance(error, StoreFullError) else StoreError
                    raise kind(f"it is unknown whether the batch was stored: {refusal}") from error
            await asyncio.sleep(pause)

    # --- entering

    async def enter(self) -> None:
        """Become the partition's writer and start to renew the lease. Raises StoreError."""
        async with self._turn:
            await self._enter()
        if self.lease:
            self._tasks.start(self._beat())

    async def _enter(self) -> port.PartitionState:
        asked_at = self.clock.boottime()
        judge(self.seen, await self.keeper.look())
        try:
            # The time in a new mark lets an operator tell two marks apart.
            when = datetime.fromtimestamp(self.clock.now(), UTC).isoformat(timespec="microseconds")
            state = await self.keeper.enter(self.seen.writer, mark=f"{when} {self.seen.writer}")
        except port.NodeTakenError as error:
            if self._has_entered:
                raise port.FencedError(f"another writer owns the partition: {error}") from error
            raise
        judge(self.seen, state)
        if self.lease:
            self._valid_until = asked_at + self.lease
        if self._in_doubt is None:
            if self._has_entered and state.last != self.seen.last:
                raise port.FencedError(
                    f"another writer has written to the partition: {state.last} follows {self.seen.last}"
                )
            self._note(state)
        self._has_entered = True
        return state

    async def _enter_again(self) -> bool:
        """Become the partition's writer in a new epoch, and return whether the unconfirmed batch is durable.
        Afterwards no batch is unconfirmed.
        """
        async with self._turn:
            state = await self._enter()
            batch = self._in_doubt
            if batch is None:
                return False
            if state.last not in (batch.position, self.seen.last):
                raise port.FencedError(
                    f"another writer has written to the partition: {state.last} is not {batch.position}"
                )
            self._in_doubt = None
            self._note(state)
            return state.last == batch.position

    def _note(self, seen: port.PartitionState) -> None:
        self.seen = seen
        if self.seen_file is not None:
            self.seen_file.note(seen)

    # --- the lease

    def is_held(self) -> bool:
        """Return whether the lease is still valid, so that no other writer can have taken over the
        partition.
        """
        return self.clock.boottime() < self._valid_until

    def check(self) -> None:
        """Raise ClaimLostError if the lease has expired, because another writer may have taken over the
        partition.
        """
        if not self.is_held():
            raise contract.ClaimLostError("the lease of this relay was not renewed in time")

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.lease / BEATS)
            async with self._turn:
                asked_at = self.clock.boottime()
                try:
                    await self.keeper.renew()
                except port.FencedError as error:
                    self._valid_until = float("-inf")
                    self._fail(error)
                    return
                except StoreError as error:
                    _log.warning("the lease could not be renewed: %s", error)
                    # Without mail there is no other write that would detect that the store cannot be written.
                    self.write(port.Write(makes_room=True))
                else:
                    self._valid_until = asked_at + self.lease

    # --- failures

    def _fail(self, error: StoreError) -> None:
        if self._is_fenced:
            return
        _log.error("the partition cannot be written: %s", error)
        self._committer.refuse(error)
        self._is_fenced = isinstance(error, port.FencedError)
        if self._is_fenced:
            self._valid_until = float("-inf")
        elif not self._is_closing:
            self._tasks.start(self._come_back())
        self.on_failure(error)

    async def _come_back(self) -> None:
        said = ""
        for pause in self._pauses(float("inf")):
            await asyncio.sleep(pause)
            try:
                await self._enter_again()
                await self._take_back()
            except port.FencedError as error:
                self._fail(error)
                return
            except StoreError as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("the partition still cannot be written: %s", error)
            else:
                self._committer.resume()
                self.on_back()
                return

    async def _take_back(self) -> None:
        """Revert writes that were reported as failed but may be stored."""
        undo = [each for write in self._refused if (each := self.undo(write))]
        if undo:
            await self._make_durable(port.merged(undo))
        self._refused.clear()

    async def close(self) -> None:
        """Write all submissions, release the lease so that other nodes can take over, and close the
        partition.
        """
        if self._is_closing:
            return
        self._is_closing = True
        await self._committer.drain()
        self._committer.refuse(StoreError(contract.Unhealthy.CLOSED))
        await self._tasks.cancel()
        if self._refused and not self._is_fenced:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(self.patience):
                    await self._enter_again()
                    await self._take_back()
        if not self._is_fenced and self._in_doubt is None:
            with contextlib.suppress(StoreError):
                await self.keeper.leave()
        await self._release()

    async def abandon(self) -> None:
        """Close the partition as if the process had died: unwritten data is lost, and the lease is not
        released. The caller may be cancelled.
        """
        self._is_closing = True
        self._committer.refuse(StoreError(contract.Unhealthy.CLOSED))
        await completed(self._stop())

    async def _stop(self) -> None:
        await self._tasks.cancel()
        await self._release()

    async def _release(self) -> None:
        await self.keeper.close()
        if self.seen_file is not None:
            self.seen_file.close()


def judge(seen: port.PartitionState, state: port.PartitionState | None) -> None:
    """Check that a store was not replaced or restored from an older copy: its state must be the last one that
    this machine has seen, or a later one. Raises WrongStoreError or OlderStateError.
    """
    if not seen.mark:
        return
    mark = "" if state is None else state.mark
    if state is None or mark != seen.mark:
        found = f"its mark is {mark!r}" if mark else "it has no mark, like an empty store"
        raise port.WrongStoreError(
            "the store does not contain the queue that this machine last used "
            f"(mark {seen.mark!r}): {found}. Nothing was changed there. Restore its data, or connect to "
            "the right server. If the store was emptied on purpose, run zonerelay spool accept-empty on "
            "each machine that shares it"
        )
    last = state.last
    if state.epoch < seen.epoch or last.epoch < seen.last.epoch or last.number < seen.last.number:
        raise port.OlderStateError(
            f"the store contains an older state of the queue: its last batch is number {last.number} "
            f"(epoch {state.epoch}), but this machine has stored number {seen.last.number} "
            f"(epoch {seen.epoch}). It may be a former primary, or a truncated or restored file. Nothing "
            "was changed there. Restore the newer state, or connect to the right server. If that is not "
            "possible, run zonerelay spool accept-empty"
        )


async def open_partition(
    engine: port.Engine,
    node: int,
    *,
    clock: Clock,
    token: str = "",
    seen_file: SeenFile | None = None,
    wait: float = 0.0,
    patience: float = PATIENCE,
) -> Partition:
    """Become the writer of this node's own partition, or of the partition of a peer whose lease has expired.

    `token` identifies this process if there is no seen_file; by default it is a new one. While another
    process has the lease, this waits for up to `wait` seconds and then raises NodeTakenError. Raises
    StoreError, in which case nothing is left open.
    """
    partition = Partition(
        engine.keeper(node),
        lease=engine.lease,
        seen=port.PartitionState(token or uuid4().hex) if seen_file is None else seen_file.seen,
        seen_file=seen_file,
        clock=clock,
        patience=patience,
    )
    until = clock.monotonic() + wait
    try:
        while True:
            try:
                await partition.enter()
            except port.NodeTakenError:
                if clock.monotonic() >= until:
                    raise
                await asyncio.sleep(max(0.01, min(1.0, engine.lease / 8)))
            else:
                return partition
    except BaseException:
        await partition.abandon()
        raise
