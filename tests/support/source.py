"""The package's source as trees, for rules that no linter has."""

import ast
import gc
from pathlib import Path

import zonerelay

PACKAGE = Path(zonerelay.__file__).parent


def modules() -> list[Path]:
    """Return the files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def tree_of(source: str | bytes) -> ast.Module:
    """Parse without looking for garbage, which takes twice as long as the rest. Python 3.11 also miscounts
    the depth of a tree when objects end meanwhile.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if enabled:
            gc.enable()
