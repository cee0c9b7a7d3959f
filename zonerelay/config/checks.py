"""Checks the configuration file as a whole, and warns about valid settings that may be mistakes.

Each table has its own checks and advice in a module of `tables`. This module calls them in order and adds
those that concern several tables. A check is skipped if one of the values that it compares is already
refused, because its message would be misleading. Advice refuses nothing: `zonerelay check-config` shows it
and the relay logs it at start, one sentence each, in the format of problems: `path.to.key: …`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from zonerelay.config.credentials.secrets import check_secret
from zonerelay.config.endpoints import ListenAddress, parse_listen
from zonerelay.config.options import forms
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import KeyPath, Report, all_sound
from zonerelay.config.settings import REPEATED, TABLES, Backend, Settings, is_fully_qualified
from zonerelay.config.tables import credential, delivery, listener, rewrite, route, store, webhook, zone


def check(settings: Settings, report: Report) -> Settings:
    """Report problems, and return the settings with the values that follow from others."""
    listeners, zones = settings.listener, settings.zone
    trusts_dns = settings.dns.trust_ad or not report.sound("dns", "trust_ad")
    store.check_spool(settings.spool, report)
    store.check_postgres(settings.postgres, report)
    store.check_capture(settings.capture, report)
    store.check_outbox(settings.outbox, zones, report)
    listener.check_listeners(listeners, report, takes_reports=bool(settings.srs.domain))
    route.check_access(settings.access, report)
    _check_addresses(settings, report)
    if _names_are_sound(settings, report):
        zone.check_zone_names(zones, report)
        route.check_route_zones(settings.route, zones, report)
        zone.check_destination_zones(settings.destination, zones, report)
    route.check_routes(settings.route, listeners, report)
    delivery.check_retry(settings.retry, report)
    zone.check_sources(settings.source, zones, report)
    credential.check_credentials(settings.credential, zones, report)
    rewrite.check_dkim(settings.dkim, zones, report)
    store.check_admin(settings.admin, report)
    store.check_redis(settings.redis, report)
    store.check_s3(settings.s3, settings.spool, settings.workers, report)
    rewrite.check_srs(settings.srs, zones, report)
    rewrite.check_rewrites(settings.rewrite, listeners, report)
    webhook.check_webhooks(settings.webhook, report)
    zone.check_destinations(settings.destination, zones, report, trusts_dns=trusts_dns)
    return replace(settings, zone=zone.check_zones(zones, settings.retry, report, trusts_dns=trusts_dns))


def advice(settings: Settings, hostname: str) -> tuple[str, ...]:
    """Return the advice for valid settings. `hostname` is the result of `resolve_hostname`."""
    listeners, zones, spool = settings.listener, settings.zone, settings.spool
    return (
        *_hostname_advice(hostname),
        *store.spool_advice(spool),
        *store.redis_advice(settings.redis, spool),
        *store.postgres_advice(settings.postgres, spool, settings.delivery),
        *store.s3_advice(settings.s3, spool),
        *store.outbox_advice(settings.outbox, settings.delivery),
        *listener.listener_advice(listeners),
        *route.auth_advice(settings.auth, listeners),
        *route.access_advice(settings.access, listeners),
        *zone.zone_advice(zones),
        *route.route_advice(settings.route, listeners),
        *rewrite.rewrite_advice(settings.rewrite, listeners),
        *rewrite.srs_advice(settings.srs, listeners),
        *zone.source_advice(settings.source, zones),
        *credential.credential_advice(settings.credential, zones),
        *delivery.dns_advice(settings.dns),
        *zone.destination_advice(settings.destination, zones),
        *rewrite.dkim_advice(settings.dkim, zones, hostname),
        *delivery.retry_advice(settings.retry),
        *webhook.webhook_advice(settings.webhook),
        *store.admin_advice(settings.admin),
    )


def try_secrets(settings: Settings, environment: Mapping[str, str], report: Report) -> Iterator[str]:
    """Read the secrets that are needed at start. Yield notes; problems are added to the report."""
    if settings.spool.backend is Backend.POSTGRES:
        check_secret(settings.postgres.password, ("postgres", "password"), environment, report)
    if settings.spool.backend is Backend.S3:
        check_secret(settings.s3.secret_key, ("s3", "secret_key"), environment, report)
    if settings.outbox.url:
        check_secret(settings.outbox.password, ("outbox", "password"), environment, report)
    rewrite.try_srs(settings.srs, environment, report)
    webhook.try_webhooks(settings.webhook, environment, report)
    yield from credential.try_credentials(settings.credential, environment, report)


def secrets_of(settings: Settings) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path of each option for a secret in tables with single brackets, and its reference."""
    for name in (each for each in TABLES if each not in REPEATED):
        for key, option in options_of(TABLES[name]).items():
            value = getattr(getattr(settings, name), key)
            if option.form is not forms.secret or not value:
                continue
            if option.several:
                yield from (((name, key, at), place) for at, place in enumerate(value))
            else:
                yield (name, key), value


def _hostname_advice(hostname: str) -> list[str]:
    if is_fully_qualified(hostname):
        return []
    return [
        f'hostname: the host name "{hostname}" is rejected by many servers; set it to the full name of '
        "this machine"
    ]


def _check_addresses(settings: Settings, report: Report) -> None:
    """Report listeners that have the address of another listener or of the admin port."""
    taken: list[tuple[KeyPath, ListenAddress]] = []
    wanted: list[tuple[KeyPath, str]] = [(("admin", "address"), settings.admin.address)]
    wanted += [(("listener", at, "address"), entry.address) for at, entry in enumerate(settings.listener)]
    for path, text in wanted:
        if not text or not report.sound(*path):
            continue
        address = parse_listen(text)
        other = next((place for place, there in taken if _collide(address, there)), None)
        if other is not None:
            where = "the admin address" if other[0] == "admin" else f"listener[{other[1]}]"
            report.refuse(path, f"{text} is already taken by {where}")
        taken.append((path, address))


def _collide(one: ListenAddress, other: ListenAddress) -> bool:
    if one.is_unix or other.is_unix:
        return one == other
    if one.port != other.port or one.port == 0:
        return False
    if "::" in (one.host, other.host):
        return True  # it includes IPv4
    same_family = (":" in one.host) == (":" in other.host)
    return one.host == other.host or (same_family and (one.is_wildcard or other.is_wildcard))


def _names_are_sound(settings: Settings, report: Report) -> bool:
    """Return whether all zone names are known. A zone that could not be read might have the missing name."""
    number = len(settings.zone)
    return all_sound("zone", "name", number, report) and (number > 0 or report.sound("zone"))
