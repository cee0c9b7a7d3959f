"""What an operator should know about TLS on the way out as it is configured; nothing is refused here."""

from __future__ import annotations

import ipaddress

from zonerelay.config.options.endpoints import parse_name_server
from zonerelay.config.settings import DnsSettings, Settings, TlsMode


def tls_advice(settings: Settings) -> list[str]:
    return [*_trust(settings.dns), *_mandatory_dane(settings), *_first_octet(settings)]


def _trust(dns: DnsSettings) -> list[str]:
    if not dns.trust_ad:
        return []
    if not dns.servers:
        return [
            "dns.trust_ad: goes by the system's resolvers, whichever they are: name a validating one on this "
            "machine in dns.servers"
        ]
    remote = [each for each in dns.servers if not _is_loopback(each)]
    return [
        f"dns.trust_ad: {each} is not on this machine: who can change packets on the way can forge what it "
        "vouches for"
        for each in remote
    ]


def _is_loopback(server: str) -> bool:
    return ipaddress.ip_address(parse_name_server(server).address).is_loopback


def _mandatory_dane(settings: Settings) -> list[str]:
    return [
        f"zone[{at}].tls: dane: mail of zone {zone.name} for domains without DNSSEC and TLSA records is not "
        "delivered; it comes back when it is too old"
        for at, zone in enumerate(settings.zone)
        if zone.tls is TlsMode.DANE and not zone.next_hop
    ]


def _first_octet(settings: Settings) -> list[str]:
    return [
        f"zone[{at}].tls_on_connect: MX hosts do not speak TLS from the first octet: it is for a next_hop"
        for at, zone in enumerate(settings.zone)
        if zone.tls_on_connect and not zone.next_hop
    ]
