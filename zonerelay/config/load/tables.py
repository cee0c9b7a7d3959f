"""From the tables of a TOML document to `Settings`: which key goes where, and what is said when it cannot.

A value with a problem is left at its default, so that everything else can be read and checked too.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any, TypeVar, cast

from zonerelay.config.options import convert
from zonerelay.config.options.options import Form, Option, options_of
from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import Path
from zonerelay.config.options.wording import did_you_mean, quoted
from zonerelay.config.tables.models import REPEATED, TABLES, Settings, Table

Owner = TypeVar("Owner", bound=Settings | Table)


def read_settings(document: dict[str, object], report: Report) -> Settings:
    tables: dict[str, Any] = {  # the classes in TABLES are those of the fields; a test compares them
        name: (_repeated if name in REPEATED else _single)(name, document[name], report)
        for name in TABLES
        if name in document
    }
    options = {name: value for name, value in document.items() if name not in TABLES}
    return dataclasses.replace(_read_options(Settings, options, (), report), **tables)


def _single(name: str, value: object, report: Report) -> Table:
    if isinstance(value, dict):
        return _read_options(TABLES[name], value, (name,), report)
    several = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    hint = "there is only one: write it in single brackets" if several else "expected a table"
    report.refuse((name,), f"{hint}, [{name}]")
    return TABLES[name]()


def _repeated(name: str, value: object, report: Report) -> tuple[Table, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        report.refuse((name,), f"there may be several: write it in double brackets, [[{name}]]")
        return ()
    return tuple(_read_options(TABLES[name], item, (name, at), report) for at, item in enumerate(value))


def _read_options(owner: type[Owner], table: dict[str, object], path: Path, report: Report) -> Owner:
    options = options_of(owner)
    for key in [key for key in table if key not in options]:
        report.refuse((*path, key), _unknown_key(key, path, options))
    values: dict[str, Any] = {}  # each reader returns what the field that names its form declares
    for field in dataclasses.fields(owner):
        if field.name not in table or field.name not in options:
            continue
        option, value, here = options[field.name], table[field.name], (*path, field.name)
        try:
            values[field.name] = _read(option, value, field.default, here, report)
        except ValueError as error:
            report.refuse(here, str(error))
    return owner(**values)


def _read(option: Option, value: object, default: object, path: Path, report: Report) -> object:
    item = _item_of(option)
    if item is not None:
        return _read_list(item, value, path, report)
    read = convert.read_value(value, option)
    if option.form is not Form.CHOICE:
        return read
    # The words of a choice are the members of the enumeration that its default belongs to.
    return cast("type[enum.StrEnum]", type(default))(cast("str", read))


@functools.cache
def _item_of(option: Option) -> Option | None:
    """What an item of a list must be; `None` when it is no list."""
    form = convert.item_form(option.form)
    return None if form is None else dataclasses.replace(option, form=form, optional=False)


def _read_list(option: Option, value: object, path: Path, report: Report) -> tuple[object, ...]:
    if option.form is Form.PATH and not isinstance(value, list):
        # One file needs no brackets.
        return (convert.read_value(value, option),) if value != "" else ()
    if not isinstance(value, list):
        hint = f": write [{quoted(value)}]" if isinstance(value, str) else ""
        raise convert.expected("a list in brackets", value, hint)
    read: list[object] = []
    for at, item in enumerate(value):
        try:
            read.append(convert.read_value(item, option))
        except ValueError as error:
            report.refuse((*path, at), str(error))
    return tuple(read)


def _unknown_key(key: str, path: Path, options: dict[str, Option]) -> str:
    table = str(path[0]) if path else ""
    if home := _home_of(key):
        return f"unknown key; {home}"
    known = [*options, *(TABLES if not table else ())]
    return f"unknown key{did_you_mean(key, known) or '; known here are ' + ', '.join(known)}"


def _home_of(key: str) -> str:
    """Where a key that stands in the wrong table belongs: TOML makes that mistake easy."""
    if key in options_of(Settings):
        return f"{key} belongs at the top of the file, before the first [table]"
    homes = [
        f"[[{name}]]" if name in REPEATED else f"[{name}]"
        for name, table in TABLES.items()
        if key in options_of(table)
    ]
    return f"it belongs in {' or '.join(homes)}" if homes else ""
