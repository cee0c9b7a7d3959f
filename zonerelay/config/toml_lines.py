"""Finds the line of each key in a TOML document, which tomllib does not report.

`line_numbers` only reads documents that tomllib has accepted, so it determines the structure and validates
nothing. A test compares its paths with tomllib's result for unusual and generated documents.
"""

import re
import tomllib
from bisect import bisect_right

from zonerelay.config.problems import KeyPath

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACES = re.compile(r"[ \t]*")
_KEY_PART = re.compile(r"""[ \t]*("(?:\\.|[^"\\\n])*"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*""")
_SCALAR = re.compile(
    r'"""(?:\\.|[^\\])*?""""{0,2}'  # up to two quotes may precede the closing three
    r"|'''.*?''''{0,2}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|[^,\]}#\n]+",
    re.DOTALL,
)


def line_numbers(document: str) -> dict[KeyPath, int]:
    """Return the line (from 1) of every key, table header and list item, by its path."""
    return _Scanner(document.replace("\r\n", "\n")).scan()


class _Scanner:
    """A scanner that finds the line of each key in one TOML document. `_at` is the position of the next
    token.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._lines: dict[KeyPath, int] = {}
        self._tables_in: dict[KeyPath, int] = {}  # [[name]] headers of each array of tables so far

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._key_and_value(table)
            self._skip(_BLANK)
        return self._lines

    def _header(self) -> KeyPath:
        line = self._line()
        array = self._text.startswith("[[", self._at)
        self._at += 2 if array else 1
        parts = self._key()
        self._at += 2 if array else 1
        path: KeyPath = ()
        for part in parts[:-1]:
            path = self._enter(*path, part, line=line)
        if not array:
            return self._enter(*path, parts[-1], line=line)
        path = (*path, parts[-1])
        position = self._tables_in.get(path, 0)
        self._tables_in[path] = position + 1
        self._lines.setdefault(path, line)
        self._lines[*path, position] = line
        return (*path, position)

    def _enter(self, *path: str | int, line: int) -> KeyPath:
        """Record the line of one part of a table header. The name of an array of tables refers to its last
        table so far.
        """
        self._lines.setdefault(path, line)
        count = self._tables_in.get(path)
        return path if count is None else (*path, count - 1)

    def _key_and_value(self, table: KeyPath) -> None:
        line = self._line()
        path = table
        for part in self._key():
            path = (*path, part)
            self._lines.setdefault(path, line)
        self._at += 1  # =
        self._skip(_SPACES)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at]
        if opening == "[":
            self._array(path)
        elif opening == "{":
            self._at += 1
            while not self._closed_by("}"):
                self._key_and_value(path)
        else:
            self._skip(_SCALAR)

    def _array(self, path: KeyPath) -> None:
        self._at += 1
        position = 0
        while not self._closed_by("]"):
            self._lines[*path, position] = self._line()
            self._value((*path, position))
            position += 1

    def _closed_by(self, bracket: str) -> bool:
        """Skip to the next item of a list and return False, or skip the closing bracket and return True."""
        self._skip(_BLANK)
        if self._text[self._at] == ",":
            self._at += 1
            self._skip(_BLANK)
        if self._text[self._at] != bracket:
            return False
        self._at += 1
        return True

    def _key(self) -> list[str]:
        parts: list[str] = []
        while True:
            match = _KEY_PART.match(self._text, self._at)
            assert match is not None, "tomllib accepted an invalid key"
            self._at = match.end()
            parts.append(_unquote(match[1]))
            if self._text[self._at] != ".":
                return parts
            self._at += 1

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None, "tomllib accepted an invalid value"
        self._at = match.end()

    def _line(self) -> int:
        return bisect_right(self._line_starts, self._at)


def _unquote(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    if part[0] == '"':
        # tomllib knows the escapes, and it has just accepted this string.
        return str(tomllib.loads(f"key = {part}")["key"])
    return part
