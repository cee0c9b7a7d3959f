"""Backs up, checks and migrates the files next to the spool that cannot be recreated.

`files_of` lists them. A database is copied in the state of one moment, while its worker continues to write. A
file that cannot be read is reported and never ends the command, because mail does not depend on it.
"""

import contextlib
import filecmp
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from zonerelay import durable
from zonerelay.capture.store import DIRECTORY as CAPTURED
from zonerelay.cli.terminal import output
from zonerelay.config.credentials import identities
from zonerelay.config.credentials.identities import FILE_NAME
from zonerelay.config.settings import Settings
from zonerelay.delivery.auth.logins import token_directory
from zonerelay.history.database import open_for_reading
from zonerelay.history.writer import DIRECTORY as HISTORY
from zonerelay.inbound.limits.usage_file import DIRECTORY as USAGE
from zonerelay.process.setup import REDACT_KEY, redact_key_of
from zonerelay.queue.operator.journal import DIRECTORY as ACTS
from zonerelay.queue.orders.orders import DIRECTORY as ORDERS
from zonerelay.queue.orders.orders import OrdersError, OrdersFile
from zonerelay.routing.mta_sts import policy_directory
from zonerelay.store.check import DamageKind, Findings
from zonerelay.transfer.loader import FILE as REGISTER
from zonerelay.transfer.loader import merge_registers

_POLICIES = "mta-sts"
_REFRESH_TOKENS = "refresh-tokens"
_DATABASES = frozenset({HISTORY, USAGE, CAPTURED})
_MERGED = frozenset({ORDERS, REGISTER})
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_BLOCK = 4096
_IN_HOME = (HISTORY, USAGE, CAPTURED, ACTS, ORDERS)
DIRECTORIES = (*_IN_HOME, _POLICIES, _REFRESH_TOKENS)
"""In the home, whose files a command that root has run gives to the relay's user."""

_SET_ASIDE = ": a relay renames an unusable history file and starts a new one"


def files_of(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Yield the name in a backup, and the path, of each file or directory to back up, even if it does not
    exist.
    """
    home = settings.spool.path.parent
    yield REDACT_KEY, redact_key_of(settings)
    yield _POLICIES, policy_directory(settings)
    yield _REFRESH_TOKENS, token_directory(settings)
    yield from ((name, home / name) for name in (REGISTER, FILE_NAME, *_IN_HOME))


class CopiedFiles(msgspec.Struct):
    """The names of the files that were copied to or from another directory, and of those that were not.
    `kept` are files that the target already has. `lost` are files that are damaged and were not copied, with
    the reason.
    """

    copied: list[str] = msgspec.field(default_factory=list)
    kept: list[str] = msgspec.field(default_factory=list)
    lost: list[str] = msgspec.field(default_factory=list)

    def tell(self) -> None:
        for each in self.lost:
            output.tell(f"not copied: {each}")


def octets_of(settings: Settings) -> int:
    """Return an upper limit for the size of a copy of all files to back up, in bytes. Raise OSError if one
    cannot be read.
    """
    octets = 0
    for file in (file for _, path in files_of(settings) for file in _files(path)):
        with contextlib.suppress(FileNotFoundError):
            octets += file.stat().st_size + _BLOCK
    return octets


def save(settings: Settings, target: Path) -> CopiedFiles:
    """Copy all files to back up into the directory of a backup. Raise OSError if one cannot be written."""
    carried = CopiedFiles()
    for name, path in files_of(settings):
        _union(name, path, target / name, carried)
    return carried


def restore(settings: Settings, source: Path) -> CopiedFiles:
    """Restore the files next to the spool from a backup. An existing file with the same name and other
    content is renamed. Existing suspensions and key registers stay valid, in addition to those of the backup.
    Raise OSError, OrdersError or TransferError if that fails.
    """
    stamp = time.strftime("%Y%m%dT%H%M%S")
    carried = CopiedFiles()
    for name, path in files_of(settings):
        saved = source / name
        if name in _MERGED:
            _merge(name, saved, path, carried)
            continue
        # existing files may be from an earlier run
        is_part = all(_is_same(saved / file.relative_to(path), file) for file in _files(path))
        if saved.exists() and not is_part:
            durable.rename(path, path.with_name(f"{path.name}.before-restore-{stamp}"))
        _union(name, saved, path, carried, copy=durable.copy)
    return carried


def bring_along(source: Settings, target: Settings, carried: CopiedFiles, *, records: bool) -> None:
    """Copy the files next to one spool to the directory of another spool, unless they exist there. The first
    call copies what must be active before mail arrives there; a second one (`records`) copies the databases,
    which relays of the source may write until the end. Repeating it completes an interrupted run. Raise
    OSError, OrdersError or TransferError if it fails.
    """
    theirs = dict(files_of(target))
    for name, path in files_of(source):
        if (name in _DATABASES) is not records:
            continue
        if path.resolve() == theirs[name].resolve():
            continue
        if name in _MERGED:
            _merge(name, path, theirs[name], carried)
        else:
            _union(name, path, theirs[name], carried)


def check(settings: Settings, findings: Findings) -> None:
    """Check that every file next to the spool, and every page of its databases, can be read. Add the problems
    to the findings.
    """
    for _, path in files_of(settings):
        for file in _files(path):
            if problem := _problem_in(file):
                findings.add(DamageKind.BESIDE, str(file), problem)


def _problem_in(file: Path) -> str:
    try:
        if file.suffix != ".db":
            if file.name == FILE_NAME:
                identities.read(file)
            elif file.parent.name == ORDERS:
                OrdersFile(file.parents[1]).read()
            else:
                file.read_bytes()
            return ""
        # SQLite creates files next to a database that it opens, which a read-only mount does not allow.
        kept_from = not os.access(file.parent, os.W_OK)
        with contextlib.closing(open_for_reading(file, immutable=kept_from)) as database:
            found = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
    except OrdersError as error:
        return f"{error}. Relays do not start until it is fixed"
    except identities.IdentitiesError as error:
        return f"{error}. Tokens are rejected until it is fixed"
    except (OSError, sqlite3.Error) as error:
        found = str(error)
    if found == "ok" or not file.exists():  # a relay removes changes that are too old to be undone
        return ""
    found = " ".join(found.split())
    if file.parent.name == CAPTURED:
        return f"{found}. Mail that needs it stays in the queue until the file is moved away"
    return f"{found}. No mail depends on it{_SET_ASIDE}"


def _files(path: Path) -> list[Path]:
    """Return this file or the files below this directory, except temporary files and the WAL."""
    skipped = ("-wal", "-shm", "-journal", durable.DRAFT)
    found = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in found if file.is_file() and not file.name.endswith(skipped)]


def _is_same(one: Path, other: Path) -> bool:
    return one.is_file() and filecmp.cmp(one, other, shallow=False)


def _merge(name: str, path: Path, target: Path, carried: CopiedFiles) -> None:
    if name == ORDERS:
        changed = OrdersFile(target.parent).merge(OrdersFile(path.parent).read(), time.time())
    else:
        changed = merge_registers(path, target)
    if changed:
        carried.copied.append(name)


def _union(
    name: str,
    path: Path,
    target: Path,
    carried: CopiedFiles,
    *,
    copy: Callable[[Path, Path], None] | None = None,
) -> None:
    """Copy each file of a directory that the target directory does not have. The copy of a database is
    consistent, unless `copy` is given.
    """
    copied = kept = False
    for file in _files(path):
        place = target / file.relative_to(path)
        if name in _DATABASES and file.suffix != ".db":
            continue  # a mark, or a file that was set aside
        if place.exists():
            kept = kept or not _is_same(file, place)
            continue
        try:
            if file.suffix != ".db" and (problem := _problem_in(file)):
                raise DamagedDatabaseError(problem)
            (copy or (_copy_database if file.suffix == ".db" else durable.copy))(file, place)
            copied = True
        except OSError:
            if file.exists():
                raise  # otherwise the relay has removed it
        except DamagedDatabaseError as error:
            carried.lost.append(f"{file}: {error}")
    if copied:
        carried.copied.append(name)
    if kept:
        carried.kept.append(name)


class DamagedDatabaseError(Exception):
    """The SQLite database cannot be read."""


def _copy_database(path: Path, target: Path) -> None:
    """Copy an SQLite database as a consistent snapshot. Raise DamagedDatabaseError if it cannot be read,
    OSError if the copy cannot be written.
    """
    durable.make_directory(target.parent)
    draft = target.with_name(f".{target.name}{durable.DRAFT}")
    draft.unlink(missing_ok=True)
    try:
        with (
            contextlib.closing(open_for_reading(path)) as source,
            contextlib.closing(sqlite3.connect(draft)) as copy,
        ):
            source.backup(copy)
            found = str(copy.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            raise DamagedDatabaseError(" ".join(found.split()))
        draft.chmod(durable.PRIVATE)
        durable.rename(draft, target)
    except sqlite3.Error as error:
        if (getattr(error, "sqlite_errorcode", sqlite3.SQLITE_NOTADB) & 0xFF) in _DAMAGE:
            raise DamagedDatabaseError(str(error)) from error
        raise OSError(f"{path} cannot be copied to {target}: {error}") from error
    finally:
        for end in ("", "-journal", "-wal", "-shm"):
            draft.with_name(draft.name + end).unlink(missing_ok=True)
