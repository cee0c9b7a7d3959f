"""Finds the files of a configuration: FILE, and conf.d/*.toml next to it in alphabetical order.

Together they are one document. Repeated tables are joined. A value that is given twice is a problem of the
second file, whose message names both places.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from zonerelay.config.problems import KeyPath, Report, place

FOLDER = "conf.d"


def files_of(path: Path) -> list[Path]:
    """Return all files of the configuration. Raise OSError if the folder cannot be read."""
    folder = path.parent / FOLDER
    try:
        return [path, *sorted(each for each in folder.iterdir() if each.suffix == ".toml")]
    except (FileNotFoundError, NotADirectoryError):
        return [path]


class JoinedFiles:
    """A TOML document joined from several files, with the file and line of each key."""

    def __init__(self) -> None:
        self.document: dict[str, object] = {}
        self._lines: dict[KeyPath, int] = {}
        self._files: dict[KeyPath, str] = {}
        self._again: dict[KeyPath, str] = {}

    def add(self, document: Mapping[str, object], lines: Mapping[KeyPath, int], file: str) -> None:
        """Add the content of a file. `file` is its name in problems, or "" if there is only one file."""
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
                before = cast("list[object]", there)
                moved[key] = len(before)
                self.document[key] = [*before, *cast("list[object]", value)]
            else:
                twice.add((key,))
        self._again |= {path: place(lines.get(path, 1), file) for path in twice}
        for path, line in lines.items():
            first, *rest = path
            if rest and first in moved:
                rest[0] = int(rest[0]) + moved[first]
            self._lines.setdefault((first, *rest), line)
            self._files.setdefault((first, *rest), file)

    def report(self) -> Report:
        """Return a report with all positions, and with the values that are given twice."""
        report = Report(self._lines, self._files)
        for path, there in self._again.items():
            report.refuse(path, f"is given again in {there}")
        return report


def are_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def written(document: Mapping[str, object]) -> str:
    """Return a valid document as TOML, with a line for each key of the document."""
    return "".join(f"{key} = {_value(value)}\n" for key, value in document.items())


def _value(value: object) -> str:
    if isinstance(value, dict):
        members = (f"{key} = {_value(each)}" for key, each in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False)
