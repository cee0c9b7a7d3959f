"""What must hold between settings: closed relay, names that resolve, limits that make sense together.

`check` reports problems and returns the settings with what follows from them filled in. A check is
skipped when one of the values that it compares is already refused: its complaint would mislead.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import replace

from zonerelay.config.endpoints import ListenAddress, parse_listen
from zonerelay.config.models import (
    OPEN_RELAY_WORDS,
    ListenerSettings,
    Network,
    RetryPolicyName,
    RouteSettings,
    Settings,
    ZoneSettings,
)
from zonerelay.config.problems import Report
from zonerelay.config.toml_lines import Path
from zonerelay.config.wording import did_you_mean, in_words, quoted

DEFAULT_ZONE = "default"

# Shorter than these, networks are a good part of the Internet, not somebody's own. Networks that cover
# everything in pieces (0.0.0.0/1 and 128.0.0.0/1) are put together before they are measured.
_OPEN_IPV4_PREFIX = 7
_OPEN_IPV6_PREFIX = 15
_LOCAL_IPV6 = (ipaddress.IPv6Network("fc00::/7"), ipaddress.IPv6Network("fe80::/10"))


def check(settings: Settings, report: Report) -> Settings:
    _check_listeners(settings, report)
    _check_addresses(settings, report)
    if _names_are_sound(settings, report):
        _check_zone_names(settings.zone, report)
        _check_route_zones(settings, report)
    _check_route_conditions(settings.route, report)
    _check_retry(settings, report)
    zones = tuple(_checked_limits(zone, at, report) for at, zone in enumerate(settings.zone))
    return replace(settings, zone=zones)


def _check_listeners(settings: Settings, report: Report) -> None:
    if not settings.listener and report.sound("listener"):
        report.refuse(("listener",), "there is none, so nobody could hand in mail: add a [[listener]]")
    for at, listener in enumerate(settings.listener):
        _check_words(listener, ("listener", at, "open_relay"), report)
        _check_relaying(listener, ("listener", at, "allow_networks"), report)


def _check_words(listener: ListenerSettings, path: Path, report: Report) -> None:
    if listener.open_relay not in ("", OPEN_RELAY_WORDS):
        report.refuse(path, f'if anybody may relay, say exactly "{OPEN_RELAY_WORDS}"')


def _check_relaying(listener: ListenerSettings, path: Path, report: Report) -> None:
    wide = _open_to_all(listener.allow_networks)
    if wide and listener.open_relay != OPEN_RELAY_WORDS:
        report.refuse(
            path,
            f"{in_words(map(str, wide))} would make this an open relay, which spammers find within hours: "
            f'name your own networks, or say open_relay = "{OPEN_RELAY_WORDS}"',
        )
    # Who can reach a Unix socket is decided by its directory, not by an address.
    if not listener.allow_networks and report.sound(*path) and not listener.address.startswith("unix:"):
        report.refuse(path, 'is empty, so nobody could relay: name a network, such as "127.0.0.0/8"')


def _open_to_all(networks: Iterable[Network]) -> list[Network]:
    """The networks, put together where they touch, that are too wide to be anybody's own."""
    ipv4: list[ipaddress.IPv4Network] = []
    ipv6: list[ipaddress.IPv6Network] = []
    for network in networks:
        if isinstance(network, ipaddress.IPv4Network):
            ipv4.append(network)
        else:
            ipv6.append(network)
    wide4 = [net for net in ipaddress.collapse_addresses(ipv4) if net.prefixlen <= _OPEN_IPV4_PREFIX]
    wide6 = [
        net
        for net in ipaddress.collapse_addresses(ipv6)
        if net.prefixlen <= _OPEN_IPV6_PREFIX and not any(net.subnet_of(local) for local in _LOCAL_IPV6)
    ]
    return [*wide4, *wide6]


def _check_addresses(settings: Settings, report: Report) -> None:
    """No two listeners, nor a listener and the admin port, may want the same address."""
    taken: list[tuple[Path, ListenAddress]] = []
    wanted: list[tuple[Path, str]] = [(("admin", "address"), settings.admin.address)]
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
        conditions = (route.recipient_domain, route.sender_domain, route.user, route.header)
        if not any(conditions) and report.sound("route", at):
            report.refuse(
                ("route", at),
                "has no condition, so no later route would ever be asked: give it one (recipient_domain, "
                f'sender_domain, …); the zone "{DEFAULT_ZONE}" takes what no route matches',
            )


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


def _checked_limits(zone: ZoneSettings, at: int, report: Report) -> ZoneSettings:
    """A destination's share is part of its zone's connections; the default share gives way silently."""
    if zone.max_connections_per_destination <= zone.max_connections:
        return zone
    key = ("zone", at, "max_connections_per_destination")
    if report.given(*key) and report.sound(*key) and report.sound("zone", at, "max_connections"):
        report.refuse(
            key,
            f"{zone.max_connections_per_destination} is more than max_connections = {zone.max_connections}, "
            "the limit of the whole zone",
        )
    return replace(zone, max_connections_per_destination=zone.max_connections)
