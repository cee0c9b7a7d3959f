"""Who may relay, and the words for why somebody may not.

Closed by default (rule 6): a client relays when its address is in the listener's `allow_networks`, when
it came over the listener's Unix socket (file permissions decide who can), or when the
configuration says the exact words that open the listener to anybody.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass

from zonerelay.config.models import OPEN_RELAY_WORDS, ListenerSettings

MAX_REMEMBERED = 1024


class Reason(enum.StrEnum):
    """Why something was refused: a metric label, so the list is fixed."""

    ADDRESS = "address"
    BARE_LINE_ENDS = "bare-line-ends"
    CLIENT_CONNECTIONS = "client-connections"
    CLIENT_LEFT = "client-left"
    COMMANDS = "commands"
    CONNECTIONS = "connections"
    ERRORS = "errors"
    HEADER_SIZE = "header-size"
    IDLE = "idle-timeout"
    LOOP = "loop"
    NOT_OFFERED = "not-offered"
    OTHER_PROTOCOL = "other-protocol"
    PARAMETER = "parameter"
    PIPELINING = "pipelining"
    RECIPIENTS = "recipients"
    RELAY = "relay"
    SEQUENCE = "sequence"
    SHUTDOWN = "shutdown"
    SIZE = "size"
    SMTPUTF8 = "smtputf8"
    STORE = "store"
    STORE_FULL = "store-full"
    SYNTAX = "syntax"
    TRANSACTION_TIME = "transaction-timeout"
    TROUBLE = "trouble"
    UNKNOWN_COMMAND = "unknown-command"


@dataclass(frozen=True, slots=True)
class Client:
    """A connected client: `address` is `""` on a Unix socket."""

    address: str
    port: int
    may_relay: bool


class AccessPolicy:
    """Decides per client address, and remembers the latest addresses: they come again."""

    def __init__(self, settings: ListenerSettings) -> None:
        self._networks = settings.allow_networks
        self._open = settings.open_relay == OPEN_RELAY_WORDS
        self._unix = settings.address.startswith("unix:")
        self._known: dict[str, tuple[str, bool]] = {}

    def identify(self, peer: object) -> Client:
        """`peer` is the transport's peername."""
        if self._unix or not isinstance(peer, tuple):
            # A TCP client that is gone already has no peername: that must not make it a local one.
            return Client("", 0, may_relay=self._unix)
        host, port = str(peer[0]), int(peer[1])
        known = self._known.get(host)
        if known is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            known = self._known[host] = self._decide(host)
        return Client(known[0], port, known[1])

    def _decide(self, host: str) -> tuple[str, bool]:
        address: ipaddress.IPv4Address | ipaddress.IPv6Address
        # The scope of a link-local address says which wire it came by, not who it is.
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            # An IPv4 client on a dual-stack socket is an IPv4 client.
            address = address.ipv4_mapped
        return str(address), self._open or any(address in network for network in self._networks)
