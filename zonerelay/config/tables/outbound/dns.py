"""[dns]: the resolvers, how far they are trusted, and how long answers are kept."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from zonerelay.config.endpoints import parse_name_server
from zonerelay.config.options import forms
from zonerelay.config.options.options import HOUR, MINUTE, count, duration, switch, texts


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSettings:
    """[dns]. `servers` empty: the system's resolvers."""

    servers: tuple[str, ...] = texts((), form=forms.name_server)
    """Resolvers to ask instead of those in /etc/resolv.conf, which is read again when it changes:
    "192.0.2.53", "127.0.0.1:5353". One on this machine is best.
    """
    trust_ad: bool = switch(False)
    """Believe these servers that an answer was validated by DNSSEC (the AD bit), which DANE needs. Only for a
    validating resolver on this machine, or over a path that no attacker can tamper with.
    """
    timeout: float = duration(10.0, most=5 * MINUTE)
    """How long one look-up may take over all servers; then its mail is deferred."""
    cache_size: int = count(10_000, least=0)
    """Domains whose hosts are remembered; each takes about a kilobyte of memory."""
    max_ttl: float = duration(1 * HOUR)
    """The longest that an answer is reused, whatever its TTL: moves are noticed within this time."""
    negative_ttl: float = duration(1 * MINUTE)
    """How long a failed look-up is reused, so that a queue for one broken domain asks once."""


def dns_advice(dns: DnsSettings) -> list[str]:
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
