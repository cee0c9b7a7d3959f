"""Defines the SQLite file with the history of one worker: its tables, its index, and its limits of age and
size. Blocks; used in threads.

Events are stored as JSON in blocks of at most `BLOCK`, because a row for each would cost more than everything
else. The index has a number for each address, message id and Message-ID of a block, in parts of `PART`
blocks: a part is small while it is written, so that a new entry costs the same however much is stored, and
old entries are dropped a part at a time. A number may stand for several values, so the reader checks the
events themselves.

`run` has a row for each time that a relay wrote the file, with the key of its pseudonyms; `gap` lists times
that are not covered, with the reason. All functions raise sqlite3.Error if the database fails.
"""

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from zonerelay import durable
from zonerelay.process.files import closed_on_failure

VERSION = 1
BLOCK = 64
"""Events in one row."""
PART = 256
"""Blocks."""
TOGETHER = 400
"""Rows in one statement: SQLite gives up the interpreter's lock once for each, and takes it again."""
BUSY = 30.0
"""Seconds for which another writer (`zonerelay log forget`) is waited for."""

INDEXED = ("id", "about", "sender", "recipient", "mailbox", "message-id", "user")
INDEXED_WORDS = ("to", "tags")
"""Fields that are found by their value, and those that are found by each of their words."""

MORE = "refused-more"
"""The event that counts refusals which have none of their own."""

SLACK = 3600.0
"""Seconds by which times may go back from one row to the next: a clock was set."""

CLEAR = "clear"
"""Instead of a fingerprint of the key: addresses are as they are."""

Field = str | int | float | bool | None
Event = tuple[float, str, Mapping[str, Field]]
"""Unix time, name, fields."""

_SCHEMA = f"""
BEGIN;
CREATE TABLE block (
    row INTEGER PRIMARY KEY, first REAL NOT NULL, last REAL NOT NULL, refused INTEGER NOT NULL,
    events TEXT NOT NULL
);
CREATE TABLE term (part INTEGER, number INTEGER, row INTEGER, PRIMARY KEY (part, number, row)) WITHOUT ROWID;
CREATE TABLE run (began REAL NOT NULL, ended REAL NOT NULL, stopped INTEGER NOT NULL, key TEXT NOT NULL);
CREATE TABLE gap (began REAL NOT NULL, ended REAL NOT NULL, why TEXT NOT NULL);
CREATE INDEX refused ON block (last) WHERE refused > 0;
PRAGMA user_version = {VERSION};
COMMIT;
"""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[tuple[float, str, dict[str, Field]]]).decode


def decode(block: str) -> list[tuple[float, str, dict[str, Field]]]:
    """Decode a block of events, as stored in the history. Raise sqlite3.DatabaseError if it is damaged."""
    try:
        return _decode(block)
    except ValueError as error:  # also that of msgspec
        raise sqlite3.DatabaseError(f"a block of events is damaged: {error}") from error


class VersionError(sqlite3.DatabaseError):
    """The history file was written by a later version of zonerelay."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open a history file for writing, creating it and its directory if necessary. Raise OSError if that
    fails.
    """
    durable.make_directory(path.parent)
    new = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
    with closed_on_failure(new) as database:
        # A commit is on disk when it returns: a power failure loses at most the last second.
        database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
        # The same page is written to the log again and again, and copied from there once, every 16 MB.
        database.executescript("PRAGMA wal_autocheckpoint = 4000; PRAGMA journal_size_limit = 16000000")
        if not _version(database):
            database.executescript(_SCHEMA)
    return database


def open_for_reading(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Open a history file for reading. With `immutable`, SQLite reads only the file itself, without its
    WAL.
    """
    mode = "mode=ro&immutable=1" if immutable else "mode=ro"
    new = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY)
    with closed_on_failure(new) as database:
        _version(database)
    return database


def _version(database: sqlite3.Connection) -> int:
    found = int(database.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise VersionError(f"unsupported format {found}; this release supports {VERSION}")
    return found


def number_of(value: str) -> int:
    """Return the index key of a value: the CRC-32 of the value in lower case."""
    return crc32(value.lower().encode("utf-8", "surrogatepass"))


def values_of(events: Sequence[Event]) -> set[str]:
    """Return the field values of these events by which a search can find them in the index."""
    found: set[Field] = set()
    for _, _, fields in events:
        get = fields.get
        for name in INDEXED:
            found.add(get(name))
        for name in INDEXED_WORDS:
            if words := get(name):
                found.update(str(words).split(" "))
    return {str(value) for value in found if value}


def insert(database: sqlite3.Connection, first: int, events: Sequence[Event]) -> int:
    """Store events as blocks, beginning with row `first`, and return the next free row. The caller
    commits.
    """
    blocks: list[Field] = []
    terms: list[int] = []
    row = first
    for start in range(0, len(events), BLOCK):
        some = events[start : start + BLOCK]
        refused = sum([int(str(fields["count"])) for _, name, fields in some if name == MORE])
        try:
            text = _encode(some).decode()
        except UnicodeEncodeError:  # unpaired surrogate
            text = json.dumps(some, ensure_ascii=False).encode("utf-8", "replace").decode()
        blocks += (row, some[0][0], some[-1][0], refused, text)
        for number in sorted(set(map(number_of, values_of(some)))):
            terms += (row // PART, number, row)
        row += 1
    _insert(database, "block", 5, blocks)
    _insert(database, "term", 3, terms)
    return row


def _insert(database: sqlite3.Connection, table: str, columns: int, values: Sequence[Field]) -> None:
    step = TOGETHER * columns
    for start in range(0, len(values), step):
        some = values[start : start + step]
        rows = ", ".join([f"({', '.join('?' * columns)})"] * (len(some) // columns))
        database.execute(f"INSERT INTO {table} VALUES {rows}", some)  # noqa: S608 - names of ours


def span(database: sqlite3.Connection) -> tuple[int, int]:
    """Return the row number of the first block, and one more than that of the last block."""
    ends = "SELECT coalesce((SELECT min(row) FROM block), 0), coalesce((SELECT max(row) FROM block), -1) + 1"
    low, high = database.execute(ends).fetchone()  # min and max in one SELECT would read all rows
    return int(low), int(high)


def first_row(database: sqlite3.Connection, since: float) -> int:
    """Return the first row that may have events after `since`; event times may be out of order by `SLACK`."""
    low, high = span(database)
    if since <= SLACK:
        return low
    while low < high:
        middle = (low + high) // 2
        row, last = database.execute(
            "SELECT row, last FROM block WHERE row >= ? ORDER BY row LIMIT 1", (middle,)
        ).fetchone()
        low, high = (row + 1, high) if last < since - SLACK else (low, middle)
    return int(low)


def rows_with(
    database: sqlite3.Connection, values: Iterable[str], since: float = 0.0, *, oldest_first: bool = False
) -> Iterator[int]:
    """Yield the row numbers of blocks that may have one of these values after `since`, newest first."""
    numbers = sorted({number_of(value) for value in values})
    first, last = first_row(database, since), span(database)[1] - 1
    query = (
        f"SELECT DISTINCT row FROM term WHERE part = ? AND number IN ({', '.join('?' * len(numbers))})"  # noqa: S608
        f" AND row >= ? ORDER BY row {'ASC' if oldest_first else 'DESC'}"
    )
    parts = range(first // PART, last // PART + 1)
    for part in parts if oldest_first else reversed(parts):
        for (row,) in database.execute(query, (part, *numbers, first)).fetchall():
            yield int(row)


def trim(database: sqlite3.Connection, before: float, most: int) -> bool:
    """Remove blocks older than `before`, or the oldest if the file exceeds `most` bytes; at most one index
    part per call. Return true if there may be more to remove.
    """
    first = database.execute("SELECT row, last FROM block ORDER BY row LIMIT 1").fetchone()
    if first is None:
        return False
    full = used(database) > most
    if not full and first[1] >= before:
        return False
    end = (first[0] // PART + 1) * PART
    if not full:
        young = "SELECT min(row) FROM block WHERE row < ? AND last >= ?"
        end = database.execute(young, (end, before)).fetchone()[0] or end
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("DELETE FROM block WHERE row < ?", (end,))
        database.execute("DELETE FROM term WHERE part < ?", (end // PART,))
        database.execute("DELETE FROM term WHERE part = ? AND row < ?", (end // PART, end))
        database.execute("DELETE FROM gap WHERE ended < ?", (before,))
        database.execute("DELETE FROM run WHERE ended < ?", (before,))
    return True


def used(database: sqlite3.Connection) -> int:
    """Return the size of the history file in bytes, without its free pages."""
    pages, free, size = (
        int(database.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def forget(database: sqlite3.Connection, values: Sequence[str], instead: str) -> int:
    """Replace these values by `instead` in all events, and return the number of replacements.

    The old values are overwritten with zeros on disk, too, once SQLite's log has been written to the file.
    """
    database.execute("PRAGMA secure_delete = ON")
    database.create_function("lower", 1, str.lower)  # SQLite's own function changes ASCII only
    # An address may be the end, or the beginning, of another one.
    some = "|".join(map(re.escape, values))
    found_in = re.compile(rf"(?<![\w.+-])(?:{some})(?![\w-]|\.\w)", re.IGNORECASE)
    patterns = [json.dumps(value, ensure_ascii=False)[1:-1].lower() for value in values]
    where = " OR ".join(["instr(lower(events), ?)"] * len(patterns))
    query = f"SELECT row, events FROM block WHERE row > ? AND ({where}) ORDER BY row LIMIT 100"  # noqa: S608
    changed, row = 0, 0
    while found := database.execute(query, (row, *patterns)).fetchall():
        with database:
            database.execute("BEGIN IMMEDIATE")
            for row, text in found:
                clean, count = _without(text, found_in, instead)
                changed += count
                database.execute("UPDATE block SET events = ? WHERE row = ?", (clean, row))
                for value in values:
                    place = (row // PART, number_of(value), row)
                    database.execute("DELETE FROM term WHERE part = ? AND number = ? AND row = ?", place)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return changed


def _without(text: str, found_in: re.Pattern[str], instead: str) -> tuple[str, int]:
    """Replace the matches in the field values of a block, and return the new block and their number. Field
    names and numbers are not changed, because a user name may be equal to one.
    """
    count = 0
    events = decode(text)
    for _, _, fields in events:
        for name, value in fields.items():
            if isinstance(value, str):
                fields[name], more = found_in.subn(lambda _: instead, value)
                count += more
    return _encode(events).decode(), count
