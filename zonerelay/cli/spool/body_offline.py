"""Answers `queue cat` from the spool when no relay is running, using the relay's own code for renditions.

No relay writes a log then, so this access is not logged.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import CliError, refused
from zonerelay.config.settings import Settings
from zonerelay.control.handler import Bodies
from zonerelay.delivery.rewrite.rendering import Renderer
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import BodyPiece, MessageBody
from zonerelay.operations.requests import QueueCat
from zonerelay.store.contract import MessageNotFoundError, Store, StoreError
from zonerelay.telemetry.events.events import Events, Field
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.outbound import build_srs
from zonerelay.worker.tables import build_dkim_keys


def offline(settings: Settings, request: QueueCat, show: Callable[[MessageBody | BodyPiece], None]) -> None:
    """Print the message. Raise CliError if the spool cannot be opened, and ControlError where the relay
    would.
    """
    with stopped(settings):
        asyncio.run(_send(settings, request, show))


async def _send(
    settings: Settings, request: QueueCat, show: Callable[[MessageBody | BodyPiece], None]
) -> None:
    zones = {zone.name: zone for zone in settings.zone}
    with refused(StoreError, ValueError):
        for worker in spools(settings.spool):
            async with opened(settings, worker) as store:
                bodies = Bodies(store, _renderer(settings, store), zone=zones.get, read=lambda *_: None)
                try:
                    async for frame in bodies.frames(request, ""):
                        show(frame)
                except MessageNotFoundError:
                    continue
                return
    raise CliError(f"message {request.message_id} is not in the queue")


def _renderer(settings: Settings, store: Store) -> Renderer:
    """Build the renderer. Raise ValueError if the configuration is not valid."""
    clock = SystemClock()
    events = Events(_EventPrinter(), Metrics(), Redactor(b"", enabled=False), clock)
    renderer = Renderer(read_body=store.read_body, events=events, clock=clock)
    largest = max((listener.max_header_size for listener in settings.listener), default=0)
    renderer.configure(
        keys=build_dkim_keys(settings), srs=build_srs(settings, os.environ), max_header_size=largest
    )
    return renderer


class _EventPrinter:
    """Prints the events that the relay would log about a rendition."""

    def emit(self, level: str, event: str, fields: dict[str, Field]) -> None:
        output.chatter().print(f"{event}: {fields.get('reason', '')}")
