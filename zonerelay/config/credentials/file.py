"""The credentials file: one user per line, `name:hash`, `name:hash:sender,sender` or
`name:hash:senders:priority`, and `#` comments.

    app:$argon2id$v=19$m=19456,t=2,p=1$…$…
    crm@example.com:$argon2id$…:example.com,*.example.com,bounce-*@example.net
    shop:$argon2id$…::bulk

Names are case-sensitive, NFC, and hold neither white space nor a colon. `senders` limit what the user may
say in MAIL FROM and in the From field; none means any. The `priority` is that of the user's mail; none means
the listener's. A file with one bad line is bad as a whole: a user who is silently missing would be told that
the password is wrong.

Errors name file and line, and never show a hash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay import durable
from zonerelay.config.credentials import passwords
from zonerelay.config.options import convert, forms
from zonerelay.config.options.convert import Option
from zonerelay.config.problems import quoted
from zonerelay.model.queue_name import Priority

MAX_NAME = 255
"""Octets of UTF-8 (RFC 4616 2)."""

MAX_FILE = 16 * 1024 * 1024
"""Octets: about 100,000 users."""

_USUAL = re.compile(
    rf"([!-\"$-9;-~][!-9;-~]{{0,{MAX_NAME - 1}}})"
    rf":({passwords.OURS}\$[A-Za-z0-9+/]{{22}}\$[A-Za-z0-9+/]{{43}})",
    re.ASCII,
)
_SENDER = Option(convert.text, form=forms.address_pattern)
_PRIORITY = Option(convert.choice, choices=Priority)


@dataclass(frozen=True, slots=True)
class User:
    """`senders` are address patterns as the configuration has them; none: any sender. `priority` of the mail,
    `None`: the listener's.
    """

    name: str
    hash: str = field(repr=False)
    senders: tuple[str, ...] = ()
    priority: Priority | None = None


class CredentialsError(Exception):
    """The file cannot be used; the text names it, with the line, for the operator."""


def read(path: Path, *, whole: bool = False) -> dict[str, User]:
    """Every user of the file by name. Raises CredentialsError; when the file could not be read at all its
    cause is the OSError, which may have gone the next time. `whole`: however large, for commands, which can
    make it smaller.
    """
    return parse(read_text(path, whole=whole), str(path))


def read_text(path: Path, *, whole: bool = False) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(-1 if whole else MAX_FILE + 1)
    except OSError as error:
        raise CredentialsError(f"{path}: {error.strerror or error}") from error
    if not whole and len(data) > MAX_FILE:
        raise CredentialsError(
            f"{path}: larger than {MAX_FILE:,} octets: zonerelay user remove NAME makes it smaller"
        )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
    raise CredentialsError(f"{path}:{line}: not UTF-8")


def parse(text: str, file_name: str) -> dict[str, User]:
    users: dict[str, User] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            user = parse_line(line)
        except ValueError as error:
            raise CredentialsError(f"{file_name}:{number}: {error}") from None
        if user is None:
            continue
        if user.name in users:
            raise CredentialsError(f"{file_name}:{number}: the user {quoted(user.name)} is there twice")
        users[user.name] = user
    return users


def parse_line(line: str) -> User | None:
    """Return a user, `None` for a comment. Raises ValueError. What most lines are is read at once: all
    100,000 are, after each change.
    """
    if usual := _USUAL.fullmatch(line):
        return User(usual[1], usual[2])
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    name, colon, rest = line.partition(":")
    if not colon:
        # The line is not shown: it may be half a hash, or a password.
        raise ValueError(
            "expected name:hash, name:hash:sender,sender or name:hash:senders:priority "
            "(zonerelay user add writes it)"
        )
    hashed, _, rest = rest.partition(":")
    senders, colon, priority = rest.rpartition(":")
    if not colon or "]" in priority:  # a colon of an IPv6 address in a sender
        senders, priority = rest, ""
    check_name(name)
    passwords.check_hash(hashed)
    patterns = [pattern.strip() for pattern in senders.split(",")] if senders.strip() else []
    return User(
        name,
        hashed,
        tuple(check_sender(pattern) for pattern in patterns),
        check_priority(priority) if priority else None,
    )


def format_line(user: User) -> str:
    parts = [user.name, user.hash, ",".join(user.senders), user.priority or ""]
    while not parts[-1]:
        parts.pop()
    return ":".join(parts)


def check_name(name: str) -> None:
    """Raises ValueError."""
    if not name:
        raise ValueError("the user has no name")
    if len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise ValueError(f"a user name has at most {MAX_NAME} octets")
    if ":" in name or name.startswith("#") or not name.isprintable() or any(c.isspace() for c in name):
        # With a "$" in it, it may be a hash whose colon is missing.
        shown = "what is before the colon" if "$" in name else quoted(name)
        raise ValueError(
            f"{shown} cannot be a user name: no white space, no control characters, no colon, no # in front"
        )
    if not unicodedata.is_normalized("NFC", name):
        raise ValueError("the user name is not in Unicode's form NFC")


def check_priority(name: str) -> Priority:
    """Raises ValueError."""
    return Priority(convert.choice(name, _PRIORITY))


def check_sender(pattern: str) -> str:
    """The pattern as it is kept. Raises ValueError."""
    if not pattern or "," in pattern:
        raise ValueError("a sender is empty: write the patterns with a comma between them, and none behind")
    # The reader of this form answers with text, but is typed for every form.
    return str(convert.text(pattern, _SENDER))


# The editor of the credentials file and of the guard rails beside it: it changes one user at a time, and
# writes each file whole or not at all.
#
# A relay that reads at that moment, and one that starts after a power cut, sees the old file or the new
# one. Mode, owner, comments and the order of lines stay. The lock is on the directory, because the file is
# replaced: two commands at once wait for each other, and neither loses the change of the other.

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
        if not line.lstrip().startswith(f"{name}:"):
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
