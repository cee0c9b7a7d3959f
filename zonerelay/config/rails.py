"""The guard rails of users: a TOML file beside the credentials file, a table for each user that has some.

    [user."shop"]
    recipients = ["*.example.com"]
    messages_per_hour = 500
    mode = "redirect"
    mailbox = "qa@example.com"

The file of `/etc/zonerelay/credentials` is `/etc/zonerelay/credentials.rails.toml`; without it no user has
guard rails. `zonerelay user set` writes it (`edit`). A user whose table cannot be read may do nothing until
it is right; when the file is no TOML, that holds for every user.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.credentials.edit import ChangeBeside
from zonerelay.config.credentials.file import CredentialsError, User, check_name, read_text
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
from zonerelay.config.problems import ConfigError, Report
from zonerelay.config.settings import Network
from zonerelay.config.toml_lines import line_numbers
from zonerelay.config.toml_text import quote, toml_value
from zonerelay.config.wording import did_you_mean, quoted

WINDOWS = ("minute", "hour", "day")
COUNTED = ("messages", "recipients", "octets")

_HEAD = "# The guard rails of the users in {}. zonerelay user set writes this file; comments are not kept.\n"
_MOST = 1_000_000_000


class Mode(enum.StrEnum):
    """What becomes of the user's mail: `docs/users.md`."""

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
    """0 and an empty list are no limit. `second_hash` is that of a second password (`user rotate`)."""

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


@dataclass(frozen=True, slots=True)
class RailsFile:
    """`problems` are users whose table cannot be read, and why."""

    rails: Mapping[str, Rails]
    problems: Mapping[str, str]


def file_beside(credentials: Path) -> Path:
    return credentials.with_name(f"{credentials.name}.rails.toml")


def read(path: Path) -> RailsFile:
    """Raises CredentialsError when the file says nothing of any user; see `credentials.file.read`."""
    try:
        return parse(read_text(path), str(path))
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
    users = document.pop("user", {})
    if document or not isinstance(users, dict):
        raise CredentialsError(f'{file_name}: expected tables such as [user."name"], and nothing else')
    rails: dict[str, Rails] = {}
    problems: dict[str, str] = {}
    for name, table in users.items():
        report = Report(lines)
        try:
            check_name(name)
            for key in dict(table).keys() - OPTIONS.keys():
                report.refuse(("user", name, key), f"unknown key{did_you_mean(key, OPTIONS)}")
            found = read_options(Rails, table, ("user", name), report)
            report.raise_problems()
            rails[name] = found.check()
        except (TypeError, ValueError, ConfigError) as error:
            what = "; ".join(str(error).splitlines())
            problems[name] = f"{file_name}: the user {quoted(name)}: {what}"
    return RailsFile(rails, problems)


def format_file(rails: Mapping[str, Rails], credentials: str) -> str:
    """The whole file, which `read` gives back."""
    parts = [_HEAD.format(quote(credentials))]
    for name, each in sorted(rails.items()):
        if each != NONE:
            parts.append("".join(f"{line}\n" for line in (f"[user.{quote(name)}]", *lines_of(each))))
    return "\n".join(parts)


def lines_of(rails: Rails) -> list[str]:
    """`key = value` of everything that is not as without guard rails."""
    return [
        f"{key} = {toml_value(getattr(rails, key), option)}"
        for key, option in OPTIONS.items()
        if getattr(rails, key) != getattr(NONE, key)
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
    known = [key for key in OPTIONS if key != "second_hash"]
    listed = [*known, *others]
    values: dict[str, object] = {}
    for each in assignments:
        key, sign, value = each.partition("=")
        if key not in known:
            near = did_you_mean(key, listed) or f"; there are {', '.join(listed)}"
            raise ValueError(f"{quoted(key)} is no key of a user{near}")
        if not sign:
            raise ValueError(f"{key}: write {key}=VALUE, or {key}= for none")
        option = OPTIONS[key]
        try:
            values[key] = _read(value.strip(), option) if value.strip() else getattr(NONE, key)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return dataclasses.replace(rails, **values).check()  # type: ignore[arg-type]


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
        there = read(file)
        old = new = there.rails.get(name, NONE)
        if before is None or after is None:
            new = NONE
        elif change is not None:
            new = change(after, old)
        if new == old and name not in there.problems:
            return None, file
        for user, problem in there.problems.items():
            if user != name or after is not None:  # to write the file would lose what is wrong in it
                raise CredentialsError(problem)
        return format_file({**there.rails, name: new}, path.name), file

    return changed_text
