"""The credentials file: one user per line, `name:hash`, `name:hash:sender,sender` or
`name:hash:senders:priority`, and `#` comments.

    app:$argon2id$v=19$m=19456,t=2,p=1$…$…
    crm@example.com:$argon2id$…:example.com,*.example.com,bounce-*@example.net
    shop:$argon2id$…::bulk

Names are case-sensitive, NFC, and hold neither white space nor a colon. `senders` limit what the user may
say in MAIL FROM and in the From field; none means any. The `priority` is that of the user's mail; none means
the listener's. A file with one bad line is bad as a whole: a user who is silently missing would be told that
the password is wrong.

This module only reads; `edit` writes. Errors name file and line, and never show a hash.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay.config.credentials import passwords
from zonerelay.config.options import convert, forms
from zonerelay.config.options.convert import Option
from zonerelay.config.wording import quoted
from zonerelay.model.queue_name import Priority

MAX_NAME = 255
"""Octets of UTF-8 (RFC 4616 2)."""

MAX_FILE = 16 * 1024 * 1024
"""Octets: about 100,000 users."""

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
    """`None` for a comment or an empty line. Raises ValueError."""
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
