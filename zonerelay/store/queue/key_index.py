"""Indexes, in a SQLite file, the idempotency keys in the spools of one machine's workers.

The spools are authoritative, so nothing in the index is synced. It belongs to one run of the relay. Each run
creates a new index, and so does a worker that finds the file removed, replaced or damaged. Then each worker
publishes the keys of its own spool. Until all have done so, submissions with a key raise InProgressError. A
row is pending from before the write of its message until the message is durable. The row's `worker` settles
it; after a crash it does so when it starts. The first worker moves the keys of removed spools to its own.

On failure: StoreError. One thread executes all operations in the order of the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from msgspec.structs import astuple

from zonerelay.model.envelope import MessageId
from zonerelay.process.files import SideDatabase, closed_on_failure, in_words, is_damage
from zonerelay.process.tasks import Tasks
from zonerelay.process.threads import STORE
from zonerelay.store import contract
from zonerelay.store.context import SiblingWorkers
from zonerelay.store.contract import KeepKeys, KeyPages, KeyReservation, StoredKey
from zonerelay.store.directories import ReaderThreads

if TYPE_CHECKING:
    import sqlite3

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LOOK = 1.0
"""Seconds between two checks whether the register still has the worker's keys."""
PAGE = 500
"""The number of keys that are taken over at once."""
BUSY = 5.0
"""Seconds that a statement waits for the statement of another worker."""

_log = logging.getLogger("zonerelay.store")

_TABLES = """
CREATE TABLE IF NOT EXISTS kept (
    identity TEXT PRIMARY KEY, message_id TEXT, digest TEXT, until REAL, answer TEXT,
    worker INTEGER, pending INTEGER
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS expiry ON kept (until);
CREATE INDEX IF NOT EXISTS open ON kept (worker) WHERE pending;
CREATE TABLE IF NOT EXISTS published (worker INTEGER PRIMARY KEY);
"""


class KeyIndex:
    """One worker's view of the shared index of idempotency keys."""

    def __init__(self, siblings: SiblingWorkers) -> None:
        self.worker = siblings.worker
        self._all = siblings.all
        self._directory = siblings.directory / siblings.run
        self._file = self._directory / "register.db"
        self.problem = ""
        self._database = SideDatabase(self._file, self._connect)
        self._thread = ReaderThreads(self._database, "once-register")
        self._complete: sqlite3.Connection | None = None
        """The database in which all workers have published."""
        self._tasks = Tasks()

    async def _run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a method of this object in the thread that uses the index file."""
        import sqlite3  # noqa: PLC0415 - a relay without keys does without

        try:
            found = await self._thread.run(function, *args)
        except (sqlite3.Error, OSError) as error:
            self.problem = f"the store of idempotency keys {self._file} is unusable: {in_words(error)}"
            if is_damage(error):
                await self._thread.run(self._begin_anew)
                raise contract.InProgressError(self.problem) from error
            raise contract.StoreError(self.problem) from error
        self.problem = ""
        return found

    def start(self, page: KeyPages, settle: contract.SettleKey, keep: KeepKeys) -> None:
        self._tasks.start(self._keep_published(page, settle, keep))

    async def _keep_published(self, page: KeyPages, settle: contract.SettleKey, keep: KeepKeys) -> None:
        """Publish the idempotency keys of this spool at the start, and again whenever the index file was
        recreated.
        """
        last_error, is_first = "", True
        while True:
            try:
                if is_first and self.worker == min(self._all):
                    await self._take_over(keep)
                is_published = self.worker in await self._run(self._published)
                if is_first or not is_published:
                    for identity, message_id in await self._run(self._pending):
                        await settle(identity, message_id)
                if not is_published:
                    await self._publish(page)
                last_error, is_first = "", False
            except contract.StoreError as error:
                if str(error) != last_error:
                    last_error = str(error)
                    _log.warning(
                        "the idempotency keys of this worker cannot be sent to the other workers, so messages"
                        " with keys are rejected temporarily: %s",
                        error,
                    )
            await asyncio.sleep(LOOK)

    async def _take_over(self, keep: KeepKeys) -> None:
        """Move the keys of removed spools from the index files of earlier runs to this worker's spool. These
        keys are stored nowhere else.
        """
        for old in await self._run(self._earlier):
            last = ""
            while keys := await self._run(self._left_behind, old, last):
                await keep(keys)
                last = keys[-1][0]
            await self._run(forget_registers, old)

    async def _publish(self, page: KeyPages) -> None:
        after = ""
        while keys := await page(after):
            await self._run(self._add, keys)
            after = max(identity for identity, _ in keys)
        await self._run(self._mark_published)

    async def close(self) -> None:
        await self._tasks.cancel()
        await STORE.run(self._end)

    async def reserve(
        self, once: contract.IdempotencyKey, message_id: MessageId, now: float
    ) -> KeyReservation | None:
        return await self._run(self._reserve, once, message_id, now)

    async def settle(self, identity: str, message_id: MessageId, is_kept: bool) -> None:
        await self._run(self._settle, identity, message_id, is_kept)

    async def forget(self, now: float, most: int) -> None:
        await self._run(self._forget, now, most)

    # --- in the thread

    def _end(self) -> None:
        self._thread.stop()
        self._database.close()
        if self._all == {self.worker}:  # the next start needs no register, unless one could not be taken over
            forget_registers(self._directory)
            with contextlib.suppress(OSError):
                self._directory.parent.rmdir()

    def _mark_published(self) -> None:
        self._database.opened().execute("INSERT OR IGNORE INTO published VALUES (?)", (self.worker,))

    def _reserve(
        self, once: contract.IdempotencyKey, message_id: MessageId, now: float
    ) -> KeyReservation | None:
        self._check_complete()
        with self._exclusive() as database:
            found = database.execute(
                "SELECT message_id, digest, until, answer, worker, pending FROM kept WHERE identity = ?",
                (once.identity,),
            ).fetchone()
            if found is not None:
                *entry, worker, pending = found
                kept = StoredKey(*entry)
                if pending or kept.until > now:
                    return KeyReservation(kept, worker, bool(pending))
            row = (once.identity, *astuple(once.kept(message_id)), self.worker)
            database.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, 1)", row)
            return None

    def _settle(self, identity: str, message_id: MessageId, is_kept: bool) -> None:
        sql = "UPDATE kept SET pending = 0" if is_kept else "DELETE FROM kept"
        self._database.opened().execute(
            f"{sql} WHERE identity = ? AND message_id = ? AND pending", (identity, message_id)
        )

    def _pending(self) -> list[tuple[str, MessageId]]:
        return (
            self._database.opened()
            .execute("SELECT identity, message_id FROM kept WHERE worker = ? AND pending", (self.worker,))
            .fetchall()
        )

    def _add(self, keys: contract.KeptKeys) -> None:
        """Add idempotency keys of this worker's spool to the index. If two spools hold the same key, the one
        that expires later wins.
        """
        rows = [(name, *astuple(kept), self.worker) for name, kept in keys]
        with self._exclusive() as database:
            database.executemany(
                "INSERT INTO kept VALUES (?, ?, ?, ?, ?, ?, 0) ON CONFLICT (identity) DO UPDATE SET"
                " digest = excluded.digest, message_id = excluded.message_id, until = excluded.until,"
                " answer = excluded.answer, worker = excluded.worker"
                " WHERE NOT pending AND until < excluded.until",
                rows,
            )

    def _forget(self, now: float, most: int) -> None:
        self._database.opened().execute(
            "DELETE FROM kept WHERE identity IN"
            " (SELECT identity FROM kept WHERE until < ? AND NOT pending LIMIT ?)",
            (now, most),
        )

    def _published(self) -> set[int]:
        return {worker for (worker,) in self._database.opened().execute("SELECT worker FROM published")}

    def _check_complete(self) -> None:
        database = self._database.opened()
        if self._complete is database:
            return
        if missing := self._all - self._published():
            raise contract.InProgressError(
                f"worker {min(missing)} has not yet reported the keys in its spool"
            )
        self._complete = database

    def _begin_anew(self) -> None:
        """Delete the index file, and with it the list of workers that have published. The other workers
        notice that.
        """
        self._database.close()
        forget_registers(self._directory)

    def _earlier(self) -> list[Path]:
        """Return the directories of the index files of earlier runs."""
        self._database.opened()
        return [each for each in self._directory.parent.iterdir() if each != self._directory]

    def _left_behind(self, old: Path, last: str) -> list[tuple[str, StoredKey]]:
        """Return the next keys of removed spools in the index file of an earlier run, or none if the file is
        damaged.
        """
        import sqlite3  # noqa: PLC0415 - as above

        gone = f"worker NOT IN ({', '.join(map(str, self._all))}) AND NOT pending"
        rows = f"SELECT * FROM kept WHERE identity > ? AND {gone} ORDER BY identity LIMIT {PAGE}"  # noqa: S608
        with (
            contextlib.suppress(sqlite3.Error),
            contextlib.closing(sqlite3.connect(old / self._file.name)) as register,
        ):
            found = register.execute(rows, (last,)).fetchall()
            return [(identity, StoredKey(*entry)) for identity, *entry, _, _ in found]
        return []

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[sqlite3.Connection]:
        with self._database.opened() as database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    def _connect(self, file: Path) -> sqlite3.Connection:
        import sqlite3  # noqa: PLC0415 - as above

        new = sqlite3.connect(file, timeout=BUSY, isolation_level=None, check_same_thread=False)
        with closed_on_failure(new) as database:
            database.execute("PRAGMA journal_mode = WAL")
            # Its data need not survive a power cut.
            database.execute("PRAGMA synchronous = OFF")
            database.executescript(_TABLES)
        return database


def forget_registers(directory: Path) -> None:
    """Delete index files that no worker uses: those of earlier runs, or of a relay that now has only one
    worker.
    """
    import shutil  # noqa: PLC0415 - most relays have none

    shutil.rmtree(directory, ignore_errors=True)
