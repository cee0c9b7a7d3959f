"""[[source]]: the addresses that zones send from.

Whether this machine has the addresses is no matter of the file: `check-config` and the start note what is
missing, because an address may come up later than the relay.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zonerelay.config.options import forms
from zonerelay.config.options.options import count, text, texts
from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.tables.entries import check_known, check_names
from zonerelay.config.tables.outbound.zone import ZoneSettings
from zonerelay.config.wording import quoted

_FAMILIES = {4: "IPv4", 6: "IPv6"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """[[source]]: one of this machine's identities; zones name those that they send from."""

    name: str = text("", form=forms.source_name)
    """What zones, logs and metrics call this source."""
    address: tuple[str, ...] = texts((), form=forms.ip_address)
    """The addresses of this machine to send from: one of IPv4, one of IPv6, or both. With one only, hosts are
    reached over that family alone.
    """
    ehlo_name: str = text("", form=forms.ehlo_name)
    """The name to say in EHLO from these addresses; they should resolve back to it. Empty: the zone's."""
    weight: int = count(1, least=0, most=1000, optional=True)
    """Its share of the mail, compared with the other sources of a zone. 0: none, while it is kept in the
    configuration.
    """


def check_sources(sources: Sequence[SourceSettings], zones: Sequence[ZoneSettings], report: Report) -> None:
    missing = "is missing: zones name the sources that they send from"
    check_names("source", [source.name for source in sources], missing, report)
    _check_addresses(sources, report)
    names = range(len(sources))
    if all(report.sound("source", at, "name") for at in names) and ("source",) not in report.wrong:
        for at, zone in enumerate(zones):
            if report.sound("zone", at, "sources"):
                _check_zone(zone, at, sources, report)


def source_advice(sources: Sequence[SourceSettings], zones: Sequence[ZoneSettings]) -> Iterator[str]:
    used = {name for zone in zones for name in zone.sources}
    for at, source in enumerate(sources):
        if source.name not in used:
            yield f"source[{at}]: no zone sends from {source.name}"


def _check_addresses(sources: Sequence[SourceSettings], report: Report) -> None:
    taken: dict[str, int] = {}
    for at, source in enumerate(sources):
        path: KeyPath = ("source", at, "address")
        if not report.sound(*path):
            continue
        if not source.address:
            report.refuse(path, 'is missing: give the address to send from, as in ["192.0.2.7"]')
        for index, address in enumerate(source.address):
            problem = _problem_of(address) or _problem_beside(address, source.address[:index])
            there = taken.setdefault(address, at)
            if not problem and there != at:
                problem = f"{address} is an address of source[{there}] already: its mail would have two names"
            if problem:
                report.refuse((*path, index), problem)


def _problem_of(text: str) -> str:
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return f'{quoted(text)} is IPv4: write "{address.ipv4_mapped}"'
        if address.scope_id is not None or address.is_link_local:
            return f"{quoted(text)} leads no further than its own link"
    return ""


def _problem_beside(text: str, before: tuple[str, ...]) -> str:
    family = ipaddress.ip_address(text).version
    if all(ipaddress.ip_address(other).version != family for other in before):
        return ""
    return f"a source has one {_FAMILIES[family]} address: make another [[source]] of {text}"


def _check_zone(zone: ZoneSettings, at: int, sources: Sequence[SourceSettings], report: Report) -> None:
    known = {source.name: source for source in sources}
    path: KeyPath = ("zone", at, "sources")
    named = []
    for index, name in enumerate(zone.sources):
        if not check_known(name, known, "no [[source]] is named", (*path, index), report):
            continue
        if name in zone.sources[:index]:
            report.refuse((*path, index), f"{quoted(name)} is there twice: its share is its weight")
        else:
            named.append(known[name])
    if not report.sound(*path):
        return
    if named and not any(source.weight for source in named):
        report.refuse(path, "each of them has weight = 0, so no mail of this zone could be sent")
    if not zone.ipv6 and report.sound("zone", at, "ipv6"):
        only = next(
            (each.name for each in named if each.address and all(":" in ip for ip in each.address)), ""
        )
        if only:
            report.refuse(
                path, f"{quoted(only)} has IPv6 only, which ipv6 = false keeps this zone from using"
            )
