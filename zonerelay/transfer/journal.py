"""The journal of a migration: the messages that it has begun to move, and the phase of each.

It is a SQLite file next to the source, with a row for each message that was ever moved, and is removed when
the migration ends. So a message that was moved is never copied again, wherever the previous run was killed,
even if a source that has lost its last writes lists the message again.

Promise: `plan`, `copied` and `removed` are durable when they return. `awake` becomes durable with the next of
them, because waking a message twice is harmless. Only one process at a time has the file open. Failures are
TransferErrors with a message for the operator.
"""

from __future__ import annotations

import contextlib
import enum
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.model.message_id import MessageId
from zonerelay.transfer.stored import TransferError

_TABLES = """
CREATE TABLE IF NOT EXISTS migration (source TEXT, target TEXT, spools TEXT);
CREATE TABLE IF NOT EXISTS message (
    spool INTEGER, id TEXT, copy TEXT, digest TEXT, phase INTEGER, PRIMARY KEY (spool, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS unfinished ON message (spool, phase) WHERE phase < 4;
"""


class MovePhase(enum.IntEnum):
    """The phase of a message's move.

    PLANNED: the message may be held in the source, and may have been copied. COPIED: it may also have been
    removed from the source. REMOVED: it has left the source for good, and its copy may have been released.
    AWAKE: the move is complete.
    """

    PLANNED = 1
    COPIED = 2
    REMOVED = 3
    AWAKE = 4


@dataclass(frozen=True, slots=True)
class Move:
    """The move of one message: its id in the source, and the id of its copy. `digest` is the hash of the
    copied data, or "" if it is not known yet.
    """

    id: MessageId
    copy: MessageId
    digest: str = ""


class MigrationJournal:
    """The journal of one migration. Every method raises TransferError if the file cannot be used; `close`
    also raises OSError.
    """

    def __init__(self, path: Path, source: str, target: str) -> None:
        """Open the journal. `source` and `target` are the locations of the two queues: a journal of other
        queues is refused.
        """
        self.path = path
        self.is_over = False
        """The migration has ended: nothing is left to remember."""
        self.spools: tuple[int, ...] = ()
        """The spools of the target that copies go to; empty until `choose`."""
        with self._translated():
            self._database = sqlite3.connect(path, isolation_level=None, timeout=1.0)
            try:
                self._open(source, target)
            except BaseException:
                self._database.close()
                raise

    def _open(self, source: str, target: str) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        self._database.executescript(_TABLES)
        run("BEGIN IMMEDIATE")
        if (found := run("SELECT source, target, spools FROM migration").fetchone()) is None:
            run("INSERT INTO migration VALUES (?, ?, '[]')", (source, target))
            run("COMMIT")
        elif found[:2] != (source, target):
            raise TransferError(
                f"a migration from {found[0]} to {found[1]} is not finished ({self.path}); finish it first"
            )
        else:
            run("COMMIT")
            self.spools = tuple(msgspec.json.decode(found[2], type=list[int]))
        run("BEGIN")

    def choose(self, spools: Sequence[int]) -> None:
        """Choose the spools of the target permanently, because copies are later searched for in them."""
        self.spools = tuple(spools)
        with self._translated():
            self._database.execute(
                "UPDATE migration SET spools = ?", (msgspec.json.encode(self.spools).decode(),)
            )
            self._commit()

    def is_finished(self, spool: int) -> bool:
        """Return whether all moves that were begun are complete."""
        found = "SELECT 1 FROM message WHERE spool = ? AND phase < ? LIMIT 1"
        with self._translated():
            return self._database.execute(found, (spool, MovePhase.AWAKE)).fetchone() is None

    def unfinished(self, spool: int, phase: MovePhase, limit: int) -> list[Move]:
        with self._translated():
            rows = self._database.execute(
                "SELECT id, copy, digest FROM message WHERE spool = ? AND phase = ? ORDER BY id LIMIT ?",
                (spool, phase, limit),
            )
            return [Move(*row) for row in rows]

    def phases(self, spool: int, ids: Sequence[MessageId]) -> dict[MessageId, MovePhase]:
        """Return the phases of the messages that the journal knows."""
        marks = ", ".join("?" * len(ids))
        with self._translated():
            rows = self._database.execute(
                f"SELECT id, phase FROM message WHERE spool = ? AND id IN ({marks})",  # noqa: S608
                (spool, *ids),
            )
            return {MessageId(identity): MovePhase(phase) for identity, phase in rows}

    def plan(self, spool: int, moves: Iterable[Move]) -> None:
        rows = [(spool, each.id, each.copy, "", MovePhase.PLANNED) for each in moves]
        self._write("INSERT INTO message VALUES (?, ?, ?, ?, ?)", rows)

    def forget(self, spool: int, moves: Iterable[Move]) -> None:
        """Forget moves whose messages stay in the source and have no copy."""
        self._write("DELETE FROM message WHERE spool = ? AND id = ?", [(spool, each.id) for each in moves])

    def copied(self, spool: int, moves: Iterable[Move]) -> None:
        """Record copies with their digests; a move without a digest is planned again."""
        rows = [
            (each.digest, MovePhase.COPIED if each.digest else MovePhase.PLANNED, spool, each.id)
            for each in moves
        ]
        self._write("UPDATE message SET digest = ?, phase = ? WHERE spool = ? AND id = ?", rows)

    def removed(self, spool: int, moves: Iterable[Move]) -> None:
        self._advance(spool, moves, MovePhase.REMOVED)
        with self._translated():
            self._commit()

    def awake(self, spool: int, moves: Iterable[Move]) -> None:
        self._advance(spool, moves, MovePhase.AWAKE)

    def _advance(self, spool: int, moves: Iterable[Move], phase: MovePhase) -> None:
        rows = [(phase, spool, each.id) for each in moves]
        with self._translated():
            self._database.executemany("UPDATE message SET phase = ? WHERE spool = ? AND id = ?", rows)

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._translated():
            self._database.executemany(statement, rows)
            self._commit()

    def _commit(self) -> None:
        self._database.execute("COMMIT")
        self._database.execute("BEGIN")

    def close(self) -> None:
        with self._translated():
            if self._database.in_transaction:
                self._database.execute("COMMIT")
            is_begun = self._database.execute("SELECT 1 FROM message LIMIT 1").fetchone() is not None
            self._database.close()
        if self.is_over or not is_begun:
            durable.unlink(self.path)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            other = "; it is used by another `spool migrate`"
            is_busy = error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            raise TransferError(f"{self.path}: {error}{other if is_busy else ''}") from error
        except (sqlite3.Error, msgspec.MsgspecError) as error:
            raise TransferError(
                f"{self.path}, the journal of moved mail, is damaged: {error}. Without it mail could be "
                "sent twice; see docs/store/changing-engines.md"
            ) from error
