"""The guard rails of users: a TOML file beside the credentials file, a table for each user that has some.

    [user."shop"]
    recipients = ["*.example.com"]
    messages_per_hour = 500
    mode = "redirect"
    mailbox = "qa@example.com"

    [default]                       # every user, for the keys that its own table does not have
    recipients_per_day = 5000

The file of `/etc/zonerelay/credentials` is `/etc/zonerelay/credentials.rails.toml`; without it no user has
guard rails. `zonerelay user set` writes it (`edit`). A user whose table cannot be read may do nothing until
it is right; when the file is no TOML, that holds for every user.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.credentials.file import (
    ChangeBeside,
    CredentialsError,
    User,
    check_name,
    locked,
    read_text,
    refuse_too_large,
    replace_file,
)
from zonerelay.config.credentials.passwords import check_hash
from zonerelay.config.load import read_options
from zonerelay.config.options import convert, forms
from zonerelay.config.options.convert import Option
from zonerelay.config.options.options import (
    GB,
    KEY,
    choice,
    count,
    date,
    networks,
    options_of,
    size,
    switch,
    text,
    texts,
)
from zonerelay.config.problems import ConfigError, KeyPath, Report, did_you_mean, quoted
from zonerelay.config.settings import Network
from zonerelay.config.toml_lines import line_numbers
from zonerelay.config.toml_text import quote, toml_value

WINDOWS = ("minute", "hour", "day")
COUNTED = ("messages", "recipients", "octets")

_HEAD = "# The guard rails of the users in {}. zonerelay user set writes this file; comments are not kept.\n"
_MOST = 1_000_000_000


class Mode(enum.StrEnum):
    """What becomes of the user's mail: `docs/send/users.md`."""

    DELIVER = "deliver"
    CAPTURE = "capture"
    REDIRECT = "redirect"
    LISTED = "listed"
    COPY = "copy"


class UserIdempotency(enum.StrEnum):
    LISTENER = "listener"
    OFF = "off"
    MESSAGE_ID = "message-id"


def _mailbox(line: str) -> str:
    if not forms.replacement(line).partition("@")[0]:
        raise ValueError(f'{quoted(line)} is no address: write "user@example.com"')
    return line


def _hash(line: str) -> str:
    check_hash(line)
    return line


def _octets() -> int:
    return size(0, most=1024 * GB, optional=True)


def _number() -> int:
    return count(0, most=_MOST, optional=True)


def _secret() -> str:
    option = Option(convert.text, optional=True, form=_hash)
    return dataclasses.field(default="", repr=False, metadata={KEY: option})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rails:
    """0 and an empty list are no limit. `second_hash` is that of a second password (`user rotate`). `given`
    are the keys of the table: one that says the same as no guard rails takes a default back.
    """

    disabled: bool = switch(False)
    expires: float = date()
    networks: tuple[Network, ...] = networks(())
    recipients: tuple[str, ...] = texts((), form=forms.address_pattern)
    zones: tuple[str, ...] = texts((), form=forms.zone_name)
    max_message_size: int = _octets()
    mode: Mode = choice(Mode.DELIVER)
    mailbox: str = text("", form=_mailbox)
    idempotency: UserIdempotency = choice(UserIdempotency.LISTENER)
    messages_per_minute: int = _number()
    messages_per_hour: int = _number()
    messages_per_day: int = _number()
    recipients_per_minute: int = _number()
    recipients_per_hour: int = _number()
    recipients_per_day: int = _number()
    octets_per_minute: int = _octets()
    octets_per_hour: int = _octets()
    octets_per_day: int = _octets()
    second_hash: str = _secret()
    given: frozenset[str] = dataclasses.field(default=frozenset(), compare=False)

    @property
    def quotas(self) -> dict[tuple[str, str], int]:
        """The quotas there are, by what is counted and the window."""
        every = {
            (what, window): getattr(self, f"{what}_per_{window}") for what in COUNTED for window in WINDOWS
        }
        return {name: most for name, most in every.items() if most}

    def check(self) -> Rails:
        """Return itself. Raises ValueError for options that make no sense together."""
        if self.mode in (Mode.REDIRECT, Mode.COPY) and not self.mailbox:
            raise ValueError(f'mode = "{self.mode}" needs a mailbox: where the mail, or its copy, goes')
        if self.mode is Mode.LISTED and not self.recipients:
            raise ValueError('mode = "listed" needs recipients: those whose mail is delivered')
        return self


NONE = Rails()
OPTIONS = options_of(Rails)
KEYS = tuple(key for key in OPTIONS if key != "second_hash")
"""Those that an operator writes."""


@dataclass(frozen=True, slots=True)
class RailsFile:
    """`rails` are the tables of users, `problems` are users whose table cannot be read, and why."""

    rails: Mapping[str, Rails]
    problems: Mapping[str, str]
    default: Rails = NONE

    def of(self, user: str) -> Rails | None:
        """What holds for a user; `None`: it cannot be read."""
        if user in self.problems:
            return None
        own = self.rails.get(user)
        return self.default if own is None else _over(self.default, own)


def _over(default: Rails, own: Rails) -> Rails:
    if default is NONE:
        return own
    return dataclasses.replace(default, **{key: getattr(own, key) for key in own.given}, given=own.given)


def file_beside(credentials: Path) -> Path:
    return credentials.with_name(f"{credentials.name}.rails.toml")


def read(path: Path, *, whole: bool = False) -> RailsFile:
    """Raises CredentialsError when the file says nothing of any user; see `credentials.file.read`."""
    try:
        return parse(read_text(path, whole=whole), str(path))
    except CredentialsError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return RailsFile({}, {})
        raise


def parse(content: str, file_name: str) -> RailsFile:
    try:
        document = tomllib.loads(content)
        lines = line_numbers(content)
    except (ValueError, RecursionError) as error:
        raise CredentialsError(f"{file_name}: is not TOML: {error}") from None
    users, shared = document.pop("user", {}), document.pop("default", None)
    if document or not isinstance(users, dict):
        raise CredentialsError(
            f'{file_name}: expected tables such as [user."name"], the table [default], and nothing else'
        )
    default = NONE
    if shared is not None:
        try:
            default = _table(shared, ("default",), lines)
        except (TypeError, ValueError, ConfigError) as error:
            raise CredentialsError(f"{file_name}: {'; '.join(str(error).splitlines())}") from error
    rails: dict[str, Rails] = {}
    problems: dict[str, str] = {}
    for name, table in users.items():
        try:
            check_name(name)
            rails[name] = _table(table, ("user", name), lines)
            _over(default, rails[name]).check()
        except (TypeError, ValueError, ConfigError) as error:
            what = "; ".join(str(error).splitlines())
            problems[name] = f"{file_name}: the user {quoted(name)}: {what}"
            rails.pop(name, None)
    return RailsFile(rails, problems, default)


def _table(table: dict[str, object], path: KeyPath, lines: Mapping[KeyPath, int]) -> Rails:
    """Raises TypeError, ValueError and ConfigError."""
    report = Report(lines)
    options = OPTIONS if path[0] == "user" else {key: OPTIONS[key] for key in KEYS}
    for key in dict(table).keys() - options.keys():
        report.refuse((*path, key), f"unknown key{did_you_mean(key, options)}")
    found = read_options(Rails, table, path, report)
    report.raise_problems()
    checked = dataclasses.replace(found, given=frozenset(table))
    return checked if path[0] == "user" else checked.check()


def format_file(file: RailsFile, credentials: str) -> str:
    """The whole file, which `read` gives back."""
    parts = [_HEAD.format(quote(credentials))]
    named = {f"user.{quote(name)}": each for name, each in sorted(file.rails.items())}
    for name, each in {"default": file.default, **named}.items():
        if lines := lines_of(each):
            parts.append("".join(f"{line}\n" for line in (f"[{name}]", *lines)))
    return "\n".join(parts)


def lines_of(rails: Rails) -> list[str]:
    """`key = value` of everything that is not as without guard rails, or was given all the same."""
    return [
        f"{key} = {toml_value(getattr(rails, key), option)}"
        for key, option in OPTIONS.items()
        if (key in rails.given and key in KEYS) or getattr(rails, key) != getattr(NONE, key)
    ]


def document_of(rails: Rails) -> dict[str, object]:
    """What `lines_of` says, as values, without a hash."""
    lines = lines_of(dataclasses.replace(rails, second_hash=""))
    return {
        key: value.isoformat() if isinstance(value, datetime.datetime) else value
        for key, value in tomllib.loads("\n".join(lines)).items()
    }


def changed(rails: Rails, assignments: list[str], others: tuple[str, ...] = ()) -> Rails:
    """Apply `key=value`; nothing behind the sign takes the key back. Raises ValueError in words, which
    name `others` too.
    """
    listed = [*KEYS, *others]
    values: dict[str, object] = {}
    for each in assignments:
        key, sign, value = each.partition("=")
        if key not in KEYS:
            near = did_you_mean(key, listed) or f"; there are {', '.join(listed)}"
            raise ValueError(f"{quoted(key)} is no key of a user{near}")
        if not sign:
            raise ValueError(f"{key}: write {key}=VALUE, or {key}= for none")
        option = OPTIONS[key]
        try:
            values[key] = _read(value.strip(), option) if value.strip() else getattr(NONE, key)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    taken_back = {each.partition("=")[0] for each in assignments if each.endswith("=")}
    given = (rails.given | values.keys()) - taken_back
    return dataclasses.replace(rails, **values, given=given).check()  # type: ignore[arg-type]


def _read(value: str, option: Option) -> object:
    if option.several:
        return tuple(option.read(part.strip(), option) for part in value.split(","))
    given: object = value
    if option.read in (convert.switch, convert.count, convert.date):
        try:
            given = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            given = value  # the reader says what it expects
    return option.read(given, option)


# Takes the user there is now and its guard rails, and gives those to keep. May raise to change nothing.
ChangeRails = Callable[[User, Rails], Rails]


def change_beside(path: Path, name: str, change: ChangeRails | None = None) -> ChangeBeside:
    """For `edit.change_user` of the credentials file `path`. Guard rails of a user who is removed go, and
    those that were left of one who is added. Raises CredentialsError.
    """
    file = file_beside(path)

    def changed_text(before: User | None, after: User | None) -> tuple[str | None, Path]:
        there = read(file, whole=True)
        old = new = there.rails.get(name, NONE)
        if before is None or after is None:
            new = NONE
        elif change is not None:
            new = change(after, old)
        if (new, new.given) == (old, old.given) and name not in there.problems:
            return None, file
        for user, problem in there.problems.items():
            if user != name or after is not None:  # to write the file would lose what is wrong in it
                raise CredentialsError(problem)
        kept = dataclasses.replace(there, rails={**there.rails, name: new})
        return format_file(kept, path.name), file

    return changed_text


def change_default(credentials: Path, assignments: list[str]) -> None:
    """Change `[default]` under the lock. Raises ValueError and CredentialsError in words."""
    file = file_beside(Path(os.path.realpath(credentials)))
    try:
        with locked(file.parent):
            there = read(file, whole=True)
            for problem in there.problems.values():  # to write the file would lose what is wrong in it
                raise CredentialsError(problem)
            default = changed(there.default, assignments)
            text = format_file(dataclasses.replace(there, default=default), credentials.name)
            refuse_too_large(file, text)
            replace_file(file, text, like=credentials)
    except OSError as error:
        raise CredentialsError(f"{error.filename or file}: {error.strerror or error}") from error
