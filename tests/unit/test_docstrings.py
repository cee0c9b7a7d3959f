"""How docstrings begin: a class says what it is, a function what it does; and no text has a private word.

`tests/data/docstring_exceptions.txt` has the numbers of violations by package and rule, which only shrink.
`python -m tests.unit.test_docstrings` lowers the numbers, and with the name of a package it lists them.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.source import tree_of

PACKAGE = Path(__file__).parents[2] / "zonerelay"
DATA = Path(__file__).parents[1] / "data"
EXCEPTIONS = DATA / "docstring_exceptions.txt"
VERBS = frozenset((DATA / "docstring_verbs.txt").read_text().split())

_PRIVATE = re.compile(
    r"\b(anew|octets?|in words|keeps? (its|their) word|are told|is told|hand(s|ed)? in|in force|"
    r"errand|parcel|lane|manners|journey|heir|surrender\w*|survey|handout|probation|comeback|guard rails|"
    r"ballast)\b",
    re.IGNORECASE,
)
_ONLY_RAISES = re.compile(r"Raises? (only )?\w+(, \w+)*(,? (and|or) \w+)?\.")
_PROPERTIES = ("property", "cached_property", "setter", "overload")


def is_verb(word: str) -> bool:
    """Return whether a docstring may begin with a word: "Return", "Returns", "Tries"."""
    word = word.rstrip(",.:;").lower()
    ways = (word, word.removesuffix("s"), word.removesuffix("es"), f"{word.removesuffix('ies')}y")
    return any(way in VERBS for way in ways)


def violations(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the rule that is broken, and what breaks it with its line."""
    for node in described(tree_of(path.read_text())):
        text = ast.get_docstring(node)
        if not text:
            continue
        where = f"{path.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        if isinstance(node, ast.ClassDef):
            if text.startswith(("`", "One per", "Of ")):
                yield "class", where
        elif isinstance(node, ast.Module):
            pass
        elif _ONLY_RAISES.fullmatch(text):
            yield "raises", where
        elif not is_property(node) and not is_verb(text.split()[0]):
            yield "function", where
        for found in _PRIVATE.finditer(text):
            yield "word", f"{where} ({found[0]})"


def described(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield a node and what is defined in it, without a look into expressions."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for each in getattr(node, field, ()):
            yield from described(each)


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read as an attribute, whose docstring is a noun."""
    return any(ast.unparse(each).rpartition(".")[2] in _PROPERTIES for each in node.decorator_list)


@cache
def found() -> dict[tuple[str, str], list[str]]:
    """Return the violations by package and rule."""
    result = defaultdict[tuple[str, str], list[str]](list)
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for rule, where in violations(path):
            result[package, rule].append(where)
    return result


def allowed() -> dict[tuple[str, str], int]:
    """Return the number of violations that a package may have of a rule."""
    rows = (line.split() for line in EXCEPTIONS.read_text().splitlines())
    return {(package, rule): int(count) for package, rule, count in rows}


def test_no_package_breaks_a_rule_more_often_than_before() -> None:
    most = allowed()
    for key, where in found().items():
        assert len(where) <= most.get(key, 0), "\n".join(where)


def test_the_check_sees_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    source = tmp_path / "module.py"
    source.write_text('class A:\n    """`x` of it."""\n\n    def f(self):\n        """The octets."""\n')
    assert [rule for rule, _ in violations(source)] == ["class", "function", "word"]
    source.write_text('def f():\n    """Raises OSError."""\n')
    assert [rule for rule, _ in violations(source)] == ["raises"]
    source.write_text('class A:\n    """A pool."""\n\n    def f(self):\n        """Tries it."""\n')
    assert list(violations(source)) == []


def prune() -> None:
    """Lower the numbers to those of today; never raise one."""
    most = allowed()
    counts = {key: min(most.get(key, 0), len(where)) for key, where in sorted(found().items())}
    EXCEPTIONS.write_text("".join(f"{p} {rule} {count}\n" for (p, rule), count in counts.items() if count))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print("\n".join(line for (p, _), lines in found().items() if p == sys.argv[1] for line in lines))
    else:
        prune()
