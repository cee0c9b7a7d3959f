"""Reads the docstrings of options from the source code, so that a relay keeps none of them in memory."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def docstrings_of(table: type[DataclassInstance]) -> dict[str, str]:
    """Return the docstring of each option of a table as one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(table))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
