"""Loading the configuration: TOML text to `Settings`, or one `ConfigError` with everything wrong in it.

A value that cannot be read is replaced by its default only so that the rest can be checked too;
nothing is ever returned from a file with a problem.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from zonerelay.config.load.tables import read_settings
from zonerelay.config.options.options import options_of
from zonerelay.config.options.problems import ConfigError, Problem, Report, path_text
from zonerelay.config.options.toml_lines import line_numbers
from zonerelay.config.rules import checks
from zonerelay.config.tables.models import REPEATED, TABLES, Settings

__all__ = ["ConfigError", "Problem", "load", "load_text", "load_whereabouts", "read"]

_POSITION = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


def load(path: Path) -> Settings:
    """The settings of a file. Raises ConfigError, also when the file cannot be read."""
    return read(path)[0]


def read(path: Path) -> tuple[Settings, Report]:
    """The settings, and the report for who looks further: it knows the lines. Raises ConfigError."""
    settings, report = _checked(_text(path), str(path))
    report.raise_problems()
    return settings, report


def load_whereabouts(path: Path) -> Settings:
    """For commands that only ask where the running relay is: its spool and its socket.

    They are needed most while the file is being corrected, so what is wrong elsewhere is no matter here.
    Raises ConfigError when the file does not say it.
    """
    settings, report = _checked(_text(path), str(path))
    known = {*TABLES, *options_of(Settings)} - {"spool", "admin"}
    if not all(wrong[0] in known for wrong in report.wrong):  # an unknown table may be a mistyped one
        report.raise_problems()
    return settings


def load_text(text: str, source: str = "configuration") -> Settings:
    """The settings in a TOML document; `source` names it when it is no TOML at all."""
    settings, report = _checked(text, source)
    report.raise_problems()
    return settings


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}")]) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem(str(path), "is not UTF-8, which TOML must be", line)
        raise ConfigError([problem]) from error


def _checked(text: str, source: str) -> tuple[Settings, Report]:
    """Raises ConfigError for what is no TOML; everything else is in the report."""
    try:
        document = tomllib.loads(text)
        lines = line_numbers(text)
    except ValueError as error:  # TOMLDecodeError, and what int() says of a number of 5000 digits
        raise ConfigError([_syntax_problem(str(error), text, source)]) from error
    except RecursionError as error:
        raise ConfigError([Problem(source, "lists or tables are nested too deeply", 1)]) from error
    report = Report(lines)
    settings = checks.check(read_settings(document, report), report)
    return settings, report


def _syntax_problem(message: str, text: str, source: str) -> Problem:
    """The message of tomllib says where; we say it as for every other problem."""
    match = _POSITION.search(message)
    end = text.rstrip().count("\n") + 1
    line = int(match[1]) if match and match[1] else end
    what = _POSITION.sub("", message)
    if what == "Cannot overwrite a value":
        what = "this key is given twice"
    elif twice := re.match(r"Cannot (?:declare|mutate immutable namespace) \((.*?),?\)", what):
        name = path_text(tuple(part.strip(" '\"") for part in twice[1].split(",")))
        what = f"the table {name} is given twice"
        what += f"; there may be several when each is written [[{name}]]" if name in REPEATED else ""
    return Problem(source, f"is not TOML: {what[0].lower()}{what[1:]}", line)
