"""`queue cat`: prints the bytes of one message, from the running relay or from a stopped one's spool
(`body_offline`).

A pipe or a file receives the bytes unchanged; on a terminal, control sequences are made harmless.
"""

from __future__ import annotations

import codecs
import sys
from argparse import Namespace
from collections.abc import Callable

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect, load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.operations.answers import BodyPiece, Frame, MessageBody
from zonerelay.operations.errors import NotRunningError
from zonerelay.operations.requests import QueueCat


def cat(arguments: Namespace) -> int:
    request = request_of(arguments, QueueCat)
    if request.zone and not request.as_sent:
        raise CliError(
            "--zone can be used only with --as-sent: the stored body is the same in all zones", USAGE
        )
    show = output.print_line if arguments.json else _byte_writer()
    try:
        for frame in connect(arguments).stream(request):
            if isinstance(frame, MessageBody | BodyPiece):
                show(frame)
    except NotRunningError:
        # A running relay answers without the imports that the offline case needs.
        from zonerelay.cli.spool.body_offline import offline

        offline(load_settings(arguments.config), request, show)
    return OK


def _byte_writer() -> Callable[[Frame], None]:
    """Return a function that writes the bytes of a message to standard output."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(frame: Frame) -> None:
        if isinstance(frame, MessageBody) and frame.zone:
            output.chatter().print(f"As zone {frame.zone} sends it, from {text.path(frame.sender)}:")
        elif not isinstance(frame, BodyPiece):
            return
        elif sys.stdout.isatty():
            shown = decoder.decode(frame.octets).replace("\r\n", "\n").replace("\r", "")
            sys.stdout.write("\t".join(map(text.clean_lines, shown.split("\t"))))
        else:
            sys.stdout.buffer.write(frame.octets)

    return show
