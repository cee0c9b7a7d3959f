"""Collects the problems in a configuration, each with its key and its line, and formats their messages.

A `Report` collects problems while the file is read and checked. Nothing stops at the first problem, because
an operator who corrects a file wants to see all of them.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

# Quotes, lists and suggestions in problems. URLs are shown without possible secrets.

_SHOWN = 80
MASK = "***"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s\"'<>]+)")
_WORD = re.compile(r"[^\s,<>\"']+")
_TOKEN = re.compile(r"/(?=[^/]*[0-9])[^/]{16,}")
"""A part of a path that is as long as the tokens in the webhook URLs of chat services."""
_VALUE = re.compile(r"([^&;=]*=)?[^&;]+")
_WEB = ("http://", "https://")
_PLAIN = tuple(
    f"{key}="
    for key in (
        "host", "port", "user", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey", "db", "prefix",
    )
)  # fmt: skip
"""The query keys whose values are shown: those of database URLs."""


def masked(text: str) -> str:
    """Return the text with possible secrets in URLs masked: passwords, user names in web addresses, values of
    the query, the fragment, and parts of the path that look like tokens.
    """
    return _URL.sub(lambda found: found[1] + _masked(found[2], is_web=found[1].lower() in _WEB), text)


def _masked(rest: str, *, is_web: bool) -> str:
    rest, mark, _ = rest.partition("#")
    fragment = f"#{MASK}" if mark else ""
    rest, mark, query = rest.partition("?")
    login, at, rest = rest.rpartition("@")
    if is_web:
        login, rest = MASK if login else "", _TOKEN.sub(f"/{MASK}", rest)
    elif ":" in login:
        login = f"{login.partition(':')[0]}:{MASK}"
    query = _VALUE.sub(lambda found: found[0] if found[1] in _PLAIN else f"{found[1] or ''}{MASK}", query)
    return f"{login}{at}{rest}{mark}{query}{fragment}"


def _without_login(found: re.Match[str]) -> str:
    """Mask `NAME:PASSWORD@` in a match that is not part of a URL."""
    login, at, rest = found[0].rpartition("@")
    return f"{MASK}{at}{rest}" if ":" in login and "://" not in login else found[0]


def quoted(text: str) -> str:
    """Return the text in quotes, on one line, shortened, and without secrets in URLs."""
    if "@" in text or "://" in text:
        text = _WORD.sub(_without_login, masked(text))
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    # Unprintable characters could break the line or reverse its direction.
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


def unusable(text: str, what: str, expected: str) -> ValueError:
    """Return a ValueError about an invalid value of an option, with a description of what is expected."""
    return ValueError(f"{quoted(text)} is not {what}; expected {expected}")


MAX_WORDS = 20


def in_words(words: Iterable[str], joiner: str = "and") -> str:
    """Format a list of words as a phrase: `"a"`, `"a" and "b"`, or `"a", "b" and "c"`. A long list is
    shortened, with a count.
    """
    *first, last = [quoted(word) for word in words]
    if len(first) > MAX_WORDS:
        first, last = first[:MAX_WORDS], f"{len(first) + 1 - MAX_WORDS} more"
    return f"{', '.join(first)} {joiner} {last}" if first else last


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean …?` with the nearest known word, or an empty string if none is similar."""
    import difflib  # noqa: PLC0415 - only with a mistake

    nearest = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of the document, such as `("zone", 1, "tls")`."""
Findings = Iterator[tuple[str | KeyPath, str, *tuple[str | KeyPath, ...]]]
"""What a check or advice says about a table: a key of the table or a path in it, the text, and the keys that
must be valid for the text to be true.
"""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


class ConfigProblem(msgspec.Struct, frozen=True):
    """A problem in the configuration. `line` is 0 if no line causes it, such as an unreadable file. `file` is
    "" if there is only one.
    """

    path: str
    text: str
    line: int = 0
    file: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" + (f" ({place(self.line, self.file)})" if self.line else "")


def place(line: int, file: str) -> str:
    return f"line {line} of {file}" if file else f"line {line}"


class ConfigError(Exception):
    """The configuration is invalid. Its text has one problem per line."""

    def __init__(self, problems: Iterable[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Report:
    """The configuration as one TOML document, with the file and the line of each key, and the problems in it.
    A path with a problem is invalid, and so are the paths above and below it.
    """

    def __init__(self, lines: Mapping[KeyPath, int] | None = None) -> None:
        self.document: dict[str, object] = {}
        self._lines = dict(lines or {})
        self._files: dict[KeyPath, str] = {}
        self._problems: dict[KeyPath, ConfigProblem] = {}

    def add(self, document: Mapping[str, object], lines: Mapping[KeyPath, int], file: str) -> None:
        """Add the content of a file to the document: repeated tables are joined, and values that occur twice
        are refused. `file` is its name in problems, or "" if there is only one file.
        """
        twice: set[KeyPath] = set()
        moved: dict[str | int, int] = {}
        for key, value in document.items():
            there = self.document.setdefault(key, value)
            if there is value:
                continue
            if isinstance(there, dict) and isinstance(value, dict):
                twice |= {(key, name) for name in there.keys() & value.keys()}
                self.document[key] = {**value, **there}
            elif are_tables(there) and are_tables(value):
                moved[key] = len(there)
                self.document[key] = [*there, *value]
            else:
                twice.add((key,))
        for path, line in lines.items():
            first, *rest = path
            if rest and first in moved:
                rest[0] = int(rest[0]) + moved[first]
            self._lines.setdefault((first, *rest), line)
            self._files.setdefault((first, *rest), file)
        for path in twice:
            self.refuse(path, f"is set again in {place(lines.get(path, 1), file)}")

    def refuse(self, path: KeyPath, text: str) -> None:
        """Record a problem with a key of the configuration. Only its first problem is kept."""
        at = path
        while at and at not in self._lines:
            at = at[:-1]  # the nearest table above it that is in a file
        line, file = self._lines.get(at, 1), self._files.get(at, "")
        self._problems.setdefault(path, ConfigProblem(path_text(path), text, line, file))

    @contextlib.contextmanager
    def refusing(self, path: KeyPath, *errors: type[Exception]) -> Iterator[None]:
        """Record an exception in the block as a problem of this key, and continue after the block."""
        try:
            yield
        except errors as error:
            self.refuse(path, str(error))

    def refuse_all(self, path: KeyPath, findings: Findings) -> None:
        """Record the problems that a check has found in the table at `path`."""
        for key, text, *compared in findings:
            if all(self.sound(*below(path, each)) for each in compared):
                self.refuse(below(path, key), text)

    @property
    def wrong(self) -> Iterable[KeyPath]:
        """The paths of the keys that have a problem."""
        return self._problems.keys()

    def given(self, *path: str | int) -> bool:
        """Return whether the file contains this key, even with its default value."""
        return path in self._lines

    def place_of(self, *path: str | int) -> str:
        """Return the line number of a key as text, and its file if there are several, or "" if no file
        contains it.
        """
        return place(self._lines[path], self._files.get(path, "")) if path in self._lines else ""

    def sound(self, *path: str | int) -> bool:
        """Return whether the value of this key, and every value in it, is valid. Checks between values skip
        invalid ones.
        """
        return not any(wrong[: len(path)] == path or path[: len(wrong)] == wrong for wrong in self._problems)

    @property
    def problems(self) -> tuple[ConfigProblem, ...]:
        """The problems of all keys, in the order of the files and lines."""
        files = list(dict.fromkeys(self._files.values()))
        by_file = {file: number for number, file in enumerate(files)}
        order = sorted(self._problems.values(), key=lambda each: (each.line, each.path))
        return tuple(sorted(order, key=lambda each: by_file.get(each.file, 0)))

    def check_names(self, table: str, entries: Sequence[Any]) -> None:
        """Report each entry of a repeated table that has the name of an earlier entry."""
        first: dict[str, int] = {}
        for at, entry in enumerate(entries):
            path = (table, at, "name")
            if entry.name and self.sound(*path) and (there := first.setdefault(entry.name, at)) != at:
                lacking = "" if self.given(*path) else "is missing: "
                self.refuse(path, f"{lacking}{quoted(entry.name)} is already the name of {table}[{there}]")

    def check_references(
        self, value: str | Sequence[str], known: Collection[str], what: str, path: KeyPath, *, twice: str = ""
    ) -> None:
        """Report each given name that no entry has, with a similar name or a list of all names. With the text
        `twice`, refuse repeated ones. A list with an unreadable entry is not checked, because positions in it
        have changed.
        """
        names = {(*path, at): name for at, name in enumerate(value)}
        given = {path: value} if isinstance(value, str) else names
        seen = set[str]()
        for here, name in given.items() if self.sound(*path) else ():
            if name not in known:
                near = did_you_mean(name, known) or (f"; known names are {in_words(known)}" if known else "")
                self.refuse(here, f"{what} {quoted(name)}{near}")
            elif twice and name in seen:
                self.refuse(here, f"{quoted(name)} {twice}")
            seen.add(name)

    def all_sound(self, table: str, key: str, number: int) -> bool:
        """Return whether this key is valid in every entry of a repeated table. An invalid entry might have a
        name that is missing elsewhere.
        """
        return all(self.sound(table, at, key) for at in range(number))

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self.problems)


def are_tables(value: object) -> TypeGuard[list[dict[str, object]]]:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def below(path: KeyPath, key: str | KeyPath) -> KeyPath:
    """Return the path of a key, or of several nested ones, in the table at `path`."""
    return (*path, key) if isinstance(key, str) else (*path, *key)


def path_text(path: KeyPath) -> str:
    """Format the path of a key, such as `zone[1].tls`. Positions count from 0, and a key is quoted where TOML
    requires it.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else json.dumps(part))
    return text


# Entries of repeated tables, such as [[route]], that never match, because an earlier entry matches all their
# mail.

Conditions = Mapping[str, frozenset[Any]]  # Any: texts, networks or sizes
"""The values of each condition of an entry, of which one has to match. Every condition has to match."""

MAX_COMPARED = 300
"""Up to this number of entries, each is compared with all before it. With more entries, only with those that
match everything.
"""
_ADDRESSES = ("address", "recipient", "sender")


def unreachable(entries: Sequence[Conditions]) -> Iterator[tuple[int, int]]:
    """Yield the position of each rule that never matches, and of the earlier rule that matches its mail."""
    earlier: list[int] = []
    for at, entry in enumerate(entries):
        other = next((place for place in earlier if _covers(entries[place], entry)), None)
        if other is not None:
            yield at, other
        elif len(entries) <= MAX_COMPARED or _covers(entry, {}):
            earlier.append(at)


def _covers(one: Conditions, other: Conditions) -> bool:
    """Return whether one rule certainly matches all mail that the other rule matches."""
    return all(_covers_condition(name, values, other.get(name)) for name, values in one.items())


def _covers_condition(name: str, values: frozenset[Any], other: frozenset[Any] | None) -> bool:
    if name in ("address", "recipient") and "*" in values:
        return True
    if other is None:
        return name == "recipient_domain" and values >= {"*"}
    if name in ("min_size", "max_size"):
        (mine,), (its,) = values, other
        return bool(mine <= its if name == "min_size" else mine >= its)
    if name in ("recipient_domain", "sender_domain", "sender", "user") and values >= {"*"}:
        return "<>" not in other
    if name in _ADDRESSES:
        values = frozenset(each.lower().removeprefix("@") for each in values)
        known = [each.lower().removeprefix("@") for each in other]
        return all(each in values or each.rpartition("@")[2] in values for each in known)
    return values >= other
