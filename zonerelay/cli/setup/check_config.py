"""`zonerelay check-config`: prints every problem (exit status 2), or a summary of the relay (0).

Problems go to standard error, the summary and the notes to standard output. The command checks the file
first. If the file is valid, it also checks the files and the code that the file names (`trial`).
"""

from __future__ import annotations

import socket
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from zonerelay.cli.relay import config_path
from zonerelay.cli.setup.trial import try_out
from zonerelay.cli.terminal.text import plural
from zonerelay.config.checks import advice
from zonerelay.config.endpoints import split_next_hops
from zonerelay.config.load import ConfigError, read
from zonerelay.config.settings import (
    Backend,
    ListenerAuth,
    ListenerProtocol,
    ListenerSettings,
    ListenerTls,
    RetryPolicyName,
    RouteSettings,
    Settings,
    SpoolSettings,
    UnsafeListener,
    ZoneSettings,
    resolve_hostname,
)
from zonerelay.config.units import format_duration, format_size
from zonerelay.store.spool_paths import disk_directories

_TLS = {ListenerTls.NONE: "", ListenerTls.STARTTLS: " with STARTTLS", ListenerTls.IMPLICIT: " with TLS"}

MAX_VALUES = 10  # maximum length of a route's condition in the summary


def check_config(arguments: Namespace) -> int:
    return run(config_path(arguments.config))


def run(path: Path) -> int:
    """Check a configuration without changing anything: no directory is created, no socket is opened, and only
    the machine's own name is resolved.
    """
    try:
        settings, report = read(path)
        hostname = resolve_hostname(settings, socket.getfqdn)
        notes = try_out(settings, hostname, report)
        report.raise_problems()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{path}: ok")
    for line in summary(settings, hostname):
        print(f"  {line}")
    for line in (*advice(settings, hostname), *notes):
        print(f"  note: {line}")
    return 0


def summary(settings: Settings, hostname: str) -> Iterator[str]:
    """Yield the parts of the relay in the order in which mail passes them."""
    yield f"hostname {hostname}"
    yield from (_listener(listener) for listener in settings.listener)
    if any(listener.auth is not ListenerAuth.OFF for listener in settings.listener):
        yield f"users in {settings.auth.credentials}"
    if settings.access:
        yield f"access {plural(len(settings.access), 'rule')}"
    if settings.rewrite:
        yield f"rewrite {plural(len(settings.rewrite), 'rule')}"
    yield f"spool {settings.spool.backend} {_spool_places(settings.spool)}".rstrip()
    if settings.outbox.url:
        yield f"outbox {settings.outbox.schema}.{settings.outbox.table}, zone {settings.outbox.zone}"
    yield from (_route(route) for route in settings.route)
    for source in settings.source:
        name = f" as {source.ehlo_name}" if source.ehlo_name else ""
        yield f"source {source.name} {' and '.join(source.address)}{name}"
    yield from (_zone(zone) for zone in settings.zone)
    if settings.destination:
        yield f"destinations {plural(len(settings.destination), 'table')}"
    if settings.dkim:
        yield f"dkim {plural(len(settings.dkim), 'key')}"
    if settings.srs.domain:
        yield f"srs at {settings.srs.domain}, in {_srs_zones(settings)}"
    yield _retry(settings)
    yield f"bounces {'to the sender' if settings.bounce.enabled else 'off'}"
    yield f"admin {settings.admin.address or 'off'}"


def _listener(listener: ListenerSettings) -> str:
    tls = _TLS[listener.tls]
    if listener.tls is ListenerTls.STARTTLS and listener.require_tls:
        tls += " only"
    if listener.protocol is ListenerProtocol.HTTP:
        tls = " over HTTPS" if tls else " over HTTP"
    policy = f", asks {listener.policy}" if listener.policy else ""
    size = format_size(listener.max_message_size)
    return f"listener {listener.address}{tls} from {', '.join(_who(listener))}, up to {size}{policy}"


def _who(listener: ListenerSettings) -> Iterator[str]:
    """Yield the clients that may relay."""
    if listener.auth is not ListenerAuth.REQUIRED:
        if UnsafeListener.OPEN_RELAY in listener.unsafe:
            yield "every client"
            return
        if listener.address.startswith("unix:"):
            yield "every program that may open it"
        else:
            yield from map(str, listener.allow_networks)
    if listener.auth is not ListenerAuth.OFF:
        yield "users"
    if listener.allow_certificates:
        yield plural(len(listener.allow_certificates), "client certificate")


def _route(route: RouteSettings) -> str:
    given = [f"{name} {_values(name, values)}" for name, values in route.conditions.items()]
    return f"route {' and '.join(given)} to zone {route.zone}"


def _values(name: str, values: Sequence[object]) -> str:
    if name in ("min_size", "max_size"):
        (octets,) = values
        return format_size(int(str(octets)))
    more = f" and {len(values) - MAX_VALUES:,} more" if len(values) > MAX_VALUES else ""
    return " | ".join(map(str, values[:MAX_VALUES])) + more


def _zone(zone: ZoneSettings) -> str:
    to = f"to {_next_hops(zone)}" if zone.next_hop else "to the MX of each domain"
    limits = f"{zone.max_connections} connections, {zone.max_connections_per_destination} per destination"
    sources = f", from {', '.join(zone.sources)}" if zone.sources else ""
    login = f", logs in as {' | '.join(zone.credentials)}" if zone.credentials else ""
    return f"zone {zone.name} {to}{sources}, tls {zone.tls}{login}, {limits}"


def _srs_zones(settings: Settings) -> str:
    named = [zone.name for zone in settings.zone if zone.srs]
    return f"zone {' | '.join(named)}" if named else "no zone"


def _next_hops(zone: ZoneSettings) -> str:
    hops = split_next_hops(zone.next_hop)
    return " and ".join(hops) + " evenly" if zone.next_hop_share and len(hops) > 1 else ", else ".join(hops)


def _retry(settings: Settings) -> str:
    retry = settings.retry
    if retry.backoff:
        how = f"by {retry.backoff}"
    elif retry.policy is RetryPolicyName.SCHEDULE:
        how = f"after {', '.join(map(format_duration, retry.schedule))}"
    else:
        how = f"by policy {retry.policy}"
    return f"retry {how}, for {format_duration(retry.max_age)}"


def _spool_places(spool: SpoolSettings) -> str:
    """Return the directories of the spool, or its one file. A disk queue may use three directories."""
    if spool.backend is Backend.MEMORY:
        return "" if spool.shelve is None else f"in a shelf {spool.shelve}"
    if spool.backend is not Backend.DISK:
        return str(spool.path)
    return " ".join(map(str, dict.fromkeys(disk_directories(spool))))
