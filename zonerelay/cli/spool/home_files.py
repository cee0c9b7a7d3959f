"""What lies beside the spool and cannot be made again: it goes into a backup, through a check, and along with
a migration.

`files_of` is the one list of it. A database is copied as it is at one moment, while its worker writes on. A
file that cannot be read is told and never ends the command: mail does not depend on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from zonerelay.capture.store import DIRECTORY as CAPTURED
from zonerelay.cli.terminal import output
from zonerelay.config.credentials import identities
from zonerelay.config.credentials.identities import FILE_NAME, identities_file
from zonerelay.config.settings import NOTE, Settings
from zonerelay.delivery.auth.logins import token_directory
from zonerelay.history.database import open_for_reading
from zonerelay.history.writer import DIRECTORY as HISTORY
from zonerelay.inbound.limits.usage_file import DIRECTORY as USAGE
from zonerelay.process.setup import REDACT_KEY, redact_key_of
from zonerelay.queue.operator.journal import DIRECTORY as ACTS
from zonerelay.queue.orders.orders import DIRECTORY as ORDERS
from zonerelay.routing.mta_sts.files import policy_directory
from zonerelay.store.check import Fault, Findings
from zonerelay.transfer.register import FILE as REGISTER

DIRECTORIES = (HISTORY, USAGE, CAPTURED, ACTS, ORDERS)
"""In the home, whose files a command that root has run gives to the relay's user."""

_SET_ASIDE = ": a relay sets a history that it cannot use aside, and begins another"


def files_of(settings: Settings) -> Iterator[tuple[str, Path]]:
    """Files and directories by their name in a backup, whether they exist or not."""
    home = settings.spool.path.parent
    yield REDACT_KEY, redact_key_of(settings)
    yield NOTE, home / NOTE
    yield REGISTER, home / REGISTER
    yield "mta-sts", policy_directory(settings)
    yield "refresh-tokens", token_directory(settings)
    yield FILE_NAME, identities_file(home)
    yield HISTORY, home / HISTORY
    yield USAGE, home / USAGE
    yield CAPTURED, home / CAPTURED
    yield ACTS, home / ACTS
    yield ORDERS, home / ORDERS


def save(settings: Settings, target: Path) -> None:
    """Copies all of it into the directory of a backup. Raises OSError."""
    for name, path in files_of(settings):
        if path.exists():
            _copy(path, target / name)


def restore(settings: Settings, source: Path) -> None:
    """Copies it back from a backup; what is there under the same name and differs is moved aside. Raises
    OSError.
    """
    stamp = time.strftime("%Y%m%dT%H%M%S")
    for name, path in files_of(settings):
        saved = source / name
        if not saved.exists():
            continue
        if name == REGISTER and path.exists():
            path.write_bytes(path.read_bytes() + saved.read_bytes())
            continue
        if path.exists():
            if path.is_file() and path.read_bytes() == saved.read_bytes():
                continue
            path.rename(path.with_name(f"{path.name}.before-restore-{stamp}"))
        _copy(saved, path)


def bring_along(source: Settings, target: Settings) -> tuple[list[str], list[str]]:
    """Copies to the place of another spool what is not there yet, after its queue has moved. Returns the
    names of what was copied, and those of which the target has its own. Raises OSError.
    """
    copied, kept = list[str](), list[str]()
    theirs = dict(files_of(target))
    for name, path in files_of(source):
        if name == NOTE:  # each relay has made one by now, and a later one refuses nothing more
            continue
        if not path.exists() or path.resolve() == theirs[name].resolve():
            continue
        if theirs[name].exists():
            kept.append(name)
        else:
            _copy(path, theirs[name])
            copied.append(name)
    return copied, kept


def check(settings: Settings, findings: Findings) -> None:
    """Reads every file, and every page of a database."""
    for _, path in files_of(settings):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            is_its_own = file.is_file() and not file.name.endswith(("-wal", "-shm"))  # or of a database
            if is_its_own and (problem := _problem_in(file)):
                findings.add(Fault.BESIDE, str(file), problem)


def _problem_in(file: Path) -> str:
    try:
        if file.name == FILE_NAME:
            identities.read(file)
            return ""
        if file.suffix != ".db":
            file.read_bytes()
            return ""
        # SQLite makes files beside a database that it opens, which a mount may not allow.
        kept_from = not os.access(file.parent, os.W_OK)
        with contextlib.closing(open_for_reading(file, immutable=kept_from)) as database:
            found = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
    except identities.IdentitiesError as error:
        return f"{error}. Until then no token is let in"
    except (OSError, sqlite3.Error) as error:
        found = str(error)
    if found == "ok":
        return ""
    found = " ".join(found.split())
    if file.parent.name == CAPTURED:
        return f"{found}. Mail for it waits in the queue until the file is moved away"
    return f"{found}. No mail depends on it{_SET_ASIDE}"


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.name in (HISTORY, USAGE, CAPTURED):
        _copy_databases(path, target)
    elif path.is_dir():
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("*.new"), copy_function=_copy_file)
    else:
        shutil.copy2(path, target)


def _copy_file(path: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # an act that has become too old meanwhile
        shutil.copy2(path, target)


def _copy_databases(path: Path, target: Path) -> None:
    target.mkdir(mode=0o700, parents=True)
    for file in sorted(path.glob("*.db")):
        try:
            with (
                contextlib.closing(open_for_reading(file)) as source,
                contextlib.closing(sqlite3.connect(target / file.name)) as copy,
            ):
                source.backup(copy)
        except sqlite3.Error as error:
            (target / file.name).unlink(missing_ok=True)
            output.chatter().print(f"{file} cannot be copied: {error}")
