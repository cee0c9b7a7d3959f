"""Searches the histories of all workers of this machine, and reports the periods that they do not cover.

The reader never queries a running relay: it reads the files, which may not have the last second yet. A file
that cannot be read is a gap with a reason, never an error. So is a time for which the history was off, events
that were dropped, and addresses that were hashed with another key. Search values are hashed as in the
history; rows with plain addresses are found as well.
"""

import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from zonerelay.history.database import CLEAR, MORE, Field, decode, first_row, open_for_reading, rows_with
from zonerelay.history.writer import WAS_OFF, off_mark
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.envelope import is_message_id
from zonerelay.model.pattern import is_like
from zonerelay.telemetry.events.records import TraceStep
from zonerelay.telemetry.logs.redact import Redactor, SearchForms

T = TypeVar("T")

ATTEMPTS = ("delivered", "deferred", "bounced", "expired")
OUTCOMES = ("waiting", *ATTEMPTS, "dropped", "refused")
"""`waiting`: accepted, and no attempt is known."""
_ALONE = ("refused", "login-failed")
"""Events that are about no accepted message."""
_FINAL = ("delivered", "bounced", "expired", "dropped")
_RARE = ("deferred", "bounced", "expired", "dropped")
"""Outcomes that are looked for themselves where a sender has more than `_MANY` blocks of mail."""
_MANY = 500
_BLOCKS = 64
"""That stay decoded: mail of one sender is in neighbours."""

_LOOKS = 10_000
"""Instructions of SQLite between two looks at the time."""


class TooLongError(Exception):
    """The search in the history exceeded its time limit."""


class HistoryGap(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gap"):
    """A period that the history of a worker does not cover, in Unix seconds; `None` means an open end."""

    worker: int
    began: float | None = None
    ended: float | None = None
    why: str
    unsearchable: bool = False
    """The events are there, but are not found by address."""


class HistoryEntry(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="found"):
    """The outcome of a message for one recipient, or one refusal. Addresses are as in the history.

    `at` is the time of the last event, in Unix seconds; `outcome` is one of `OUTCOMES`. `header_id` is the
    Message-ID field.
    """

    at: float
    accepted: float | None = None
    message_id: str = ""
    outcome: str
    sender: str = ""
    recipient: str = ""
    client: str = ""
    user: str = ""
    header_id: str = ""
    zone: str = ""
    destination: str = ""
    host: str = ""
    attempts: int = 0
    reply: str = ""
    replies: tuple[str, ...] = ()


class HistoryRecord(msgspec.Struct, frozen=True):
    """One event, as stored in the history."""

    at: float
    name: str
    fields: Mapping[str, Field]

    def text(self, name: str) -> str:
        value = self.fields.get(name)
        return "" if value is None else str(value)


class SentMessage(msgspec.Struct, frozen=True):
    """An accepted message with the outcomes for its recipients."""

    accepted: HistoryRecord
    entries: list[HistoryEntry]

    @property
    def place(self) -> tuple[float, str]:
        """The sort key for chronological order."""
        return self.accepted.at, self.accepted.text("id")


def _records(events: str) -> list[HistoryRecord]:
    """Return the events of a block, with a separate event for each recipient of a shared result."""
    found = []
    for at, name, fields in decode(events):
        if name in ATTEMPTS and (to := fields.pop("to", None)):
            found += [HistoryRecord(at, name, {**fields, "recipient": each}) for each in str(to).split(" ")]
        else:
            found.append(HistoryRecord(at, name, fields))
    return found


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """The conditions of a search in the history. All given conditions must match. `any` is an address, a
    Message-ID, a message id, a user or a client. Texts match parts of a field, ignoring case; times are Unix
    seconds.
    """

    any: SearchForms | None = None
    sender: SearchForms | None = None
    recipient: SearchForms | None = None
    client: SearchForms | None = None
    user: SearchForms | None = None
    zone: str = ""
    destination: str = ""
    reply: str = ""
    outcome: str = ""
    since: float = 0.0
    until: float = float("inf")
    tag: str = ""
    before: tuple[float, str] = (float("inf"), "")
    """Time and id of the message before which others were accepted. Both are for `Histories.sent` alone."""

    @property
    def indexed(self) -> frozenset[str]:
        """The values to look up in the index, one of which every match has; empty to read all blocks."""
        return next(
            (form.exact for form in (self.any, self.recipient, self.sender) if form and form.exact),
            frozenset(),
        )

    def may_match(self, record: HistoryRecord) -> bool:
        """Return whether the message or the refusal of this event may match the search."""
        text = record.text
        if form := self.any or self.recipient or self.sender:
            names = ("sender", "recipient", "mailbox", "message-id", "user", "client", "id", "about")
            return any(form.matches(each) for each in (*map(text, names), *text("to").split(" ")))
        driving = self.reply or self.destination or self.zone
        return (
            self.reply.lower() in text("reply").lower()
            and (not self.destination or _names(self.destination, text("destination"), text("host")))
            and (not self.zone or text("zone") == self.zone)
            and (bool(driving) or self.client is None or self.client.matches(text("client")))
            and (bool(driving) or self.user is None or self.user.matches(text("user")))
        )

    def matches(self, entry: HistoryEntry) -> bool:
        about = (entry.sender, entry.recipient, entry.header_id, entry.message_id, entry.client, entry.user)
        replies = (entry.reply, *entry.replies)
        return (
            (self.any is None or any(map(self.any.matches, about)))
            and (self.sender is None or self.sender.matches(entry.sender))
            and (self.recipient is None or self.recipient.matches(entry.recipient))
            and (self.client is None or self.client.matches(entry.client))
            and (self.user is None or self.user.matches(entry.user))
            and (not self.zone or self.zone == entry.zone)
            and (not self.destination or _names(self.destination, entry.destination, entry.host))
            and (not self.reply or any(self.reply.lower() in each.lower() for each in replies))
            and (not self.outcome or self.outcome == entry.outcome)
            and self.since <= entry.at <= self.until
        )


def _names(wanted: str, *names: str) -> bool:
    return any(is_like(wanted, each) for each in names)


class _HistoryFile(msgspec.Struct):
    """The history file of one worker, open for reading."""

    worker: int
    database: sqlite3.Connection
    blocks: BoundedDict[int, Mapping[str, list[HistoryRecord]]]
    """What was read last, by the ids of messages."""

    def read(self, row: int) -> list[HistoryRecord]:
        found = self.database.execute("SELECT events FROM block WHERE row = ?", (row,)).fetchone()
        return [] if found is None else _records(found[0])

    def records(self, message_id: str, row: int) -> list[HistoryRecord]:
        if (block := self.blocks.get(row)) is None:
            block = self.blocks[row] = _by_message(self.read(row))
        return block.get(message_id, [])


def _by_message(records: Iterable[HistoryRecord]) -> Mapping[str, list[HistoryRecord]]:
    found: defaultdict[str, list[HistoryRecord]] = defaultdict(list)
    for record in records:
        for message_id in {record.text("id"), record.text("about")}:
            found[message_id].append(record)
    return dict(found)


@dataclass(slots=True)
class Histories:
    """The history files of all workers in a directory, open for reading; a context manager. `now` is the Unix
    time.
    """

    directory: Path
    redactor: Redactor | None
    now: float = field(default_factory=time.time)
    worker: int | None = None
    """Only the file of this worker."""
    longest: float | None = None
    """Seconds of reading; whatever reads longer raises TooLongError."""
    until: float = field(default=float("inf"), init=False)
    """On the clock of `time.monotonic`."""
    files: list[_HistoryFile] = field(default_factory=list)
    broken: list[HistoryGap] = field(default_factory=list)

    def __enter__(self) -> Self:
        if self.longest is not None:
            self.until = time.monotonic() + self.longest
        for path in sorted(self.directory.glob("[0-9][0-9]*.db")):
            if not path.stem.isdecimal():  # a copy by hand
                continue
            worker = int(path.stem)
            if self.worker not in (None, worker):
                continue
            try:
                database = open_for_reading(path)
                if self.longest is not None:  # a value other than zero interrupts the statement
                    database.set_progress_handler(self._is_late, _LOOKS)
                self.files.append(_HistoryFile(worker, database, BoundedDict(_BLOCKS)))
            except sqlite3.Error as error:
                self._is_broken(worker, error)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.database.close()

    @property
    def workers(self) -> list[int]:
        """The numbers of the workers whose history can be read."""
        return [file.worker for file in self.files]

    def find(self, query: Query, limit: int) -> tuple[list[HistoryEntry], bool]:
        """Search for messages and refusals: return the newest `limit` in chronological order, and whether
        there are more.
        """
        seen: set[str] = set()
        entries = self._of_each(lambda file: islice(self._entries(file, query, seen), limit + 1))
        found = sorted(entries, key=lambda entry: entry.at)
        return found[-limit:], len(found) > limit

    def records(self, message_id: str, *, until_final: bool = False) -> list[HistoryRecord]:
        """Return the events of a message in chronological order, or only those that determine its outcomes
        (`until_final`).
        """
        began = int(message_id[:11], 16) / 1000 if is_message_id(message_id) else 0.0
        found: list[HistoryRecord] = []
        for some in self._of_each(
            lambda file: (
                file.records(message_id, row)
                for row in rows_with(file.database, (message_id,), began, oldest_first=True)
            )
        ):
            self._in_time()
            found += some
            if until_final and _is_final(found):
                return found
        return sorted(found, key=lambda record: record.at)

    def sent(self, query: Query, limit: int) -> list[SentMessage]:
        """Return the newest accepted messages that match, at most `limit`, the newest first."""
        found = self._of_each(lambda file: islice(self._sent(file, query), limit))
        return sorted(found, key=lambda each: each.place, reverse=True)[:limit]

    def _sent(self, file: _HistoryFile, query: Query) -> Iterator[SentMessage]:
        tag, last = query.tag, min(query.before[0], query.until)
        forms = (SearchForms(frozenset({tag})) if tag else None, query.recipient, query.user)
        terms = next((each.exact for each in forms if each and each.exact), frozenset[str]())
        for record in _before(file, terms, last, query.since):
            self._in_time()
            message_id = record.text("id")
            if (
                record.name == "accepted"
                and (record.at, message_id) < query.before
                and query.since <= record.at <= query.until
                and (query.user is None or query.user.matches(record.text("user")))
                and (not tag or tag in record.text("tags").split(" "))
                and (
                    query.recipient is None or any(map(query.recipient.matches, record.text("to").split(" ")))
                )
            ):
                entries = [
                    each
                    for each in entries_of(message_id, self.records(message_id, until_final=True))
                    if each.outcome != "refused"
                ]
                if not query.outcome or any(each.outcome == query.outcome for each in entries):
                    yield SentMessage(record, entries)

    def since(self, since: float, until: float = float("inf")) -> Iterator[HistoryRecord]:
        """Yield all events of a period, in chronological order per worker."""
        query = "SELECT events FROM block WHERE last >= ? AND first <= ? ORDER BY row"
        return self._of_each(
            lambda file: (
                each
                for (text,) in file.database.execute(query, (since, until))
                for each in _records(text)
                if since <= each.at <= until
            )
        )

    def gaps(self, since: float, until: float) -> list[HistoryGap]:
        """Return the parts of a period that the histories do not cover, with the reasons."""
        found = list(self._of_each(lambda file: self._gaps_of(file, since, until)))
        return [*self.broken, *found]

    def refused_more(self, query: Query) -> int:
        """Return the number of refusals that were counted but not stored, in total or of the client in the
        query.
        """
        blocks = "SELECT events FROM block WHERE refused > 0 AND last BETWEEN ? AND ?"
        values = query.since, min(query.until, self.now)
        return sum(
            self._of_each(
                lambda file: (
                    self._refused_more_in(text, query) for (text,) in file.database.execute(blocks, values)
                )
            )
        )

    def _refused_more_in(self, events: str, query: Query) -> int:
        self._in_time()
        client = query.client
        return sum(
            int(str(fields.get("count", 0)))
            for at, name, fields in decode(events)
            if name == MORE and query.since <= at <= query.until
            if client is None or (whose := str(fields.get("client", ""))) == "others" or client.matches(whose)
        )

    def _entries(self, file: _HistoryFile, query: Query, seen: set[str]) -> Iterator[HistoryEntry]:
        for record in _candidates(file, query, self._in_time):
            self._in_time()
            if record.name in _ALONE:
                entries = [_refusal(record)]
            else:
                message_id = record.text("id")
                if not message_id or message_id in seen:
                    continue
                seen.add(message_id)
                entries = entries_of(message_id, self.records(message_id, until_final=True))
            yield from sorted((each for each in entries if query.matches(each)), key=lambda each: -each.at)

    def _gaps_of(self, file: _HistoryFile, since: float, until: float) -> Iterator[HistoryGap]:
        database, worker = file.database, file.worker
        oldest = database.execute("SELECT first FROM block ORDER BY row LIMIT 1").fetchone()
        run = database.execute("SELECT min(began) FROM run").fetchone()[0]
        first = min((each for each in (run, oldest and oldest[0]) if each is not None), default=None)
        if first is not None and since < first:
            yield HistoryGap(worker=worker, ended=first, why="no events of that time are stored")
        for start, end, why in database.execute(
            "SELECT began, ended, why FROM gap WHERE ended >= ? AND began <= ? ORDER BY began", (since, until)
        ):
            yield HistoryGap(worker=worker, began=start or None, ended=end, why=why)
        mine = "" if self.redactor is None else self.redactor.fingerprint
        for start, end, key in database.execute(
            "SELECT min(began), max(ended), key FROM run WHERE ended >= ? AND began <= ? GROUP BY key",
            (since, until),
        ):
            if key not in (CLEAR, mine):
                why = "addresses were hashed with another key and cannot be found by address"
                yield HistoryGap(worker=worker, began=start, ended=end, why=why, unsearchable=True)
        off = off_mark(self.directory / f"{worker:02d}.db")
        try:
            began = off.stat().st_mtime
        except FileNotFoundError:  # a relay that starts with its history removes it
            return
        if began <= until:
            yield HistoryGap(worker=worker, began=began, why=f"{WAS_OFF}, and still is")

    def _of_each(self, read: Callable[[_HistoryFile], Iterable[T]]) -> Iterator[T]:
        """Yield the results of `read` for each history file. Record a file as broken if it cannot be read."""
        for file in list(self.files):
            try:
                yield from read(file)
            except sqlite3.Error as error:
                self._is_broken(file.worker, error)

    def _is_late(self) -> bool:
        return time.monotonic() > self.until

    def _in_time(self) -> None:
        """Raise TooLongError if the search has exceeded its time limit."""
        if self._is_late():
            raise TooLongError

    def _is_broken(self, worker: int, error: sqlite3.Error) -> None:
        self._in_time()  # SQLite's "interrupted" does not mean a fault of the file
        for file in [each for each in self.files if each.worker == worker]:
            file.database.close()
            self.files.remove(file)
        self.broken.append(HistoryGap(worker=worker, why=f"{worker:02d}.db cannot be read: {error}"))


def _before(file: _HistoryFile, terms: frozenset[str], last: float, since: float) -> Iterator[HistoryRecord]:
    """Yield events up to the time `last`, newest first, from blocks that may contain one of these values."""
    found = file.database.execute(
        "SELECT row FROM block WHERE first <= ? ORDER BY row DESC LIMIT 1", (last,)
    ).fetchone()
    if found is None:
        return
    rows: Iterable[int] = range(found[0], first_row(file.database, since) - 1, -1)
    for row in rows_with(file.database, terms, since) if terms else rows:
        if row <= found[0]:
            yield from reversed(file.read(row))


def _is_final(records: Sequence[HistoryRecord]) -> bool:
    """Return whether every recipient of a message has a final outcome."""
    named = {each for record in records if record.name == "accepted" for each in record.text("to").split(" ")}
    done = {record.text("recipient") for record in records if record.name in _FINAL}
    return bool(named) and named <= done


def _candidates(file: _HistoryFile, query: Query, in_time: Callable[[], None]) -> Iterator[HistoryRecord]:
    """Yield events, newest first, whose messages may match the search."""
    rare = query.outcome in _RARE
    blocks: Iterable[list[HistoryRecord]]
    if query.indexed:
        rows = rows_with(file.database, query.indexed, query.since)
        some = list(islice(rows, _MANY if rare else 0))
        rare = rare and len(some) == _MANY
        blocks = map(file.read, chain(some, rows))
    if rare or not query.indexed:
        blocks = _all(file.database, query)
    for block in chain(blocks, ([],)):
        in_time()
        for record in reversed(block):
            wanted = record.name == query.outcome if rare else query.may_match(record)
            if wanted and query.since <= record.at <= query.until:
                yield record


def _all(database: sqlite3.Connection, query: Query) -> Iterator[list[HistoryRecord]]:
    """Yield the events of all blocks, newest first. SQLite omits blocks that cannot match."""
    if query.outcome in _RARE:
        where, parts = " AND instr(events, ?)", [f'"{query.outcome}"']
    else:
        texts = [each for each in (query.reply, query.zone) if each and each.isascii()]
        where = " AND instr(lower(events), ?)" * len(texts)
        parts = [json.dumps(each)[1:-1].lower() for each in texts]
    rows = database.execute(
        f"SELECT events FROM block WHERE row >= ?{where} ORDER BY row DESC",  # noqa: S608 - marks
        (first_row(database, query.since), *parts),
    )
    return (_records(text) for (text,) in rows)


def _refusal(record: HistoryRecord) -> HistoryEntry:
    text = record.text
    is_recipient = text("command") == "RCPT"
    return HistoryEntry(
        at=record.at,
        message_id=text("id"),
        outcome="refused",
        sender=text("sender") or ("" if is_recipient else text("mailbox")),
        recipient=text("mailbox") if is_recipient else "",
        client=text("client"),
        user=text("user"),
        reply=text("reply") or f"login failed: {text('reason')}",
    )


def entries_of(message_id: str, records: Sequence[HistoryRecord]) -> list[HistoryEntry]:
    """Return the outcome of a message for each known recipient."""
    by_recipient: dict[str, HistoryEntry] = {}
    base = HistoryEntry(at=0.0, message_id=message_id, outcome="waiting")
    refusals = [_refusal(each) for each in records if each.name in _ALONE]
    for record in records:
        text = record.text
        if record.name == "accepted":
            base = msgspec.structs.replace(
                base,
                at=record.at,
                accepted=record.at,
                sender=text("sender"),
                client=text("client"),
                user=text("user"),
                header_id=text("message-id"),
            )
            for recipient in text("to").split(" "):
                by_recipient[recipient.lower()] = msgspec.structs.replace(base, recipient=recipient)
        elif record.name == "dsn" and text("id") == message_id:
            base = msgspec.structs.replace(base, at=record.at, accepted=record.at, sender="<>")
        elif record.name in (*ATTEMPTS, "dropped"):
            recipient = text("recipient")
            before = by_recipient.get(recipient.lower()) or msgspec.structs.replace(base, recipient=recipient)
            by_recipient[recipient.lower()] = _after(before, record)
    return [*by_recipient.values(), *refusals]


def _after(entry: HistoryEntry, record: HistoryRecord) -> HistoryEntry:
    text = record.text
    if record.name == "dropped":
        return msgspec.structs.replace(entry, at=record.at, outcome="dropped")
    return msgspec.structs.replace(
        entry,
        at=record.at,
        outcome=record.name,
        **{name: text(name) for name in ("zone", "destination", "host", "reply")},
        attempts=int(text("attempt") or 0),
        replies=(*entry.replies, text("reply")),
    )


def steps(records: Iterable[HistoryRecord], message_id: str, users: Mapping[str, str]) -> list[TraceStep]:
    """Convert the events of one message to its timeline, with the names of `users` in place of their
    pseudonyms.
    """
    return [
        TraceStep(each.at, _named(each, message_id), each.text("recipient"), _description(each, users))
        for each in records
    ]


def _named(record: HistoryRecord, message_id: str) -> str:
    if record.name == "dsn":
        return "is-report" if record.text("id") == message_id else "report"
    return record.name.replace("-", " ")


def _description(record: HistoryRecord, users: Mapping[str, str]) -> str:
    text = record.text
    match record.name:
        case "accepted":
            found = [
                f"from {text('sender')}",
                f"to {text('recipients')}: {text('to')}",
                f"{text('size')} bytes",
                f"Message-ID {text('message-id')}" if text("message-id") else "",
                f"by client {text('client')} ({text('helo')})",
                f"as user {users.get(text('user'), text('user'))}" if text("user") else "",
                " ".join(filter(None, [text("protocol"), text("tls"), f"on {text('listener')}"])),
                text("route"),
            ]
        case "refused" | "login-failed":
            found = [
                f"{text('command') or 'AUTH'}: {text('reply') or text('reason')}",
                text("mailbox"),
                f"client {text('client')}",
                text("detail"),
            ]
        case "dsn":
            found = [f"{text('kind')}: message {text('id')} about {text('about')}"]
        case "no-dsn":
            found = [f"no DSN: {text('reason')}"]
        case "reply-lost":
            found = ["the client disconnected before it received the 250; it may send the message again"]
        case "held":
            found = [f"because of the suspension or hold rule {text('order')}"]
        case "repeated":
            found = [
                "the message was submitted again with its idempotency key and was not stored a second time"
            ]
        case "dropped":
            found = ["by an operator, without a DSN"]
        case _:
            host = " ".join(filter(None, [text("host"), f"[{text('peer')}]" if text("peer") else ""]))
            found = [
                f"{host}: {text('reply')}" if host else text("reply"),
                f"attempt {text('attempt')}",
                f"from source {text('source')}" if text("source") else "",
                text("tls") or ("" if not host else "no TLS"),
                f"{text('seconds')} s" if text("seconds") else "",
                f"zone {text('zone')}",
                "in doubt" if text("in_doubt") else "",
            ]
            if text("next_attempt"):
                due = time.strftime("%H:%M:%S", time.localtime(float(text("next_attempt"))))
                found.append(f"again at {due}")
    return "; ".join(filter(None, found))
