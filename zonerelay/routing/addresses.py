"""Classifies IP addresses (private ones and the relay's own), and converts domain names to ASCII.

`is_private` keeps a forged MX record from making the relay connect to loopback, the local network or a
cloud's metadata service (169.254.169.254). It checks the address of the connection, not a name, because a
name may resolve differently the next time. The table contains the IANA special-purpose registries (RFC 6890),
so that it does not change with the Python version. Of IPv6, only global unicast addresses are public; one
that embeds an IPv4 address is judged by that.

Domain names become A-labels: lower case, without a final dot. Only this module uses the idna library (IDNA
2008 with UTS #46 mapping). Plain ASCII names bypass the library, because it rejects characters of real names
(underscores).
"""

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache

import idna

from zonerelay.config.endpoints import ListenAddress
from zonerelay.config.settings import Network

MAX_NAME = 253  # RFC 1035 2.3.4, as text without the final dot

_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)


@lru_cache(8192)
def ascii_domain(domain: str) -> str:
    """Convert a domain name to ASCII: `Bücher.Example.` becomes `xn--bcher-kva.example`. Raise ValueError if
    it is not valid.
    """
    name = domain.lower().removesuffix(".")
    if not name.isascii():
        name = _encode(name)
    if not name or len(name) > MAX_NAME:
        raise ValueError(f"a domain name must have 1 to {MAX_NAME} characters")
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise ValueError("not a domain name")
    return name


def _encode(name: str) -> str:
    try:
        return idna.encode(name, uts46=True, std3_rules=True).decode("ascii").removesuffix(".")
    except idna.IDNAError as error:
        raise ValueError("not a valid internationalized domain name") from error


def organization(name: str) -> str:
    """Return the registrable domain of a name (an estimate): its last two labels, or three as in
    example.co.uk. Its owner can create any number of names below it.
    """
    labels = name.rsplit(".", 3)
    is_two_parts = len(labels) > 2 and len(labels[-1]) == 2 and len(labels[-2]) <= 3
    return ".".join(labels[-3:] if is_two_parts else labels[-2:])


def is_literal(domain: str) -> bool:
    """Return whether a domain begins like an address literal, with a bracket."""
    return domain.startswith("[")


# Matches a client's address against networks, for access rules, routes and the zone header.


class Networks:
    """A lookup table of numbered IP networks, which finds those that contain an address."""

    def __init__(self, networks: Iterable[Network] = ()) -> None:
        self._numbers: dict[tuple[int, int], dict[int, list[int]]] = {}
        for number, network in enumerate(networks):
            self.add(network, number)

    def add(self, network: Network, number: int) -> None:
        shift = network.max_prefixlen - network.prefixlen
        found = self._numbers.setdefault((network.version, shift), {})
        found.setdefault(int(network.network_address) >> shift, []).append(number)

    def find(self, address: str) -> list[int]:
        """Return the numbers of the networks that contain the address, which is `""` on a Unix socket."""
        version, asked = address_number(address)
        return [
            number
            for (of, shift), numbers in self._numbers.items()
            if of == version
            for number in numbers.get(asked >> shift, ())
        ]

    def match(self, address: str) -> bool:
        """Return whether any network contains the address."""
        return bool(self.find(address))


_MADE = 16
_made: dict[int, tuple[Sequence[Network], Networks]] = {}


def networks_of(networks: Sequence[Network]) -> Networks:
    """Return a lookup table for the networks that an option of the configuration lists. The result is cached;
    for many networks a reload builds it in a thread.
    """
    known = _made.get(id(networks))
    if known is None or known[0] is not networks:
        if len(_made) >= _MADE:
            _made.pop(next(iter(_made)), None)
        known = _made[id(networks)] = networks, Networks(networks)
    return known[1]


@lru_cache(1024)
def address_number(address: str) -> tuple[int, int]:
    """Return the IP version and the address as an integer, or (0, 0) if the string is not an IP address."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket
        return 0, 0
    return ip.version, int(ip)


IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_IPV4 = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # "this network"; connecting to 0.0.0.0 reaches the local host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT (RFC 6598), also used by overlay networks
        "127.0.0.0/8",
        "169.254.0.0/16",  # link local: cloud metadata lives here
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4, deprecated
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_GLOBAL = ipaddress.IPv6Network("2000::/3")
"""The rest of IPv6 is not assigned for the Internet, or embeds an IPv4 address in some form."""
_IPV6 = tuple(
    ipaddress.IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",
        "3fff::/20",
    )
)

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@lru_cache(4096)
def is_private(ip: str) -> bool:
    """Return whether the address is private, so that Internet mail must not be sent there. A text that is not
    an IP address counts as private.
    """
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return True
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded(address)
        if embedded is None:
            return address not in _GLOBAL or any(address in network for network in _IPV6)
        address = embedded
    return any(address in network for network in _IPV4)


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that is embedded in an IPv4-mapped, 6to4 or NAT64 address, or None. Other forms
    (compatible, `::ffff:0:a.b.c.d` of RFC 2765, Teredo, a local NAT64 prefix) are never public.
    """
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


class OwnAddresses:
    """The addresses and ports of the relay's own listeners, because mail sent there would loop."""

    def __init__(self, listeners: Iterable[ListenAddress] = ()) -> None:
        self._exact: set[tuple[IPAddress, int]] = set()
        self._wildcard_ports: set[int] = set()
        for listener in listeners:
            if listener.is_unix:
                continue
            if listener.is_wildcard:
                self._wildcard_ports.add(listener.port)
            else:
                self._exact.add((ipaddress.ip_address(listener.host), listener.port))

    def has_port(self, port: int) -> bool:
        """Return whether one of our listeners uses this port. If not, names need no look-up."""
        return port in self._wildcard_ports or any(own == port for _, own in self._exact)

    def includes(self, ip: str, port: int) -> bool:
        try:
            address = ipaddress.ip_address(ip)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return (address, port) in self._exact or (
            port in self._wildcard_ports and is_address_of_this_machine(address)
        )


def is_address_of_this_machine(address: IPAddress) -> bool:
    """Return whether a network interface of this machine has the address. The kernel allows binding only to
    such addresses.
    """
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
