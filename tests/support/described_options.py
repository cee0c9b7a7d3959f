"""Every option with its default as TOML and the docstring below its field, in the order of the file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from zonerelay.config.options import convert
from zonerelay.config.options.convert import Option
from zonerelay.config.options.forms import date_text
from zonerelay.config.options.options import options_of
from zonerelay.config.settings import REPEATED, TABLES, Settings
from zonerelay.config.units import format_duration, format_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


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
    tables: dict[str, type[DataclassInstance]] = {"": Settings, **TABLES}
    for name, table in tables.items():
        yield from _options_in(name, table)


def _options_in(name: str, table: type[DataclassInstance]) -> Iterator[Described]:
    described, docs = options_of(table), _docstrings(table)
    for field in dataclasses.fields(table):
        if field.name in described:
            option = described[field.name]
            yield Described(name, field.name, toml_value(field.default, option), docs.get(field.name, ""))


def _docstrings(table: type[DataclassInstance]) -> dict[str, str]:
    """The string below each field, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def toml_value(value: object, option: Option) -> str:
    """A setting as its option is written in the file."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(member, option) for member in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _number(value, option)
    if value is None:
        return quote("auto" if option.read is convert.switch_or_auto else "")
    return quote(str(value))


def _number(value: float, option: Option) -> str:
    if option.read is convert.date:
        return date_text(value)
    if value == 0:
        return "0"
    if option.read is convert.size:
        return quote(format_size(int(value)))
    return quote(format_duration(value)) if option.read is convert.duration else str(value)


def quote(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's."""
    return json.dumps(text, ensure_ascii=False)
