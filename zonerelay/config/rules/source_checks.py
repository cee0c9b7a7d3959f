"""What must hold of [[source]], and of the zones that name them; and what may surprise there.

Whether this machine has the addresses is no matter of the file: it is noted by `check-config` and at the
start (`delivery/source_ways.py`), because an address may come up later than the relay.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.options.wording import did_you_mean, in_words, quoted
from zonerelay.config.settings import Settings, SourceSettings, ZoneSettings

_FAMILIES = {4: "IPv4", 6: "IPv6"}


def check_sources(settings: Settings, report: Report) -> None:
    _check_names(settings.source, report)
    _check_addresses(settings.source, report)
    names = range(len(settings.source))
    if all(report.sound("source", at, "name") for at in names) and ("source",) not in report.wrong:
        for at, zone in enumerate(settings.zone):
            if report.sound("zone", at, "sources"):
                _check_zone(zone, at, settings.source, report)


def source_advice(settings: Settings) -> Iterator[str]:
    used = {name for zone in settings.zone for name in zone.sources}
    for at, source in enumerate(settings.source):
        if source.name not in used:
            yield f"source[{at}]: no zone sends from {source.name}"


def _check_names(sources: tuple[SourceSettings, ...], report: Report) -> None:
    first: dict[str, int] = {}
    for at, source in enumerate(sources):
        if not report.sound("source", at, "name"):
            continue
        if not source.name:
            report.refuse(("source", at, "name"), "is missing: zones name the sources that they send from")
            continue
        there = first.setdefault(source.name, at)
        if there != at:
            text = f"{quoted(source.name)} is the name of source[{there}] already"
            report.refuse(("source", at, "name"), text)


def _check_addresses(sources: tuple[SourceSettings, ...], report: Report) -> None:
    taken: dict[str, int] = {}
    for at, source in enumerate(sources):
        path: KeyPath = ("source", at, "address")
        if not report.sound(*path):
            continue
        if not source.address:
            report.refuse(path, 'is missing: give the address to send from, as in ["192.0.2.7"]')
        for index, text in enumerate(source.address):
            problem = _problem_of(text) or _problem_beside(text, source.address[:index])
            there = taken.setdefault(text, at)
            if not problem and there != at:
                problem = f"{text} is an address of source[{there}] already: its mail would have two names"
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


def _check_zone(zone: ZoneSettings, at: int, sources: tuple[SourceSettings, ...], report: Report) -> None:
    known = {source.name: source for source in sources}
    path: KeyPath = ("zone", at, "sources")
    named = []
    for index, name in enumerate(zone.sources):
        if name not in known:
            near = did_you_mean(name, known) or (f"; there is {in_words(known)}" if known else "")
            report.refuse((*path, index), f"no [[source]] is named {quoted(name)}{near}")
        elif name in zone.sources[:index]:
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
