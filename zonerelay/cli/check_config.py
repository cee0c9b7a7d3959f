"""`zonerelay check-config`: every problem on stderr and 2, or what was understood on stdout and 0."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from zonerelay.config.advice import advice
from zonerelay.config.hostname import resolve_hostname
from zonerelay.config.models import ListenerSettings, RetryPolicyName, RouteSettings, Settings, ZoneSettings
from zonerelay.config.settings import ConfigError, load
from zonerelay.config.units import format_duration, format_size


def run(path: Path) -> int:
    """Check one file. Touches nothing else: no directory is made, no name is looked up but our own."""
    try:
        settings = load(path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    hostname = resolve_hostname(settings, socket.getfqdn)
    print(f"{path}: ok")
    for line in summary(settings, hostname):
        print(f"  {line}")
    for line in advice(settings, hostname):
        print(f"  note: {line}")
    return 0


def summary(settings: Settings, hostname: str) -> Iterator[str]:
    """What the relay will do, in the order in which mail passes through it."""
    yield f"hostname {hostname}"
    yield from (_listener(listener) for listener in settings.listener)
    yield f"spool {settings.spool.backend} {settings.spool.path}"
    yield from (_route(route) for route in settings.route)
    yield from (_zone(zone) for zone in settings.zone)
    yield _retry(settings)
    yield f"bounces {'to the sender' if settings.bounce.enabled else 'off'}"
    yield f"admin {settings.admin.address or 'off'}"


def _listener(listener: ListenerSettings) -> str:
    if listener.open_relay:
        who = "from anybody"
    elif listener.address.startswith("unix:"):
        who = "from whoever may open it"
    else:
        who = f"from {', '.join(map(str, listener.allow_networks))}"
    return f"listener {listener.address} {who}, up to {format_size(listener.max_message_size)}"


def _route(route: RouteSettings) -> str:
    conditions = {
        "recipient_domain": route.recipient_domain,
        "sender_domain": route.sender_domain,
        "user": route.user,
        "header": route.header,
    }
    given = [f"{name} {' | '.join(values)}" for name, values in conditions.items() if values]
    return f"route {' and '.join(given)} to zone {route.zone}"


def _zone(zone: ZoneSettings) -> str:
    to = f"to {zone.next_hop}" if zone.next_hop else "to each domain's MX"
    limits = f"{zone.max_connections} connections, {zone.max_connections_per_destination} per destination"
    return f"zone {zone.name} {to}, tls {zone.tls}, {limits}"


def _retry(settings: Settings) -> str:
    retry = settings.retry
    if retry.backoff:
        how = f"by {retry.backoff}"
    elif retry.policy is RetryPolicyName.SCHEDULE:
        how = f"after {', '.join(map(format_duration, retry.schedule))}"
    else:
        how = f"by policy {retry.policy}"
    return f"retry {how}, for {format_duration(retry.max_age)}"
