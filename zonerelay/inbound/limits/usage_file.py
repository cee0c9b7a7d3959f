"""Stores the usage records of users in an SQLite file next to the spool; all workers of the machine share it.

The usage survives restarts. It is not synced to disk for each message, so the last seconds may be missing
after a power failure. While SQLite cannot read the file, mail of users with quotas is refused temporarily.
"""

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from zonerelay.history.database import open_for_reading
from zonerelay.limits.authority import AuthorityError
from zonerelay.limits.shared import VersionedRecord
from zonerelay.model.clock import Clock
from zonerelay.process.files import SideDatabase, closed_on_failure, in_words, is_damage
from zonerelay.process.threads import USAGE

DIRECTORY = "usage"
FILE = "usage.db"
BUSY = 5.0
"""Seconds that a statement waits for a statement of another worker."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS usage (name TEXT PRIMARY KEY, stamp INTEGER, page BLOB, until REAL)"
    " WITHOUT ROWID"
)
_READ = "SELECT page, stamp FROM usage WHERE name = ?"
_REPLACE = (
    "INSERT INTO usage VALUES (?1, ?2 + 1, ?3, ?4) ON CONFLICT (name) DO UPDATE SET"
    " stamp = ?2 + 1, page = ?3, until = ?4 WHERE stamp = ?2"
)

T = TypeVar("T")


class UsageFile:
    """The SQLite file with the usage records of users."""

    def __init__(self, home: Path, clock: Clock, *, read_only: bool = False) -> None:
        self._file = home / DIRECTORY / FILE
        self.name = str(self._file)
        self._clock = clock
        connect = self._for_reading if read_only else self._for_writing
        self._database = SideDatabase(self._file, connect, lock=not read_only)

    async def read(self, zone: str) -> VersionedRecord:
        def read() -> VersionedRecord:
            found = self._database.opened().execute(_READ, (zone,)).fetchone()
            data, version = found or (None, 0)
            return VersionedRecord(data, version, self._clock.now())

        return await self._run(read)

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        row = (zone, record.version, data, record.now + ttl)
        return await self._run(lambda: self._database.opened().execute(_REPLACE, row).rowcount == 1)

    async def close(self) -> None:
        await USAGE.run(self._database.close)

    def _for_reading(self, file: Path) -> sqlite3.Connection:
        return open_for_reading(file, immutable=not os.access(file.parent, os.W_OK))

    def _for_writing(self, file: Path) -> sqlite3.Connection:
        new = sqlite3.connect(file, timeout=BUSY, isolation_level=None, check_same_thread=False)
        with closed_on_failure(new) as database:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(_TABLE)
            # Users who have not sent for a long time may no longer exist.
            database.execute("DELETE FROM usage WHERE until < ?", (self._clock.now(),))
        return database

    async def _run(self, function: Callable[[], T]) -> T:
        try:
            return await USAGE.run(function)
        except (sqlite3.Error, OSError) as error:
            what_to_do = "; move it away to restart counting from zero" if is_damage(error) else ""
            raise AuthorityError(f"{self._file}: {in_words(error)}{what_to_do}") from error
