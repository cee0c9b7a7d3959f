"""Describes each option with its default and its purpose, for the reference pages.

The descriptions are the docstrings below the fields of `tables` and those of the classes. They are read from
the source code, so a relay keeps none of them in memory.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from zonerelay.config.options.options import options_of
from zonerelay.config.settings import REPEATED, TABLES, Settings
from zonerelay.config.toml_text import toml_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDTH = 96


@dataclass(frozen=True, slots=True)
class OptionDescription:
    """The description of an option for the reference pages. `table` is "" for the keys at the top of the
    file; `default` is written as TOML.
    """

    table: str
    key: str
    default: str
    doc: str

    @property
    def heading(self) -> str:
        """The heading of the table in the file."""
        return f"[[{self.table}]]" if self.table in REPEATED else f"[{self.table}]" if self.table else ""


def options() -> Iterator[OptionDescription]:
    """Yield every option, in the order of the file."""
    tables: dict[str, type[DataclassInstance]] = {"": Settings, **TABLES}
    for name, table in tables.items():
        described, docs = options_of(table), _docstrings(table)
        for field in dataclasses.fields(table):
            if option := described.get(field.name):
                yield OptionDescription(name, field.name, toml_value(field.default, option), docs[field.name])


def about(table: str) -> str:
    """Return the purpose of a table. It is "" for the top of the file."""
    return " ".join((TABLES[table].__doc__ or "").split()) if table else ""


def defaults() -> str:
    """Return a document with every option at its default, below its description. A table that does not exist
    by default is commented out.
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


def _docstrings(table: type[DataclassInstance]) -> dict[str, str]:
    """Return the docstring of each field as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
