"""[[destination]] tables, and MTA-STS: what must hold, and what an operator should know about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.options.wording import did_you_mean, in_words, quoted
from zonerelay.config.settings import DestinationSettings, DestinationTls, Settings, ZoneSettings

MAX_COMPARED = 300
"""Entries of which each is compared with all before it; of more, only with those that take everything."""


def check_destinations(settings: Settings, report: Report) -> None:
    for at, entry in enumerate(settings.destination):
        path: KeyPath = ("destination", at)
        if report.sound(*path):
            _check_names(entry, path, report)
            _check_connections(entry, settings.zone, path, report)


def check_destination_zones(settings: Settings, report: Report) -> None:
    """Once the zones' names are known to be right."""
    names = [zone.name for zone in settings.zone]
    for at, entry in enumerate(settings.destination):
        for index, name in enumerate(entry.zone):
            path = ("destination", at, "zone", index)
            if name not in names and report.sound(*path):
                near = did_you_mean(name, names) or f"; there is {in_words(names)}"
                report.refuse(path, f"no zone is named {quoted(name)}{near}")


def _check_names(entry: DestinationSettings, path: KeyPath, report: Report) -> None:
    for key, given in (("tls_names", entry.tls_names), ("tls_certificates", entry.tls_certificates)):
        if given and entry.tls is not DestinationTls.VERIFY:
            report.refuse((*path, key), 'goes with tls = "verify" alone: write that, or leave this out')
    if entry.tls_names and entry.tls_certificates:
        text = "these certificates are accepted whatever their names are: leave tls_names out"
        report.refuse((*path, "tls_certificates"), text)


def _check_connections(
    entry: DestinationSettings, zones: Sequence[ZoneSettings], path: KeyPath, report: Report
) -> None:
    limits = [zone.max_connections for zone in _its(entry, zones)]
    if entry.max_connections and limits and entry.max_connections > max(limits):
        report.refuse(
            (*path, "max_connections"),
            f"{entry.max_connections} is more than max_connections = {max(limits)}, the limit of the whole "
            "zone",
        )


def destination_advice(settings: Settings) -> Iterator[str]:
    yield from _unreachable(settings.destination)
    for at, entry in enumerate(settings.destination):
        zones = _its(entry, settings.zone)
        if entry.domain and zones and all(zone.next_hop for zone in zones):
            yield (
                f"destination[{at}].domain: never matches: {_of(zones)} to a next hop, whatever its domain; "
                "mx is compared with that"
            )
    for at, zone in enumerate(settings.zone):
        if zone.mta_sts and zone.next_hop:
            yield f"zone[{at}].mta_sts: has no effect: policies are about MX hosts, not a next_hop"


def _its(entry: DestinationSettings, zones: Sequence[ZoneSettings]) -> list[ZoneSettings]:
    """The zones whose mail the entry can meet."""
    return [zone for zone in zones if not entry.zone or zone.name in entry.zone]


def _of(zones: Sequence[ZoneSettings]) -> str:
    if len(zones) == 1:
        return f"mail of zone {zones[0].name} goes"
    return f"mail of zones {in_words(zone.name for zone in zones)} goes"


def _unreachable(entries: Sequence[DestinationSettings]) -> Iterator[str]:
    earlier: list[tuple[int, DestinationSettings]] = []
    for at, entry in enumerate(entries):
        other = next((place for place, taken in earlier if _covers(taken, entry)), None)
        if other is not None:
            yield f"destination[{at}]: never matches: destination[{other}] takes all its mail"
        elif len(entries) <= MAX_COMPARED or _covers(entry, DestinationSettings()):
            earlier.append((at, entry))


def _covers(one: DestinationSettings, other: DestinationSettings) -> bool:
    """Whether all mail that matches the other matches the one too. False where that is hard to say."""
    pairs = ((one.domain, other.domain), (one.mx, other.mx), (one.zone, other.zone))
    return all(not mine or (its and set(its) <= set(mine)) for mine, its in pairs)
