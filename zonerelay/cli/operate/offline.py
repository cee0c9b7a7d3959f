"""Answers `explain` and `queue cat` when no relay is running, by building the same components from the
configuration.

Suspensions are state of a running scheduler and remain unknown. Nothing is written. No relay writes a log
then, so the access to a body is not logged.
"""

import asyncio
import os
import random
import socket
from collections.abc import Callable
from functools import partial

from rich.console import Console

from zonerelay.cli.operate.tail import EventLog
from zonerelay.cli.spool.stopped import opened, spools, stopped
from zonerelay.cli.terminal import output
from zonerelay.cli.terminal.exits import USAGE, CliError, refused
from zonerelay.config import user_limits
from zonerelay.config.credentials.file import CredentialsError
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.settings import Settings, resolve_hostname
from zonerelay.control.explain import Explainer
from zonerelay.control.handler import Bodies
from zonerelay.delivery.auth.logins import first_for, senders_of
from zonerelay.delivery.rewrite.rendering import Renderer
from zonerelay.delivery.source import SourceSelection
from zonerelay.inbound.state.transaction import RewriteRules
from zonerelay.message.srs import Srs
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import BodyPiece, Explanation, MessageBody
from zonerelay.operations.requests import Explain, QueueCat
from zonerelay.routing.addresses import OwnAddresses
from zonerelay.routing.destinations.mx import DestinationTable, MxRouter
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.mta_sts import StsFiles, StsPolicies, policy_directory
from zonerelay.routing.zones.zones import Zones
from zonerelay.store.contract import MessageNotFoundError, Store, StoreError
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.tables import build_dkim_keys, build_srs


async def explanation(settings: Settings, request: Explain) -> Explanation:
    """Explain the route of mail as the running relay would, from the configuration. Raise CliError if the
    configuration is not usable, and ControlError where the relay would.
    """
    clock = SystemClock()
    hostname = resolve_hostname(settings, socket.getfqdn)
    resolver = Resolver(settings.dns, clock)
    # The relay's cache is read; the results of this request are not added to it.
    files = StsFiles(policy_directory(settings), writable=False)
    events = _events(Console(quiet=True))
    sts = StsPolicies(resolver, events, clock, files=files)
    try:
        with refused(ValueError, status=USAGE):
            explainer = _explainer(settings, resolver, sts, events, hostname)
        return await explainer.explain(request)
    finally:
        await sts.close()
        await resolver.close()


def _explainer(
    settings: Settings, resolver: Resolver, sts: StsPolicies, events: Events, hostname: str
) -> Explainer:
    """Build the `Explainer`, which determines the route of mail, from the configuration. Raise ValueError if
    the configuration is not valid.
    """
    clock = SystemClock()
    rewriting = RewriteRules(settings.rewrite)
    senders = senders_of(settings.credential)
    router = MxRouter(
        resolver,
        hostname=hostname,
        clock=clock,
        random=random.Random(),
        own_addresses=OwnAddresses(parse_listen(each.address) for each in settings.listener),
        sts=sts,
        destinations=DestinationTable(settings.destination),
    )
    sources = SourceSelection(clock, events)
    sources.configure(settings.source)
    return Explainer(
        zones=Zones(settings.zone, settings.route),
        router=router,
        resolver=resolver,
        hostname=hostname,
        clock=clock,
        selection=sources,
        listeners=lambda: settings.listener,
        rewriting=lambda: rewriting,
        srs=lambda: _srs(settings),
        keys=lambda: build_dkim_keys(settings),
        rails=partial(_rails, settings),
        credential=lambda zone, sender: first_for(sender, zone, senders),
        relay_running=False,
    )


async def _rails(settings: Settings, user: str) -> user_limits.UserLimits | None:
    try:
        return user_limits.read(user_limits.file_beside(settings.auth.credentials)).of(user)
    except CredentialsError:
        return None


def _srs(settings: Settings) -> Srs | None:
    """Return the SRS rewriter, or None if the current user cannot read its secret."""
    try:
        return build_srs(settings, os.environ)
    except ValueError:
        return None


def print_body(
    settings: Settings, request: QueueCat, show: Callable[[MessageBody | BodyPiece], None]
) -> None:
    """Print the body of a message in the spool of a stopped relay. Raise CliError if the spool cannot be
    opened, and ControlError where the relay would.
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
    """Build the `Renderer`, which makes a zone's changes to messages. Raise ValueError if the configuration
    is not valid.
    """
    renderer = Renderer(read_body=store.read_body, events=_events(output.chatter()), clock=SystemClock())
    largest = max((listener.max_header_size for listener in settings.listener), default=0)
    renderer.configure(
        keys=build_dkim_keys(settings), srs=build_srs(settings, os.environ), max_header_size=largest
    )
    return renderer


def _events(console: Console) -> Events:
    """Return an `Events` object that shows log events on this console."""
    return Events(EventLog(console), Metrics(), Redactor(b"", enabled=False), SystemClock())
