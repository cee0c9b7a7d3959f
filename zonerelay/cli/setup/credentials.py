"""`user …` manages the credentials file and the file of user limits, and `token …` the API tokens. A running
relay applies changes of users immediately, and those of tokens at its next request.

The file of users is `--file`, or the one that `[auth] credentials` of the configuration names. All questions
are asked and all passwords hashed before the file is locked, and the file is checked again under the lock.

A new password is read from a terminal (asked twice, not shown) or from standard input, or is generated. It is
never on the command line, where every user of the machine could read it. A token is generated here and
printed once. Only what is generated goes to standard output, so that a script can read it; the files contain
hashes.
"""

import contextlib
import dataclasses
import grp
import os
import pwd
import secrets
import stat
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from rich.text import Text

from zonerelay.cli.relay import load_needed, load_settings
from zonerelay.cli.setup.init import SERVICE_USER
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError, refused
from zonerelay.cli.terminal.passwords import ask, read_line
from zonerelay.config import user_limits
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import identities, passwords
from zonerelay.config.credentials.file import CredentialsError, User
from zonerelay.config.credentials.identities import IdentitiesError, Scope, Token
from zonerelay.config.settings import Settings
from zonerelay.config.user_limits import NONE, UserLimits, change_user
from zonerelay.model.envelope import Priority
from zonerelay.smtp.server.sasl import MAX_PASSWORD, prepare_password, prepare_user

NEARLY_FULL = 0.8
"""The part of the largest file, from which on every change says so."""


class UserRow(msgspec.Struct, kw_only=True):
    """A user, as one line of `user list --json`."""

    name: str
    senders: tuple[str, ...]
    priority: str = ""


_IN_THE_LINE = ("senders", "priority")


def user(arguments: Namespace) -> int:
    path = arguments.file or load_needed(arguments.config, "auth").auth.credentials
    with refused(CredentialsError):
        _VERBS[arguments.verb](arguments, path)
    for file in (path, user_limits.file_beside(path)):
        _say_when_nearly_full(file)
    return OK


def _say_when_nearly_full(file: Path) -> None:
    size, most = file.stat().st_size if file.exists() else 0, credentials.MAX_FILE
    if size > most:
        output.tell(f"No user can log in: {file} exceeds {most:,} bytes ({size:,}). Remove users.")
    elif size > NEARLY_FULL * most:
        output.tell(f"{file} is nearly full: it has {size:,} bytes, and the limit is {most:,}.")


Change = Callable[[User, UserLimits, str], tuple[User, UserLimits]]
"""Returns a user and its limits, changed. The text is the hash of a new password, or "" if there is none."""


def _change(
    arguments: Namespace,
    path: Path,
    change: Change,
    said: str,
    *,
    is_new: bool = False,
    asks: bool = False,
    advised: Path | None = None,
) -> None:
    """Change a user in the credentials file, and print the message `said` with its name in place of `{}`.
    With `asks`, it gets a new password. Advice about the file `advised` follows.
    """
    name = prepare_user(arguments.name)

    def checked(there: User | None, limits: UserLimits, hashed: str = "") -> tuple[User, UserLimits]:
        if there is None and not is_new:
            raise _unknown(name, path)
        if there is not None and is_new:
            shown = text.clean(name)
            raise CliError(f"{shown} is already in {path}; change the password with: zonerelay user passwd")
        return change(there or User(name, "", (), None), limits, hashed)

    # The errors are reported before a password is asked for.
    own = NONE if is_new else user_limits.read(user_limits.file_beside(path), whole=True).own(name)
    checked(_users(path, missing_ok=is_new).get(name), own)
    password = new_password(arguments, name) if asks else ""
    change_user(path, name, partial(checked, hashed=passwords.make_hash(password) if asks else ""))
    output.tell(said.replace("{}", text.clean(name)))
    if asks and arguments.generate:
        output.tell("The password, which is not shown again:")
        print(password)
    if advised is not None and advised.exists():  # no limits may be stored
        _advise(advised, made=is_new)


def _add(arguments: Namespace, path: Path) -> None:
    with refused(ValueError, status=USAGE):
        credentials.check_name(prepare_user(arguments.name))
    senders = _senders(arguments.sender)
    priority = Priority(arguments.priority) if arguments.priority else None

    def add(there: User, _: UserLimits, hashed: str) -> tuple[User, UserLimits]:
        return dataclasses.replace(there, hash=hashed, senders=senders, priority=priority), NONE

    said = f"User {{}} was added to {path}."
    _change(arguments, path, add, said, is_new=True, asks=True, advised=path)


def _passwd(arguments: Namespace, path: Path) -> None:
    def only(there: User, limits: UserLimits, hashed: str) -> tuple[User, UserLimits]:
        return dataclasses.replace(there, hash=hashed), dataclasses.replace(limits, second_hash="")

    said = "The password of {} was changed; the old one is no longer accepted."
    _change(arguments, path, only, said, asks=True, advised=path)


def _remove(arguments: Namespace, path: Path) -> None:
    name = _known(arguments, path).name
    change_user(path, name, None)
    output.tell(f"User {text.clean(name)} was removed from {path}. Connections that are logged in stay open.")


def _list(arguments: Namespace, path: Path) -> None:
    rows = [
        UserRow(name=each.name, senders=each.senders, priority=each.priority or "")
        for each in sorted(_users(path).values(), key=lambda user: user.name)
    ]
    nothing = f"{path} has no users yet. Add one with: zonerelay user add NAME"
    output.print_rows(rows, _table, nothing, as_json=arguments.json)


@output.tabular(cut=("senders",))
def _table(row: UserRow) -> output.Row:
    return {"user": row.name, "senders": _senders_of(row), "priority": row.priority}


def _senders_of(user: UserRow | User) -> str:
    return ", ".join(user.senders) or "any"


def _set(assignments: list[str], arguments: Namespace, path: Path) -> None:
    """Set options of a user with `key=value` assignments. Senders and priority are in the user's line of the
    credentials file, the limits in the file next to it.
    """
    own = [each for each in assignments if each.partition("=")[0] in _IN_THE_LINE and "=" in each]
    others = [each for each in assignments if each not in own]

    def change(there: User, limits: UserLimits, _: str) -> tuple[User, UserLimits]:
        for each in own:
            key, _, value = each.partition("=")
            if key == "senders":
                patterns = _senders([part.strip() for part in value.split(",")] if value else [])
                there = dataclasses.replace(there, senders=patterns)
            else:
                priority = credentials.check_priority(value) if value else None
                there = dataclasses.replace(there, priority=priority)
        return there, user_limits.changed(limits, others, _IN_THE_LINE)

    said = f"{{}} was changed: {', '.join(assignments)}. This applies from the next message."
    advised = user_limits.file_beside(path) if others else None
    with refused(ValueError, after="; nothing was changed", status=USAGE):
        _change(arguments, path, change, said, advised=advised)


def _default(arguments: Namespace, path: Path) -> None:
    """Set the default limits of all users. Without assignments, print these limits."""
    file = user_limits.file_beside(path)
    if not arguments.assignment:
        lines = user_limits.lines_of(user_limits.read(file, whole=True).default)
        print("\n".join(lines) or "There are no default limits. Only the limits of each user apply.")
        return
    _users(path)
    with refused(ValueError, after="; nothing was changed", status=USAGE):
        user_limits.change_default(path, arguments.assignment)
    changed = ", ".join(arguments.assignment)
    output.tell(f"The default limits were changed: {changed}. This applies from the next message.")
    _advise(file, made=False)


def _rotate(arguments: Namespace, path: Path) -> None:
    def second(there: User, limits: UserLimits, hashed: str) -> tuple[User, UserLimits]:
        if limits.second_hash:
            shown = text.clean(there.name)
            finish = f"zonerelay user rotate {shown} --finish"
            raise CliError(f"{shown} already has two passwords; remove the old one with: {finish}")
        return there, dataclasses.replace(limits, second_hash=hashed)

    said = "{} has two passwords now. Remove the old one with: zonerelay user rotate {} --finish"
    _change(arguments, path, second, said, asks=True, advised=user_limits.file_beside(path))


def _finish_rotation(arguments: Namespace, path: Path) -> None:
    def drop(there: User, limits: UserLimits, _: str) -> tuple[User, UserLimits]:
        if not limits.second_hash:
            shown = text.clean(there.name)
            raise CliError(f"{shown} has one password; add a second one with: zonerelay user rotate NAME")
        hashed = limits.second_hash
        return dataclasses.replace(there, hash=hashed), dataclasses.replace(limits, second_hash="")

    _change(arguments, path, drop, "The old password of {} is no longer accepted.")


def _show_user(arguments: Namespace, path: Path) -> None:
    found = _known(arguments, path)
    name = found.name
    there = _rails(path, name)
    usage, problem = ({}, "") if arguments.file else _usage(load_settings(arguments.config), name)
    if arguments.json:
        document = {
            "name": name,
            "senders": found.senders,
            "priority": found.priority or "",
            "passwords": 2 if there.second_hash else 1,
            "rails": user_limits.document_of(there),
            "usage": usage,
            "usage_unknown": problem,
        }
        output.print_line(document)
        return
    rows: list[tuple[str, str]] = [
        ("user", name),
        ("senders", _senders_of(found)),
        ("priority", found.priority or "the listener's"),
        ("passwords", "2: rotation not finished" if there.second_hash else "1"),
    ]
    own = user_limits.read(user_limits.file_beside(path), whole=True).own(name).given
    for line in user_limits.lines_of(dataclasses.replace(there, second_hash="")):
        key, _, value = line.partition(" = ")
        used = f" ({text.amount(key, usage[key])} used)" if key in usage else ""
        whose = "" if key in own else ", the default"
        rows.append((key, f"{value}{used}{whose}"))
    if problem:
        rows.append(("usage", f"unknown: {problem}"))
    output.console().print(output.facts(rows))


def _usage(settings: Settings, name: str) -> tuple[dict[str, int], str]:
    """Return how much of each quota the user has used, or the reason why it cannot be determined."""
    quotas = _rails(settings.auth.credentials, name)
    if not quotas.quotas:
        return {}, ""
    import asyncio  # the other commands need none of these imports

    from zonerelay.inbound.limits.quotas import used_by
    from zonerelay.inbound.limits.usage_file import DIRECTORY, FILE, UsageFile
    from zonerelay.limits.authority import AuthorityError
    from zonerelay.model.clock import SystemClock
    from zonerelay.store.contract import StoreOpenError
    from zonerelay.store.open import open_record_store

    try:
        shared, home = open_record_store(settings, os.environ), settings.spool.path.parent
        if shared is None and not (home / DIRECTORY / FILE).exists():
            return {f"{what}_per_{window}": 0 for what, window in quotas.quotas}, ""
        records = shared or UsageFile(home, SystemClock(), read_only=True)
        levels = asyncio.run(used_by(records, name, quotas))
    except (AuthorityError, StoreOpenError, OSError) as error:
        return {}, str(error)
    return {level.limit: level.used for level in levels}, ""


def _rails(path: Path, name: str) -> UserLimits:
    """Return the limits that apply to a user: its own limits, and defaults for the others."""
    return user_limits.read(user_limits.file_beside(path), whole=True).of(name)


def _users(path: Path, *, missing_ok: bool = False) -> dict[str, User]:
    if not path.exists():
        if missing_ok:
            return {}
        raise CliError(f"{path} does not exist; create it with: zonerelay user add NAME")
    return credentials.read(path, whole=True)


def _known(arguments: Namespace, path: Path) -> User:
    """Return the user whose name was given on the command line. Raise CliError if it does not exist."""
    name = prepare_user(arguments.name)
    found = _users(path).get(name)
    if found is None:
        raise _unknown(name, path)
    return found


def _senders(patterns: list[str]) -> tuple[str, ...]:
    with refused(ValueError, before="--sender: ", status=USAGE):
        if not all(map(str.isprintable, patterns)):
            raise ValueError("control characters and invalid UTF-8 are not allowed")
        # Remove duplicates, and keep the given order.
        return tuple(dict.fromkeys(credentials.check_sender(pattern) for pattern in patterns))


def _unknown(name: str, path: Path) -> CliError:
    return CliError(f"{path} does not contain the user {text.clean(name)}; names are case-sensitive")


def _advise(path: Path, *, made: bool) -> None:
    """Print a warning if the relay cannot read the credentials file, or if every user of the machine can."""
    found = path.stat()
    if found.st_mode & stat.S_IROTH:
        output.tell(f"All users of this machine can read the password hashes. Run: chmod 640 {path}")
    elif _service_can_read(found) is False:
        output.tell(f"{SERVICE_USER} cannot read it. Run: chgrp {SERVICE_USER} {path}; chmod 640 {path}")
    elif made:
        owner, group = str(found.st_uid), str(found.st_gid)
        with contextlib.suppress(KeyError):  # in a container they may have no names
            owner, group = path.owner(), path.group()
        who = f"{owner} and the group {group}"
        output.tell(f"{path} can be read by {who}. The relay's user must be one of them.")


def _service_can_read(found: os.stat_result) -> bool | None:
    """Return whether the relay's user can read the file, or `None` if the machine does not have this user."""
    try:
        service = pwd.getpwnam(SERVICE_USER)
    except KeyError:
        return None
    if found.st_uid == service.pw_uid:
        return bool(found.st_mode & stat.S_IRUSR)
    groups = {service.pw_gid, *(group.gr_gid for group in grp.getgrall() if SERVICE_USER in group.gr_mem)}
    return found.st_gid in groups and bool(found.st_mode & stat.S_IRGRP)


MIN_PASSWORD = 8
"""Characters. Shorter ones are found by trying, whatever the hash."""

_GENERATED_OCTETS = 18  # 24 characters, 144 bits


def new_password(arguments: Namespace, name: str) -> str:
    """Generate a password, or read it from the terminal or standard input. Raise CliError if it cannot be
    read or is not acceptable. The caller prints a generated password once it is active.
    """
    if arguments.generate:
        return secrets.token_urlsafe(_GENERATED_OCTETS)
    if arguments.password_stdin:
        return _checked(read_line(), name)
    if not sys.stdin.isatty():
        raise CliError(
            "cannot prompt for a password: standard input is not a terminal. Use --password-stdin to read "
            "it, or --generate to create one",
            USAGE,
        )
    password = _checked(ask(f"Password for {name}: "), name)
    if prepare_password(ask("Repeat the password: ")) != password:
        raise CliError("the passwords do not match; nothing was changed")
    return password


def _checked(password: str, name: str) -> str:
    if not password:
        raise CliError("no password was given; nothing was changed")
    if not all(c.isprintable() or c.isspace() for c in password) or "\n" in password or "\r" in password:
        raise CliError("the password must be a single line without control characters; nothing was changed")
    # Hash the normalized form, which a client's password is also converted to.
    prepared = prepare_password(password)
    if len(prepared.encode()) > MAX_PASSWORD:
        raise CliError(f"the password exceeds {MAX_PASSWORD} bytes; nothing was changed")
    if len(prepared) < MIN_PASSWORD or prepared == name:
        raise CliError(
            f"the password is too weak: use at least {MIN_PASSWORD} characters, and not the user's name "
            "(--generate creates a strong one); nothing was changed"
        )
    return prepared


_VERBS: dict[str, Callable[[Namespace, Path], None]] = {
    "add": _add,
    "passwd": _passwd,
    "list": _list,
    "remove": _remove,
    "show": _show_user,
    "set": lambda arguments, path: _set(arguments.assignment, arguments, path),
    "default": _default,
    "disable": lambda arguments, path: _set(["disabled=true"], arguments, path),
    "enable": lambda arguments, path: _set(["disabled="], arguments, path),
    "rotate": lambda arguments, path: (_finish_rotation if arguments.finish else _rotate)(arguments, path),
}


# --- tokens -------------------------------------------------------------------------------------------------


def token(arguments: Namespace) -> int:
    settings = load_needed(arguments.config, "spool")
    path = identities.identities_file(settings.spool.path.parent)
    with refused(IdentitiesError):
        match arguments.verb:
            case "add":
                _check_user(settings, arguments.name, arguments.scope, arguments.user)
                made = identities.make_token()
                now = time.time()
                expires = now + arguments.lifetime if arguments.lifetime else 0.0
                added = identities.token_of(
                    made, arguments.name, arguments.scope, created=now, expires=expires, user=arguments.user
                )
                identities.add(path, added)
                print(made)
                until = f"expires {text.when(expires)}" if expires else "does not expire"
                output.tell(f"Token {added.name} with scope {added.scope} {until}. It is not shown again.")
            case "list":
                nothing = "There are no tokens. Create one with: zonerelay token add NAME --scope read"
                output.print_rows(identities.read(path), _token_table, nothing, as_json=arguments.json)
            case "remove":
                identities.remove(path, arguments.name)
                output.tell(f"Token {arguments.name} was removed. Requests with it are now rejected.")
    return OK


def _check_user(settings: Settings, name: str, scope: Scope, user: str) -> None:
    """Raise CliError if the scope of a token requires a user and none is given, or if the user does not
    exist.
    """
    path = settings.auth.credentials
    if not user:
        if scope == "submit":
            raise CliError(
                "a token with the scope submit requires a user, whose limits apply: zonerelay token "
                f"add {name} --scope submit --user USER"
            )
        return
    with refused(CredentialsError, after=f". Add the user first: zonerelay user add {user}"):
        found = credentials.read(path)
    if user not in found:
        raise CliError(f"the user {user} is not in {path}; add it with: zonerelay user add {user}")


@output.tabular()
def _token_table(row: Token) -> output.Row:
    expires = text.when(row.expires) if row.expires else "never"
    return {
        "name": row.name,
        "scope": row.scope,
        "user": row.user or "-",
        "made": text.when(row.created),
        "expires": Text(f"{expires} (over)", style="red") if 0 < row.expires <= time.time() else expires,
    }
