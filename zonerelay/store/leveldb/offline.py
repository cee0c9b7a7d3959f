"""Checks and repairs a LevelDB spool without a relay.

The check reads a snapshot (`take_snapshot`), because LevelDB writes when it opens a database. So it works
while a relay is running and on a read-only file system, and it changes no byte and no timestamp of the spool.
It verifies every block's checksum, and compares the records as for every engine (`store/check`).

The repair builds a new database from every record that can still be read:

1. A subdirectory of the spool gets hard links to the tables, and logs with every intact record. A table with
   a damaged index is added as a log of its rows, and a partly unreadable file with its readable part.
2. LevelDB's own repair runs on that directory in a separate process, because it may abort.
3. All rows are copied into a new database and repaired there as in any engine (`store/check`).
   Incomplete messages go to the salvage directory.
4. The new database is checked. Only then do its files replace the old ones.

Promises: until the end of step 4 the spool is unchanged, and the files of an unfinished repair are removed.
All files of the old database are kept as links. A repair that is killed in step 4 is completed by the next
one; until then no relay opens the spool. A removal that was recorded in damaged bytes is lost, so mail may be
sent again. A delivery is never lost for that reason.

Memory: the deliveries of one message, and one batch.
"""

import errno
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from zonerelay import durable
from zonerelay.config.units import rough_size
from zonerelay.store import check, records
from zonerelay.store.contract import StoreError, StoreFullError, StoreOpenError
from zonerelay.store.keys.port import Op
from zonerelay.store.leveldb.damage import directory as files
from zonerelay.store.leveldb.damage import format as file_format
from zonerelay.store.leveldb.damage.format import has_index, named_in
from zonerelay.store.leveldb.engine import damaged_tables, repair_database
from zonerelay.store.leveldb.spool import LevelDb, SpoolKeys, SpoolReads, judge_format, run_through

_WRITE_BUFFER = 16 * 1024 * 1024
READ_BUFFER = 4 * 1024 * 1024
_BATCH_SIZE = 4 * 1024 * 1024
_PAGE = 4096
TRIES = 50
_LOG = re.compile(r"\d+\.log")
_FAR = 1 << 56
"""A sequence number that no write reaches."""
_SLACK = 64 * 1024 * 1024


def repair_leveldb(
    spool: Path, home: Path, salvage: check.Salvage, tell: check.Tell, *, carry_out: bool
) -> check.RepairResult:
    """Repair the LevelDB spool in the directory `spool`, which is inside `home`. The old files are moved to
    `home` if both are on one file system, and stay in the spool otherwise. Without `carry_out` everything
    except step 4 is done, and its files are removed.

    Blocks. Raises StoreError with a message, or OSError.
    """
    work = spool / files.REPAIR_NAME
    lock = files.lock_directory(spool)
    try:
        if (work / files.READY_NAME).exists():
            done = msgspec.json.decode((work / files.READY_NAME).read_bytes(), type=check.RepairResult)
            if not carry_out:
                return done
        else:
            times = spool.stat()
            try:
                shutil.rmtree(work, ignore_errors=True)
                done = _prepare(spool, work, salvage, tell)
                if not carry_out or not done.kept:
                    return msgspec.structs.replace(done, kept=[])
                done = msgspec.structs.replace(done, kept=[str(_keep(spool, home, work))])
                durable.sync_tree(work)  # the exchange deletes its source
                durable.write(work / files.READY_NAME, msgspec.json.encode(done))
            finally:
                if not (work / files.READY_NAME).exists():
                    shutil.rmtree(work, ignore_errors=True)
                    os.utime(spool, ns=(times.st_atime_ns, times.st_mtime_ns))
        _exchange(spool, work / "new")
        # This comes first. A repair that found the mark next to the new database would repeat the exchange.
        (work / files.READY_NAME).unlink()
        durable.sync_directory(work)
        shutil.rmtree(work)
        return done
    finally:
        os.close(lock)


def _prepare(spool: Path, work: Path, salvage: check.Salvage, tell: check.Tell) -> check.RepairResult:
    """Write a repaired copy of the database into `work`. `kept` in the result is set if there are files to
    exchange.
    """
    octets = sum(path.stat().st_size for path in _database_files(spool))
    if not octets:
        return check.RepairResult()  # no relay has been started here yet
    if (mark := _mark_of(spool)) is not None:
        judge_format(spool, mark.format.encode(), is_empty=False)
    # Twice, because LevelDB rewrites the repaired tables when they are opened.
    needed, free = 2 * octets + _SLACK, shutil.disk_usage(spool).free
    if free < needed:
        raise StoreFullError(
            f"the repair of {spool} requires {rough_size(needed)} there, but only {rough_size(free)} are "
            "free; nothing was changed"
        )
    old = work / "old"
    old.mkdir(parents=True, mode=0o700)
    lost, noted = _collect(spool, old, tell)
    if any(old.iterdir()):
        if failed := repair_database(old):
            raise StoreError(f"LevelDB's own repair of {spool} {failed}; nothing was changed")
        lost += _name_blocks(spool, damaged_tables(old))
        # A spool without a record of its format is accepted, because the configuration names it.
        files.write_mark(old, files.SyncMark(records.FORMAT_VERSION.decode(), 0, 0))
    tell(0, octets)
    source, target = (LevelDb(path, write_buffer=_WRITE_BUFFER) for path in (old, work / "new"))
    try:
        source.open()
        _refuse_foreign(spool, source)
        target.open()
        _copy(source, target, tell, octets)
        # The files of the old database are kept, and with them the records.
        repair = check.RecordRepair(salvage, None, carry_out=True, takes_uploads=True)
        keys = SpoolKeys(target)
        done = repair.repaired(run_through(check.mend(keys, repair, tell, keys.write)).deliveries)
    finally:
        source.close()
        target.close()
    return msgspec.structs.replace(done, lost=[*lost, *done.lost], noted=noted, kept=["later"])


def _refuse_foreign(spool: Path, source: LevelDb) -> None:
    first = next(source.rows(b"", limit=1), None)
    if first is not None and not first[0].startswith(check.PREFIXES):
        raise StoreError(
            f"{spool} contains a LevelDB database that is not a zonerelay spool: its first key "
            f"is {first[0][:40]!r}; nothing was changed"
        )


# --- reading the old spool


def _collect(spool: Path, old: Path, tell: check.Tell) -> tuple[list[str], list[str]]:
    """Collect the readable tables and logs in the directory `old`, for LevelDB's repair. Return descriptions
    of data that neither contains, and of other damage.
    """
    lost: list[str] = []
    noted: list[str] = []
    mark = _mark_of(spool)
    needed = _needed(spool, mark, lost, noted)
    highest = needed.highest
    for path in needed.tables:
        tell(0, 0)
        raw, is_whole = _read(path, lost)
        if is_whole and has_index(raw):
            os.link(path, old / path.name)
        elif has_index(raw):
            (old / path.name).write_bytes(raw)
        else:
            blocks = list(file_format.data_blocks(raw))
            found = itertools.chain.from_iterable(block.batches for block in blocks)
            highest += 1
            (old / f"{highest:06d}.log").write_bytes(file_format.write_log(found))
            end = blocks[-1].end if blocks else 0
            read = f"records were read from the first {end:,} of {len(raw):,} bytes"
            lost.append(f"{path.name} has no readable index; {read}{named_in(raw[end:])}")
    logs = [(path, _read(path, lost)[0]) for path in needed.logs]
    for log in files.found_logs(logs, mark, needed.last_sequence, verify=True):
        tell(0, 0)
        (old / log.path.name).write_bytes(file_format.write_log(log.contents.records))
        for gap in log.contents.gaps:
            where = f"bytes {gap.start:,} to {gap.end:,} of {log.path.name} are damaged"
            if gap.end >= len(log.raw):
                where = f"{log.path.name} is damaged or missing from byte {gap.start:,}"
            lost.append(where + named_in(log.raw[gap.start : gap.end]))
    return lost, noted


def _name_blocks(spool: Path, tables: list[int]) -> Iterator[str]:
    """Yield a description of each damaged block of these tables, because LevelDB skips damaged blocks
    silently.
    """
    for number in tables:
        path = spool / f"{number:06d}.ldb"
        raw = _read(path, [])[0] if path.exists() else b""
        for start, end in file_format.damaged_blocks(raw):
            yield f"bytes {start:,} to {end:,} of {path.name} are damaged{named_in(raw[start:end])}"


def _read(path: Path, lost: list[str]) -> tuple[bytes, bool]:
    """Read a file; unreadable parts become zeros, which LevelDB detects by their checksums. Return whether it
    was whole.
    """
    try:
        return path.read_bytes(), True
    except OSError as error:
        lost.append(f"{path.name} cannot be read completely: {error.strerror}")
    out, size = bytearray(), path.stat().st_size
    for at in range(0, size, _PAGE):
        wanted = min(_PAGE, size - at)
        try:
            with path.open("rb", buffering=0) as file:
                octets = os.pread(file.fileno(), wanted, at)
        except OSError:
            octets = b""
        out += octets.ljust(wanted, b"\0")
    return bytes(out), False


def _mark_of(spool: Path) -> files.SyncMark | None:
    try:
        return files.read_mark(spool)
    except OSError:
        return None


class _DatabaseFiles(NamedTuple):
    """The tables and logs of a database, and its highest file and sequence numbers."""

    tables: list[Path]
    logs: list[Path]
    highest: int
    last_sequence: int


def _needed(spool: Path, mark: files.SyncMark | None, lost: list[str], noted: list[str]) -> _DatabaseFiles:
    """Return the tables and logs that the manifest names. Other files were replaced, and would bring back
    delivered mail. Every file is used if there is no manifest or if it names a missing file, because its end,
    with the names of newer files, may be missing.
    """
    numbered = {path: int(path.stem) for path in _database_files(spool) if path.stem.isdigit()}
    tables = [path for path in numbered if path.suffix == ".ldb"]
    logs = [path for path in numbered if path.suffix == ".log"]
    try:
        manifest = _manifest(spool, noted)
    except (OSError, ValueError) as error:
        noted.append(f"the manifest is unusable, so all tables are used: {error}")
        manifest = file_format.Manifest(last_sequence=_FAR)
    belong = {table.number for table in manifest.tables.values()}
    missing = belong.difference(map(numbered.__getitem__, tables))
    lost += [f"{number:06d}.ldb is missing" for number in sorted(missing)]
    present = [numbered[path] for path in logs]
    lost += [
        f"{number:06d}.log, which contained the newest mail, is missing"
        for number in files.missing_logs(present, manifest, mark)
    ]
    if not missing and manifest.log in present:
        tables = [path for path in tables if numbered[path] in belong]
        logs = [path for path in logs if numbered[path] >= manifest.log]
    return _DatabaseFiles(tables, logs, max(numbered.values(), default=0), manifest.last_sequence)


def _manifest(spool: Path, noted: list[str]) -> file_format.Manifest:
    """Return the manifest that CURRENT names, or the newest if it names none. Raises OSError, ValueError."""
    try:
        current = (spool / "CURRENT").read_bytes().decode("ascii").strip()
        if not current.startswith("MANIFEST-"):
            raise ValueError("it does not name a manifest")
        path = spool / current
    except (OSError, ValueError) as error:
        found = sorted(path for path in _database_files(spool) if path.name.startswith("MANIFEST-"))
        if not found:
            raise
        path = found[-1]
        noted.append(f"CURRENT is unusable ({error}), so {path.name} is used")
    return file_format.read_manifest(path.read_bytes())


def _database_files(spool: Path) -> list[Path]:
    return sorted(path for path in spool.iterdir() if path.is_file() and files.is_database_file(path.name))


# --- the new database


def _copy(source: LevelDb, target: LevelDb, tell: check.Tell, octets: int) -> None:
    """Copy all rows with an iterator. After LevelDB's repair a Get may find replaced values, because all
    repaired tables are in level 0 and Get prefers the newest of them. Raises StoreError.
    """
    ops: list[Op] = []
    size = done = 0
    for key, value in source.rows(b"", limit=sys.maxsize):
        ops.append((key, value))
        size += len(key) + len(value)
        if size >= _BATCH_SIZE:
            target.write([ops])
            done += size
            tell(min(done, octets), octets)
            ops, size = [], 0
    last = run_through(SpoolReads(source).last_message_id())
    if last is not None:
        ops.append((records.META_LAST_ID, last.encode("ascii")))
    target.write([ops])


# --- the exchange


def _keep(spool: Path, home: Path, work: Path) -> Path:
    """Keep all files of the old database as hard links in a new directory, and return its path. Raises
    OSError.
    """
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
    """Replace the files of the old database by those of the new one. Every step can be repeated. No relay
    opens the spool during the exchange. An older release treats the spool as damaged while there is a mark
    and no CURRENT, so a mark exists throughout, and CURRENT is moved last.
    """
    for draft in spool.glob(f"*{durable.DRAFT}"):  # left by a write that was killed
        draft.unlink()
    if _mark_of(spool) is None:
        durable.write(spool / files.MARK_NAME, files.SyncMark(records.FORMAT_VERSION.decode(), 0, 0).encode())
    for path in sorted(_database_files(spool), key=lambda each: each.name != "CURRENT"):
        if path.name != files.MARK_NAME:
            path.unlink()
    durable.sync_directory(spool)
    owner = spool.stat()
    for path in sorted(
        _database_files(new), key=lambda each: (each.name == "CURRENT", each.name == files.MARK_NAME)
    ):
        if os.geteuid() == 0:
            os.chown(path, owner.st_uid, owner.st_gid)
        if path.name in (files.MARK_NAME, "CURRENT"):
            durable.sync_directory(spool)
            durable.write(spool / path.name, path.read_bytes())
        else:
            os.link(path, spool / path.name)
    durable.sync_directory(spool)


# --- the check


def check_leveldb(
    spool: Path, place: Path, findings: check.Findings, tell: check.Tell
) -> check.SpoolContents:
    """Check the spool, using a temporary copy in `place`. Blocks. Raises StoreError, or OSError, if the spool
    cannot be read at all.
    """
    with tempfile.TemporaryDirectory(prefix=".zonerelay-", dir=place) as scratch:
        copy = Path(scratch) / "copy"
        take_snapshot(spool, copy)
        return _check_snapshot(spool, copy, findings, tell)


def _check_snapshot(
    spool: Path, copy: Path, findings: check.Findings, tell: check.Tell
) -> check.SpoolContents:
    def damaged(text: str) -> None:
        findings.add(check.DamageKind.UNREADABLE, str(spool), text.replace(str(copy), str(spool)))

    octets = sum(path.stat().st_size for path in copy.iterdir())
    if not any(copy.iterdir()):
        return check.SpoolContents(0, 0, 0)  # no relay has been started here yet
    tables = sorted(path for path in copy.iterdir() if path.suffix == ".ldb")
    db = LevelDb(copy, write_buffer=READ_BUFFER)
    met: list[str] = []
    db.on_damage = met.append
    try:
        db.open()
    except StoreOpenError as error:
        damaged(error.finding if isinstance(error, files.DamagedSpoolError) else str(error))
        return check.SpoolContents(0, 0, octets)
    try:
        for loss in db.losses.open:  # damage that was repaired in the snapshot when it was opened
            named = f"; they refer to {', '.join(loss.messages[:3])}" if loss.messages else ""
            damaged(f"{loss.what}{named}")
        return run_through(check.compare(SpoolKeys(db), findings, tell, octets=octets))
    finally:
        db.close()
        if met and not _find_blocks(spool, tables, findings, tell):
            for text in dict.fromkeys(met):
                damaged(text)


def _find_blocks(spool: Path, tables: list[Path], findings: check.Findings, tell: check.Tell) -> bool:
    """Report the damaged blocks of the tables, because LevelDB reports damage without its location. Return
    false if no readable table has damage.
    """
    before = findings.counts[check.DamageKind.UNREADABLE]
    for path in filter(Path.exists, tables):  # the check's own LevelDB may have replaced some that are whole
        tell(0, 0)
        where = str(spool / path.name)
        try:
            raw = path.read_bytes()
        except OSError as error:
            findings.add(check.DamageKind.UNREADABLE, where, f"it cannot be read: {error.strerror}")
            continue
        if not has_index(raw):
            findings.add(check.DamageKind.UNREADABLE, where, "its index or its end is damaged")
            continue
        for start, end in file_format.damaged_blocks(raw):
            text = f"bytes {start:,} to {end:,} are damaged{named_in(raw[start:end])}"
            findings.add(check.DamageKind.UNREADABLE, where, text)
    return findings.counts[check.DamageKind.UNREADABLE] > before


# --- snapshots


def take_snapshot(spool: Path, into: Path) -> None:
    """Create a consistent snapshot of a spool in the new directory `into`. A relay may write to the spool at
    the same time. Raises StoreError, StoreFullError, or OSError, after which the caller removes `into`.

    Tables never change, so they become hard links. Logs and the manifest grow, so they are copied. The
    snapshot has a prefix of all writes: every write that was acknowledged before this was called, and later
    ones up to some moment. The spool's directory is not written to, and the relay does not wait.

    A compaction may remove a file after the manifest was copied and before the file is. Then the snapshot
    starts again. If `into` is on another file system, the tables are copied after a check of the free space.
    """
    files.refuse_half_repaired(spool)
    for _ in range(TRIES):
        try:
            before = _manifest_state(spool)
            _copy_state(spool, into)
            if _manifest_state(spool) == before:
                return
        except FileNotFoundError:
            # Before LevelDB removes a file, it writes to the manifest that the file is no longer needed.
            if not spool.is_dir():
                raise
        shutil.rmtree(into, ignore_errors=True)
    raise StoreError(f"{spool} was modified while it was being read, {TRIES} times in a row; try again later")


def _manifest_state(spool: Path) -> tuple[bytes, int]:
    """Return a value that changes when LevelDB adds or removes a file, because its manifest has grown or was
    replaced.
    """
    try:
        current = (spool / "CURRENT").read_bytes()
        return current, (spool / os.fsdecode(current.strip())).stat().st_size
    except (OSError, ValueError):  # checked with the snapshot
        return b"", 0


def _copy_state(spool: Path, into: Path) -> None:
    into.mkdir(mode=0o700)
    # The mark defines what a log must contain, so it is copied first. If a newer log exists, the older one is
    # complete, so the logs together are a prefix of all writes.
    names = sorted(os.listdir(spool))  # noqa: PTH208 - names alone
    first = [name for name in (files.MARK_NAME, "CURRENT") if name in names]
    manifests = [name for name in names if name.startswith("MANIFEST-")]
    for name in (*first, *manifests, *filter(_LOG.fullmatch, names)):
        shutil.copyfile(spool / name, into / name)
    _link(spool, into, _named_tables(into, set(names)))


def _named_tables(into: Path, names: set[str]) -> list[str]:
    """Return those file names in `names` that belong to tables in the manifest. A table that is still being
    written must not be linked, because LevelDB would reuse its number for a table of the snapshot and
    overwrite the spool's file.
    """
    try:
        current = into / os.fsdecode((into / "CURRENT").read_bytes().strip())
        tables = file_format.read_manifest(current.read_bytes()).tables.values()
    except (OSError, ValueError):  # the error is reported when the snapshot is opened
        return []
    return [name for table in tables if (name := f"{table.number:06d}.ldb") in names]


def _link(spool: Path, into: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        try:
            os.link(spool / name, into / name)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
            _copy_tables(spool, into, names[number:])
            return


def _copy_tables(spool: Path, into: Path, names: list[str]) -> None:
    needed = sum((spool / name).stat().st_size for name in names)
    free = shutil.disk_usage(into).free
    if needed > free:
        raise StoreFullError(
            f"a copy of {spool} requires {rough_size(needed)}, but only {rough_size(free)} are free in "
            f"{into.parent}; use a directory on the same file system as the spool, where hard links suffice"
        )
    for name in names:
        shutil.copyfile(spool / name, into / name)
