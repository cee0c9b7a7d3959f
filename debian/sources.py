"""Reads the metrics and the log events of the relay from its source.

Neither can be listed by importing: labels and fields are given where a metric is made or an event is logged.
A metric is a call whose first argument is its name and whose second is its help; further texts are labels.
An event is a method with the decorator `logged`, or a call of `emit` or `report`; where its name is not a
literal, the names in the back-ticks of the function's docstring are meant.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import zonerelay
from zonerelay.telemetry.events.events import RENAMED
from zonerelay.telemetry.metrics.families import READ

PACKAGE = Path(zonerelay.__file__).parent
LEVELS = ("info", "warning", "error")
LEVEL = re.compile(rf'"({"|".join(LEVELS)})"|lifecycle\(')
"""What each file has that logs an event."""
KINDS = {"Info": "info", "labelled": "counter"}
NAMES = re.compile(r"`([a-z]+(?:-[a-z]+)*)`")
CALLS = {"_emit", "emit", "report", "_line", "_queue"}


@dataclass(frozen=True, slots=True)
class Described:
    """A metric with its kind, labels and help, or an event with its levels and fields."""

    name: str
    kind: str
    fields: tuple[str, ...]
    text: str = ""


Function = ast.FunctionDef | ast.AsyncFunctionDef


def metrics() -> list[Described]:
    """All metrics of the relay in the order of the source."""
    found = {}
    for file in sorted(
        PACKAGE.rglob("*.py"), key=lambda file: ("telemetry" not in file.parts, file.name != "metrics.py")
    ):
        source = file.read_text()
        if "zonerelay_" not in source:
            continue
        tree = ast.parse(source)
        if file.name == "families.py":
            for name, each in READ.items():
                kind = "counter" if name.endswith("_total") else "gauge"
                found.setdefault(name, Described(name, kind, each.labels, each.help))
        for call, function in calls(tree):
            texts = [text for each in call.args if (text := literal(each, [function, tree])) is not None]
            maker = called(call)
            if maker == "labelled":
                texts += [each.arg for each in call.keywords if each.arg]
            if maker == "Info" and texts:
                texts = [f"{texts[0]}_info", *texts[1:], "version"]
            if len(texts) > 1 and texts[0].startswith("zonerelay_"):
                kind = KINDS.get(maker) or maker.removesuffix("MetricFamily").lower() or "gauge"
                found.setdefault(texts[0], Described(texts[0], kind, tuple(texts[2:]), texts[1]))
    return list(found.values())


def events() -> list[Described]:
    """All events of the log, sorted by name; of one that is logged in several places, the first."""
    found: dict[str, Described] = {}
    for file in [PACKAGE / "telemetry/events/events.py", *sorted(PACKAGE.rglob("*.py"))]:
        source = file.read_text()
        if not LEVEL.search(source):
            continue
        tree = ast.parse(source)
        functions = {each.name: each for each in ast.walk(tree) if isinstance(each, Function)}
        for arguments, function in emissions(tree):
            level, name = (texts(each) for each in arguments[:2])
            given = (
                arguments[2]
                if isinstance(arguments[2], ast.Dict) and None not in arguments[2].keys
                else function
            )
            fields = tuple(dict.fromkeys(keys(given, functions)))
            for each in name or NAMES.findall(ast.get_docstring(function) or ""):
                if set(level) & set(LEVELS):
                    found.setdefault(each, Described(each, ", ".join(level), fields))
    return [found[name] for name in sorted(found)]


def emissions(tree: ast.AST) -> Iterator[tuple[list[ast.expr], Function]]:
    """The level, the name and the fields of each event, with the function that logs it."""
    for call, function in calls(tree):
        name, arguments = called(call), call.args
        if name == "callback":  # of an exit stack: what it calls, then the arguments
            name, arguments = getattr(arguments[0], "attr", ""), arguments[1:]
        if function is not None and name in CALLS and len(arguments) > 2:
            yield arguments, function
        elif function is not None and name == "lifecycle":
            names = [ast.Constant(each.arg) for each in call.keywords if each.arg]
            yield [ast.Constant("info"), arguments[0], ast.Dict([*names], [*names])], function
    for node in ast.walk(tree):
        if isinstance(node, Function):
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and called(each) == "logged":
                    yield logged(each, node), node
            for each in ast.walk(node):
                if (
                    isinstance(each, ast.Return)
                    and isinstance(each.value, ast.Tuple)
                    and len(each.value.elts) == 3
                ):
                    yield each.value.elts, node


def logged(decorator: ast.Call, method: Function) -> list[ast.expr]:
    """The level, the name and the fields of an event that a method reports."""
    level, *name = decorator.args
    arguments = (*method.args.args[1 if name else 2 :], *method.args.kwonlyargs)
    fields = [ast.Constant(RENAMED.get(each.arg, each.arg)) for each in arguments]
    return [level, *(name or [ast.Constant(None)]), ast.Dict([*fields], [*fields])]


def calls(tree: ast.AST, function: Function | None = None) -> Iterator[tuple[ast.Call, Function | None]]:
    """Each call with the outermost function that it is in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, function
        yield from calls(node, function or (node if isinstance(node, Function) else None))


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def literal(node: ast.expr, scopes: Sequence[ast.AST | None]) -> str | None:
    """A text, also that of a variable which is set to one in a function or a module."""
    if isinstance(node, ast.Name):
        for scope in scopes:
            if scope is not None and node.id in (values := assigned(scope)):
                return literal(values[node.id], ())
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@functools.cache
def assigned(scope: ast.AST) -> dict[str, ast.expr]:
    """The names that a function or a module sets, each with the first value."""
    found: dict[str, ast.expr] = {}
    for each in ast.walk(scope):
        if isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            found.setdefault(each.targets[0].id, each.value)
    return found


def texts(node: ast.expr) -> list[str]:
    """A text, or those that a conditional expression chooses from."""
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def keys(function: ast.AST, functions: dict[str, Function]) -> Iterator[str]:
    """The keys of the dictionaries that are made in a function, or by a function `…_fields` that it calls."""
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and key.value)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                yield node.slice.value
        elif isinstance(node, ast.Call) and called(node).endswith("_fields") and called(node) in functions:
            yield from keys(functions[called(node)], functions)
