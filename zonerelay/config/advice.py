"""What a valid configuration implies that its operator may not expect; nothing here refuses anything.

Shown by `zonerelay check-config` and logged at start. One sentence each, `path.to.key: …`, as problems are.
"""

from __future__ import annotations

import contextlib

from zonerelay.config.credentials.secrets import is_public
from zonerelay.config.hostname import is_fully_qualified
from zonerelay.config.options.endpoints import parse_listen
from zonerelay.config.rules.credential_checks import credential_advice
from zonerelay.config.rules.destination_checks import destination_advice
from zonerelay.config.rules.dkim_checks import dkim_advice
from zonerelay.config.rules.limit_checks import limit_advice
from zonerelay.config.rules.listener_advice import listener_advice
from zonerelay.config.rules.outbox_checks import outbox_advice
from zonerelay.config.rules.postgres_checks import postgres_advice
from zonerelay.config.rules.redis_checks import redis_advice
from zonerelay.config.rules.rewrite_checks import rewrite_advice
from zonerelay.config.rules.route_advice import route_advice
from zonerelay.config.rules.s3_checks import s3_advice
from zonerelay.config.rules.source_checks import source_advice
from zonerelay.config.rules.spool_checks import raised_guard
from zonerelay.config.rules.tls_advice import tls_advice
from zonerelay.config.settings import Backend, Settings, TlsMode


def advice(settings: Settings, hostname: str) -> tuple[str, ...]:
    """`hostname` is what `resolve_hostname` made of the settings."""
    return (
        *_hostname(hostname),
        *_spool(settings),
        *redis_advice(settings),
        *postgres_advice(settings),
        *s3_advice(settings),
        *outbox_advice(settings),
        *listener_advice(settings),
        *_zones(settings),
        *route_advice(settings),
        *rewrite_advice(settings),
        *source_advice(settings),
        *credential_advice(settings),
        *tls_advice(settings),
        *destination_advice(settings),
        *dkim_advice(settings, hostname),
        *limit_advice(settings),
        *_admin(settings),
    )


def _hostname(hostname: str) -> list[str]:
    if is_fully_qualified(hostname):
        return []
    return [f'hostname: this relay calls itself "{hostname}", which many servers refuse: set its full name']


def _spool(settings: Settings) -> list[str]:
    found = []
    path = settings.spool.path
    with contextlib.suppress(OSError):  # it is not there yet, and is made private
        if is_public(path):
            found.append(
                f"spool.path: every user of this machine can look into {path}: no file in it is readable for "
                "them, but chmod o-rwx it"
            )
    if settings.spool.backend is Backend.MEMORY:
        if settings.spool.shelve is None:
            found.append("spool.backend: memory: every queued message is lost when the relay stops")
        else:
            found.append(
                "spool.shelve: a shelf is not durable: a crash loses the queued messages written last, and "
                "can damage all of them"
            )
    if settings.spool.min_free_space == 0:
        found.append("spool.min_free_space: 0: nothing is refused before the disk is full")
    if raised := raised_guard(settings.spool):
        found.append(f"spool.min_free_space: {raised}")
    return found


def _zones(settings: Settings) -> list[str]:
    return [
        f"zone[{at}].tls: none: mail of zone {zone.name} is sent in clear text even where TLS is offered"
        for at, zone in enumerate(settings.zone)
        if zone.tls is TlsMode.NONE and not zone.next_hop
    ]


def _admin(settings: Settings) -> list[str]:
    if not settings.admin.address or parse_listen(settings.admin.address).is_loopback:
        return []
    return [
        f"admin.address: metrics and health at {settings.admin.address} can be read from other machines "
        "(nothing can be changed there)"
    ]
