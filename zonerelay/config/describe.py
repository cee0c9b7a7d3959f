"""Every option with its default and its reason, in the order of the file: what documentation is made of."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass

from zonerelay.config.options.convert import item_form
from zonerelay.config.options.forms import date_text
from zonerelay.config.options.options import Form, Option, options_of
from zonerelay.config.options.units import format_duration, format_size
from zonerelay.config.settings import REPEATED, TABLES, Settings, Table


@dataclass(frozen=True, slots=True)
class Described:
    """`table` is "" for the keys at the top of the file; `default` is written as TOML."""

    table: str
    key: str
    default: str
    doc: str

    @property
    def heading(self) -> str:
        """The table as it is written in the file."""
        return f"[[{self.table}]]" if self.table in REPEATED else f"[{self.table}]"


def options() -> Iterator[Described]:
    for name, table in {"": Settings, **TABLES}.items():
        yield from _options_in(name, table)


def _options_in(name: str, table: type[Settings | Table]) -> Iterator[Described]:
    described = options_of(table)
    for field in dataclasses.fields(table):
        if field.name in described:
            option = described[field.name]
            yield Described(name, field.name, toml_value(field.default, option), option.doc)


def toml_value(value: object, option: Option) -> str:
    """A setting as its option is written in the file."""
    if isinstance(value, tuple):
        item = dataclasses.replace(option, form=item_form(option.form) or Form.TEXT)
        return f"[{', '.join(toml_value(member, item) for member in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value, option.form)
    if value is None:
        return quote("auto" if option.form is Form.SWITCH_OR_AUTO else "")
    return quote(str(value))


def _number(value: float, form: Form) -> str:
    if form is Form.DATE:
        return date_text(value)
    if value == 0:
        return "0"
    if form not in {Form.SIZE, Form.DURATION}:
        return str(value)
    return quote(format_size(int(value)) if form is Form.SIZE else format_duration(value))


def quote(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False)
