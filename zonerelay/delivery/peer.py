"""Opens the socket to a peer, from the right source address and only to an allowed address.

With a source, the socket is bound to the source's address of the peer's family, or not opened, so that mail
never leaves from an address that the zone does not name. The peer's address is checked right before the
connection to that address, so that a name that resolves differently a moment later cannot evade the check.
The caller owns the socket that is returned. If a function raises, including by cancellation, no socket stays
open.

`ConnectionKey` and `Terms` are what a batch demands of its connection: source, credential and next hop, with
the zone's and the route's terms. The key is chosen once for a batch, before a connection is searched: the
source by `source.py`, the credential by `auth/logins.py`, and the host by `connection/session_limits.py`. An
idle connection carries a batch only if it matches.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from dataclasses import KW_ONLY, dataclass, field, replace

import msgspec
from msgspec import structs

from zonerelay.config.endpoints import join_port
from zonerelay.config.settings import CredentialSettings, SourceSettings, TlsMode, ZoneSettings
from zonerelay.model.reply import Reply, Scope
from zonerelay.routing.addresses import is_private
from zonerelay.routing.destinations.route import DestinationKey, DestinationLimits, Route, TlsDemand


@dataclass(frozen=True, slots=True)
class ConnectionKey:
    """Identifies the connections that can be used for the same mail within a zone. `source` and `credential`
    are None in zones without any. `text` identifies the key within one zone.

    `ipv4_only` is true if the batch does not use the source's IPv6 for now, so a connection over IPv6 does
    not match. `host` (`name:port`) is the one of several equal next hops that the batch tries first. `verify`
    is true if the message demands TLS and a verified certificate (RFC 8689), whatever the route demands.
    """

    source: SourceSettings | None = None
    credential: CredentialSettings | None = None
    ipv4_only: bool = False
    host: str = ""
    verify: bool = False
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if self.source is not None or self.credential is not None or self.host or self.verify:
            source = "" if self.source is None else self.source.name
            credential = "" if self.credential is None else self.credential.name
            family = "/4" if self.ipv4_only else ""
            verify = " verify" if self.verify else ""
            object.__setattr__(self, "text", f"{source}{family} {credential} {self.host}{verify}")

    def from_source(self, chosen: ConnectionKey) -> ConnectionKey:
        """Return the same key with the source and address family that `SourceSelection` has chosen."""
        if self is ANY_CONNECTION:
            return chosen
        return replace(self, source=chosen.source, ipv4_only=chosen.ipv4_only)


ANY_CONNECTION = ConnectionKey()

PoolKey = tuple[DestinationKey, str]


class Terms(msgspec.Struct, frozen=True, eq=False):
    """The TLS and login requirements with which a connection is opened."""

    zone: ZoneSettings
    route: Route
    key: ConnectionKey = ANY_CONNECTION

    @property
    def pool_key(self) -> PoolKey:
        """The key under which the pool keeps a connection. Connections with the same pool key may carry the
        same mail while the settings do not change.
        """
        return self.route.destination, self.key.text

    @property
    def limits(self) -> DestinationLimits:
        return self.route.limits_in(self.zone)

    @property
    def tls(self) -> TlsDemand:
        demand = self.route.tls_in(self.zone)
        if self.key.verify:
            return TlsDemand(TlsMode.VERIFY, dane=demand.dane, because="message")
        return demand

    def verifying(self) -> Terms:
        """Return these terms, with the additional requirement of a verified certificate if they lack it."""
        if self.tls.mode in (TlsMode.VERIFY, TlsMode.DANE):
            return self
        return structs.replace(self, key=replace(self.key, verify=True))

    def ehlo_name(self, hostname: str) -> str:
        """Return the name that EHLO sends: the source's, or else the zone's, or else the relay's."""
        source = self.key.source
        return (source.ehlo_name if source is not None else "") or self.zone.ehlo_name or hostname

    def cover(self, other: Terms) -> bool:
        """Return whether a connection on these terms may carry mail on the other terms. Their TLS, names,
        source and login settings must be the same.
        """
        mine, theirs = self.route, other.route
        return (
            (self.zone is other.zone or self.zone == other.zone)
            and (mine is theirs or (mine.tls == theirs.tls and mine.limits == theirs.limits))
            and (self.key is other.key or self.key == other.key)
        )


@dataclass(eq=False, repr=False)
class HostFailure(Exception):
    """The host cannot be used for this attempt. Another host may be usable.

    `reply` is the reason. `asked` is false if nothing was sent to a peer. `said` is the host's own reply, if
    there was one. `down` is true if the host serves no mail now, so other hosts are tried before it for a
    while (`connection/session_limits.py`). `scope` is LOCAL if the failure says nothing about the host.
    """

    reply: Reply
    _: KW_ONLY
    address: str = ""
    asked: bool = True
    said: Reply | None = None
    down: bool = False
    scope: Scope = Scope.HOST

    def __str__(self) -> str:
        return str(self.reply)


class SourceFailure(HostFailure):
    """The source address cannot be used on this machine. `ip` is the address, and `reason` the system's
    message.
    """

    def __init__(self, source: str, ip: str, reason: str) -> None:
        text = f"the address {ip} of source {source} cannot be used: {reason}"
        super().__init__(Reply(451, "3.5", text), asked=False, scope=Scope.LOCAL)
        self.ip = ip
        self.reason = reason


class UntrustedCertificateError(Exception):
    """The TLS handshake succeeded, but the server does not have the required certificate. The message is the
    reason.
    """


def check_address(zone: ZoneSettings, host: str, ip: str) -> None:
    """Raise HostFailure if the address is private and was found in DNS. The operator's own next hops are not
    checked.
    """
    if zone.allow_private_addresses or zone.next_hop or not is_private(ip):
        return
    # 4.4.4 defers instead of bouncing: a wrong MX record is often corrected before the message expires.
    text = f"{host} has the private address {ip}, which the zone does not allow"
    raise HostFailure(Reply(451, "4.4", text), asked=False)


def own_address(source: SourceSettings, *, ipv6: bool) -> str:
    """Return the IPv4 or IPv6 address of a source, or `""` if it has none."""
    return next((ip for ip in source.address if (":" in ip) == ipv6), "")


async def open_socket(
    zone: ZoneSettings, host: str, ip: str, port: int, *, timeout: float, source: SourceSettings | None = None
) -> socket.socket:
    """Connect to an address and return the non-blocking TCP socket. Raise HostFailure."""
    check_address(zone, host, ip)
    address = join_port(ip, port)
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # out of file descriptors, or no IPv6 on this machine
        raise HostFailure(Reply(451, "3.0", f"cannot create a socket: {error}"), asked=False) from error
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source is not None:
            _bind(sock, source, ipv6=family == socket.AF_INET6)
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, (ip, port))
    except BaseException as error:
        sock.close()
        if not isinstance(error, OSError):
            raise
        reason = os.strerror(error.errno) if error.errno else str(error)
        what = "timed out" if isinstance(error, TimeoutError) else f"failed: {reason}"
        reply = Reply(451, "4.1", f"connecting to {address} {what}")
        raise HostFailure(reply, address=address, down=True) from error
    return sock


# The errors of bind for an address on no interface, and for a family that is disabled.
_NOT_HERE = frozenset((errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENODEV, errno.EAFNOSUPPORT))


def _bind(sock: socket.socket, source: SourceSettings, *, ipv6: bool) -> None:
    """Bind a socket to the source's address. Raise SourceFailure if this machine lacks the address now, and
    OSError for any other failure.
    """
    ip = own_address(source, ipv6=ipv6)
    if not ip:
        family = "IPv6" if ipv6 else "IPv4"
        raise HostFailure(Reply(451, "3.5", f"the source {source.name} has no {family} address"), asked=False)
    no_port_yet = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", None)  # Linux only
    if no_port_yet is not None:
        # The kernel chooses the port when connecting, for one peer. When binding, all peers would share
        # 28,000 ports.
        sock.setsockopt(socket.IPPROTO_IP, no_port_yet, 1)
    try:
        sock.bind((ip, 0))
    except OSError as error:
        if error.errno in _NOT_HERE:
            raise SourceFailure(source.name, ip, os.strerror(error.errno)) from error
        raise
