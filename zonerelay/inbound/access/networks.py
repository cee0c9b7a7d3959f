"""Which client an address is, and what the listener lets that address do.

Closed by default (rule 6): by its address a client relays when it is in the listener's `allow_networks`, when
it came over the listener's Unix socket (file permissions decide who can), or when the configuration says the
exact words that open the listener to every client. Passwords and certificates come on top of that, in the
conversation. A client that a PROXY header or XCLIENT names is judged by its own address alone: the balancer's
never makes its clients trusted.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from zonerelay.config.settings import OPEN_RELAY_WORDS, ListenerSettings

MAX_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Client:
    """A connected client: `address` is `""` on a Unix socket, and where it is unknown.

    `proxies`: it must begin with a PROXY header. `may_xclient`: it may name another client.
    """

    address: str
    port: int
    may_relay: bool
    proxies: bool = False
    may_xclient: bool = False


class AccessPolicy:
    """Decides per client address, and remembers the latest addresses: they come again."""

    def __init__(self, settings: ListenerSettings) -> None:
        self._networks = settings.allow_networks
        self._proxies = settings.proxy_networks
        self._xclient = settings.xclient_networks
        self._open = settings.open_relay == OPEN_RELAY_WORDS
        self._unix = settings.address.startswith("unix:")
        self._known: dict[str, tuple[str, bool, bool, bool]] = {}

    def identify(self, peer: object) -> Client:
        """`peer` is the transport's peername."""
        if self._unix or not isinstance(peer, tuple):
            # A TCP client that is gone already has no peername: that must not make it a local one.
            return Client("", 0, may_relay=self._unix)
        return self.client(str(peer[0]), int(peer[1]))

    def named(self, address: str, port: int, *, by: Client) -> Client:
        """Return the client that a PROXY header or XCLIENT names; without an address it is an unknown one."""
        # A server that says XCLIENT may say it again. Behind a balancer the client itself is talking.
        again = by.may_xclient and not by.proxies
        if not address:
            return Client("", 0, may_relay=self._open, may_xclient=again)
        client = self.client(address, port)
        return replace(client, proxies=False, may_xclient=client.may_xclient or again)

    def client(self, host: str, port: int) -> Client:
        """Return the client at this address."""
        known = self._known.get(host)
        if known is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            known = self._known[host] = self._decide(host)
        address, may_relay, proxies, may_xclient = known
        return Client(address, port, may_relay, proxies, may_xclient)

    def _decide(self, host: str) -> tuple[str, bool, bool, bool]:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address
        # The scope of a link-local address names the interface it came by, not the client.
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            # An IPv4 client on a dual-stack socket is an IPv4 client.
            address = address.ipv4_mapped
        return (
            str(address),
            self._open or any(address in network for network in self._networks),
            any(address in network for network in self._proxies),
            any(address in network for network in self._xclient),
        )
