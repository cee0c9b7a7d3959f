"""Sends the requests of commands and prints the responses, as JSON with `--json`.

`show` is the command of an operation that has no view of its own: rows are a table, anything else is names
and values. A response whose `ok` is false is a failure.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from rich.console import RenderableType

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED
from zonerelay.control.client import ControlClient
from zonerelay.operations.answers import Count
from zonerelay.operations.catalogue import OPERATIONS, operation_of
from zonerelay.operations.operation import ResponseKind
from zonerelay.operations.requests import Request


def answered(
    arguments: Namespace,
    request: Request,
    view: Callable[[Any], Any],
    nothing: str = "",
    *,
    relay: ControlClient | None = None,
) -> tuple[Any, int]:
    """Send a request, and print the response with `view`, or the text `nothing` if it has no rows. Return the
    rows or the frame, and the exit status, which is 1 if a part of the relay did not answer.
    """
    operation, relay = operation_of(request), relay or connect(arguments)
    answer = Count if getattr(request, "dry_run", False) else operation.reply or msgspec.Struct
    found: Any
    with output.frames_seen(operation.help) as saw:
        if operation.shape is ResponseKind.ROWS:
            found, end = relay.all(request, answer, saw)
        else:
            found, end = relay.answered(request, answer, saw)
    if operation.shape is ResponseKind.ROWS:
        output.print_rows(found, view, nothing, as_json=arguments.json)
    else:
        output.print_one(found, view, as_json=arguments.json)
    return found, output.completeness(end)


def show(arguments: Namespace) -> int:
    words = " ".join(filter(None, (arguments.command, getattr(arguments, "verb", ""))))
    operation = next(each for each in OPERATIONS if each.command == words)
    request = cast(Request, request_of(arguments, operation.request))
    view = _table if operation.shape is ResponseKind.ROWS else _print
    found, status = answered(arguments, request, view, "There are none.")
    return FAILED if getattr(found, "ok", True) is False else status


def _print(frame: msgspec.Struct) -> None:
    given = [(name, value) for name in frame.__struct_fields__ if (value := _shown(name, frame))]
    if len(given) == 1:  # for scripts
        print(text.clean(str(getattr(frame, given[0][0]))))
    else:
        output.console().print(output.facts(given))


def _table(found: Sequence[msgspec.Struct]) -> RenderableType:
    values = msgspec.structs.asdict(found[0])
    cut = [name for name, value in values.items() if isinstance(value, str)][1:]
    return output.table(({name: _shown(name, row) for name in values} for row in found), cut=cut)


def _shown(name: str, frame: msgspec.Struct) -> str:
    """Format the value of a response field for the terminal. A number that is not whole is a Unix time."""
    match getattr(frame, name):
        case None | ():
            return ""
        case float() as at:
            return text.when(at)
        case value:
            return f"{value:,}" if type(value) is int else str(value)
