"""An engine of ordered keys in one SQLite file, for all processes of a machine.

A worked example for docs/develop/develop-engine.md: the standard library alone. It passes the contract suite
(`make test ARGS="tests/store/keys -k sqlite"`). The write-ahead log is synced with each commit
(`synchronous = FULL`), so a batch survives a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from zonerelay.model.clock import Clock
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys import port
from zonerelay.store.keys.port import (
    PAGE_ROWS,
    FencedError,
    KeyPage,
    PartitionState,
    PeerPartition,
    WriteBatch,
)

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds to wait for another process's transaction."""
TABLES = """
CREATE TABLE IF NOT EXISTS mark (one INTEGER PRIMARY KEY CHECK (one = 1), mark TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS partition (
    node INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, writer TEXT NOT NULL,
    batch_epoch INTEGER NOT NULL DEFAULT 0, batch INTEGER NOT NULL DEFAULT 0, expires REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS entry (
    node INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (node, key)
) WITHOUT ROWID;
"""
FENCE = "UPDATE partition SET batch_epoch = ?, batch = ? WHERE node = ? AND epoch = ? AND batch = ?"


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn an error of SQLite into one of the port, by its code and not by its text."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", None)
        kind = StoreFullError if code == sqlite3.SQLITE_FULL else StoreError
        raise kind(f"SQLite: {error}") from error


class SqliteEngine:
    """The partitions in one file. A lease goes by the machine's clock."""

    def __init__(self, path: Path, clock: Clock, *, lease: float) -> None:
        self.path = path
        self.clock = clock
        self.lease = lease

    def keeper(self, node: int) -> SqliteKeys:
        return SqliteKeys(self, node)

    async def peers(self) -> list[PeerPartition]:
        """All partitions, by a connection of a moment."""
        keys = self.keeper(0)
        try:
            return await keys.run(keys.peers)
        finally:
            await keys.close()

    async def close(self) -> None:
        """Nothing is open here."""


class SqliteKeys:
    """One partition: a connection in a thread of its own, made at its first use."""

    def __init__(self, engine: SqliteEngine, node: int) -> None:
        self._engine = engine
        self._node = node
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._connection: sqlite3.Connection | None = None
        self._epoch = 0

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Call the function in the thread. Raises StoreError."""

        def call() -> T:
            with translated():
                return function(self._connect())

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except RuntimeError as error:
            raise StoreError("the partition is closed") from error

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            made = sqlite3.connect(
                self._engine.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
            )
            made.execute("PRAGMA journal_mode = WAL")
            made.execute("PRAGMA synchronous = FULL")
            made.executescript(TABLES)
            self._connection = made
        return self._connection

    # --- reading: each call is one statement, and so one moment

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        def get(db: sqlite3.Connection) -> list[bytes | None]:
            asked = "SELECT value FROM entry WHERE node = ? AND key = ?"
            found = (db.execute(asked, (self._node, key)).fetchone() for key in keys)
            return [None if row is None else row[0] for row in found]

        return await self.run(get)

    async def page(self, start: bytes, end: bytes, *, rows: int = PAGE_ROWS, values: bool = True) -> KeyPage:
        asked = (
            "SELECT key, CASE WHEN ? THEN value ELSE x'' END FROM entry"
            " WHERE node = ? AND key >= ? AND key < ? ORDER BY key LIMIT ?"
        )
        wanted = (values, self._node, start, end, rows + 1)
        return await self.run(lambda db: port.page_of(db.execute(asked, wanted), rows))

    async def last_key(self, start: bytes, end: bytes) -> bytes | None:
        asked = "SELECT max(key) FROM entry WHERE node = ? AND key >= ? AND key < ?"
        found: tuple[bytes | None] = await self.run(
            lambda db: db.execute(asked, (self._node, start, end)).fetchone()
        )
        return found[0]

    def peers(self, db: sqlite3.Connection) -> list[PeerPartition]:
        now = self._engine.clock.now()
        rows = db.execute("SELECT node, epoch, writer, expires FROM partition ORDER BY node").fetchall()
        return [
            PeerPartition(node, epoch, writer, expires == 0, self._is_over(expires, now))
            for node, epoch, writer, expires in rows
        ]

    def _is_over(self, expires: float, now: float) -> bool:
        """A lease that ends later than one from now was written before the clock was set back."""
        return not now < expires <= now + self._engine.lease

    # --- entering

    async def look(self) -> PartitionState | None:
        return await self.run(self._look)

    def _look(self, db: sqlite3.Connection) -> PartitionState | None:
        row = db.execute(
            "SELECT ifnull(writer, ''), mark, ifnull(epoch, 0), ifnull(batch_epoch, 0), ifnull(batch, 0)"
            " FROM mark LEFT JOIN partition ON node = ?",
            (self._node,),
        ).fetchone()
        return row and PartitionState(row[0], row[1], row[2], port.Position(row[3], row[4]))

    async def enter(self, writer: str, *, mark: str) -> PartitionState:
        def enter(db: sqlite3.Connection) -> PartitionState:
            now = self._engine.clock.now()
            with transaction(db):
                db.execute("INSERT OR IGNORE INTO mark VALUES (1, ?)", (mark,))
                row = db.execute(
                    "SELECT writer, expires FROM partition WHERE node = ?", (self._node,)
                ).fetchone()
                if row is not None and row[0] != writer and not self._is_over(row[1], now):
                    raise port.NodeTakenError(f"another process is node {self._node}")
                db.execute(
                    "INSERT INTO partition (node, epoch, writer, expires) VALUES (?, 1, ?, ?) ON CONFLICT DO"
                    " UPDATE SET epoch = epoch + 1, writer = excluded.writer, expires = excluded.expires",
                    (self._node, writer, now + self._engine.lease),
                )
            state = self._look(db)
            assert state is not None
            self._epoch = state.epoch
            return state

        return await self.run(enter)

    # --- writing

    async def apply(self, batch: WriteBatch) -> None:
        node, (epoch, number) = self._node, batch.position
        changes = batch.write.changes.items()

        def apply(db: sqlite3.Connection) -> None:
            with transaction(db):
                # The fence: no row has another epoch, or another number before.
                self._expect(db.execute(FENCE, (epoch, number, node, epoch, number - 1)))
                gone = [(node, key) for key, value in changes if value is None]
                made = [(node, key, value) for key, value in changes if value is not None]
                db.executemany("DELETE FROM entry WHERE node = ? AND key = ?", gone)
                db.executemany("INSERT OR REPLACE INTO entry VALUES (?, ?, ?)", made)

        await self.run(apply)

    async def renew(self) -> None:
        await self._set_lease(self._engine.clock.now() + self._engine.lease)

    async def leave(self) -> None:
        await self._set_lease(0.0)

    async def _set_lease(self, expires: float) -> None:
        asked = "UPDATE partition SET expires = ? WHERE node = ? AND epoch = ?"
        await self.run(lambda db: self._expect(db.execute(asked, (expires, self._node, self._epoch))))

    def _expect(self, done: sqlite3.Cursor) -> None:
        if done.rowcount != 1:
            raise FencedError(f"another writer has node {self._node}")

    async def room(self) -> int | None:
        return None

    async def close(self) -> None:
        if self._connection is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """One transaction that may write, from its beginning on."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
