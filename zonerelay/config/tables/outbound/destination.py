"""[[destination]]: limits and TLS of a zone for some of its destinations."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from zonerelay.config.options import forms
from zonerelay.config.options.options import choice, count, rate, texts
from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.tables.entries import check_known, unreachable
from zonerelay.config.tables.outbound.zone import DANE_NEEDS_TRUST, ZoneSettings, is_faster
from zonerelay.config.units import Rate
from zonerelay.config.wording import in_words


class DestinationTls(enum.StrEnum):
    """The modes of `TlsMode`, and one that leaves the mode to the zone."""

    ZONE = "zone"
    NONE = "none"
    OPPORTUNISTIC = "opportunistic"
    REQUIRED = "required"
    VERIFY = "verify"
    DANE = "dane"


@dataclass(frozen=True, slots=True, kw_only=True)
class DestinationSettings:
    """[[destination]]: other limits or TLS for some destinations; the first one that matches counts."""

    domain: tuple[str, ...] = texts((), form=forms.domain)
    """Mail for these recipient domains: "example.com", "*.example.com" (every name below it)."""
    mx: tuple[str, ...] = texts((), form=forms.domain)
    """Mail that goes to these MX hosts, or this next hop: written like domains, and all hosts have to match:
    "*.mail.protection.outlook.com" is every domain hosted there.
    """
    zone: tuple[str, ...] = texts(())
    """Only mail of these zones. Empty: of any."""
    tls: DestinationTls = choice(DestinationTls.ZONE)
    """zone: what the zone says; otherwise as tls of [[zone]]."""
    tls_names: tuple[str, ...] = texts((), form=forms.domain)
    """Names to accept in the certificate with tls = verify, instead of the host's: "example.com",
    "*.example.com".
    """
    tls_certificates: tuple[str, ...] = texts((), form=forms.fingerprint)
    """With tls = verify: accept just these certificates, whichever authority signed them: SHA-256
    fingerprints.
    """
    max_connections: int = count(0, optional=True, most=10_000)
    """Connections to such a destination, instead of max_connections_per_destination. 0: as the zone."""
    max_recipients_per_transaction: int = count(0, optional=True, most=10_000)
    """Recipients of one transaction. 0: as the zone."""
    max_messages_per_connection: int = count(0, optional=True)
    """Messages on one connection. 0: as the zone."""
    max_rate: Rate | None = rate()
    """Transactions to such a destination in a time, instead of max_rate_per_destination: "100/1m". Empty: as
    the zone.
    """


_WEAK = {DestinationTls.NONE, DestinationTls.OPPORTUNISTIC}


def check_destinations(
    destinations: Sequence[DestinationSettings],
    zones: Sequence[ZoneSettings],
    report: Report,
    *,
    trusts_dns: bool,
) -> None:
    """`trusts_dns`: [dns] says that answers are validated, which DANE needs."""
    with_credentials = {zone.name for zone in zones if zone.credentials}
    for at, entry in enumerate(destinations):
        path: KeyPath = ("destination", at)
        if report.sound(*path):
            _check_names(entry, path, report)
            _check_connections(entry, zones, path, report)
        if report.sound(*path, "tls"):
            _check_tls(entry, with_credentials, (*path, "tls"), report, trusts_dns=trusts_dns)


def check_destination_zones(
    destinations: Sequence[DestinationSettings], zones: Sequence[ZoneSettings], report: Report
) -> None:
    """Needs zones whose names are sound."""
    names = [zone.name for zone in zones]
    for at, entry in enumerate(destinations):
        for index, name in enumerate(entry.zone):
            path = ("destination", at, "zone", index)
            if report.sound(*path):
                check_known(name, names, "no zone is named", path, report)


def _check_names(entry: DestinationSettings, path: KeyPath, report: Report) -> None:
    for key, given in (("tls_names", entry.tls_names), ("tls_certificates", entry.tls_certificates)):
        if given and entry.tls is not DestinationTls.VERIFY:
            report.refuse((*path, key), 'goes with tls = "verify" alone: write that, or leave this out')
    if entry.tls_names and entry.tls_certificates:
        text = "these certificates are accepted whatever their names are: leave tls_names out"
        report.refuse((*path, "tls_certificates"), text)


def _check_tls(
    entry: DestinationSettings,
    with_credentials: Collection[str],
    path: KeyPath,
    report: Report,
    *,
    trusts_dns: bool,
) -> None:
    """An entry that names a zone with credentials must not lower its TLS."""
    named = [name for name in entry.zone if name in with_credentials]
    if entry.tls in _WEAK and named:
        report.refuse(path, f"{entry.tls}: zone {named[0]} logs in, which is never done without TLS")
    if entry.tls is DestinationTls.DANE and not trusts_dns:
        report.refuse(path, DANE_NEEDS_TRUST)


def _check_connections(
    entry: DestinationSettings, zones: Sequence[ZoneSettings], path: KeyPath, report: Report
) -> None:
    limits = [zone.max_connections for zone in _zones_of(entry, zones)]
    if entry.max_connections and limits and entry.max_connections > max(limits):
        report.refuse(
            (*path, "max_connections"),
            f"{entry.max_connections} is more than max_connections = {max(limits)}, the limit of the whole "
            "zone",
        )


def destination_advice(
    destinations: Sequence[DestinationSettings], zones: Sequence[ZoneSettings]
) -> Iterator[str]:
    everything = DestinationSettings()
    for at, other in unreachable(destinations, _covers, lambda entry: _covers(entry, everything)):
        yield f"destination[{at}]: never matches: destination[{other}] takes all its mail"
    for at, entry in enumerate(destinations):
        own = _zones_of(entry, zones)
        if entry.domain and own and all(zone.next_hop for zone in own):
            yield (
                f"destination[{at}].domain: never matches: {_of(own)} to a next hop, whatever its domain; "
                "mx is compared with that"
            )
        if own and all(is_faster(entry.max_rate, zone.max_rate) for zone in own):
            whose = f"zone {own[0].name}" if len(own) == 1 else "all its zones"
            yield f"destination[{at}].max_rate: never reached: max_rate of {whose} is slower"


def _zones_of(entry: DestinationSettings, zones: Sequence[ZoneSettings]) -> list[ZoneSettings]:
    """The zones whose mail the entry can meet."""
    return [zone for zone in zones if not entry.zone or zone.name in entry.zone]


def _of(zones: Sequence[ZoneSettings]) -> str:
    if len(zones) == 1:
        return f"mail of zone {zones[0].name} goes"
    return f"mail of zones {in_words(zone.name for zone in zones)} goes"


def _covers(one: DestinationSettings, other: DestinationSettings) -> bool:
    """Whether all mail that matches the other matches the one too. False where that is hard to say."""
    pairs = ((one.domain, other.domain), (one.mx, other.mx), (one.zone, other.zone))
    return all(not mine or (its and set(its) <= set(mine)) for mine, its in pairs)
