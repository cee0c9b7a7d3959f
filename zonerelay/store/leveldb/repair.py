"""Makes a sound LevelDB spool of a damaged one: a new database from every record that can still be read.

1. A directory in the spool's gets links to its tables, and its logs with every record that is whole. Tables
whose index is damaged go in as a log of their rows, and of a file that the disk cannot read whole what it can
read. 2. LevelDB's own repair runs over that directory in a process of its own, for it may abort. 3. Every
message whose record, body and deliveries are there is copied into a new database, with new indexes and
counts; what is not whole goes to the salvage. 4. The new database is checked. Then, and only then, its files
take the place of the old ones.

Promises: until the end of step 4 the spool is as it was, and what was made for the repair goes away with it.
All files of the old database stay, as links. A repair that was killed in step 4 is completed by the next one,
and until then no relay opens the spool. A removal that was recorded in damaged octets is forgotten, so that
mail may be sent again; a delivery is never lost for it.

Memory: the deliveries of one message, and one batch.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay import durable
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.model.queue_name import QueueName
from zonerelay.store.check import KEPT, Examination, Findings, Repaired, Salvage, Salvaged, Tell
from zonerelay.store.common import records
from zonerelay.store.contract import CHUNK_SIZE, StoreCorruptError, StoreError, StoreFullError
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.check import Records
from zonerelay.store.leveldb.damage.directory import (
    MARK_NAME,
    READY_NAME,
    REPAIR_NAME,
    Mark,
    found_logs,
    is_database_file,
    lock_directory,
    read_mark,
    write_mark,
)
from zonerelay.store.leveldb.damage.format import (
    Manifest,
    named_in,
    read_manifest,
    write_log,
)
from zonerelay.store.leveldb.damage.table import as_batch, damaged_blocks, data_blocks, has_index
from zonerelay.store.leveldb.engine import Op, Row, damaged_tables, repair_database
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.leveldb.write_plan import due_time

_WRITE_BUFFER = 16 * 1024 * 1024
_BATCH_SIZE = 4 * 1024 * 1024
_PAGE = 4096
_FAR = 1 << 56
"""No number of a write is as high."""
_WORDS = frozenset(
    {b"message", b"delivery-zone", b"delivery-webhook", b"deferred-zone", b"delivery-domain", b"meta"}
)
_SLACK = 64 * 1024 * 1024


def repair(spool: Path, home: Path, salvage: Salvage, tell: Tell, *, carry_out: bool) -> Repaired:
    """The spool is somewhere in `home`, where its old files go if that is on the same file system; they stay
    in the spool otherwise. Without `carry_out` everything is done but step 4, and nothing of it stays.

    Blocks. Raises StoreError in words, or OSError.
    """
    work = spool / REPAIR_NAME
    lock = lock_directory(spool)
    try:
        if (work / READY_NAME).exists():
            done = msgspec.json.decode((work / READY_NAME).read_bytes(), type=Repaired)
            if not carry_out:
                return done
        else:
            times = spool.stat()
            try:
                shutil.rmtree(work, ignore_errors=True)
                done = _prepare(spool, work, salvage, tell)
                if not carry_out or not done.kept:
                    return msgspec.structs.replace(done, kept="")
                done = msgspec.structs.replace(done, kept=str(_keep(spool, home, work)))
                durable.sync_tree(work)  # the exchange removes what it was made of
                durable.write(work / READY_NAME, msgspec.json.encode(done))
            finally:
                if not (work / READY_NAME).exists():
                    shutil.rmtree(work, ignore_errors=True)
                    os.utime(spool, ns=(times.st_atime_ns, times.st_mtime_ns))
        _exchange(spool, work / "new")
        # First of all: a repair that saw the mark beside the new database would make the exchange again.
        (work / READY_NAME).unlink()
        durable.sync_directory(work)
        shutil.rmtree(work)
        return done
    finally:
        os.close(lock)


def _prepare(spool: Path, work: Path, salvage: Salvage, tell: Tell) -> Repaired:
    """`kept` is set when there is something to be exchanged."""
    octets = sum(path.stat().st_size for path in _database_files(spool))
    if not octets:
        return Repaired(before=0, after=0)  # no relay has been started here yet
    _refuse_other_formats(spool)
    # Twice: LevelDB orders the repaired tables anew as soon as they are opened.
    needed, free = 2 * octets + _SLACK, shutil.disk_usage(spool).free
    if free < needed:
        raise StoreFullError(
            f"the repair of {spool} needs {needed / 1e9:.2f} GB there, {free / 1e9:.2f} GB are free; nothing"
            " was changed"
        )
    old = work / "old"
    old.mkdir(parents=True, mode=0o700)
    lost = _collect(spool, old, tell)
    if any(old.iterdir()):
        if failed := repair_database(old):
            raise StoreError(f"LevelDB's own repair of {spool} {failed}; nothing was changed")
        lost += _name_blocks(spool, damaged_tables(old))
        # A spool whose record of the format is lost is ours all the same: the configuration says so.
        write_mark(old, Mark(records.FORMAT_VERSION.decode(), 0, 0))
    tell(0, octets)
    source, target = (LevelDb(path, write_buffer=_WRITE_BUFFER) for path in (old, work / "new"))
    try:
        source.open()
        _refuse_foreign(spool, source)
        target.open()
        rebuilt = _Rebuild(source, target, salvage, tell, octets)
        rebuilt.run()
        findings = Findings()
        Records(target, Examination(work, findings, tell), 0).check()
        if findings.kept:
            raise StoreError(f"the repaired spool is not sound: {findings.kept[0]}; nothing was changed")
    finally:
        source.close()
        target.close()
    return Repaired(
        before=rebuilt.named,
        after=rebuilt.deliveries,
        lost=(*lost, *rebuilt.lost),
        more_lost=rebuilt.more_lost,
        repeats=tuple(rebuilt.repeats),
        salvaged=rebuilt.salvaged,
        kept="later",
    )


def _refuse_other_formats(spool: Path) -> None:
    """The record of the format is looked at when the database is opened."""
    with contextlib.suppress(OSError):
        mark = read_mark(spool)
        if mark is not None and mark.format != records.FORMAT_VERSION.decode():
            raise StoreError(
                f"the spool {spool} has format {mark.format}, this release repairs"
                f" {records.FORMAT_VERSION.decode()}: use the release that wrote it; nothing was changed"
            )


def _refuse_foreign(spool: Path, source: LevelDb) -> None:
    first = next(source.rows(b"", limit=1), None)
    if first is not None and first[0].partition(b" ")[0] not in _WORDS:
        raise StoreError(
            f"{spool} holds a LevelDB database that is not a zonerelay spool: its first key is"
            f" {first[0][:40]!r}; nothing was changed"
        )


# --- what can be read


def _collect(spool: Path, old: Path, tell: Tell) -> list[str]:
    """Give LevelDB's repair tables and logs that it can read; says what is in neither."""
    lost: list[str] = []
    needed = _needed(spool, lost)
    highest = needed.highest
    for path in needed.tables:
        tell(0, 0)
        raw = _read(path, lost)
        if raw.is_whole and has_index(raw.octets):
            os.link(path, old / path.name)
        elif has_index(raw.octets):
            (old / path.name).write_bytes(raw.octets)
        else:
            blocks = list(data_blocks(raw.octets))
            found = itertools.chain.from_iterable(block.versions for block in blocks)
            highest += 1
            (old / f"{highest:06d}.log").write_bytes(write_log(map(as_batch, found)))
            end = blocks[-1].end if blocks else 0
            read = f"{end:,} of its {len(raw.octets):,} octets hold records that were read"
            lost.append(f"{path.name} has no index that can be read: {read}{named_in(raw.octets[end:])}")
    mark = _mark_of(spool)
    logs = [(path, _read(path, lost).octets) for path in needed.logs]
    for log in found_logs(logs, mark, needed.last_sequence, verify=True):
        tell(0, 0)
        (old / log.path.name).write_bytes(write_log(log.contents.records))
        for gap in log.contents.gaps:
            where = f"octets {gap.start:,} to {gap.end:,} of {log.path.name} are damaged"
            if gap.end >= len(log.raw):
                where = f"{log.path.name} is damaged or missing from octet {gap.start:,} on"
            lost.append(where + named_in(log.raw[gap.start : gap.end]))
    present = {int(path.stem) for path in needed.logs}
    wanted = {needed.log} if needed.log else set[int]()
    if mark is not None and mark.size and mark.log >= needed.log:
        wanted.add(mark.log)
    lost += [
        f"{number:06d}.log is missing, which held the newest mail" for number in sorted(wanted - present)
    ]
    return lost


def _name_blocks(spool: Path, tables: list[int]) -> Iterator[str]:
    """LevelDB leaves damaged blocks out, and does not say which."""
    for number in tables:
        for path in (spool / f"{number:06d}.ldb", spool / f"{number:06d}.sst"):
            if path.exists():
                raw = _read(path, []).octets
                for start, end in damaged_blocks(raw):
                    yield f"octets {start:,} to {end:,} of {path.name} are damaged{named_in(raw[start:end])}"


class _Read(NamedTuple):
    octets: bytes
    is_whole: bool


def _read(path: Path, lost: list[str]) -> _Read:
    """Zeros where the disk cannot read: their checksum is wrong."""
    try:
        return _Read(path.read_bytes(), is_whole=True)
    except OSError as error:
        lost.append(f"{path.name} cannot be read whole: {error.strerror}")
    out, size = bytearray(), path.stat().st_size
    for at in range(0, size, _PAGE):
        wanted = min(_PAGE, size - at)
        try:
            with path.open("rb", buffering=0) as file:
                octets = os.pread(file.fileno(), wanted, at)
        except OSError:
            octets = b""
        out += octets.ljust(wanted, b"\0")
    return _Read(bytes(out), is_whole=False)


def _mark_of(spool: Path) -> Mark | None:
    try:
        return read_mark(spool)
    except OSError:
        return None


class _Needed(NamedTuple):
    """Tables and logs that are the database, and the highest number of any file. `log` is the number of the
    first log that must be there, 0 when it is not known.
    """

    tables: list[Path]
    logs: list[Path]
    highest: int
    log: int = 0
    last_sequence: int = 0


def _needed(spool: Path, lost: list[str]) -> _Needed:
    """What the manifest does not name was replaced, and would bring back what was delivered. Every file is
    taken where there is no manifest, and where the manifest names a file that is not there: its end may be
    missing, and with it the names of newer files.
    """
    numbered = {path.name: path for path in _database_files(spool) if path.stem.isdigit()}
    tables = sorted(path for name, path in numbered.items() if name.endswith((".ldb", ".sst")))
    logs = sorted(path for name, path in numbered.items() if name.endswith(".log"))
    highest = max((int(path.stem) for path in numbered.values()), default=0)
    try:
        manifest = _manifest(spool, lost)
    except (OSError, ValueError) as error:
        lost.append(f"which tables belong to the database is not known, all are taken: {error}")
        return _Needed(tables, logs, highest, last_sequence=_FAR)
    belong = {table.number for table in manifest.tables.values()}
    missing = belong - {int(path.stem) for path in tables}
    lost += [f"{number:06d}.ldb is missing" for number in sorted(missing)]
    first = manifest.previous_log or manifest.log
    if not missing and manifest.log in {int(path.stem) for path in logs}:
        tables = [path for path in tables if int(path.stem) in belong]
        logs = [path for path in logs if int(path.stem) >= first]
    return _Needed(tables, logs, highest, manifest.log, manifest.last_sequence)


def _manifest(spool: Path, lost: list[str]) -> Manifest:
    """The one that CURRENT names, and the newest where it names none. Raises OSError, ValueError."""
    try:
        current = (spool / "CURRENT").read_bytes().decode("ascii").strip()
        if not current.startswith("MANIFEST-"):
            raise ValueError("it names no manifest")
        path = spool / current
    except (OSError, ValueError) as error:
        found = sorted(path for path in _database_files(spool) if path.name.startswith("MANIFEST-"))
        if not found:
            raise
        path = found[-1]
        lost.append(f"CURRENT cannot be used ({error}), {path.name} is")
    return read_manifest(path.read_bytes())


def _database_files(spool: Path) -> list[Path]:
    return sorted(path for path in spool.iterdir() if path.is_file() and is_database_file(path.name))


# --- the new database


class _Rebuild:
    def __init__(self, source: LevelDb, target: LevelDb, salvage: Salvage, tell: Tell, octets: int) -> None:
        self._source = source
        self._target = target
        self._salvage = salvage
        self._tell = tell
        self._octets = octets
        self._done = 0
        self._ops: list[Op] = []
        self._size = 0
        self.named = self.deliveries = self.salvaged = self.more_lost = 0
        self.lost: list[str] = []
        self.repeats: list[str] = []

    def run(self) -> None:
        """Raises StoreError."""
        deliveries = itertools.groupby(self._deliveries(), key=lambda each: each.message_id)
        waiting = next(deliveries, None)
        for identity, rows in itertools.groupby(self._message_rows(), key=lambda row: row[0].split(b" ")[1]):
            named = identity.decode("ascii", "replace")
            while waiting is not None and waiting[0] < named:
                self._without_message(waiting[0], list(waiting[1]))
                waiting = next(deliveries, None)
            own: list[Delivery] = []
            if waiting is not None and waiting[0] == named:
                own = list(waiting[1])
                waiting = next(deliveries, None)
            self._message(named, rows, own)
        while waiting is not None:
            self._without_message(waiting[0], list(waiting[1]))
            waiting = next(deliveries, None)
        last = scan.last_message_id(self._source)
        if last is not None:
            self._ops.append((records.META_LAST_ID, last.encode("ascii")))
        self._write()
        self._copy_keys()
        self._tell(self._octets, self._octets)

    def _copy_keys(self) -> None:
        """Idempotency keys are no mail: those that can be read are copied, others are forgotten."""
        for prefix in (records.ONCE_PREFIX, records.ONCE_UNTIL_PREFIX):
            rows = self._source.rows(prefix, records.after(prefix), limit=sys.maxsize)
            while page := list(itertools.islice(rows, _PAGE)):
                self._target.write([page])

    def _lose(self, text: str) -> None:
        if len(self.lost) < KEPT:
            self.lost.append(text)
        else:
            self.more_lost += 1

    def _deliveries(self) -> Iterator[Delivery]:
        """Those of all zones, in the order of their messages; a record without sense is told."""
        zones = [self._zone(zone) for zone in sorted(scan.queues(self._source))]
        return heapq.merge(*zones, key=lambda each: each.message_id)

    def _zone(self, queue: QueueName) -> Iterator[Delivery]:
        prefix = records.queue_prefix(queue)
        for key, value in self._source.rows(prefix, records.after(prefix), limit=sys.maxsize):
            self.named += 1
            try:
                delivery = records.decode_delivery(key, value)
            except StoreCorruptError as error:
                self._lose(str(error))
                continue
            if is_message_id(delivery.message_id):
                yield delivery
            else:
                self._lose(f"a delivery of a message {delivery.message_id!r}, which is no id")

    def _message_rows(self) -> Iterator[Row]:
        start = records.MESSAGE_PREFIX
        for key, value in self._source.rows(start, records.after(start), limit=sys.maxsize):
            self._done += len(key) + len(value)
            self._tell(min(self._done, self._octets), self._octets)
            yield key, value

    def _message(self, identity: str, rows: Iterator[Row], deliveries: list[Delivery]) -> None:
        if not is_message_id(identity):
            self._lose(f"records of a message {identity!r}, which is no id")
            return
        message: Message | None = None
        why = "its record is missing"
        sizes: list[int] = []
        written: list[bytes] = []
        for key, value in rows:
            part = key.rpartition(b" ")[2]
            if part == b"*":
                try:
                    message = records.decode_message(MessageId(identity), value)
                except StoreCorruptError as error:
                    why = str(error)
            elif part.isdigit():
                sizes.append(len(value) if int(part) == len(sizes) + 1 else -1)
            else:
                continue
            written.append(key)
            if message is not None and deliveries:
                self._put(key, value)
        is_whole = message is not None and _is_whole(message, sizes)
        if message is None or not deliveries or not is_whole:
            if message is not None and deliveries:
                self._ops += [(key, None) for key in written]
            self._set_aside(identity, message, deliveries, why, is_whole=is_whole)
            return
        self._complete(message, deliveries)

    def _complete(self, message: Message, deliveries: list[Delivery]) -> None:
        """Everything of the message is there, but perhaps some deliveries: those left or were lost."""
        recipients = [each.address for each in message.envelope.recipients]
        self._put(records.exists_key(message.id), b"%d" % message.envelope.created)
        for delivery in deliveries:
            self._put(records.delivery_key(delivery.key), records.encode_delivery(delivery))
            if due := due_time(delivery):
                self._put(records.deferred_key(delivery.key, due), b"")
        self.deliveries += len(deliveries)
        if len(deliveries) != len(recipients):
            self._put(records.open_count_key(message.id), b"%d" % len(deliveries))
        gone = self._open(message) - len(deliveries)
        if gone < 0 and len(self.repeats) < KEPT:
            shown = ", ".join(sorted(each.recipient for each in deliveries)[:10])
            self.repeats.append(f"{-gone:,} of message {message.id}, among those to {shown}")
        elif gone > 0:
            self.named += gone
            absent = tuple(sorted(set(recipients) - {each.recipient for each in deliveries}))
            self._lose(
                f"{gone:,} of the deliveries of message {message.id}, to {', '.join(absent[:10])}: no record"
            )
            self._give(message.id, message, (), absent, "deliveries without a record", is_whole=True)

    def _open(self, message: Message) -> int:
        """How many deliveries the message had. By a walk: after LevelDB's repair a Get may find what was
        replaced, for it believes the newest of the tables that it repaired, all of them of level 0.
        """
        key = records.open_count_key(message.id)
        try:
            for _, raw in self._source.rows(key, key + b"\0", limit=1):
                return records.parse_count(message.id, raw)
        except StoreCorruptError as error:
            self._lose(str(error))
        return len(message.envelope.recipients)

    def _without_message(self, identity: str, deliveries: list[Delivery]) -> None:
        self._set_aside(identity, None, deliveries, "its record and its body are missing", is_whole=False)

    def _set_aside(
        self, identity: str, message: Message | None, deliveries: list[Delivery], why: str, *, is_whole: bool
    ) -> None:
        if message is None and not deliveries:
            why = f"{why}: an upload that never ended, or what is left of a message"
        elif message is not None and not is_whole:
            why = "its body is not whole"
        elif message is not None:
            why = "no delivery has a record, so it was delivered or they are lost; it is whole in the salvage"
            self.named += self._open(message)
        known = {each.recipient for each in deliveries}
        recipients = () if message is None else message.envelope.recipients
        unknown = tuple(each.address for each in recipients if each.address not in known)
        shown = ", ".join([*sorted(known), *unknown][:10]) or "recipients that nothing names"
        self._lose(f"message {identity} to {shown}: {why}")
        self._give(identity, message, tuple(deliveries), unknown, why, is_whole=is_whole)

    def _give(
        self,
        identity: str,
        message: Message | None,
        deliveries: tuple[Delivery, ...],
        unknown: tuple[str, ...],
        why: str,
        *,
        is_whole: bool,
    ) -> None:
        self.salvaged += 1
        prefix = records.message_prefix(MessageId(identity))

        def body() -> Iterator[bytes]:
            for key, value in self._source.rows(prefix + b"0", records.after(prefix), limit=sys.maxsize):
                if key.rpartition(b" ")[2].isdigit():
                    yield value

        self._salvage(Salvaged(identity, why, message, deliveries, unknown, body, is_whole))

    # --- writing

    def _put(self, key: bytes, value: bytes) -> None:
        self._ops.append((key, value))
        self._size += len(key) + len(value)
        if self._size >= _BATCH_SIZE:
            self._write()

    def _write(self) -> None:
        self._target.write([self._ops])
        self._ops, self._size = [], 0


def _is_whole(message: Message, sizes: Sequence[int]) -> bool:
    return (
        len(sizes) == message.chunks
        and sum(sizes) == message.size
        and all(size == CHUNK_SIZE for size in sizes[:-1])
    )


# --- the exchange


def _keep(spool: Path, home: Path, work: Path) -> Path:
    """Links to every file of the database as it is. Raises OSError."""
    links = work / "kept"
    links.mkdir(mode=0o700)
    owner = spool.stat()
    if os.geteuid() == 0:
        os.chown(links, owner.st_uid, owner.st_gid)
    for path in _database_files(spool):
        os.link(path, links / path.name)
    durable.sync_directory(links)
    name = f"{'-'.join(spool.relative_to(home).parts)}.before-repair-{time.strftime('%Y%m%dT%H%M%S')}"
    for place in (home, spool):
        try:
            kept = links.rename(_unused(place / name))
        except OSError as error:
            if place == spool or error.errno not in (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            continue
        durable.sync_directory(place)
        break
    return kept


def _unused(path: Path) -> Path:
    names = (path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 100)))
    return next(each for each in names if not each.exists())


def _exchange(spool: Path, new: Path) -> None:
    """Every step may be done again. No relay opens the spool meanwhile; to one of an older release it is
    damaged as long as there is a mark and no CURRENT, so a mark is there throughout, and CURRENT comes last.
    """
    for draft in spool.glob(f"*{durable.DRAFT}"):  # of a write that was killed
        draft.unlink()
    if _mark_of(spool) is None:
        durable.write(spool / MARK_NAME, Mark(records.FORMAT_VERSION.decode(), 0, 0).encode())
    for path in sorted(_database_files(spool), key=lambda each: each.name != "CURRENT"):
        if path.name != MARK_NAME:
            path.unlink()
    durable.sync_directory(spool)
    owner = spool.stat()
    for path in sorted(
        _database_files(new), key=lambda each: (each.name == "CURRENT", each.name == MARK_NAME)
    ):
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)
        if path.name in (MARK_NAME, "CURRENT"):
            durable.sync_directory(spool)
            durable.write(spool / path.name, path.read_bytes())
        else:
            os.link(path, spool / path.name)
    durable.sync_directory(spool)
