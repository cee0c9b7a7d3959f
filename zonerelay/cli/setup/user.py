"""`user add|passwd|list|remove`: the credentials file, changed so that a running relay sees it at once.

The file is `--file`, or what `[auth] credentials` of the configuration names. Everything is asked and hashed
before the file is locked, and checked again under the lock.

A new password comes from a terminal (asked twice, not shown), from standard input or from random numbers,
never from the command line, where every user of the machine can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import os
import pwd
import secrets
import stat
import sys
from argparse import Namespace
from pathlib import Path

import msgspec

from zonerelay.cli.relay import load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.cli.terminal.passwords import ask, read_line
from zonerelay.config import rails
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.edit import change_user
from zonerelay.config.credentials.file import CredentialsError, User
from zonerelay.model.priority import Priority
from zonerelay.smtp.server.sasl import MAX_PASSWORD, prepare_password, prepare_user

SERVICE_USER = "zonerelay"
"""The user that the systemd unit runs the relay as."""


class UserRow(msgspec.Struct, kw_only=True):
    """One line of `user list --json`."""

    name: str
    senders: tuple[str, ...]
    priority: str = ""


def user(arguments: Namespace) -> int:
    path = arguments.file or load_settings(arguments.config).auth.credentials
    try:
        match arguments.verb:
            case "add":
                return _add(arguments, path)
            case "passwd":
                return _passwd(arguments, path)
            case "list":
                return _list(arguments, path)
            case "remove":
                return _remove(arguments, path)
    except CredentialsError as error:
        raise CliError(str(error)) from error
    raise AssertionError(arguments.verb)


def _add(arguments: Namespace, path: Path) -> int:
    name = _new_name(arguments.name)
    senders = _senders(arguments.sender)
    priority = Priority(arguments.priority) if arguments.priority else None
    if name in _users(path, missing_ok=True):
        raise _exists(name, path)
    password = new_password(arguments, name)
    hashed = passwords.make_hash(password)

    def add(there: User | None) -> User:
        if there is not None:
            raise _exists(name, path)
        return User(name, hashed, senders, priority)

    made = change_user(path, name, add, rails.change_beside(path, name))
    _say(f"User {text.clean(name)} was added to {path}.")
    _show(arguments, password)
    _advise(path, made=made)
    return OK


def _passwd(arguments: Namespace, path: Path) -> int:
    name = prepare_user(arguments.name)
    if name not in _users(path):
        raise _unknown(name, path)
    password = new_password(arguments, name)
    hashed = passwords.make_hash(password)

    def replace(there: User | None) -> User:
        if there is None:
            raise _unknown(name, path)
        return dataclasses.replace(there, hash=hashed)

    change_user(path, name, replace, rails.change_beside(path, name))
    _say(f"The password of {text.clean(name)} was changed; the old one is refused from now on.")
    _show(arguments, password)
    _advise(path, made=False)
    return OK


def _remove(arguments: Namespace, path: Path) -> int:
    name = prepare_user(arguments.name)

    def remove(there: User | None) -> None:
        if there is None:
            raise _unknown(name, path)

    _users(path)  # before a lock is taken: a missing file is the more helpful answer
    change_user(path, name, remove, rails.change_beside(path, name))
    _say(f"User {text.clean(name)} was removed from {path}. Connections that are logged in stay open.")
    return OK


def _list(arguments: Namespace, path: Path) -> int:
    users = sorted(_users(path).values(), key=lambda user: user.name)
    if arguments.json:
        for each in users:
            output.print_line(UserRow(name=each.name, senders=each.senders, priority=each.priority or ""))
    elif users:
        rows = [
            (text.clean(each.name), ", ".join(map(text.clean, each.senders)) or "any", each.priority or "")
            for each in users
        ]
        output.console().print(output.table(["user", "senders", "priority"], rows, cut=("senders",)))
    else:
        _say(f"{path} has no users yet: zonerelay user add NAME makes one.")
    return OK


def _users(path: Path, *, missing_ok: bool = False) -> dict[str, User]:
    if not path.exists():
        if missing_ok:
            return {}
        raise CliError(f"{path} does not exist: zonerelay user add NAME makes it")
    return credentials.read(path)


def _new_name(name: str) -> str:
    name = prepare_user(name)
    try:
        credentials.check_name(name)
    except ValueError as error:
        raise CliError(str(error), USAGE) from error
    return name


def _senders(patterns: list[str]) -> tuple[str, ...]:
    try:
        # Each once, in the order given.
        return tuple(dict.fromkeys(credentials.check_sender(pattern) for pattern in patterns))
    except ValueError as error:
        raise CliError(f"--sender: {error}", USAGE) from error


def _exists(name: str, path: Path) -> CliError:
    return CliError(f"{text.clean(name)} is in {path} already: zonerelay user passwd changes the password")


def _unknown(name: str, path: Path) -> CliError:
    return CliError(f"{path} has no user {text.clean(name)}; names are case-sensitive")


def _say(words: str) -> None:
    """On standard error: standard output is for what a script wants, which is the generated password."""
    output.chatter().print(words, soft_wrap=True)


def _show(arguments: Namespace, password: str) -> None:
    if arguments.generate:
        _say("Its password, which is kept nowhere in this form:")
        print(password)


def _advise(path: Path, *, made: bool) -> None:
    """Says when the relay cannot read the file, or when other users can."""
    found = path.stat()
    if found.st_mode & stat.S_IROTH:
        _say(f"Every user of this machine can read the hashes: chmod 640 {path}")
    elif _service_can_read(found) is False:
        _say(f"The user {SERVICE_USER} cannot read it: chgrp {SERVICE_USER} {path}; chmod 640 {path}")
    elif made:
        owner, group = _name_of_user(found.st_uid), _name_of_group(found.st_gid)
        _say(f"{path} can be read by {owner} and the group {group}: the relay's user has to be one of them.")


def _service_can_read(found: os.stat_result) -> bool | None:
    """`None` on a machine without such a user."""
    try:
        service = pwd.getpwnam(SERVICE_USER)
    except KeyError:
        return None
    if found.st_uid == service.pw_uid:
        return bool(found.st_mode & stat.S_IRUSR)
    groups = {service.pw_gid, *(group.gr_gid for group in grp.getgrall() if SERVICE_USER in group.gr_mem)}
    return found.st_gid in groups and bool(found.st_mode & stat.S_IRGRP)


def _name_of_user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def _name_of_group(gid: int) -> str:
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


MIN_PASSWORD = 8
"""Characters. Shorter ones are found by trying, whatever the hash."""

_GENERATED_OCTETS = 18  # 24 characters, 144 bits


def new_password(arguments: Namespace, name: str) -> str:
    """Raises CliError. A generated one is for the caller to show, once it is in force."""
    if arguments.generate:
        return secrets.token_urlsafe(_GENERATED_OCTETS)
    if arguments.password_stdin:
        return _checked(read_line(), name)
    if not sys.stdin.isatty():
        raise CliError(
            "there is no person to ask for a password on this input: add --password-stdin to read it from "
            "there, "
            "or --generate to get one",
            USAGE,
        )
    password = _checked(ask(f"Password for {name}: "), name)
    if prepare_password(ask("The same again: ")) != password:
        raise CliError("the two are not the same; nothing was changed")
    return password


def _checked(password: str, name: str) -> str:
    if not password:
        raise CliError("there is no password; nothing was changed")
    if not all(c.isprintable() or c.isspace() for c in password) or "\n" in password or "\r" in password:
        raise CliError("a password is one line without control characters; nothing was changed")
    # What is hashed is what a client's password will be turned into.
    prepared = prepare_password(password)
    if len(prepared.encode()) > MAX_PASSWORD:
        raise CliError(f"a password has at most {MAX_PASSWORD} octets; nothing was changed")
    if len(prepared) < MIN_PASSWORD or prepared == name:
        raise CliError(
            f"too weak: a password needs {MIN_PASSWORD} characters or more and is not the user's name "
            "(--generate makes a good one); nothing was changed"
        )
    return prepared
