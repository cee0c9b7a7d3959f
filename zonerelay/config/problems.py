"""Collects what is wrong with a configuration: every problem at once, each with its key and its line, and how
problems quote, list and suggest.

A `Report` collects while the file is read and checked. Nothing here stops at the first problem:
an operator who corrects a file wants the whole list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

# How problems quote, list and suggest, and how URLs are shown: without what may be a secret in them.

_SHOWN = 80
MASK = "***"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s\"'<>]+)")
_WORD = re.compile(r"[^\s,<>\"']+")
_TOKEN = re.compile(r"/(?=[^/]*[0-9])[^/]{16,}")
"""Part of a path: as long as the tokens that chat services put into the addresses of their hooks."""
_VALUE = re.compile(r"([^&;=]*=)?[^&;]+")
_WEB = ("http://", "https://")
_PLAIN = tuple(
    f"{key}="
    for key in (
        "host", "port", "user", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey", "db", "prefix",
    )
)  # fmt: skip
"""Keys of queries whose values are shown: those of databases."""


def masked(text: str) -> str:
    """Returns the text with what may be a secret in a URL masked: a password, in web addresses the user name
    too, values of the query, the fragment, and parts of a path that look like tokens.
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
    return f"{login}{at}{rest}{mark}{_VALUE.sub(_masked_value, query)}{fragment}"


def _masked_value(found: re.Match[str]) -> str:
    return found[0] if found[1] in _PLAIN else f"{found[1] or ''}{MASK}"


def _without_login(found: re.Match[str]) -> str:
    """Masks NAME:PASSWORD@ where no scheme says that it is a URL."""
    login, at, rest = found[0].rpartition("@")
    return f"{MASK}{at}{rest}" if ":" in login and "://" not in login else found[0]


def quoted(text: str) -> str:
    """Return the text as the file has it, on one line and not too long, without a secret that a URL in it
    has.
    """
    if "@" in text or "://" in text:
        text = _WORD.sub(_without_login, masked(text))
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    # What is not printable could break the line, or turn it round.
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


MAX_WORDS = 20


def in_words(words: Iterable[str], joiner: str = "and") -> str:
    """`"a"`, `"a" and "b"`, `"a", "b" and "c"`; of many the first ones, and how many more there are."""
    *first, last = [quoted(word) for word in words]
    if len(first) > MAX_WORDS:
        first, last = first[:MAX_WORDS], f"{len(first) + 1 - MAX_WORDS} more"
    return f"{', '.join(first)} {joiner} {last}" if first else last


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the nearest known word, or nothing when none is near."""
    import difflib  # noqa: PLC0415 - only with a mistake

    nearest = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of the document: `("zone", 1, "tls")`."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """`line` is 0 when no line is to blame (the file cannot be read). `file` is "" when there is only one."""

    path: str
    text: str
    line: int = 0
    file: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" + (f" ({place(self.line, self.file)})" if self.line else "")


def place(line: int, file: str) -> str:
    return f"line {line} of {file}" if file else f"line {line}"


class ConfigError(Exception):
    """The configuration cannot be used. Its text has one problem per line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Report:
    """Collects problems. A path with a problem is unsound, and so is what lies above and below it."""

    def __init__(self, lines: Mapping[KeyPath, int], files: Mapping[KeyPath, str] | None = None) -> None:
        """`files` has the file of each key, where there are several."""
        self._lines = lines
        self._files = files or {}
        self._problems: dict[KeyPath, Problem] = {}

    def refuse(self, path: KeyPath, text: str) -> None:
        """Record a problem; of several with one key the first says enough."""
        at = self._nearest(path)
        line, file = self._lines.get(at, 1), self._files.get(at, "")
        self._problems.setdefault(path, Problem(path_text(path), text, line, file))

    @property
    def wrong(self) -> Iterable[KeyPath]:
        """The paths that have a problem."""
        return self._problems.keys()

    def given(self, *path: str | int) -> bool:
        """Return whether the file itself says this, be it the default or not."""
        return path in self._lines

    def place_of(self, *path: str | int) -> str:
        """Return the line at which a file says this, as text; "" where none does."""
        return place(self._lines[path], self._files.get(path, "")) if path in self._lines else ""

    def sound(self, *path: str | int) -> bool:
        """Return whether nothing is wrong with this value; checks between values skip unsound ones."""
        return not any(wrong[: len(path)] == path or path[: len(wrong)] == wrong for wrong in self._problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """In the order of the files."""
        files = list(dict.fromkeys(self._files.values()))
        by_file = {file: number for number, file in enumerate(files)}
        order = sorted(self._problems.values(), key=lambda each: (each.line, each.path))
        return tuple(sorted(order, key=lambda each: by_file.get(each.file, 0)))

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self.problems)

    def _nearest(self, path: KeyPath) -> KeyPath:
        """Return the key; the nearest table above it when the key itself is not in a file."""
        while path and path not in self._lines:
            path = path[:-1]
        return path


def path_text(path: KeyPath) -> str:
    """`zone[1].tls`; positions count from 0, and a key that TOML would quote is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else json.dumps(part))
    return text


# Rules for tables that are written several times, as [[source]] is: names, and entries that never match.

Entry = TypeVar("Entry")

MAX_COMPARED = 300
"""Entries of which each is compared with all before it; of more, only with those that take everything."""


def check_names(table: str, names: Sequence[str], missing: str, report: Report) -> None:
    """Refuses an entry without a name, with the text `missing`, and one with the name of an earlier entry."""
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        path = (table, at, "name")
        if not report.sound(*path):
            continue
        if not name:
            report.refuse(path, missing)
        elif (there := first.setdefault(name, at)) != at:
            report.refuse(path, f"{quoted(name)} is the name of {table}[{there}] already")


def check_known(name: str, names: Collection[str], what: str, path: KeyPath, report: Report) -> bool:
    """Refuses the option at `path` when it names what is not in `names`, with the nearest name or all names.
    Returns whether it is known.
    """
    if name in names:
        return True
    near = did_you_mean(name, names) or (f"; there is {in_words(names)}" if names else "")
    report.refuse(path, f"{what} {quoted(name)}{near}")
    return False


def unreachable(
    entries: Sequence[Entry], covers: Callable[[Entry, Entry], bool], takes_all: Callable[[Entry], bool]
) -> Iterator[tuple[int, int]]:
    """Yields each entry that never matches, with the earlier entry that covers it; both as positions."""
    earlier: list[int] = []
    for at, entry in enumerate(entries):
        other = next((place for place in earlier if covers(entries[place], entry)), None)
        if other is not None:
            yield at, other
        elif len(entries) <= MAX_COMPARED or takes_all(entry):
            earlier.append(at)
