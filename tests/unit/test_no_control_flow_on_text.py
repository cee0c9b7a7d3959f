"""No decision of the relay hangs on a sentence: errors and results have kinds and fields.

A sentence that somebody rewrites would change what the relay does, and no type checker would notice. Texts
of other programs are read where nothing else tells what happened; each such place has its reason in FOREIGN.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

import pytest

from tests.support.source import PACKAGE, modules, tree_of

FOREIGN = {
    "smtp": "commands of clients and replies of peers",
    "message": "header fields",
    "config": "what operators write",
    "transfer/others": "files and logs of other systems",
    "telemetry/logs/redact.py": "addresses in texts of peers and libraries",
    "delivery/tls/dane.py": "kinds of names in Python's description of a certificate",
    "inbound/tls/channel.py": "reasons of OpenSSL, for which pyOpenSSL has no numbers",
    "store/leveldb/engine.py": "LevelDB's errors, which plyvel hands on as text alone",
    "admin/problems.py": "msgspec's errors, which have no fields",
    "cli/arguments.py": "msgspec's errors, which have no fields",
    "cli/setup/init.py": "the configuration file that the package ships",
}
"""Files and folders that parse what others write."""


METHODS = {
    *("startswith", "endswith", "removeprefix", "removesuffix", "index", "find", "rindex", "rfind"),
    *("partition", "rpartition", "split", "rsplit", "replace", "count"),
}
_WORDS = re.compile(r"[A-Za-z]+[,;:.]? \(?\w+")
_SIGNS = re.compile(r"\[[^]]*\]|\\.")
"""Classes and escapes of a regular expression."""


def decisions(tree: ast.Module) -> Iterator[str]:
    """Yield the places that compare or search a text with a sentence, as `line: sentence`."""
    nodes = list(ast.walk(tree))
    constants = {
        alias.asname or alias.name: value
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        for value in [_exported(node.module or "").get(alias.name)]
        if value is not None
    }
    constants |= dict(_assigned(tree.body))
    constants |= {
        name: value
        for name, value in _assigned(nodes)
        if isinstance(value, ast.Tuple) and all(isinstance(each, ast.Constant) for each in value.elts)
    }
    caught = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    for node in nodes:
        if not isinstance(node, ast.Compare | ast.MatchValue | ast.Call):
            continue
        operands = _operands(node, constants)
        is_of_error = any(_is_text_of(each, caught) for each in operands)
        for operand in operands:
            for text in _texts(operand, constants):
                if is_of_error or _WORDS.search(_SIGNS.sub("", text)):
                    yield f"{getattr(node, 'lineno', 0)}: {text!r}"


@cache
def _exported(module: str) -> Mapping[str, ast.expr]:
    path = PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    return (
        dict(_assigned(tree_of(path.read_bytes()).body))
        if path.is_relative_to(PACKAGE) and path.exists()
        else {}
    )


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _operands(node: ast.AST, constants: Mapping[str, ast.expr]) -> list[ast.expr]:
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    if isinstance(node, ast.MatchValue):
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, name = node.func.value, node.func.attr
        if isinstance(owner, ast.Name) and owner.id == "re":
            return node.args[:1]
        if name in METHODS:
            known = constants.get(owner.id) if isinstance(owner, ast.Name) else owner
            is_searched = isinstance(known, ast.Tuple | ast.List | ast.Call)
            return [owner, *node.args] if is_searched else [*node.args]
    return []


def _is_text_of(node: ast.expr, caught: set[str | None]) -> bool:
    """`str(error)`, or a call of a method on it."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return _is_text_of(node.func.value, caught)
    is_text = isinstance(node.func, ast.Name) and node.func.id == "str" and len(node.args) == 1
    return is_text and isinstance(node.args[0], ast.Name) and node.args[0].id in caught


def _texts(node: ast.expr | None, constants: Mapping[str, ast.expr], depth: int = 0) -> Iterator[str]:
    """Yield the constant texts that a value is made of."""
    parts: list[ast.expr | None] = []
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=values):
            yield "".join(str(each.value) for each in values if isinstance(each, ast.Constant))
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            parts = [*elements]
        case ast.Dict(keys=keys):
            parts = keys
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple"), args=arguments):
            parts = [*arguments]
        case ast.Name(id=name) if name in constants:
            parts = [constants[name]]
    if depth < 5:
        for part in parts:
            yield from _texts(part, constants, depth + 1)


@pytest.mark.proof
def test_no_decision_hangs_on_a_sentence() -> None:
    names = {str(path.relative_to(PACKAGE)): path for path in modules()}
    found = {
        name: places
        for name, path in names.items()
        if not any(f"{name}/".startswith(f"{each}/") for each in FOREIGN)
        and (places := list(decisions(tree_of(path.read_bytes()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        'if reason == "the spool is damaged": pass',
        'if "in use, by another" in text: pass',
        'if text in ("no mail", "some mail"): pass',
        'text.startswith("no worker ")',
        'text.startswith(("the spool: ", "no"))',
        'number = text.index(" octets accepted")',
        'text.partition("; nothing was changed")',
        'WHEN = re.compile(r"in (\\d+) minutes or hours")',
        'FULL = "disk full"\nif text == FULL: pass',
        'match text:\n    case "the disk is full": pass',
        'STATES = ("ok", "disabled (410) for good")\nSTATES.index(state)',
        'try: pass\nexcept OSError as error:\n    full = "full" in str(error)',
        'try: pass\nexcept OSError as error:\n    full = str(error).lower().startswith("full")',
    ],
)
def test_every_way_is_seen(line: str) -> None:
    assert list(decisions(ast.parse(line)))
