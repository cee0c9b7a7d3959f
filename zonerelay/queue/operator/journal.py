"""Keeps a journal of operators' changes (who changed what and why, and the previous state), so that they can
be undone.

A *change* is one command that changes the queue. Its id is the same in all workers. For each change a worker
writes two files next to its spool: `ID.json` records who did what, and `ID.log` holds the deliveries that it
changes, each with its state before and after. Other commands that change something, such as a suspension, use
the same interface:

    await journal.begin(act)            # record the change; raises JournalError
    noted = await journal.note(id, entries)     # durable; call this before the store is changed
    await journal.finish(act)           # record the counts
    async for entries in journal.entries(id): …     # what was noted, at most one `note` at a time

The change in the store sets `Delivery.act` to the id of the change in the same write. This distinguishes an
entry that was applied from one that was noted but never applied because of a crash. An undo restores a
delivery only if `DeliverySnapshot.of(delivery)` equals `JournalEntry.after`, so it never reverts more than
the command changed.

Policy: changes are kept for `KEPT` seconds. A worker keeps at most `MAX_ACTS` of them and `MAX_SIZE` bytes.
Failure: a change that cannot be noted, because the disk or the journal is full, goes on and cannot be undone:
`note` returns false, and `problem_of` returns the reason. Files are read and written in other threads, one
chunk at a time.
"""

import os
import re
import struct
import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from zonerelay import durable
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName, parse_queue
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.process.threads import OPERATORS

KEPT = 24 * 3600.0
MAX_ACTS = 10_000
MAX_SIZE = 256 * 1024 * 1024
DIRECTORY = "acts"

_ID = re.compile(r"[0-9a-f]{8}", re.ASCII)
_FRAME = struct.Struct("!II")


class JournalError(Exception):
    """The change does not exist, or its id is already used. The message is for an operator."""


class DeliverySnapshot(NamedTuple):
    """The values of those fields of a delivery that an operator can change. `attempts` is included to detect
    later attempts.
    """

    queue: QueueName
    held: bool
    next_attempt: float
    attempts: int
    act: str

    @classmethod
    def of(cls, delivery: Delivery) -> "DeliverySnapshot":
        return cls(delivery.queue, delivery.held, delivery.next_attempt, delivery.attempts, delivery.act)

    def restored(self, delivery: Delivery) -> Delivery:
        """Return the delivery with the recorded values restored. Its number of attempts stays as it is."""
        return structs.replace(
            delivery, queue=self.queue, held=self.held, next_attempt=self.next_attempt, act=self.act
        )


class JournalEntry(NamedTuple):
    """The state of one delivery before and after an operator's change. `key` is its key before the change."""

    key: DeliveryKey
    before: DeliverySnapshot
    after: DeliverySnapshot


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """A change that an operator made to the queue, as stored in the journal for `undo`. `what` describes the
    filter. `problem` is the reason why it cannot be undone and is "" if it can. `undoes` is the change that
    this one has undone, and `undone_by` the change that has undone this one. `finished` is false while it
    runs, or after a crash has interrupted it.
    """

    id: str
    at: float
    verb: str
    who: str = ""
    what: str = ""
    reason: str = ""
    matched: int = 0
    changed: int = 0
    busy: int = 0
    finished: bool = False
    problem: str = ""
    undoes: str = ""
    undone_by: str = ""


class Journal:
    """The journal of operators' changes in one worker. `directory` is created with the first change."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._problems: BoundedDict[str, str] = BoundedDict(MAX_ACTS)
        self._unwritten = ""
        self._running: set[str] = set()
        self._size = 0

    async def begin(self, act: Act) -> None:
        """Begin to record a change. Raise JournalError if its id is invalid or used by an earlier change."""
        if _ID.fullmatch(act.id) is None:
            raise JournalError(f"{act.id!r} is not the id of a change; expected 8 hexadecimal digits")
        if act.id in self._running:
            raise JournalError(f"change {act.id} is still running")
        self._running.add(act.id)
        # A change that could not be written has a problem.
        if act.id in self._problems or await OPERATORS.run(self._json(act.id).exists):
            self._running.discard(act.id)
            raise JournalError(f"change {act.id} already exists")
        self._unwritten = ""
        try:
            await OPERATORS.run(self._begin, act)
        except OSError as error:
            self._cannot_write(act.id, error)

    async def note(self, act_id: str, entries: Sequence[JournalEntry]) -> bool:
        """Write the previous states of deliveries to the journal and sync them. Return false if that fails;
        then the whole change cannot be undone.
        """
        if entries and act_id not in self._problems:
            try:
                await OPERATORS.run(self._append, act_id, entries)
            except OSError as error:
                self._cannot_write(act_id, error)
                await OPERATORS.run(self._forget_entries, act_id)
        return act_id not in self._problems

    def _cannot_write(self, act_id: str, error: OSError) -> None:
        self._problems[act_id] = self._unwritten = f"the journal cannot be written: {error.strerror}"

    def problems(self) -> tuple[str, ...]:
        """Return why the latest change could not be recorded and cannot be undone, or () if it was
        recorded.
        """
        return (f"{self._directory}: {self._unwritten}",) if self._unwritten else ()

    def break_off(self, act_id: str) -> None:
        """Record that a change has failed. It is left as after a crash, and what it changed can be undone."""
        self._running.discard(act_id)

    def is_running(self, act_id: str) -> bool:
        return act_id in self._running

    def problem_of(self, act_id: str) -> str:
        return self._problems.get(act_id, "")

    async def finish(self, act: Act) -> Act:
        """Write the final counts of a change to the journal, and return the change as stored. The result of
        `problem_of` takes precedence over the change's own `problem`.
        """
        act = msgspec.structs.replace(act, finished=True, problem=self.problem_of(act.id) or act.problem)
        self._running.discard(act.id)
        try:
            return await OPERATORS.run(self._finish, act)
        except OSError:
            return act

    async def mark_undone(self, act_id: str, by: str) -> None:
        """Record that a change was undone by another one. Raise OSError."""
        act = await self.find(act_id)
        await OPERATORS.run(self._write, msgspec.structs.replace(act, undone_by=by))

    async def find(self, act_id: str) -> Act:
        """Return a change by its id. Raise JournalError if it does not exist or is too old."""
        act = await OPERATORS.run(self._read, act_id) if _ID.fullmatch(act_id) else None
        if act is None or act.at < self._clock.now() - KEPT:
            raise JournalError(f"no change {act_id} in the last 24 hours (list them with zonerelay acts)")
        return act

    async def acts(self) -> list[Act]:
        """Return the changes of the last 24 hours, newest first."""
        return await OPERATORS.run(self._acts)

    async def entries(self, act_id: str) -> AsyncGenerator[list[JournalEntry], None]:
        """Yield the deliveries that a change affected, with their previous states. A frame that a crash has
        truncated is skipped, because the store was not changed yet.
        """
        pieces = self._pieces(act_id)
        while (piece := await OPERATORS.run(next, pieces, None)) is not None:
            yield piece

    # In other threads

    def _json(self, act_id: str) -> Path:
        return self._directory / f"{act_id}.json"

    def _log(self, act_id: str) -> Path:
        return self._directory / f"{act_id}.log"

    def _begin(self, act: Act) -> None:
        durable.make_directory(self._directory)
        kept = self._prune()
        if kept >= MAX_ACTS:
            self._problems[act.id] = f"the journal already contains {MAX_ACTS:,} changes of the last 24 hours"
            return
        self._write(act)

    def _prune(self) -> int:
        """Remove journal files older than 24 hours, and return the number of remaining changes."""
        oldest = self._clock.now() - KEPT
        kept = size = 0
        for file in os.scandir(self._directory):
            try:
                facts = file.stat()
            except FileNotFoundError:  # the temporary file of a change that is just beginning was renamed
                continue
            # The time of the file is never before that of the change, so thousands of files need not be read.
            if facts.st_mtime < oldest:
                Path(file.path).unlink(missing_ok=True)
                continue
            size += facts.st_size
            kept += file.name.endswith(".json")
        self._size = size
        return kept

    def _append(self, act_id: str, entries: Sequence[JournalEntry]) -> None:
        packed = zlib.compress(_pack(entries), 1)
        frame = _FRAME.pack(len(packed), zlib.crc32(packed)) + packed
        self._size += len(frame)
        if self._size > MAX_SIZE:
            self._size -= len(frame)
            raise OSError(0, f"the journal has reached its limit of {MAX_SIZE // 2**20} MiB")
        durable.append(self._log(act_id), frame)

    def _forget_entries(self, act_id: str) -> None:
        log = self._log(act_id)
        if log.exists():
            self._size -= log.stat().st_size
            log.unlink(missing_ok=True)

    def _pieces(self, act_id: str) -> Iterator[list[JournalEntry]]:
        try:
            file = self._log(act_id).open("rb")
        except FileNotFoundError:
            return
        with file:
            while len(head := file.read(_FRAME.size)) == _FRAME.size:
                length, check = _FRAME.unpack(head)
                packed = file.read(length)
                if len(packed) < length or zlib.crc32(packed) != check:
                    return
                yield _unpack(zlib.decompress(packed))

    def _finish(self, act: Act) -> Act:
        if self._json(act.id).exists():
            self._write(act)
        if act.problem:
            self._forget_entries(act.id)  # nothing will undo it
        return act

    def _write(self, act: Act) -> None:
        durable.write(self._json(act.id), msgspec.json.encode(act))

    def _read(self, act_id: str) -> Act | None:
        try:
            return _decode(self._json(act_id).read_bytes())
        except (OSError, ValueError, msgspec.MsgspecError):
            return None

    def _noted(self, act_id: str) -> int:
        """Return the number of deliveries that an unfinished change has recorded."""
        return sum(map(len, self._pieces(act_id)))

    def _acts(self) -> list[Act]:
        oldest = self._clock.now() - KEPT
        names = [path.stem for path in self._directory.glob("*.json")]
        found = [
            act if act.finished else msgspec.structs.replace(act, changed=self._noted(act.id))
            for name in names
            if (act := self._read(name)) is not None and act.at >= oldest
        ]
        return sorted(found, key=lambda act: act.at, reverse=True)


_State = tuple[str, bool, float, int, str]
_decode_entries = msgspec.msgpack.Decoder(list[tuple[tuple[str, str, str], _State, _State]]).decode


def _pack(entries: Sequence[JournalEntry]) -> bytes:
    # The queue is the first field of each tuple.
    return msgspec.msgpack.encode([[(part.queue.text, *part[1:]) for part in entry] for entry in entries])


def _unpack(raw: bytes) -> list[JournalEntry]:
    return [
        JournalEntry(
            DeliveryKey(parse_queue(key[0]), MessageId(key[1]), Mailbox(key[2])),
            *(DeliverySnapshot(parse_queue(state[0]), *state[1:]) for state in states),
        )
        for key, *states in _decode_entries(raw)
    ]


_decode = msgspec.json.Decoder(Act).decode
