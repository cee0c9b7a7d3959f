"""Prints the response of an operation that has no view of its own: rows as a table, anything else as names
and values. A response whose `ok` is false is a failure.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import cast

import msgspec
from rich.table import Table

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.operation import ResponseKind
from zonerelay.operations.requests import Request


def show(arguments: Namespace) -> int:
    words = " ".join(filter(None, (arguments.command, getattr(arguments, "verb", ""))))
    operation = next(each for each in OPERATIONS if each.command == words)
    with output.frames_seen(operation.help) as saw:
        request = cast(Request, request_of(arguments, operation.request))
        found, end = connect(arguments).all(request, operation.reply or msgspec.Struct, saw)
    if operation.shape is ResponseKind.ROWS:
        output.print_rows(found, _table, "There are none.", as_json=arguments.json)
        return output.completeness(end)
    for frame in found:
        given = [(name, value) for name, value in _shown(frame) if value]
        if arguments.json:
            output.print_document(frame)
        elif len(given) == 1:  # for scripts
            print(text.clean(str(getattr(frame, given[0][0]))))
        else:
            output.console().print(output.facts(given))
    failed = any(getattr(frame, "ok", True) is False for frame in found)
    return FAILED if failed else output.completeness(end)


def _table(rows: Sequence[msgspec.Struct]) -> Table:
    names, texts = rows[0].__struct_fields__, msgspec.structs.asdict(rows[0]).items()
    cut = [name for name, value in texts if isinstance(value, str)][1:]
    return output.table(names, ([value or "-" for _, value in _shown(row)] for row in rows), cut=cut)


def _shown(frame: msgspec.Struct) -> Iterator[tuple[str, str]]:
    """Yield names and values. A number that is not whole is a Unix time."""
    for name, value in msgspec.structs.asdict(frame).items():
        match value:
            case None | ():
                yield name, ""
            case float():
                yield name, text.when(value)
            case _:
                yield name, f"{value:,}" if type(value) is int else text.clean(str(value))
