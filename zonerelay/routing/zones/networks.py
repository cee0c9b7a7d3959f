"""Matches a client's address against networks, for access rules, routes and the zone header."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from zonerelay.config.settings import Network


class Networks:
    """Networks in a set for each prefix length, so that the cost does not grow with their number."""

    def __init__(self, networks: Iterable[Network]) -> None:
        self._prefixes: dict[tuple[int, int], set[int]] = {}
        for network in networks:
            shift = network.max_prefixlen - network.prefixlen
            found = self._prefixes.setdefault((network.version, shift), set())
            found.add(int(network.network_address) >> shift)

    def match(self, address: str) -> bool:
        """True when a network contains the address, which is `""` on a Unix socket."""
        version, number = _number(address)
        return any(
            version == of and number >> shift in prefixes for (of, shift), prefixes in self._prefixes.items()
        )


@lru_cache(1024)
def _number(address: str) -> tuple[int, int]:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket
        return 0, 0
    return ip.version, int(ip)
