"""TLS on the way out: what must hold between a zone's level, its next hop and [dns]."""

from __future__ import annotations

from zonerelay.config.options.endpoints import NextHopKind, parse_next_hop, split_next_hops
from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.settings import DestinationTls, Settings, TlsMode, ZoneSettings

_UNTRUSTED = (
    "dane needs to know what DNSSEC vouches for: set trust_ad = true in [dns], with a validating resolver on "
    "this machine"
)


def check_tls(settings: Settings, report: Report) -> None:
    trusts = settings.dns.trust_ad or not report.sound("dns", "trust_ad")
    for at, zone in enumerate(settings.zone):
        if zone.tls is TlsMode.DANE and report.sound("zone", at, "tls"):
            _check_dane(zone, ("zone", at), trusts, report)
        if zone.tls_on_connect and zone.tls is TlsMode.NONE and report.sound("zone", at, "tls"):
            text = "is TLS from the first octet, and tls = none is none at all: leave one of the two out"
            report.refuse(("zone", at, "tls_on_connect"), text)
    for at, destination in enumerate(settings.destination):
        if destination.tls is DestinationTls.DANE and not trusts and report.sound("destination", at, "tls"):
            report.refuse(("destination", at, "tls"), _UNTRUSTED)


def _check_dane(zone: ZoneSettings, path: KeyPath, trusts: bool, report: Report) -> None:
    if not trusts:
        report.refuse((*path, "tls"), _UNTRUSTED)
    if not zone.dane and report.sound(*path, "dane"):
        report.refuse((*path, "dane"), "tls = dane asks for it: leave one of the two out")
    if not report.sound(*path, "next_hop"):
        return
    for text in split_next_hops(zone.next_hop):
        if parse_next_hop(text).kind is NextHopKind.ADDRESS:
            report.refuse((*path, "next_hop"), f"{text} is an address, and TLSA records belong to names")
