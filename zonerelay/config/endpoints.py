"""Parses network endpoints as the configuration writes them: listeners, next hops and name servers.

    listener, admin   "127.0.0.1:2525"   "[::]:25"   "unix:/run/zonerelay/smtp.sock"
    next hop          "host" (its MX)   "[host]:587" (no MX)   "192.0.2.1:25"   "[2001:db8::1]:25"
                      "capture:"
    name server       "192.0.2.53"   "[2001:db8::53]:5353"

Parsers raise ValueError with a text that explains what to write instead. Nothing in this module resolves a
name.
"""

import enum
import ipaddress
import re

import msgspec

from zonerelay.config.problems import quoted, unusable

MAX_NAME = 253  # RFC 1035 2.3.4, as text without the final dot
DNS_PORT = 53

_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", re.ASCII)
_HOST_AND_PORT = re.compile(r"(\[[^\[\]]*\]|[^\[\]:]*)(?::([^:]*))?")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class ListenAddress(msgspec.Struct, frozen=True):
    """The address of a listening socket. A Unix socket has a `path`, an empty `host` and `port` 0."""

    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only programs on this machine can connect."""
        return self.is_unix or ipaddress.ip_address(self.host).is_loopback

    @property
    def is_wildcard(self) -> bool:
        return not self.is_unix and ipaddress.ip_address(self.host).is_unspecified

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.is_unix else join_port(self.host, self.port)


class NextHopKind(enum.StrEnum):
    """How the hosts of a next hop are found: MX lookup of a name, address lookup of a name, or no lookup."""

    MX = "mx"
    HOST = "host"
    ADDRESS = "address"
    CAPTURE = "capture"


CAPTURE = "capture:"
"""The next hop of captured mail, which is stored for inspection instead of being sent."""


class NextHop(msgspec.Struct, frozen=True):
    """A next hop: hosts to which mail is sent instead of the MX hosts of a domain. `port` is `None` if it is
    not given; then the zone's `port` applies.
    """

    kind: NextHopKind
    host: str
    port: int | None = None


class NameServer(msgspec.Struct, frozen=True):
    """The address and port of a name server."""

    address: str
    port: int = DNS_PORT

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return host if self.port == DNS_PORT else f"{host}:{self.port}"


def parse_listen(text: str) -> ListenAddress:
    if text.startswith("unix:"):
        return _unix(text.removeprefix("unix:"))
    host, port = _split(text)
    address = _address(host)
    if port is None:
        raise ValueError(f'{quoted(text)} has no port: write it as "127.0.0.1:2525" or "[::1]:2525"')
    if address is None:
        raise unusable(host, "an IP address", '"127.0.0.1:2525", "[::]:25" or "unix:/run/smtp.sock"')
    return ListenAddress(host=str(address), port=_port(port, least=0))


def parse_next_hop(text: str) -> NextHop:
    if text == CAPTURE:
        return NextHop(NextHopKind.CAPTURE, text.rstrip(":"))
    host, port = _split(text)
    number = None if port is None else _port(port, least=1)
    address = _address(host)
    if address is not None:
        return NextHop(NextHopKind.ADDRESS, str(address), number)
    kind = NextHopKind.HOST if host.startswith("[") else NextHopKind.MX
    name = host.strip("[]").lower()
    if not is_domain(name.replace("_", "-x")):  # container names have underscores, and resolve
        raise unusable(text, "a next hop", '"host" (its MX), "[host]:587" (that host) or "192.0.2.1:25"')
    return NextHop(kind, name, number)


def split_next_hops(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of next hops, the preferred one first."""
    return tuple(hop.strip() for hop in text.split(",")) if text else ()


def parse_name_server(text: str) -> NameServer:
    host, port = _split(text)
    address = _address(host)
    if address is None:
        raise unusable(text, "a name server", 'its address, such as "192.0.2.53" or "[::1]:5353"')
    return NameServer(str(address), DNS_PORT if port is None else _port(port, least=1))


def is_domain(text: str) -> bool:
    """Return whether the text is a host name (RFC 1123). Internationalized names must be A-labels (xn--…)."""
    labels = text.split(".")
    # A numeric last label is a mistyped IPv4 address (RFC 1123 2.1).
    return (
        len(text) <= MAX_NAME
        and not labels[-1].isdigit()
        and all(_LABEL.fullmatch(label) for label in labels)
    )


def is_ehlo_name(text: str) -> bool:
    """Return whether the text may follow EHLO (RFC 5321 4.1.1.1): a domain, or an address literal in
    brackets.
    """
    if not text.startswith("["):
        return is_domain(text)
    address = _address(text[1:-1].removeprefix("IPv6:"))
    return address is not None and address_literal(address).lower() == text.lower()


def address_literal(address: IPAddress) -> str:
    """Format an IP address as an address literal, such as `[192.0.2.1]` (RFC 5321 4.1.3)."""
    return f"[{address}]" if address.version == 4 else f"[IPv6:{address}]"


def is_address(text: str) -> bool:
    return _address(text) is not None


def join_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _unix(path: str) -> ListenAddress:
    # sockaddr_un has 108 bytes including the final NUL. An error here is clearer than one from bind().
    if not path.startswith("/") or len(path.encode()) > 107 or "\0" in path:
        raise unusable(f"unix:{path}", "a Unix socket", "an absolute path of at most 107 bytes")
    return ListenAddress(path=path)


def _split(text: str) -> tuple[str, str | None]:
    """Split a text into the host (with brackets if it has any) and the port. A bare IPv6 address is a host
    without a port.
    """
    if _address(text) is not None:
        return text, None
    if "://" in text or ":" in text.rpartition("@")[0]:
        raise unusable(text, "an address and port", "no scheme and no login (use [[credential]])")
    match = _HOST_AND_PORT.fullmatch(text)
    if match is None:
        raise unusable(text, "an address and port", 'an IPv6 address in brackets, such as "[::1]:25"')
    if not match[1].strip("[]"):
        raise ValueError(f'{quoted(text)} has no host; use "[::]:25" for all addresses of this machine')
    return match[1], match[2]


def _address(host: str) -> IPAddress | None:
    try:
        address = ipaddress.ip_address(host[1:-1] if host.startswith("[") else host)
    except ValueError:
        return None
    # The standard library accepts anything after "%", even ":25".
    scope = getattr(address, "scope_id", None)
    return address if scope is None or scope.isalnum() else None


def _port(text: str, *, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and least <= int(text) <= 65_535):
        raise unusable(text, "a port", f"a number from {least} to 65535")
    return int(text)
