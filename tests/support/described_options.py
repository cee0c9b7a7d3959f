"""Every option with its default as TOML and the docstring below its field, in the order of the file."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from zonerelay.config.options.options import options_of
from zonerelay.config.settings import REPEATED, TABLES, Settings
from zonerelay.config.toml_text import toml_value

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
