"""Writes the events of one worker to its history, without delaying mail.

`put` appends to a bounded queue in memory and never waits; a thread, which starts with the first event,
writes the queue every `INTERVAL` seconds. While the file cannot be written (disk full or slow, no permission,
locked), events wait in the queue. When the queue is full, new events are dropped and counted, the log and
`zonerelay status` show the reason, and the history later lists the missing time as a gap. A file that is no
longer a database is set aside, and a new one is created. So that the history never takes the space that mail
needs, it is not written while free space is near the limit of `[spool] min_free_space`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay import durable
from zonerelay.model.clock import Clock
from zonerelay.process.files import SideDatabase, in_words
from zonerelay.telemetry.logs.redact import Redactor

if TYPE_CHECKING:
    import sqlite3

    from zonerelay.history.database import Event
    from zonerelay.telemetry.metrics.instruments import Counter

Field = str | int | float | bool | None

DIRECTORY = "history"

Lost = tuple[float, float, int]
"""The first and the last time, and how many events."""

INTERVAL = 0.8
"""Seconds: what a crash loses is what came in them, and what it took to write that."""
MOST = 10_000
"""Events that wait: some 10 MB, ten seconds of a busy worker."""
AGAIN = 5.0
"""Seconds until the file is tried again."""
TRIMMED = 3600.0
"""Seconds after which old events are looked for; the size is looked at with every part."""
AT_THE_END = 3.0
"""Seconds for which a relay that stops waits for the last events."""
PATIENCE = 3.0
"""Seconds for which a question waits for the last events."""
MARGIN = 1.25

CRASHED = "the relay ended without a shutdown; events of the last second may be missing"
WAS_OFF = "the history was disabled"


@dataclass(eq=False, repr=False)
class History:
    """Writes the history of a worker (implements `events.HistorySink`). `file` is its database; `guard` is
    the free space in bytes below which the relay accepts no mail.
    """

    file: Path
    redactor: Redactor
    _: KW_ONLY
    keep: float
    max_size: int
    guard: int
    clock: InitVar[Clock]
    dropped: Counter

    def __post_init__(self, clock: Clock) -> None:
        self.problem = ""
        self.since: float | None = None
        """When its oldest event was. Known once the file is open."""
        self._now = clock.now
        self._began = clock.now()
        self._broken: Callable[[str], None] = lambda _: None
        self._restored: Callable[[int], None] = lambda _: None
        self._queue: deque[Event] = deque()
        self._lost: Lost | None = None
        self._lock = threading.Lock()  # of what was lost
        self._armed = False
        self._hurry = threading.Event()
        """Asks the thread to write at once."""
        self._asking: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._database = SideDatabase(self.file, self._open)
        self._row = 0
        self._run = 0
        self._trim_at = 0.0

    def tell(self, broken: Callable[[str], None], restored: Callable[[int], None]) -> None:
        """Set the functions to call when writing fails and when it works again; they run in the writing
        thread.
        """
        self._broken, self._restored = broken, restored

    def problems(self) -> tuple[str, ...]:
        return (f"history: {self.problem}",) if self.problem else ()

    def size(self) -> int:
        """Return the size of the history on disk in bytes. This blocks."""
        found = 0
        for end in ("", "-wal"):
            with contextlib.suppress(OSError):
                found += self.file.with_name(self.file.name + end).stat().st_size
        return found

    def put(self, event: str, fields: Mapping[str, Field]) -> None:
        """Queue an event for writing; call this on the event loop. This never raises an exception and never
        waits. The caller must not change the fields afterwards.
        """
        now = self._now()
        if len(self._queue) >= MOST:
            self._note_lost((now, now, 1))
            self.dropped.value += 1
            return
        self._queue.append((now, event, fields))
        if not self._armed:
            self._armed = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_on, name="history", daemon=True)
                self._thread.start()
            self._wake.set()

    async def written(self) -> None:
        """Wait until all events so far are in the history file. Return immediately if the file cannot be
        written, and after at most `PATIENCE` seconds.
        """
        if not self._queue or self.problem or self._stop.is_set():
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._asking.append((loop, waiter))
        self._hurry.set()
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiter, PATIENCE)

    def close(self) -> None:
        """Write the remaining events and end the writing thread, blocking for at most `AT_THE_END` seconds.
        Call it in a thread.
        """
        self._stop.set()
        self._hurry.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(AT_THE_END)

    # ---- in the thread ---------------------------------------------------------------------------

    def _write_on(self) -> None:
        while not self._stop.is_set():
            if self.problem:
                self._stop.wait(AGAIN)
            elif self._wake.wait(TRIMMED):
                self._hurry.wait(INTERVAL)
            self._hurry.clear()
            self._wake.clear()
            self._armed = False
            asking, self._asking = self._asking, []
            self._write()
            for loop, waiter in asking:
                with contextlib.suppress(RuntimeError):  # the loop has ended in the meantime
                    loop.call_soon_threadsafe(_answer, waiter)
        if self._queue:  # events that came while the last ones were written
            self._write()
        if self._run:
            with contextlib.suppress(Exception):
                stopped = (self._now(), self._run)
                database = self._database.opened()
                database.execute("UPDATE run SET ended = ?, stopped = 1 WHERE rowid = ?", stopped)
                self._database.close()

    def _write(self) -> None:
        import sqlite3  # noqa: PLC0415 - a relay that has nothing to write does without

        events = list(self._queue)
        dropped = 0
        with self._lock:
            lost, self._lost = self._lost, None
        try:
            self._check_space()
            if self._database.is_gone:
                self._broken(f"{self.file} was removed or replaced; a new file is created")
            database = self._database.opened()
            is_new_part = self._commit(database, events, lost)
            # They are stored now: if old ones cannot be removed, these must not be written again.
            for _ in events:
                self._queue.popleft()
            dropped = lost[2] if lost else 0
            events, lost = [], None
            self._trim(database, is_new_part=is_new_part)
        except (sqlite3.OperationalError, OSError) as error:
            self._note_lost(lost)
            self._fail(f"{self.file} cannot be written: {in_words(error)}")
            return
        except sqlite3.DatabaseError as error:
            self._note_lost(lost)
            self._set_aside(error)
            return
        except Exception as error:  # noqa: BLE001 - these events can never be written
            self._note_lost(lost)
            self._fail(f"{len(events)} events cannot be written: {type(error).__name__}: {error}")
            if events:
                self._note_lost((events[0][0], events[-1][0], len(events)))
                self.dropped.value += len(events)
        for _ in events:
            self._queue.popleft()
        if self.problem and self._run:
            self.problem = ""
            self._restored(dropped)

    def _commit(self, database: sqlite3.Connection, events: Sequence[Event], lost: Lost | None) -> bool:
        """Write events to the history file, and return whether the next events begin a new index part."""
        from zonerelay.history.database import PART, insert  # noqa: PLC0415 - as above

        before = self._row // PART
        with database:
            database.execute("BEGIN IMMEDIATE")
            row = insert(database, self._row, events)
            if lost is not None:
                why = f"{lost[2]} events were dropped: {self.problem or 'they arrived too fast'}"
                database.execute("INSERT INTO gap VALUES (?, ?, ?)", (lost[0], lost[1], why))
            database.execute("UPDATE run SET ended = ? WHERE rowid = ?", (self._now(), self._run))
        self._row = row
        return row // PART != before

    def _trim(self, database: sqlite3.Connection, *, is_new_part: bool) -> None:
        from zonerelay.history.database import trim  # noqa: PLC0415 - as above

        now = self._now()
        if is_new_part or now >= self._trim_at:
            self._trim_at = now + TRIMMED
            while trim(database, now - self.keep, self.max_size) and not self._stop.is_set():
                pass
            oldest = database.execute("SELECT first FROM block ORDER BY row LIMIT 1").fetchone()
            self.since = oldest[0] if oldest else None

    def _open(self, file: Path) -> sqlite3.Connection:
        from zonerelay.history.database import CLEAR, open_for_writing, span  # noqa: PLC0415 - as above

        database = open_for_writing(file)
        off = off_mark(file)
        with database:
            database.execute("BEGIN IMMEDIATE")
            last = database.execute("SELECT ended, stopped FROM run ORDER BY rowid DESC LIMIT 1").fetchone()
            if last is not None and not last[1]:
                gap = (last[0], max(last[0], self._began), CRASHED)
                database.execute("INSERT INTO gap VALUES (?, ?, ?)", gap)
            if off.exists():
                gap = (off.stat().st_mtime, self._began, WAS_OFF)
                database.execute("INSERT INTO gap VALUES (?, ?, ?)", gap)
            key = self.redactor.fingerprint if self.redactor.enabled else CLEAR
            run = (self._began, self._now(), 0, key)
            self._run = database.execute("INSERT INTO run VALUES (?, ?, ?, ?)", run).lastrowid or 0
            self._row = max(span(database)[1], 1)
        off.unlink(missing_ok=True)
        return database

    def _check_space(self) -> None:
        if not self.guard:
            return
        place = self.file.parent if self.file.parent.exists() else self.file.parent.parent
        found = os.statvfs(place)
        if found.f_bavail * found.f_frsize < self.guard * MARGIN:
            raise OSError("the disk is nearly full, and the remaining space is reserved for mail")

    def _fail(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self._broken(problem)

    def _set_aside(self, error: Exception) -> None:
        """Rename an unusable history file, and write the waiting events to a new one, which records the
        gap.
        """
        with contextlib.suppress(Exception):
            self._database.close()
        aside = self.file.with_name(f"{self.file.name}.aside")
        try:
            durable.rename(self.file, aside)
            for end in ("-wal", "-shm"):
                self.file.with_name(self.file.name + end).unlink(missing_ok=True)
            database = self._database.opened()
            why = f"the previous file cannot be read ({error}); it was renamed to {aside.name}"
            database.execute("INSERT INTO gap VALUES (?, ?, ?)", (0.0, self._now(), why))
        except Exception as another:  # noqa: BLE001 - tried again
            self._fail(f"{self.file} cannot be read ({error}) or renamed: {another}")
            return
        self._broken(
            f"{self.file} cannot be read ({error}); it was renamed to {aside.name}, and a new file is created"
        )
        self._wake.set()

    def _note_lost(self, more: Lost | None) -> None:
        with self._lock:
            if more is None or self._lost is None:
                self._lost = self._lost or more
            else:
                first, last, count = self._lost
                self._lost = (min(first, more[0]), max(last, more[1]), count + more[2])


def _answer(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def file_of(home: Path, worker: int) -> Path:
    """Return the path of a worker's history file; `home` is the parent of the spool."""
    return home / DIRECTORY / f"{worker:02d}.db"


def off_mark(file: Path) -> Path:
    return file.with_suffix(".off")


def note_off(file: Path) -> None:
    """Record that the history is disabled at this start, if there is a history file."""
    mark = off_mark(file)
    with contextlib.suppress(OSError):
        if file.exists() and not mark.exists():
            durable.create(mark, b"")
