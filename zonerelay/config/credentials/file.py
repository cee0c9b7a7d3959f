"""The credentials file: one user per line, `name:hash`, `name:hash:sender,sender` or
`name:hash:senders:priority`, and comments that begin with `#`.

    app:$argon2id$v=19$m=19456,t=2,p=1$…$…
    crm@example.com:$argon2id$…:example.com,*.example.com,bounce-*@example.net
    shop:$argon2id$…::bulk

Names are case-sensitive and NFC, and contain neither white space nor a colon. `senders` limit the addresses
that the user may use in MAIL FROM and in the From field; without senders, every address is permitted.
`priority` is the priority of the user's mail; without it, the listener's priority applies. A file with one
invalid line is invalid as a whole: otherwise a user could be missing, and would be informed that the password
is wrong.

Errors name file and line, and never contain a hash.
"""

import contextlib
import os
import re
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay import durable
from zonerelay.config.credentials import passwords
from zonerelay.config.options import convert, forms
from zonerelay.config.options.convert import Option
from zonerelay.config.problems import quoted
from zonerelay.model.envelope import Priority

MAX_NAME = 255
"""Bytes of UTF-8 (RFC 4616 2)."""

MAX_FILE = 16 * 1024 * 1024
"""Bytes: about 100,000 users."""

_USUAL = re.compile(
    rf"([!-\"$-9;-~][!-9;-~]{{0,{MAX_NAME - 1}}})"
    rf":({passwords.OURS}\$[A-Za-z0-9+/]{{22}}\$[A-Za-z0-9+/]{{43}})",
    re.ASCII,
)
_SENDER = Option(convert.text, form=forms.address_pattern)
_PRIORITY = Option(convert.choice, choices=Priority)


@dataclass(frozen=True, slots=True)
class User:
    """A user in the credentials file. `senders` are address patterns as in the configuration; without any,
    every sender is permitted. `priority` applies to the user's mail; if it is `None`, the listener's priority
    applies.
    """

    name: str
    hash: str = field(repr=False)
    senders: tuple[str, ...] = ()
    priority: Priority | None = None


class CredentialsError(Exception):
    """The credentials file cannot be used. The text names it, with the line, for the operator."""


def read(path: Path, *, whole: bool = False) -> dict[str, User]:
    """Return all users in the credentials file, by name. Raise CredentialsError if it is invalid. If the file
    could not be read, the cause is the OSError, which may be temporary. With `whole`, the file may have any
    size, for commands that can reduce it.
    """
    return parse(read_text(path, whole=whole), str(path))


def read_text(path: Path, *, whole: bool = False) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(-1 if whole else MAX_FILE + 1)
    except OSError as error:
        raise CredentialsError(f"{path}: {error.strerror or error}") from error
    if not whole and len(data) > MAX_FILE:
        remedy = "remove users with: zonerelay user remove NAME"
        raise CredentialsError(f"{path}: the file exceeds {MAX_FILE:,} bytes; {remedy}")
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
            raise CredentialsError(f"{file_name}:{number}: the user {quoted(user.name)} is defined twice")
        users[user.name] = user
    return users


def parse_line(line: str) -> User | None:
    """Parse a line of the credentials file, and return its user, or None for a comment. Raise ValueError if
    the line is invalid. Common lines have a fast path, because files with 100,000 lines are read again after
    each change.
    """
    if usual := _USUAL.fullmatch(line):
        return User(usual[1], usual[2])
    line = line.strip()
    if not line or line.startswith("#"):
        return None
    name, colon, rest = line.partition(":")
    if not colon:
        # The line is not shown, because it may contain part of a hash, or a password.
        raise ValueError("expected name:hash, name:hash:sender,sender or name:hash:senders:priority")
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
    """Raise ValueError if the user name is invalid."""
    if not name:
        raise ValueError("the user name is missing")
    if len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise ValueError(f"the user name exceeds {MAX_NAME} bytes")
    if ":" in name or name.startswith("#") or not name.isprintable() or any(c.isspace() for c in name):
        # With a "$" in it, it may be a hash whose colon is missing.
        shown = "the part before the colon" if "$" in name else quoted(name)
        wrong = "white space, control characters, colons and a leading # are not allowed"
        raise ValueError(f"{shown} is not a valid user name: {wrong}")
    if not unicodedata.is_normalized("NFC", name):
        raise ValueError("the user name is not in Unicode normalization form NFC")


def check_priority(name: str) -> Priority:
    """Return the priority with this name, such as `bulk`. Raise ValueError if there is none."""
    return Priority(str(convert.choice(name, _PRIORITY)))


def check_sender(pattern: str) -> str:
    """Check a sender pattern, and return it in its stored form. Raise ValueError if it is invalid."""
    if not pattern or "," in pattern:
        raise ValueError("a sender pattern is empty; separate the patterns with single commas")
    # The reader of this form returns text, but its type covers every form.
    return str(convert.text(pattern, _SENDER))


# Edits the credentials file, and the file of users' limits next to it (`user_limits.change_user`). Each file
# is replaced atomically.
#
# A relay that reads at that moment, or that starts after a power failure, sees the old file or the new one.
# Mode, owner, comments and the order of lines are preserved. The lock is on the directory, because the file
# is replaced: two commands at the same time wait for each other, and no change is lost.

NEW_FILE_MODE = 0o640


def edited(text: str, name: str, after: User | None) -> str:
    """Return the text of the credentials file with the user's line replaced, removed or appended."""
    lines = text.removesuffix("\n").split("\n") if text else []
    kept: list[str] = []
    new = [] if after is None else [format_line(after)]
    for line in lines:
        if line.lstrip().startswith(f"{name}:"):
            kept, new = kept + new, []
        else:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept + new)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory for the block, against other commands that change the user files in it. Raise
    CredentialsError if it does not exist, and for an OSError in the block.
    """
    try:
        if not directory.exists():
            raise CredentialsError(f"{directory} does not exist: create it, or set `credentials` in [auth]")
        with durable.locked_directory(directory):
            yield
    except OSError as error:
        raise CredentialsError(f"{error.filename or directory}: {error.strerror or error}") from error


def refuse_too_large(path: Path, text: str, most: int | None = None) -> None:
    """Raise CredentialsError if the new text of a file is too large for the relay and not a reduction."""
    size, most = len(text.encode()), MAX_FILE if most is None else most
    if size > most and (not path.exists() or size >= path.stat().st_size):
        remedy = "remove entries that are not needed. Nothing was changed"
        raise CredentialsError(f"{path} would have {size:,} bytes; a relay reads at most {most:,}: {remedy}")


def replace_file(path: Path, text: str, *, like: Path | None = None) -> None:
    """Replace the content of a file atomically. Raise OSError, or CredentialsError if its owner would change.
    A new file gets owner and mode of the file that it is `like`.
    """
    model = path if like is None or path.exists() else like
    durable.write(path, text.encode(), dress=lambda descriptor: _dress(descriptor, model))


def _dress(descriptor: int, path: Path) -> None:
    """Set the mode and owner of a new file to those of the file that it replaces. If there is none, it gets
    the group of its directory, which is often the relay's.
    """
    try:
        old = path.stat()
    except FileNotFoundError:
        # Without the permission to change the group, the file keeps its creator's: the command reports who
        # can read it.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, -1, path.parent.stat().st_gid)
        os.fchmod(descriptor, NEW_FILE_MODE)
        return
    made = os.fstat(descriptor)
    if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
        # This precedes the mode, because a change of owner clears bits. If it is refused, the command ends: a
        # file with a silently changed owner could not be read by the relay.
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except PermissionError as error:
            owner = f"user {old.st_uid}, group {old.st_gid}"
            raise CredentialsError(f"{path} belongs to {owner}; change it as that user or as root") from error
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
