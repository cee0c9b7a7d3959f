"""Makes a sound LevelDB spool of a damaged one: a new database from every record that can still be read.

1. Beside the spool a directory gets links to its tables, and its logs with every record that is whole.
Tables whose index is damaged go in as a log of their rows. 2. LevelDB's own repair runs over that directory
in a process of its own, for it may abort. 3. Every message whose record, body and deliveries are there is
copied into a new database, with new indexes and counts; what is not whole goes to the salvage. 4. The new
database is checked. Then, and only then, its files take the place of the old ones.

Promises: until step 4 the spool is not touched. All its files stay as links beside it. A repair that was
killed in step 4 is completed by the next one, and a relay that is started in between refuses the spool. A
removal that was recorded in damaged octets is forgotten, so that mail may be sent again; a delivery is never
lost for it.

Memory: the deliveries of one message, and one batch.
"""

from __future__ import annotations

import heapq
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.check import KEPT, Examination, Findings, Repaired, Salvage, Salvaged, Tell
from zonerelay.store.common import records
from zonerelay.store.common.private_directories import sync, write_durably
from zonerelay.store.contract import CHUNK_SIZE, StoreCorruptError, StoreError, StoreFullError
from zonerelay.store.leveldb import scan
from zonerelay.store.leveldb.check import Records
from zonerelay.store.leveldb.damage.directory import (
    MARK_NAME,
    Mark,
    is_database_file,
    lock_directory,
    write_mark,
)
from zonerelay.store.leveldb.damage.format import (
    identities_in,
    read_log,
    read_manifest,
    write_log,
)
from zonerelay.store.leveldb.damage.table import as_batch, has_index, versions
from zonerelay.store.leveldb.engine import LevelDb, Op, Row
from zonerelay.store.leveldb.write_plan import due_time

_WRITE_BUFFER = 16 * 1024 * 1024
_BATCH_SIZE = 4 * 1024 * 1024
_READY = "ready"
_SLACK = 64 * 1024 * 1024
_REPAIR = (
    "import sys; from zonerelay.store.leveldb.engine import plyvel;"
    " plyvel.repair_db(sys.argv[1], paranoid_checks=True, bloom_filter_bits=10)"
)
"""Without paranoid_checks LevelDB keeps damaged octets, in part under new checksums."""


def repair(spool: Path, salvage: Salvage, tell: Tell, *, carry_out: bool) -> Repaired:
    """Without `carry_out` everything is done but step 4, and nothing of it stays. Blocks.

    Raises StoreError in words, or OSError.
    """
    work = spool.parent / f".{spool.name}.repair"
    lock = lock_directory(spool)
    try:
        if (work / _READY).exists():
            done = msgspec.json.decode((work / _READY).read_bytes(), type=Repaired)
        else:
            shutil.rmtree(work, ignore_errors=True)
            done = _prepare(spool, work, salvage, tell)
            if not carry_out:
                shutil.rmtree(work)
                return done
            kept = spool.with_name(f"{spool.name}.before-repair-{time.strftime('%Y%m%dT%H%M%S')}")
            done = msgspec.structs.replace(done, kept=str(kept))
            _keep(spool, kept)
            write_durably(work / _READY, msgspec.json.encode(done))
        _exchange(spool, work / "new")
        shutil.rmtree(work)
        return done
    finally:
        os.close(lock)


def _prepare(spool: Path, work: Path, salvage: Salvage, tell: Tell) -> Repaired:
    octets = sum(path.stat().st_size for path in _database_files(spool))
    free = shutil.disk_usage(spool.parent).free
    if free < octets + _SLACK:
        raise StoreFullError(
            f"the repair of {spool} needs {(octets + _SLACK) / 1e9:.2f} GB beside it,"
            f" {free / 1e9:.2f} GB are free; nothing was changed"
        )
    old = work / "old"
    old.mkdir(parents=True, mode=0o700)
    lost = _collect(spool, old)
    ran = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", _REPAIR, str(old)], capture_output=True, check=False
    )
    if ran.returncode:
        said = ran.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise StoreError(
            f"LevelDB's own repair of {spool} ended with {ran.returncode}: {said}; nothing was changed"
        )
    # A spool whose record of the format is lost is ours all the same: the caller's configuration says so.
    write_mark(old, Mark(records.FORMAT_VERSION.decode(), 0, 0))
    source, target = (LevelDb(path, write_buffer=_WRITE_BUFFER) for path in (old, work / "new"))
    try:
        source.open()
        target.open()
        rebuilt = _Rebuild(source, target, salvage, tell, octets)
        rebuilt.run()
        findings = Findings()
        Records(target, Examination(work, findings, lambda done, total: None), 0).check()
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
        salvaged=rebuilt.salvaged,
    )


# --- what can be read


def _collect(spool: Path, old: Path) -> list[str]:
    """Give LevelDB's repair tables and logs that it can read; says what is in neither."""
    lost: list[str] = []
    tables, logs, highest = _needed(spool, lost)
    for path in tables:
        try:
            raw = path.read_bytes()
        except OSError as error:
            lost.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        if has_index(raw):
            os.link(path, old / path.name)
            continue
        found, end = versions(raw)
        highest += 1
        (old / f"{highest:06d}.log").write_bytes(write_log(map(as_batch, found)))
        named = _named(raw[end:]) if end < len(raw) else ""
        lost.append(
            f"{path.name} has no index that can be read: {end:,} of {len(raw):,} octets were read{named}"
        )
    for path in logs:
        try:
            log = read_log(path.read_bytes())
        except OSError as error:
            lost.append(f"{path.name} cannot be read: {error.strerror}")
            continue
        (old / path.name).write_bytes(write_log(log.records))
        lost += [
            f"octets {gap.start:,} to {gap.end:,} of {path.name} are damaged"
            + _named(path.read_bytes()[gap.start : gap.end])
            for gap in log.gaps
        ]
    return lost


def _named(octets: bytes) -> str:
    named = identities_in(octets)
    more = "" if len(named) <= 10 else f" and {len(named) - 10} more"
    return f"; they name the messages {', '.join(named[:10])}{more}" if named else ""


def _needed(spool: Path, lost: list[str]) -> tuple[list[Path], list[Path], int]:
    """Tables and logs that are the database, and the highest number of any file.

    What the manifest does not name was replaced, and would bring back what was delivered. Without a manifest
    every file is taken.
    """
    numbered = {path.name: path for path in _database_files(spool) if path.stem.isdigit()}
    tables = sorted(path for name, path in numbered.items() if name.endswith((".ldb", ".sst")))
    logs = sorted(path for name, path in numbered.items() if name.endswith(".log"))
    highest = max((int(path.stem) for path in numbered.values()), default=0)
    try:
        current = (spool / "CURRENT").read_bytes().decode("ascii").strip()
        manifest = read_manifest((spool / current).read_bytes())
    except (OSError, ValueError) as error:
        lost.append(f"which tables belong to the database is not known, all are taken: {error}")
        return tables, logs, highest
    belong = {table.number for table in manifest.tables.values()}
    missing = belong - {int(path.stem) for path in tables}
    lost += [f"{number:06d}.ldb is missing" for number in sorted(missing)]
    first = manifest.previous_log or manifest.log
    return (
        [path for path in tables if int(path.stem) in belong],
        [path for path in logs if int(path.stem) >= first],
        highest,
    )


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
        self._tell(self._octets, self._octets)

    def _lose(self, text: str) -> None:
        if len(self.lost) < KEPT:
            self.lost.append(text)
        else:
            self.more_lost += 1

    def _deliveries(self) -> Iterator[Delivery]:
        """Those of all zones, in the order of their messages; a record without sense is told."""
        zones = [self._zone(zone) for zone in sorted(scan.zones(self._source))]
        return heapq.merge(*zones, key=lambda each: each.message_id)

    def _zone(self, zone: str) -> Iterator[Delivery]:
        prefix = records.zone_prefix(zone)
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
                if int(part) == len(sizes) + 1:
                    sizes.append(len(value))
                else:
                    sizes.append(-1)
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
        if (gone := self._open(message) - len(deliveries)) > 0:
            self.named += gone
            absent = tuple(sorted(set(recipients) - {each.recipient for each in deliveries}))
            self._lose(f"{gone} of the deliveries of message {message.id}, to {', '.join(absent)}")
            self._give(message.id, message, (), absent, "deliveries without a record", is_whole=True)

    def _open(self, message: Message) -> int:
        """How many deliveries the message had."""
        (raw,) = self._source.get_each([records.open_count_key(message.id)])
        try:
            if isinstance(raw, bytes):
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
            why = "no delivery has a record: it was delivered, or they were lost"
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


def _keep(spool: Path, kept: Path) -> None:
    """Links to every file of the database as it is. Raises OSError."""
    kept.mkdir(mode=0o700)
    owner = spool.stat()
    if os.geteuid() == 0:
        os.chown(kept, owner.st_uid, owner.st_gid)
    for path in _database_files(spool):
        os.link(path, kept / path.name)
    sync(kept)
    sync(kept.parent)


def _exchange(spool: Path, new: Path) -> None:
    """Every step may be done again. A relay refuses a spool without CURRENT as long as there is a mark, so
    that one is there throughout, and CURRENT comes last.
    """
    if not (spool / MARK_NAME).exists():
        write_mark(spool, Mark(records.FORMAT_VERSION.decode(), 0, 0))
    for path in sorted(_database_files(spool), key=lambda each: each.name != "CURRENT"):
        if path.name != MARK_NAME:
            path.unlink()
    sync(spool)
    owner = spool.stat()
    for path in sorted(
        _database_files(new), key=lambda each: (each.name == "CURRENT", each.name == MARK_NAME)
    ):
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)
        if path.name in (MARK_NAME, "CURRENT"):
            sync(spool)
            write_durably(spool / path.name, path.read_bytes())
        else:
            os.link(path, spool / path.name)
    sync(spool)
