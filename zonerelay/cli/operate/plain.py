"""Prints the response of an operation that has no view of its own."""

from __future__ import annotations

from argparse import Namespace
from typing import cast

import msgspec

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.operation import Shape
from zonerelay.operations.requests import Request


def show(arguments: Namespace) -> int:
    words = " ".join(filter(None, (arguments.command, getattr(arguments, "verb", ""))))
    operation = next(each for each in OPERATIONS if each.command == words)
    with output.progress(operation.help) as reach:
        request = cast(Request, request_of(arguments, operation.request))
        saw = output.frames_seen(reach)
        found, end = connect(arguments).all(request, operation.reply or msgspec.Struct, saw)
    if arguments.json:
        for frame in found:
            (output.print_line if operation.shape is Shape.ROWS else output.print_document)(frame)
    else:
        for frame in found:
            fields = msgspec.structs.asdict(frame).items()
            given = [(name, value) for name, value in fields if value not in ("", ())]
            if len(given) == 1:  # for scripts
                print(text.clean(str(given[0][1])))
            else:
                output.console().print(output.facts((name, text.clean(str(value))) for name, value in given))
    return output.completeness(end)
