"""Answers `explain` when no relay is running, by building the same components from the configuration.

Suspensions are state of a running scheduler and remain unknown. Nothing is written.
"""

from __future__ import annotations

import os
import random
import socket
from functools import partial

from zonerelay.cli.terminal.exits import USAGE, refused
from zonerelay.config import user_limits
from zonerelay.config.credentials.file import CredentialsError
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.settings import Settings, resolve_hostname
from zonerelay.control.explain import Explainer
from zonerelay.delivery.auth.logins import first_for, senders_of
from zonerelay.delivery.source import SourceSelection
from zonerelay.inbound.state.rewriting import RewriteRules
from zonerelay.message.srs import Srs
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import Explanation
from zonerelay.operations.requests import Explain
from zonerelay.routing.addresses import OwnAddresses
from zonerelay.routing.destinations.destination_table import DestinationTable
from zonerelay.routing.destinations.mx import MxRouter
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.mta_sts import StsFiles, StsPolicies, policy_directory
from zonerelay.routing.zones.zones import Zones
from zonerelay.telemetry.events.events import Events, Field
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics
from zonerelay.worker.outbound import build_srs
from zonerelay.worker.tables import build_dkim_keys


async def offline(settings: Settings, request: Explain) -> Explanation:
    """Answer the request. Raise CliError if the configuration is not usable, and ControlError where the relay
    would.
    """
    clock = SystemClock()
    hostname = resolve_hostname(settings, socket.getfqdn)
    resolver = Resolver(settings.dns, clock)
    # The relay's cache is read; the results of this request are not added to it.
    files = StsFiles(policy_directory(settings), writable=False)
    events = Events(_Silence(), Metrics(), Redactor(b"", enabled=False), clock)
    sts = StsPolicies(resolver, events.sts, clock, files=files)
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
    """Build the explainer. Raise ValueError if the configuration is not valid."""
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


class _Silence:
    """Ignores the events that a relay would log."""

    def emit(self, level: str, event: str, fields: dict[str, Field]) -> None: ...


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
