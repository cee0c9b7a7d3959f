"""Checks a LevelDB spool: every block's checksum, every record, and the consistency of the records.

The check reads a snapshot (`snapshot`), because LevelDB writes when it opens a database. So it works while a
relay is running and on a read-only file system, and it changes no byte and no timestamp of the spool.

The records are compared as for every engine (`store/keys/check`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from zonerelay.store.check import CheckOptions, DamageKind, SpoolContents
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.keys.check import compare
from zonerelay.store.leveldb.damage.directory import DamagedSpoolError
from zonerelay.store.leveldb.damage.format import named_in
from zonerelay.store.leveldb.damage.table import damaged_blocks, has_index
from zonerelay.store.leveldb.scan import SpoolKeys, run_through
from zonerelay.store.leveldb.snapshot import take_snapshot
from zonerelay.store.leveldb.spool import LevelDb

WRITE_BUFFER = 4 * 1024 * 1024


def check(spool: Path, examination: CheckOptions) -> SpoolContents:
    """Check the spool. Blocks. Raises StoreError, or OSError, if the spool cannot be read at all."""
    scratch = examination.scratch
    try:
        take_snapshot(spool, scratch)
        return _check_snapshot(spool, examination)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_snapshot(spool: Path, examination: CheckOptions) -> SpoolContents:
    scratch, findings = examination.scratch, examination.findings

    def damaged(text: str) -> None:
        findings.add(DamageKind.UNREADABLE, str(spool), text.replace(str(scratch), str(spool)))

    octets = sum(path.stat().st_size for path in scratch.iterdir())
    if not any(scratch.iterdir()):
        return SpoolContents(0, 0, 0)  # no relay has been started here yet
    tables = sorted(path for path in scratch.iterdir() if path.suffix in (".ldb", ".sst"))
    db = LevelDb(scratch, write_buffer=WRITE_BUFFER)
    met: list[str] = []
    db.on_damage = met.append
    try:
        db.open()
    except StoreOpenError as error:
        damaged(error.finding if isinstance(error, DamagedSpoolError) else str(error))
        return SpoolContents(0, 0, octets)
    try:
        for loss in db.losses.open:  # damage that was repaired in the snapshot when it was opened
            named = f"; they refer to {', '.join(loss.messages[:3])}" if loss.messages else ""
            damaged(f"{loss.what}{named}")
        return run_through(compare(SpoolKeys(db), findings, examination.tell, octets=octets))
    finally:
        db.close()
        if met and not _name_blocks(spool, tables, examination):
            for text in dict.fromkeys(met):
                damaged(text)


def _name_blocks(spool: Path, tables: list[Path], examination: CheckOptions) -> bool:
    """Find the damaged blocks, because LevelDB reports damage without its location. Return false if no
    readable table has damage.
    """
    before = examination.findings.counts[DamageKind.UNREADABLE]
    for path in filter(Path.exists, tables):  # the check's own LevelDB may have replaced some that are whole
        examination.tell(0, 0)
        where = str(spool / path.name)
        try:
            raw = path.read_bytes()
        except OSError as error:
            examination.findings.add(DamageKind.UNREADABLE, where, f"it cannot be read: {error.strerror}")
            continue
        if not has_index(raw):
            examination.findings.add(DamageKind.UNREADABLE, where, "its index or its end is damaged")
            continue
        for start, end in damaged_blocks(raw):
            text = f"bytes {start:,} to {end:,} are damaged{named_in(raw[start:end])}"
            examination.findings.add(DamageKind.UNREADABLE, where, text)
    return examination.findings.counts[DamageKind.UNREADABLE] > before
