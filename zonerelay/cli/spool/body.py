"""`queue cat`: the octets of one message on standard output, from the running relay or from a stopped one's
spool.

A pipe and a file get the octets as they are; a terminal gets text in which nothing moves a cursor.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
from argparse import Namespace
from collections.abc import Callable

from zonerelay.cli.relay import connect, load_settings
from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.config.settings import Settings
from zonerelay.control.bodies import Bodies
from zonerelay.control.messages.answers import BodyPiece, Frame, MessageBody
from zonerelay.control.messages.requests import QueueCat
from zonerelay.control.socket.errors import NotRunningError
from zonerelay.delivery.rewrite.rendering import Renderer
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import MessageNotFoundError, Store, StoreError
from zonerelay.telemetry.events.events import Events, Field
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.outbound import build_dkim_keys, build_srs


def cat(arguments: Namespace) -> int:
    if arguments.zone and not arguments.as_sent:
        raise CliError("--zone chooses what --as-sent shows: a stored body is the same in all zones", USAGE)
    request = QueueCat(message_id=arguments.message_id, as_sent=arguments.as_sent, zone=arguments.zone or "")
    show = output.print_line if arguments.json else _Octets().show
    try:
        for frame in connect(arguments.config).stream(request):
            if isinstance(frame, MessageBody | BodyPiece):
                show(frame)
    except NotRunningError:
        settings = load_settings(arguments.config)
        with stopped(settings):
            asyncio.run(_offline(settings, request, show))
    return OK


class _Octets:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def show(self, frame: Frame) -> None:
        if isinstance(frame, MessageBody) and frame.zone:
            output.chatter().print(f"As zone {frame.zone} sends it, from {text.path(frame.sender)}:")
        elif not isinstance(frame, BodyPiece):
            return
        elif sys.stdout.isatty():
            shown = self._decoder.decode(frame.octets).replace("\r\n", "\n").replace("\r", "")
            sys.stdout.write("\t".join(map(text.clean_lines, shown.split("\t"))))
        else:
            sys.stdout.buffer.write(frame.octets)


async def _offline(
    settings: Settings, request: QueueCat, show: Callable[[MessageBody | BodyPiece], None]
) -> None:
    """Raises CliError and ControlError."""
    zones = {zone.name: zone for zone in settings.zone}
    try:
        for worker in spools(settings.spool):
            async with opened(settings, worker) as store:
                bodies = Bodies(store, _renderer(settings, store), zone=zones.get, read=lambda *_: None)
                try:
                    async for frame in bodies.frames(request, ""):
                        show(frame)
                except MessageNotFoundError:
                    continue
                return
    except (StoreError, ValueError) as error:
        raise CliError(str(error)) from error
    raise CliError(f"no message {request.message_id} in the queue")


def _renderer(settings: Settings, store: Store) -> Renderer:
    """Raises ValueError."""
    clock = SystemClock()
    events = Events(_Told(), Metrics(), Redactor(b"", enabled=False), clock)
    renderer = Renderer(read_body=store.read_body, events=events, clock=clock)
    largest = max((listener.max_header_size for listener in settings.listener), default=0)
    renderer.configure(
        keys=build_dkim_keys(settings), srs=build_srs(settings, os.environ), max_header_size=largest
    )
    return renderer


class _Told:
    """What the relay would log about a rendition is told."""

    def emit(self, level: str, event: str, fields: dict[str, Field]) -> None:
        output.chatter().print(f"{event}: {fields.get('reason', '')}")
