"""Loads the configuration: TOML files become `Settings`, or one `ConfigError` with all problems.

To check the whole file, the loader replaces an unreadable value by its default and ignores an unknown key. It
never returns settings from a file with a problem.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from zonerelay.config import checks, problems
from zonerelay.config.files import FOLDER, files_of, written
from zonerelay.config.options import convert
from zonerelay.config.options.convert import Option
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import ConfigError, ConfigProblem, KeyPath, Report, did_you_mean, path_text
from zonerelay.config.settings import REPEATED, TABLES, Settings
from zonerelay.config.toml_lines import line_numbers

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["ConfigError", "ConfigProblem", "load", "load_partial", "load_text", "read"]

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")

Table = TypeVar("Table", bound="DataclassInstance")


def load(path: Path) -> Settings:
    """Load the settings from a TOML file and the files in conf.d. Raise ConfigError if it is invalid or
    cannot be read.
    """
    return read(path)[0]


def read(path: Path) -> tuple[Settings, Report]:
    """Load the settings, and return them with the report, which further checks need for line numbers. Raise
    ConfigError on failure.
    """
    report = _joined(path)
    return _valid(report), report


def read_copy(path: Path) -> tuple[bytes, Settings]:
    """Load the settings, and return them with one TOML document that has the content of all files. Raise
    ConfigError on failure.
    """
    data = _read(path)
    report = _joined(path, data)
    settings = _valid(report)
    return data[path] if len(data) == 1 else written(report.document).encode(), settings


class PartialSettings(msgspec.Struct, frozen=True):
    """The settings that could be read from a file that may be invalid. `wrong` are its invalid top-level
    tables and keys; if it is `None`, the file is not TOML, and `settings` only have the paths found in it.
    `is_sure` means that the control socket in these settings is that of the file, not a default for an
    unreadable value.
    """

    settings: Settings
    problems: tuple[ConfigProblem, ...]
    wrong: frozenset[str] | None
    is_sure: bool


def load_partial(path: Path) -> PartialSettings:
    """Load the valid settings of a file for commands that call a running relay or read its files. These
    commands must work while the file is being corrected.
    """
    try:
        report = _joined(path)
    except ConfigError as error:
        scanned = Report()
        scanned.document |= _scanned(path)
        return PartialSettings(settings_in(scanned), error.problems, None, bool(scanned.document))
    settings = _checked(report)
    wrong = frozenset(str(each[0]) for each in report.wrong)
    known = {*TABLES, *options_of(Settings)} - {"spool", "admin"}
    given = ("admin", "socket") if settings.admin.socket else ("spool", "path")
    is_sure = wrong <= known or (report.given(*given) and report.sound(*given))
    return PartialSettings(settings, report.problems, wrong, is_sure)


_PLACES = (("spool", "path"), ("admin", "socket"), ("log", "redact_key_file"), ("history", "addresses"))


def _scanned(path: Path) -> dict[str, object]:
    """Search configuration files that are not valid TOML for paths, line by line."""
    places: dict[str, dict[str, str]] = {}
    try:
        texts = [each.read_bytes().decode("utf-8-sig", "replace") for each in files_of(path)]
    except OSError:
        return {}
    for text in texts:
        table = ""
        for line in text.splitlines():
            try:
                found = tomllib.loads(line)
            except (ValueError, RecursionError):
                continue  # a part of a value, or a mistake
            if line.lstrip().startswith("["):
                table = next(iter(found))
                continue
            for name, key in _PLACES:
                values = found if name == table else {} if table else found.get(name)
                if isinstance(values, dict) and isinstance(values.get(key), str):
                    places.setdefault(name, {})[key] = values[key]
    return dict(places)


def load_text(text: str, source: str = "configuration") -> Settings:
    """Load the settings from the text of a TOML document. `source` names it in errors if it is not TOML."""
    return _valid(_parsed(text, source))


def refused_in(text: str) -> frozenset[KeyPath]:
    """Return the keys of a TOML document that have a problem. Raise ConfigError if it is not TOML."""
    report = _parsed(text, "configuration")
    _checked(report)
    return frozenset(report.wrong)


def _read(path: Path) -> dict[Path, bytes]:
    try:
        return {each: each.read_bytes() for each in files_of(path)}
    except OSError as error:
        file = str(error.filename or path)
        raise ConfigError([ConfigProblem(file, f"cannot be read: {error.strerror}")]) from error


def _joined(path: Path, data: Mapping[Path, bytes] | None = None) -> Report:
    data = _read(path) if data is None else data
    report = Report()
    for each, content in data.items():
        name = "" if len(data) == 1 else each.name if each is path else f"{FOLDER}/{each.name}"
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise ConfigError([ConfigProblem(str(each), "is not UTF-8, as TOML requires", line)]) from error
        _parsed(text, str(each), report, name)
    return report


def _parsed(text: str, source: str, report: Report | None = None, name: str = "") -> Report:
    """Parse a configuration file, and add its content to the report of the files before it. Raise ConfigError
    if it is not TOML.
    """
    try:
        document = tomllib.loads(text)
        lines = line_numbers(text)
    except ValueError as error:  # TOMLDecodeError, or the error of int() for a number with 5000 digits
        raise ConfigError([_syntax_problem(str(error), text, source)]) from error
    except RecursionError as error:
        raise ConfigError([ConfigProblem(source, "lists or tables are nested too deeply", 1)]) from error
    report = report or Report()
    report.add(document, lines, name)
    return report


def _checked(report: Report) -> Settings:
    return checks.check(settings_in(report), report)


def _valid(report: Report) -> Settings:
    settings = _checked(report)
    report.raise_problems()
    return settings


def _syntax_problem(message: str, text: str, source: str) -> ConfigProblem:
    """Convert an error message of tomllib, which contains the position, to a ConfigProblem."""
    match = _POSITION.search(message)
    end = text.rstrip().count("\n") + 1
    line = int(match[1]) if match and match[1] else end
    what = _POSITION.sub("", message)
    if what == "Cannot overwrite a value":
        what = "this key is given twice"
    elif twice := re.match(r"Cannot (?:declare|mutate immutable namespace) \((.*?),?\)", what):
        name = path_text(tuple(part.strip(" '\"") for part in twice[1].split(",")))
        what = f"the table {name} is given twice"
        what += f"; to define several, write each as [[{name}]]" if name in REPEATED else ""
    return ConfigProblem(source, f"is not valid TOML: {what[0].lower()}{what[1:]}", line)


def settings_in(report: Report) -> Settings:
    """Convert the report's document to settings, and record problems in the report."""
    document = report.document
    tables: dict[str, Any] = {
        name: (_repeated if name in REPEATED else _single)(name, document[name], report)
        for name in TABLES
        if name in document
    }
    options = {name: value for name, value in document.items() if name not in TABLES}
    return dataclasses.replace(read_options(Settings, options, (), report), **tables)


def _single(name: str, value: object, report: Report) -> DataclassInstance:
    if isinstance(value, dict):
        return read_options(TABLES[name], value, (name,), report)
    several = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    hint = "only one such table is allowed; write it in single brackets" if several else "expected a table"
    report.refuse((name,), f"{hint}, [{name}]")
    return TABLES[name]()


def _repeated(name: str, value: object, report: Report) -> tuple[DataclassInstance, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        report.refuse((name,), f"several such tables are allowed; write it in double brackets, [[{name}]]")
        return ()
    return tuple(read_options(TABLES[name], item, (name, at), report) for at, item in enumerate(value))


def read_options(owner: type[Table], table: dict[str, object], path: KeyPath, report: Report) -> Table:
    """Convert the options of one table. Problems are added to the report."""
    options = options_of(owner)
    for key in [key for key in table if key not in options]:
        report.refuse((*path, key), _unknown_key(key, path, options))
    values: dict[str, Any] = {}  # each reader returns the type that the field declares
    for name, option in options.items():
        if name in table:
            value, here, several = table[name], (*path, name), option.several
            with report.refusing(here, ValueError):
                values[name] = _list(option, value, here, report) if several else option.value_of(value)
    return owner(**values)


def _list(option: Option, value: object, path: KeyPath, report: Report) -> tuple[object, ...]:
    if option.read is convert.path and not isinstance(value, list):
        # A single file needs no brackets.
        return (option.value_of(value),) if value != "" else ()
    if not isinstance(value, list):
        hint = f": write [{problems.quoted(value)}]" if isinstance(value, str) else ""
        raise convert.expected("a list in brackets", value, hint)
    read: list[object] = []
    for at, item in enumerate(value):
        with report.refusing((*path, at), ValueError):
            read.append(option.value_of(item))
    return tuple(read)


def _unknown_key(key: str, path: KeyPath, options: Mapping[str, Option]) -> str:
    table = str(path[0]) if path else ""
    if home := _home_of(key):
        return f"unknown key; {home}"
    known = [*options, *(TABLES if not table else ())]
    return f"unknown key{did_you_mean(key, known) or '; known keys are ' + ', '.join(known)}"


def _home_of(key: str) -> str:
    """Return a hint that names the table to which a misplaced key belongs, or ""."""
    if key in options_of(Settings):
        return f"{key} must be at the top of the file, before the first [table]"
    homes = [
        f"[[{name}]]" if name in REPEATED else f"[{name}]"
        for name, table in TABLES.items()
        if key in options_of(table)
    ]
    return f"it belongs in {' or '.join(homes)}" if homes else ""
