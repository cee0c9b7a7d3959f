"""Writes settings as TOML that the loader reads back to the same settings, with the line number of each key.
Describes each option with its default and its purpose, for the reference pages.

Secrets are references in the settings, and only these are written. Possible secrets in URLs are masked. The
document can always be read back: if a default contradicts an explicit value, the defaults of that table are
written as comments.

The descriptions are the docstrings below the fields of `tables` and those of the classes.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from zonerelay.config import load
from zonerelay.config.options import convert, forms
from zonerelay.config.options.convert import Option
from zonerelay.config.options.docstrings import docstrings_of
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import KeyPath, Report, masked
from zonerelay.config.settings import REPEATED, TABLES, Settings
from zonerelay.config.units import format_duration, format_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DERIVED = "depends on other options"


def effective(settings: Settings, report: Report) -> str:
    """Return the active configuration as TOML, with every option. `report` has the line numbers of the
    files.
    """
    text = _document(settings, report, commented=frozenset())
    # The problem may be reported for an explicit key or for a default in the same table.
    tables = frozenset(path[:2] if path[0] in REPEATED else path[:1] for path in load.refused_in(text))
    return _document(settings, report, commented=tables) if tables else text


def changed(settings: Settings, report: Report) -> str:
    """Return the options that differ from their defaults as TOML."""
    return _document(settings, report, commented=frozenset(), only_changed=True)


def _document(
    settings: Settings, report: Report, *, commented: frozenset[KeyPath], only_changed: bool = False
) -> str:
    def keys(table: DataclassInstance, path: KeyPath) -> Iterator[str]:
        for key, option in options_of(type(table)).items():
            value, here = getattr(table, key), (*path, key)
            is_default = value == _default(type(table), key)
            if only_changed and is_default and key != "name":
                continue
            origin = report.place_of(*here) or ("" if is_default else DERIVED)
            mark = "#" if path in commented and not origin else ""
            yield mark + _key(key, value, option) + (f"  # {origin}" if origin else "")

    lines = list(keys(settings, ()))
    tables: list[str] = []
    for name in TABLES:
        content = getattr(settings, name)
        if name not in REPEATED:
            written = list(keys(content, (name,)))
            tables += ["", f"[{name}]", *written] if written else []
        elif not content and getattr(Settings(), name):
            lines.append(f"{name} = []")
        elif not only_changed or content != getattr(Settings(), name):
            for at, item in enumerate(content):
                tables += ["", f"[[{name}]]", *keys(item, (name, at))]
    return "\n".join([*lines, *tables]).lstrip("\n") + "\n"


def is_url(key: str) -> bool:
    return key == "url" or key.endswith("_url")


def _default(table: type[DataclassInstance], key: str) -> object:
    return next(field.default for field in dataclasses.fields(table) if field.name == key)


def _key(key: str, value: object, option: Option) -> str:
    if is_url(key):
        value = masked(str(value))
    return f"{key} = {toml_value(value, option)}"


def toml_value(value: object, option: Option) -> str:
    """Format the value of an option as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(member, option) for member in value)}]"
    if option.word and value == option.meaning:
        return quote(option.word)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value, option)
    return quote("" if value is None else str(value))


def _number(value: float, option: Option) -> str:
    if option.read is convert.date:
        return forms.date_text(value)
    if value == 0:
        return "0"
    if option.read is convert.size:
        return quote(format_size(int(value)))
    return quote(format_duration(value)) if option.read is convert.duration else str(value)


def quote(text: str) -> str:
    """Format a text as a TOML basic string. JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False)


WIDTH = 96


class OptionDescription(msgspec.Struct, frozen=True):
    """The description of an option for the reference pages. `table` is "" for the keys at the top of the
    file; `default` is written as TOML.
    """

    table: str
    key: str
    default: str
    doc: str

    @property
    def heading(self) -> str:
        """The heading of the table in the file, such as `[[zone]]`."""
        return f"[[{self.table}]]" if self.table in REPEATED else f"[{self.table}]" if self.table else ""


def options() -> Iterator[OptionDescription]:
    """Yield the description of every option, in the order of the file."""
    tables: dict[str, type[DataclassInstance]] = {"": Settings, **TABLES}
    for name, table in tables.items():
        docs = docstrings_of(table)
        for key, option in options_of(table).items():
            yield OptionDescription(name, key, toml_value(_default(table, key), option), docs[key])


def about(table: str) -> str:
    """Return the description of a table. It is "" for the top of the file."""
    return " ".join((TABLES[table].__doc__ or "").split()) if table else ""


def defaults() -> str:
    """Return a TOML document with every option at its default value, below its description. A table that does
    not exist by default is commented out.
    """
    lines: list[str] = []
    for (table, heading), described in groupby(options(), lambda each: (each.table, each.heading)):
        mark = "#" if table in REPEATED and not getattr(Settings(), table) else ""
        if table:
            lines += [*_comment(about(table)), f"{mark}{heading}", ""]
        for each in described:
            lines += [*_comment(each.doc), f"{mark}{each.key} = {each.default}", ""]
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")
