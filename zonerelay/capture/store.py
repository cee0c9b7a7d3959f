"""Stores captured mail in one SQLite database next to the spool; all processes of a relay write to it.

`add` returns when the message is committed and synced, so its 250 or its outcome may follow. It raises
`CaptureFullError` while the file system has less free space than `[spool] min_free_space` requires; any other
failure of the file is a `CaptureError`, and the sender retries. The oldest messages are deleted when all
together exceed `max_size`, and each one when it is older than `keep`; messages are only deleted as a whole.
All functions block and may be called from any thread.

A search has Mailpit's syntax:

    from:@example.org to:bob subject:"your order" has:attachment is:unread after:2026-11-01 larger:1M -word

Everything given must match; `-` or `!` in front excludes. A word without a name is looked for in subject,
addresses, file names and text. Upper and lower case are one.
"""

import contextlib
import json
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec

from zonerelay.capture.parts import SNIPPET, MimeParts, take_apart
from zonerelay.config.settings import Settings, space_guard
from zonerelay.process.files import SideDatabase, closed_on_failure, in_words

DIRECTORY = "captured"
FILE = "captured.db"
LATEST = "latest"

VERSION = 1
BUSY = 30.0
OVERHEAD = 4096
"""Octets that a message takes beside its own, at a guess."""

_TABLES = f"""
PRAGMA auto_vacuum = FULL;
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS mail (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, at REAL NOT NULL,
    sender TEXT NOT NULL, recipients TEXT NOT NULL, size INTEGER NOT NULL, is_read INTEGER NOT NULL,
    message_id TEXT NOT NULL, from_ TEXT NOT NULL, to_ TEXT NOT NULL, cc TEXT NOT NULL, bcc TEXT NOT NULL,
    reply_to TEXT NOT NULL, subject TEXT NOT NULL, attachments INTEGER NOT NULL, inline INTEGER NOT NULL,
    tags TEXT NOT NULL, snippet TEXT NOT NULL, words TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS content (number INTEGER PRIMARY KEY, octets BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS total (messages INTEGER NOT NULL, octets INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON mail BEGIN
    UPDATE total SET messages = messages + 1, octets = octets + NEW.size + {OVERHEAD};
END;
CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON mail BEGIN
    UPDATE total SET messages = messages - 1, octets = octets - OLD.size - {OVERHEAD};
    DELETE FROM content WHERE number = OLD.number;
END;
PRAGMA user_version = {VERSION};
COMMIT;
"""  # noqa: S608 - two numbers
LONGEST = 10.0
"""Seconds of one search."""


class CaptureError(Exception):
    """An operation on the capture store failed; the text of the exception is for the operator."""


class CaptureFullError(CaptureError):
    """The message was not stored, because there is not enough free space now."""


class CaptureTooLargeError(CaptureError):
    """The message is larger than the capture store accepts."""


class CaptureRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the list of captured messages. Each person is a pair of name and address; `bcc` are the
    recipients that are not in any header field.
    """

    id: str
    at: float
    sender: str
    recipients: list[str]
    size: int
    is_read: bool
    message_id: str
    from_: list[tuple[str, str]]
    to_: list[tuple[str, str]]
    cc: list[tuple[str, str]]
    bcc: list[tuple[str, str]]
    reply_to: list[tuple[str, str]]
    subject: str
    attachments: int
    inline: int
    tags: list[str]
    snippet: str


_SUMMARY = ", ".join(CaptureRow.__struct_fields__)


class Totals(msgspec.Struct, frozen=True):
    """The numbers of captured and unread messages, and the bytes stored."""

    messages: int
    unread: int
    octets: int


def open_capture(settings: Settings, now: Callable[[], float]) -> "Capture":
    """Return the capture store of a relay. The file is created or opened on first use."""
    return Capture(
        settings.spool.path.parent / DIRECTORY / FILE,
        keep=settings.capture.keep,
        max_size=settings.capture.max_size,
        guard=space_guard(settings.spool),
        now=now,
    )


@dataclass(eq=False, repr=False)
class Capture:
    """The store of captured mail, an SQLite database. `guard` is the free space in bytes below which no
    message is stored; 0 means no limit.
    """

    file: Path
    _: KW_ONLY
    keep: float
    max_size: int
    guard: int
    now: Callable[[], float]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._database = SideDatabase(self.file, _open)

    def add(self, message_id: str, sender: str, recipients: Sequence[str], octets: bytes) -> None:
        """Store a captured message. If one with this id exists, the recipients are added to it. Raise
        CaptureError if that fails.
        """
        size = len(octets)
        if size + OVERHEAD > self.max_size:
            raise CaptureTooLargeError(
                f"message of {size} bytes exceeds [capture] max_size ({self.max_size})"
            )
        parts = take_apart(octets)
        with self._writing() as database:
            self._check_space(size)
            found = database.execute("SELECT recipients FROM mail WHERE id = ?", (message_id,)).fetchone()
            if found is not None:
                recipients = list(dict.fromkeys([*json.loads(found[0]), *recipients]))
                values = (_encode(recipients), _encode(_unnamed(parts, recipients)), message_id)
                database.execute("UPDATE mail SET recipients = ?, bcc = ? WHERE id = ?", values)
                return
            self._make_room(database, size)
            row = self._row(message_id, sender, recipients, size, parts)
            marks = ", ".join("?" * len(row))
            added = database.execute(f"INSERT INTO mail ({_SUMMARY}, words) VALUES ({marks})", row)  # noqa: S608
            database.execute("INSERT INTO content VALUES (?, ?)", (added.lastrowid, octets))

    def _row(
        self, message_id: str, sender: str, recipients: Sequence[str], size: int, parts: MimeParts
    ) -> tuple[object, ...]:
        bcc = _unnamed(parts, recipients)
        words = " ".join([parts.words(), sender, *(address for _, address in bcc)]).lower()
        row = (
            message_id, self.now(), sender, _encode(list(recipients)), size, 0,
            parts.header("message-id").strip("<> "),
            *(_encode(parts.people(name)) for name in ("from", "to", "cc")),
            _encode(bcc), _encode(parts.people("reply-to")), parts.header("subject"),
            len(parts.attachments), len(parts.inline), _encode(parts.tags),
            " ".join(parts.plain().split())[:SNIPPET], words,
        )  # fmt: skip
        return tuple(_storable(each) if isinstance(each, str) else each for each in row)

    def _make_room(self, database: sqlite3.Connection, size: int) -> None:
        self._forget_old(database)
        over = database.execute("SELECT octets FROM total").fetchone()[0] + size + OVERHEAD - self.max_size
        rows = database.execute("SELECT number, size FROM mail ORDER BY number") if over > 0 else ()
        going = list[tuple[int]]()
        for number, octets in rows:
            if over <= 0:
                break
            going.append((number,))
            over -= octets + OVERHEAD
        database.executemany("DELETE FROM mail WHERE number = ?", going)

    def _forget_old(self, database: sqlite3.Connection) -> None:
        database.execute("DELETE FROM mail WHERE at < ?", (self.now() - self.keep,))

    def expire(self) -> None:
        """Delete captured messages that are older than `keep`. Raise CaptureError if that fails."""
        if self.file.exists():
            with self._writing() as database:
                self._forget_old(database)

    # --- reading and changing ---------------------------------------------------------------------------

    def find(
        self, query: str = "", *, start: int = 0, limit: int = 50, tz: str = ""
    ) -> tuple[list[CaptureRow], int, int]:
        """Search for messages, and return a page of them (newest first), the number of matches and of unread
        ones. Raise SearchError or CaptureError if that fails.
        """
        where, values = condition(query, tz)
        where, values = f"{where} AND at >= ?", [*values, self.now() - self.keep]
        with self._reading() as database, _in_time(database):
            rows = database.execute(
                f"SELECT {_SUMMARY} FROM mail WHERE {where} ORDER BY number DESC LIMIT ? OFFSET ?",  # noqa: S608
                (*values, limit, start),
            ).fetchall()
            count = f"SELECT count(*), count(*) FILTER (WHERE NOT is_read) FROM mail WHERE {where}"  # noqa: S608
            matched, unread = database.execute(count, values).fetchone()
        return [_summary(row) for row in rows], matched, unread

    def totals(self) -> Totals:
        """Return the numbers of stored and unread messages, and their size. Raise CaptureError if that
        fails.
        """
        with self._reading() as database:
            messages, octets = database.execute("SELECT messages, octets FROM total").fetchone()
            unread = database.execute("SELECT count(*) FROM mail WHERE NOT is_read").fetchone()[0]
        return Totals(messages, unread, octets)

    def tags(self) -> dict[str, int]:
        """Return the number of messages with each tag. Raise CaptureError if that fails."""
        with self._reading() as database:
            found = database.execute(
                "SELECT value, count(*) FROM mail, json_each(tags) GROUP BY value ORDER BY value LIMIT 1000"
            )
            return dict(found.fetchall())

    def read(
        self, message_id: str, *, mark: bool = True, query: str = "", tz: str = ""
    ) -> tuple[CaptureRow, bytes] | None:
        """Return a captured message, or `None` if it does not exist; `LATEST` is the newest one that the
        query finds. With `mark`, mark it as read.

        Raise SearchError or CaptureError if that fails.
        """
        where, values = condition(query, tz) if message_id == LATEST else ("id = ?", [message_id])
        which = f"AND {where} ORDER BY number DESC LIMIT 1"
        with self._writing() as database, _in_time(database):
            values = [self.now() - self.keep, *values]
            row = database.execute(
                f"SELECT {_SUMMARY}, (SELECT octets FROM content WHERE number = mail.number) "  # noqa: S608
                f"FROM mail WHERE at >= ? {which}",
                values,
            ).fetchone()
            if row is None:
                return None
            if mark:
                database.execute("UPDATE mail SET is_read = 1 WHERE id = ? AND NOT is_read", (row[0],))
        return _summary(row[:-1]), row[-1]

    def tag(self, tags: Sequence[str], ids: Sequence[str]) -> None:
        """Replace the tags of these captured messages. Raise CaptureError if that fails."""
        self._change("UPDATE mail SET tags = ?", (_encode(list(dict.fromkeys(tags))),), ids, "", "")

    def rename_tag(self, old: str, new: str) -> int:
        """Rename a tag, or remove it if `new` is empty. Return the number of messages. Raise CaptureError if
        that fails.
        """
        renamed = "SELECT CASE value WHEN :old THEN :new ELSE value END AS tag FROM json_each(mail.tags)"
        with self._writing() as database:
            return database.execute(
                f"UPDATE mail SET tags = (SELECT json_group_array(DISTINCT tag) FROM ({renamed}) "  # noqa: S608
                "WHERE tag <> '') WHERE EXISTS (SELECT * FROM json_each(mail.tags) WHERE value = :old)",
                {"old": old, "new": new},
            ).rowcount

    def mark(self, read: bool, *, ids: Sequence[str] | None = None, query: str = "", tz: str = "") -> None:
        """Mark messages as read or unread, either all that match the query or those with these ids. Raise
        SearchError or CaptureError if that fails.
        """
        self._change("UPDATE mail SET is_read = ?", (int(read),), ids, query, tz)

    def delete(self, *, ids: Sequence[str] | None = None, query: str = "", tz: str = "") -> int:
        """Delete all messages that match the query, or those with these ids, and return their number. Raise
        SearchError or CaptureError if that fails.
        """
        return self._change("DELETE FROM mail", (), ids, query, tz)

    def _change(
        self, statement: str, values: tuple[object, ...], ids: Sequence[str] | None, query: str, tz: str
    ) -> int:
        where, wanted = condition(query, tz)
        with self._writing() as database:
            if ids is None:
                return database.execute(f"{statement} WHERE {where}", (*values, *wanted)).rowcount
            return database.executemany(
                f"{statement} WHERE id = ?", [(*values, each) for each in ids]
            ).rowcount

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # --- the file ---------------------------------------------------------------------------------------

    def _check_space(self, size: int) -> None:
        if not self.guard:
            return
        found = os.statvfs(self.file.parent)
        if found.f_bavail * found.f_frsize < self.guard + 2 * size:  # once in SQLite's log, once in the file
            raise CaptureFullError("the disk of captured mail is nearly full ([capture] min_free_space)")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._reading() as database, database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._database.opened()
            except (sqlite3.Error, OSError) as error:
                full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
                text = f"{self.file}: {in_words(error)}"
                raise (CaptureFullError if full else CaptureError)(text) from error


@contextlib.contextmanager
def _in_time(database: sqlite3.Connection) -> Iterator[None]:
    """Interrupt SQL statements in the block that still run after `LONGEST` seconds."""
    until = time.monotonic() + LONGEST

    def is_late() -> bool:
        return time.monotonic() > until

    database.set_progress_handler(is_late, 1000)  # instructions between two checks
    try:
        yield
    except sqlite3.OperationalError as error:
        if is_late():
            raise CaptureError(
                f"the search was aborted after {LONGEST:g} s; use a narrower search"
            ) from error
        raise
    finally:
        database.set_progress_handler(None, 0)


def _open(file: Path) -> sqlite3.Connection:
    new = sqlite3.connect(file, timeout=BUSY, isolation_level=None, check_same_thread=False)
    with closed_on_failure(new) as database:
        found = int(database.execute("PRAGMA user_version").fetchone()[0])
        if found > VERSION:
            raise sqlite3.DatabaseError(f"unsupported format {found}; this release supports {VERSION}")
        if not found:
            database.executescript(_TABLES)  # another process may have been first
        # A commit is on disk when it returns.
        database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")
        database.executescript("PRAGMA journal_size_limit = 16000000; PRAGMA case_sensitive_like = OFF;")
    return database


def _summary(row: Sequence[object]) -> CaptureRow:
    known = dict(zip(CaptureRow.__struct_fields__, row, strict=True))
    for name in ("recipients", "from_", "to_", "cc", "bcc", "reply_to", "tags"):
        known[name] = json.loads(str(known[name]))
    return msgspec.convert(known, CaptureRow, strict=False)


def _unnamed(parts: MimeParts, recipients: Sequence[str]) -> list[tuple[str, str]]:
    named = {address.lower() for name in ("to", "cc") for _, address in parts.people(name)}
    bcc = [each for each in parts.people("bcc") if each[1].lower() not in named]
    named |= {address.lower() for _, address in bcc}
    return [*bcc, *(("", each) for each in recipients if each.lower() not in named)]


def _encode(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _storable(text: str) -> str:
    """Replace characters that SQLite cannot store or process: unpaired surrogates, and NUL, which ends a text
    for some functions.
    """
    return re.sub("[\ud800-\udfff\0]", "\ufffd", text)


# --- searches -----------------------------------------------------------------------------------------------

MAX_QUERY = 1000

_TERM = re.compile(r'([-!]?)(?:([a-z-]+):)?("[^"]*"|\S+)', re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([km])b?|b)?", re.IGNORECASE)
_COLUMNS = {
    "to": "to_", "from": "from_", "cc": "cc", "bcc": "bcc", "reply-to": "reply_to", "subject": "subject",
    "message-id": "message_id", "tag": "tags",
}  # fmt: skip
_ADDRESSED = ("to_", "from_", "cc", "bcc", "reply_to")
_FLAGS = {
    "is:read": "is_read", "is:unread": "NOT is_read", "is:tagged": "tags <> '[]'",
    "has:attachment": "attachments > 0", "has:attachments": "attachments > 0",
    "has:inline": "inline > 0", "has:inlines": "inline > 0",
}  # fmt: skip


class SearchError(ValueError):
    """The text is not a valid search query; the message of the exception explains the syntax."""


def condition(query: str, tz: str = "") -> tuple[str, list[object]]:
    """Return the SQL condition for a search query, with its parameters. Raise SearchError if the query is not
    valid.
    """
    if len(query) > MAX_QUERY:
        raise SearchError(f"a search may have at most {MAX_QUERY} characters")
    parts, values = ["1"], list[object]()
    for exclude, name, text in _TERM.findall(query):
        value = text.strip('"')
        if not value:
            continue
        part, given = _term(name.lower(), value, f"{name}:{text}" if name else value, tz)
        parts.append(f"NOT ({part})" if exclude else part)
        values += given
    return " AND ".join(parts), values


def _term(name: str, value: str, whole: str, tz: str) -> tuple[str, list[object]]:
    if (flag := _FLAGS.get(f"{name}:{value.lower()}")) is not None:
        return flag, []
    if name in _COLUMNS:
        return _like(_COLUMNS[name], value)
    if name == "addressed":
        return " OR ".join(_like(each, "")[0] for each in _ADDRESSED), [_pattern(value)] * len(_ADDRESSED)
    if name in ("after", "before"):
        return ("at >= ?" if name == "after" else "at <= ?"), [_time(value, tz)]
    if name in ("larger", "smaller") and (found := _SIZE.fullmatch(value)):
        unit = {"k": 1024, "m": 1024 * 1024}.get((found[2] or "").lower(), 1)
        return ("size > ?" if name == "larger" else "size < ?"), [float(found[1]) * unit]
    return _like("words", whole.lower())


def _like(column: str, value: str) -> tuple[str, list[object]]:
    return rf"{column} LIKE ? ESCAPE '\'", [_pattern(value)]


def _pattern(value: str) -> str:
    return "%{}%".format(re.sub(r"([\\%_])", r"\\\1", _storable(value)))


def _time(value: str, tz: str) -> float:
    try:
        zone: tzinfo = ZoneInfo(tz) if tz else UTC
    except (ValueError, OSError, KeyError) as error:
        raise SearchError(f"{tz} is not a time zone; expected a name such as Europe/Berlin") from error
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()
    except (ValueError, OverflowError) as error:
        raise SearchError(f'{value} is not a date; expected "2026-11-25" or "2026-11-25T18:00:00"') from error
