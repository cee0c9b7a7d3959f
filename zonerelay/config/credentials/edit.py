"""The editor of the credentials file and of the guard rails beside it: it changes one user at a time, and
writes each file whole or not at all.

A relay that reads at that moment, and one that starts after a power cut, sees the old file or the new one.
Mode, owner, comments and the order of lines stay. The lock is on the directory, because the file is replaced:
two commands at once wait for each other, and neither loses the change of the other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from zonerelay import durable
from zonerelay.config.credentials.file import (
    MAX_FILE,
    CredentialsError,
    User,
    format_line,
    parse,
    parse_line,
    read_text,
)

NEW_FILE_MODE = 0o640

# Takes the user there is, if any, and gives the one to keep; None removes. May raise to change nothing.
Change = Callable[[User | None], User | None]


# Takes the user there was and the one there is now, and gives the new text of the file beside the credentials
# file, `None` where it stays as it is, and that file. May raise to change nothing.
ChangeBeside = Callable[[User | None, User | None], tuple[str | None, Path]]


def _nothing(_: User | None, __: User | None) -> tuple[str | None, Path]:
    return None, Path()


def change_user(path: Path, name: str, change: Change, beside: ChangeBeside = _nothing) -> bool:
    """Apply one change under the lock. True when the file was made anew.

    Raises CredentialsError, also for a file that was bad before: nothing is built on what cannot be read.
    """
    path = Path(os.path.realpath(path))  # a symbolic link stays one
    try:
        with locked(path.parent):
            missing = not path.exists()
            text = "" if missing else read_text(path, whole=True)  # one that is too large can be made smaller
            before = parse(text, str(path)).get(name)
            after = change(before)
            kept, file = beside(before, after)
            edited = _edited(text, name, after) if after != before else None
            for each, new in ((path, edited), (file, kept)):
                if new is not None:
                    refuse_too_large(each, new)
            if before is None and kept is not None:  # a new user never has those of an older one
                replace_file(file, kept, like=path)
            if edited is not None:
                replace_file(path, edited)
            if before is not None and kept is not None:
                replace_file(file, kept, like=path)
            return missing
    except OSError as error:
        raise CredentialsError(f"{error.filename or path}: {error.strerror or error}") from error


def _edited(text: str, name: str, after: User | None) -> str:
    """The text with the user's line replaced, removed, or added at the end."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    kept: list[str] = []
    written = False
    for line in lines:
        user = parse_line(line)
        if user is None or user.name != name:
            kept.append(line)
        elif after is not None:
            kept.append(format_line(after))
            written = True
    if after is not None and not written:
        kept.append(format_line(after))
    return "".join(f"{line}\n" for line in kept)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Commands that change a file of the directory wait for each other. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def refuse_too_large(path: Path, text: str, most: int | None = None) -> None:
    """Raise CredentialsError if a relay would not read the file with this text; it may get smaller."""
    size, most = len(text.encode()), MAX_FILE if most is None else most
    if size > most and (not path.exists() or size >= path.stat().st_size):
        raise CredentialsError(
            f"{path} would have {size:,} bytes; a relay that finds more than {most:,} refuses every log-in:"
            " remove entries that are not needed. Nothing was changed"
        )


def replace_file(path: Path, text: str, *, like: Path | None = None) -> None:
    """Writes the file whole or not at all. Raises OSError, and CredentialsError if its owner would change.
    A new file has owner and mode of the one that it is `like`.
    """
    model = path if like is None or path.exists() else like
    durable.write(path, text.encode(), dress=lambda descriptor: _dress(descriptor, model))


def _dress(descriptor: int, path: Path) -> None:
    """Mode and owner of the old file. A new one is for its directory's group, which is often the relay's."""
    try:
        old = path.stat()
    except FileNotFoundError:
        # Without the right to give it away the file stays its maker's: the command says who can read it.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, -1, path.parent.stat().st_gid)
        os.fchmod(descriptor, NEW_FILE_MODE)
        return
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
        # Before the mode, because a change of owner clears bits. Refused, it ends the command: a file that
        # has quietly changed its owner is one that the relay cannot read.
        _give_back(descriptor, path, old)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _give_back(descriptor: int, path: Path, old: os.stat_result) -> None:
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except PermissionError as error:
        raise CredentialsError(
            f"{path} belongs to user {old.st_uid}, group {old.st_gid}: change it as that user, or as root"
        ) from error
