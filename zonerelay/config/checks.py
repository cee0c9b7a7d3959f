"""What must hold between settings: closed relay, names that resolve, limits that make sense together.

`check` reports problems and returns the settings with what follows from them filled in. A check is
skipped when one of the values that it compares is already refused: its complaint would mislead.
"""

from __future__ import annotations

from dataclasses import replace

from zonerelay.config.options.endpoints import ListenAddress, parse_listen
from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.options.units import format_size
from zonerelay.config.options.wording import did_you_mean, in_words, quoted
from zonerelay.config.rules.credential_checks import check_credentials
from zonerelay.config.rules.destination_checks import check_destination_zones, check_destinations
from zonerelay.config.rules.dkim_checks import check_dkim
from zonerelay.config.rules.limit_checks import check_limits
from zonerelay.config.rules.listener_checks import check_listeners
from zonerelay.config.rules.outbox_checks import check_outbox
from zonerelay.config.rules.postgres_checks import check_postgres
from zonerelay.config.rules.redis_checks import check_redis
from zonerelay.config.rules.rewrite_checks import check_rewrites
from zonerelay.config.rules.s3_checks import check_s3
from zonerelay.config.rules.source_checks import check_sources
from zonerelay.config.rules.spool_checks import check_spool
from zonerelay.config.rules.srs_checks import check_srs
from zonerelay.config.rules.tls_checks import check_tls
from zonerelay.config.settings import (
    AccessAction,
    AccessSettings,
    RetryPolicyName,
    RouteSettings,
    Settings,
    ZoneSettings,
)

DEFAULT_ZONE = "default"


def check(settings: Settings, report: Report) -> Settings:
    check_spool(settings, report)
    check_postgres(settings, report)
    check_outbox(settings, report)
    check_listeners(settings, report)
    _check_access(settings.access, report)
    _check_addresses(settings, report)
    if _names_are_sound(settings, report):
        _check_zone_names(settings.zone, report)
        _check_route_zones(settings, report)
        check_destination_zones(settings, report)
    _check_route_conditions(settings.route, report)
    _check_route_listeners(settings, report)
    _check_retry(settings, report)
    check_sources(settings, report)
    check_credentials(settings, report)
    check_dkim(settings, report)
    check_redis(settings, report)
    check_s3(settings, report)
    check_srs(settings, report)
    check_rewrites(settings, report)
    check_tls(settings, report)
    check_destinations(settings, report)
    return replace(settings, zone=check_limits(settings, report))


def _check_addresses(settings: Settings, report: Report) -> None:
    """No two listeners, nor a listener and the admin port, may want the same address."""
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
        return True  # it takes IPv4 too
    same_family = (":" in one.host) == (":" in other.host)
    return one.host == other.host or (same_family and (one.is_wildcard or other.is_wildcard))


def _names_are_sound(settings: Settings, report: Report) -> bool:
    """False while a zone or a name that could not be read might be the one that is missing."""
    names = range(len(settings.zone))
    return all(report.sound("zone", at, "name") for at in names) and (bool(names) or report.sound("zone"))


def _check_zone_names(zones: tuple[ZoneSettings, ...], report: Report) -> None:
    first: dict[str, int] = {}
    for at, zone in enumerate(zones):
        there = first.setdefault(zone.name, at)
        if there != at and report.given("zone", at, "name"):
            report.refuse(("zone", at, "name"), f"{quoted(zone.name)} is the name of zone[{there}] already")
        elif there != at:
            report.refuse(("zone", at, "name"), f"is missing; {quoted(zone.name)} is zone[{there}] already")
    if DEFAULT_ZONE not in first:
        there_is = f"the zones are {in_words(first)}" if first else "there is none"
        text = f'mail that no route matches goes to the zone "{DEFAULT_ZONE}", but {there_is}: add it'
        report.refuse(("zone",), text)


def _check_route_zones(settings: Settings, report: Report) -> None:
    names = [zone.name for zone in settings.zone]
    for at, route in enumerate(settings.route):
        if route.zone not in names and report.sound("route", at, "zone"):
            near = did_you_mean(route.zone, names)
            report.refuse(("route", at, "zone"), f"no zone is named {quoted(route.zone)}{near}")


def _check_route_conditions(routes: tuple[RouteSettings, ...], report: Report) -> None:
    for at, route in enumerate(routes):
        if not route.conditions and report.sound("route", at):
            report.refuse(
                ("route", at),
                "has no condition, so no later route would ever be asked: give it one (recipient_domain, "
                f'sender_domain, …); the zone "{DEFAULT_ZONE}" takes what no route matches',
            )
        if route.max_size and route.min_size > route.max_size and report.sound("route", at):
            report.refuse(
                ("route", at, "min_size"),
                f"{format_size(route.min_size)} is more than max_size = {format_size(route.max_size)}, so "
                "this route would never match",
            )


def _check_route_listeners(settings: Settings, report: Report) -> None:
    known = [listener.address for listener in settings.listener]
    if not all(report.sound("listener", at, "address") for at in range(len(known))):
        return
    for at, route in enumerate(settings.route):
        if not report.sound("route", at, "listener"):
            continue
        for index, address in enumerate(route.listener):
            if address not in known:
                near = did_you_mean(address, known) or f"; there is {in_words(known)}"
                text = f"no [[listener]] has the address {quoted(address)}{near}"
                report.refuse(("route", at, "listener", index), text)


def _check_access(rules: tuple[AccessSettings, ...], report: Report) -> None:
    for at, rule in enumerate(rules):
        if not any((rule.client, rule.sender, rule.recipient, rule.user)) and report.sound("access", at):
            report.refuse(
                ("access", at),
                "has no condition, so it would match all mail: give it one (client, sender, recipient, user)",
            )
        if rule.reply and report.sound("access", at):
            _check_reply(rule, ("access", at, "reply"), report)


def _check_reply(rule: AccessSettings, path: KeyPath, report: Report) -> None:
    suits = {AccessAction.REFUSE: "5", AccessAction.DEFER: "4"}.get(rule.action)
    if suits is None:
        report.refuse(path, 'is not used with action = "accept": leave one of the two out')
    elif not rule.reply.startswith(suits):
        other = "defer" if suits == "5" else "refuse"
        report.refuse(
            path,
            f'action = "{rule.action}" is answered with a code from {suits}00 to {suits}99: write one, or '
            f'action = "{other}"',
        )
    elif rule.reply.startswith("421"):
        report.refuse(path, "421 says that the connection is closed, which no rule does: write 450 or 451")


def _check_retry(settings: Settings, report: Report) -> None:
    retry = settings.retry
    if report.given("retry", "schedule") and report.sound("retry"):
        if not retry.schedule:
            report.refuse(("retry", "schedule"), 'is empty: give at least one delay, as in ["5m"]')
        elif retry.policy is not RetryPolicyName.SCHEDULE:
            report.refuse(
                ("retry", "schedule"),
                f'is not used with policy = "{retry.policy}": leave one of the two out',
            )
    if retry.backoff and report.given("retry", "policy") and report.sound("retry", "policy"):
        report.refuse(("retry", "backoff"), "takes the place of policy: leave one of the two out")
    if report.sound("retry") and retry.suspend_min > retry.suspend_max:
        report.refuse(("retry", "suspend_min"), "is longer than suspend_max, up to which it doubles")
