"""Parses and changes the file of user limits, a TOML file next to the credentials file with a table per user.

    [user."shop"]
    recipients = ["*.example.com"]
    messages_per_hour = 500
    mode = "redirect"
    mailbox = "qa@example.com"

    [default]                       # every user, for the keys that its own table does not have
    recipients_per_day = 5000

The file for `/etc/zonerelay/credentials` is `/etc/zonerelay/credentials.rails.toml`. Without it, no user has
limits. `zonerelay user set` writes it. A user whose table is invalid may do nothing until it is corrected. If
the tables cannot be separated, this applies to every user.

There may be 100,000 tables. Each is read when it is needed, and written without the others. Another TOML
style, such as `user.shop = {…}`, is refused.
"""

import dataclasses
import datetime
import enum
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from zonerelay.config.credentials import file as users
from zonerelay.config.credentials.file import CredentialsError, User
from zonerelay.config.credentials.passwords import check_hash
from zonerelay.config.load import read_options
from zonerelay.config.options import convert, forms
from zonerelay.config.options import options as declare
from zonerelay.config.options.convert import Option
from zonerelay.config.options.options import GB, KEY, options_of
from zonerelay.config.problems import ConfigError, KeyPath, Report, did_you_mean, quoted
from zonerelay.config.settings import Idempotency, Network
from zonerelay.config.toml_lines import line_numbers
from zonerelay.config.toml_text import quote, toml_value

WINDOWS = ("minute", "hour", "day")
COUNTED = ("messages", "recipients", "octets")

_HEAD = "# The limits of the users in {}. zonerelay user set writes this file; comments are not kept.\n"
_SUFFIX = ".rails.toml"
_DEFAULT = ""
"""The key of the table [default]. User names are never empty."""
_HEAD_OF_TABLE = re.compile(
    r"""^[ \t]*\[(?:(default|user\.("(?:\\.|[^"\\\n])+"|'[^'\n]+'|[A-Za-z0-9_-]+))\][ \t]*(?:\#.*)?$)?""",
    re.MULTILINE,
)
"""Without a group, the line begins like a heading but is not one."""
_ONLY_TABLES = 'expected only tables such as [user."name"] and [default]'
_MOST = 1_000_000_000


class UserMode(enum.StrEnum):
    """What happens to a user's mail, such as delivery or capture (`docs/send/users.md`)."""

    DELIVER = "deliver"
    CAPTURE = "capture"
    REDIRECT = "redirect"
    LISTED = "listed"
    COPY = "copy"


def _mailbox(line: str) -> str:
    if not forms.replacement(line).partition("@")[0]:
        raise ValueError(f'{quoted(line)} is not an address; expected "user@example.com"')
    return line


def _hash(line: str) -> str:
    check_hash(line)
    return line


def _octets() -> int:
    return declare.size(0, most=1024 * GB, optional=True)


def _number() -> int:
    return declare.count(0, most=_MOST, optional=True)


def _secret() -> str:
    option = Option(convert.text, optional=True, form=_hash)
    return dataclasses.field(default="", repr=False, metadata={KEY: option})


@dataclass(frozen=True, kw_only=True)
class UserLimits:
    """The limits of a user: allowed recipients, sizes, quotas and mode. 0 and an empty list mean no limit.
    `second_hash` is the hash of a second password (`user rotate`). `given` are the keys in the table; a key
    with the value for no limit overrides the default table.
    """

    disabled: bool = declare.switch(False)
    expires: float = declare.date()
    networks: tuple[Network, ...] = declare.networks(())
    recipients: tuple[str, ...] = declare.texts((), form=forms.address_pattern)
    zones: tuple[str, ...] = declare.texts((), form=forms.name)
    max_message_size: int = _octets()
    mode: UserMode = declare.choice(UserMode.DELIVER)
    mailbox: str = declare.text("", form=_mailbox)
    idempotency: Idempotency | None = declare.choice_or("listener", Idempotency)
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

    @cached_property
    def quotas(self) -> dict[tuple[str, str], int]:
        """The user's quotas, by what is counted (such as messages) and by the period."""
        every = {
            (what, window): getattr(self, f"{what}_per_{window}") for what in COUNTED for window in WINDOWS
        }
        return {name: most for name, most in every.items() if most}

    def check(self) -> "UserLimits":
        """Check that the limits do not contradict each other, and return this object. Raise ValueError if
        they do.
        """
        if self.mode in (UserMode.REDIRECT, UserMode.COPY) and not self.mailbox:
            raise ValueError(f'mode = "{self.mode}" requires a mailbox that receives the mail or its copy')
        if self.mode is UserMode.LISTED and not self.recipients:
            raise ValueError('mode = "listed" requires recipients, to whom mail is delivered')
        return self


NONE = UserLimits()
OPTIONS = options_of(UserLimits)
KEYS = tuple(key for key in OPTIONS if key != "second_hash")
"""The keys that an operator writes."""


@dataclass(slots=True)
class UserLimitsFile:
    """The parsed file of user limits; the tables of users are parsed when they are needed. `places` has the
    position of each user's table in the text. `_DEFAULT` is the key of the table [default].
    """

    name: str
    text: str = ""
    places: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    default: UserLimits = NONE
    _known: dict[str, UserLimits | CredentialsError] = dataclasses.field(default_factory=dict)

    def users(self) -> list[str]:
        return [each for each in self.places if each != _DEFAULT]

    def own(self, user: str) -> UserLimits:
        """Return the limits in a user's own table, without the values of [default]. Raise CredentialsError if
        it is invalid.
        """
        if user not in self.places:
            return NONE
        if user not in self._known:
            try:
                self._known[user] = found = self._table(user)
                _over(self.default, found).check()
            except (TypeError, ValueError, ConfigError) as error:
                who = f"the user {quoted(user)}: " if user != _DEFAULT else ""
                what = "; ".join(str(error).splitlines())
                self._known[user] = CredentialsError(f"{self.name}: {who}{what}")
        known = self._known[user]
        if isinstance(known, CredentialsError):
            raise known
        return known

    def of(self, user: str) -> UserLimits:
        """Return the limits that apply to a user. Raise CredentialsError if they are invalid."""
        return _over(self.default, self.own(user)) if user in self.places else self.default

    def changed(self, user: str, table: UserLimits) -> str:
        """Return the text of the file with the table of a user replaced or added."""
        text = self.text or _HEAD.format(quote(Path(self.name).name.removesuffix(_SUFFIX)))
        start, end = self.places.get(user, (len(text), len(text)))
        before, behind = text[:start].rstrip("\n"), text[end:].lstrip("\n")
        return f"{before}\n{_written(user, table)}" + (f"\n{behind}" if behind else "")

    def _table(self, user: str) -> UserLimits:
        """Parse the table of a user, and return its limits. Raise TypeError, ValueError or ConfigError if it
        is invalid.
        """
        path: KeyPath = ("user", user) if user != _DEFAULT else ("default",)
        if user != _DEFAULT:
            users.check_name(user)
        start, end = self.places[user]
        document = tomllib.loads(self.text[start:end])
        table = document["user"][user] if user != _DEFAULT else document["default"]
        above = self.text.count("\n", 0, start)
        lines = line_numbers(self.text[start:end])
        report = Report({key: above + line for key, line in lines.items()})
        options = OPTIONS if user != _DEFAULT else {key: OPTIONS[key] for key in KEYS}
        for key in dict(table).keys() - options.keys():
            report.refuse((*path, key), f"unknown key{did_you_mean(key, options)}")
        found = read_options(UserLimits, table, path, report)
        report.raise_problems()
        checked = dataclasses.replace(found, given=frozenset(table))
        return checked if user != _DEFAULT else checked.check()


def _written(user: str, table: UserLimits) -> str:
    head = f"[user.{quote(user)}]" if user != _DEFAULT else "[default]"
    lines = lines_of(table)
    return "".join(f"{line}\n" for line in ("", head, *lines)) if lines else ""


def _over(default: UserLimits, own: UserLimits) -> UserLimits:
    if default is NONE:
        return own
    return dataclasses.replace(default, **{key: getattr(own, key) for key in own.given}, given=own.given)


def file_beside(credentials: Path) -> Path:
    return credentials.with_name(f"{credentials.name}{_SUFFIX}")


def read(path: Path, *, whole: bool = False) -> UserLimitsFile:
    """Read the file of user limits. Raise CredentialsError if the whole file is unusable (see
    `credentials.file.read`).
    """
    try:
        return parse(users.read_text(path, whole=whole), str(path))
    except CredentialsError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return UserLimitsFile(str(path))
        raise


def parse(content: str, file_name: str) -> UserLimitsFile:
    """Find the tables in the file of user limits, without parsing their content. Raise CredentialsError if
    they cannot be separated.
    """
    content = content.replace("\r\n", "\n")
    heads = [*_HEAD_OF_TABLE.finditer(content)]
    starts = [*(each.start() for each in heads), len(content)]
    places: dict[str, tuple[int, int]] = {}
    if any(line.strip() and not line.lstrip().startswith("#") for line in content[: starts[0]].split("\n")):
        raise CredentialsError(f"{file_name}: {_ONLY_TABLES}")
    for head, end in zip(heads, starts[1:], strict=True):
        try:
            name = _name_in(head)
            if name in places:
                raise ValueError("a table with this name already exists")
        except ValueError as error:
            line = content.count("\n", 0, head.start()) + 1
            raise CredentialsError(f"{file_name}:{line}: {error}") from None
        places[name] = (head.start(), end)
    found = UserLimitsFile(file_name, content, places)
    if _DEFAULT in places:
        found.default = found.own(_DEFAULT)
    return found


def _name_in(head: re.Match[str]) -> str:
    """Return the name of the user in the heading of a table. Raise ValueError if there is none."""
    if head[1] is None:
        raise ValueError(_ONLY_TABLES)
    name = _DEFAULT if head[1] == "default" else head[2].strip('"')
    # tomllib would take most of the time for 100,000 headings
    return next(iter(tomllib.loads(head[0])["user"])) if "\\" in name or name[:1] == "'" else name


def lines_of(rails: UserLimits) -> list[str]:
    """Format the limits of a user as lines `key = value`: those that are set or in the user's table."""
    return [
        f"{key} = {toml_value(getattr(rails, key), option)}"
        for key, option in OPTIONS.items()
        if (key in rails.given and key in KEYS) or getattr(rails, key) != getattr(NONE, key)
    ]


def document_of(rails: UserLimits) -> dict[str, object]:
    """Return the limits that `lines_of` formats as a dictionary, without the hash of the second password."""
    lines = lines_of(dataclasses.replace(rails, second_hash=""))
    return {
        key: value.isoformat() if isinstance(value, datetime.datetime) else value
        for key, value in tomllib.loads("\n".join(lines)).items()
    }


def changed(rails: UserLimits, assignments: list[str], others: tuple[str, ...] = ()) -> UserLimits:
    """Return the limits as changed by `key=value` assignments; an empty value removes the key. Raise
    ValueError with a message, which also lists `others`.
    """
    listed = [*KEYS, *others]
    values: dict[str, object] = {}
    for each in assignments:
        key, sign, value = each.partition("=")
        if key not in KEYS:
            near = did_you_mean(key, listed) or f"; valid names are {', '.join(listed)}"
            raise ValueError(f"{quoted(key)} is not a key of a user{near}")
        if not sign:
            raise ValueError(f"{key}: write {key}=VALUE, or {key}= to unset it")
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
        return tuple(option.value_of(part.strip()) for part in value.split(","))
    given: object = value
    if option.read in (convert.switch, convert.count, convert.date):
        try:
            given = tomllib.loads(f"value = {value}")["value"]
        except ValueError:
            given = value  # the reader reports what it expects
    return option.value_of(given)


# Receives the user, or None if there is none, and the limits, and returns the new ones.
Change = Callable[[User | None, UserLimits], tuple[User, UserLimits]]


def change_user(path: Path, name: str, change: Change | None) -> bool:
    """Change a user in the credentials file `path` and its limits, or remove both if `change` is `None`.
    `change` may raise an exception to change nothing. A new user never gets the limits of an older one.
    Return whether the file was created.

    Raise CredentialsError on failure, including for a file that was invalid before.
    """
    path = Path(os.path.realpath(path))  # a symbolic link stays a link
    file = file_beside(path)
    with users.locked(path.parent):
        missing = not path.exists()
        # a file that is too large can be reduced
        text = "" if missing else users.read_text(path, whole=True)
        before = users.parse(text, str(path)).get(name)
        rails = read(file, whole=True)
        if change is None:
            after, new, is_new = None, NONE, name in rails.places
        else:
            old = NONE if before is None else rails.own(name)
            after, new = change(before, old)
            is_new = (new, new.given) != (old, old.given) if before else name in rails.places
        texts = {path: users.edited(text, name, after)} if after != before else {}
        tables = {file: rails.changed(name, new)} if is_new else {}
        # a new user never gets the limits of an older one
        texts = tables | texts if before is None else texts | tables
        for each, content in texts.items():
            users.refuse_too_large(each, content)
        for each, content in texts.items():
            users.replace_file(each, content, like=path)
        return missing


def change_default(credentials: Path, assignments: list[str]) -> None:
    """Change the limits in `[default]` in the file of user limits, which is locked meanwhile. Raise
    ValueError or CredentialsError with a message for the operator.
    """
    file = file_beside(Path(os.path.realpath(credentials)))
    with users.locked(file.parent):
        there = read(file, whole=True)
        text = there.changed(_DEFAULT, changed(there.default, assignments))
        users.refuse_too_large(file, text)
        users.replace_file(file, text, like=credentials)
