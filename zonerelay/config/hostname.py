"""The name that the relay calls itself: the configured one, the machine's, or an address literal."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from zonerelay.config.endpoints import address_literal, is_domain, parse_listen
from zonerelay.config.settings import Settings

_LOCAL = ("localhost", "localdomain", "local")


def resolve_hostname(settings: Settings, getfqdn: Callable[[], str]) -> str:
    """A valid EHLO name (RFC 5321 4.1.1.1), always.

    A machine that has no fully qualified name, as most containers, gets an address literal, which RFC
    5321 4.1.4 provides for exactly this; `advice` tells the operator to set `hostname`.
    """
    if settings.hostname:
        return settings.hostname
    name = getfqdn().rstrip(".").lower()
    return name if is_fully_qualified(name) else _literal(settings)


def is_fully_qualified(name: str) -> bool:
    """A domain of at least two labels that means this machine to others too."""
    return is_domain(name) and "." in name and name.rpartition(".")[2] not in _LOCAL


def _literal(settings: Settings) -> str:
    """The first address of a listener that others can see; loopback when there is none."""
    for listener in settings.listener:
        address = parse_listen(listener.address)
        if not (address.is_loopback or address.is_wildcard):
            return address_literal(ipaddress.ip_address(address.host))
    return "[127.0.0.1]"
