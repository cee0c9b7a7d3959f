"""Collects what is wrong with a configuration: every problem at once, each with its key and its line.

A `Report` collects while the file is read and checked. Nothing here stops at the first problem:
an operator who corrects a file wants the whole list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of the document: `("zone", 1, "tls")`."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Problem:
    """`line` is 0 when no line is to blame (the file cannot be read)."""

    path: str
    text: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" + (f" (line {self.line})" if self.line else "")


class ConfigError(Exception):
    """The configuration cannot be used. Its text has one problem per line."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class Report:
    """Collects problems. A path with a problem is unsound, and so is what lies above and below it."""

    def __init__(self, lines: Mapping[KeyPath, int]) -> None:
        self._lines = lines
        self._problems: dict[KeyPath, Problem] = {}

    def refuse(self, path: KeyPath, text: str) -> None:
        """Record a problem; of several with one key the first says enough."""
        self._problems.setdefault(path, Problem(path_text(path), text, self._line(path)))

    @property
    def wrong(self) -> Iterable[KeyPath]:
        """The paths that have a problem."""
        return self._problems.keys()

    def given(self, *path: str | int) -> bool:
        """Whether the file itself says this, be it the default or not."""
        return path in self._lines

    def line_of(self, *path: str | int) -> int:
        """The line (from 1) at which the file itself says this; 0 where it does not."""
        return self._lines.get(path, 0)

    def sound(self, *path: str | int) -> bool:
        """Whether nothing is wrong with this value; checks between values skip unsound ones."""
        return not any(wrong[: len(path)] == path or path[: len(wrong)] == wrong for wrong in self._problems)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """In the order of the file."""
        return tuple(sorted(self._problems.values(), key=lambda problem: (problem.line, problem.path)))

    def raise_problems(self) -> None:
        if self._problems:
            raise ConfigError(self.problems)

    def _line(self, path: KeyPath) -> int:
        """The line of the key; of the nearest table above it when the key itself is not in the file."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return 1


def path_text(path: KeyPath) -> str:
    """`zone[1].tls`; positions count from 0, and a key that TOML would quote is quoted."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else json.dumps(part))
    return text
