"""Whether a client's address is in one of some networks: for access rules, routes and who may name a zone."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from zonerelay.config.settings import Network


class Networks:
    """Networks in a set for each length of prefix: the cost does not grow with their number."""

    def __init__(self, networks: Iterable[Network]) -> None:
        self._prefixes: dict[tuple[int, int], set[int]] = {}
        for network in networks:
            shift = network.max_prefixlen - network.prefixlen
            found = self._prefixes.setdefault((network.version, shift), set())
            found.add(int(network.network_address) >> shift)

    def match(self, address: str) -> bool:
        """`address` is `""` on a Unix socket, which is in no network."""
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
