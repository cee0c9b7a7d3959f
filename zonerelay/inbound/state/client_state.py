"""The known facts about a client: its address, TLS, HELO name and user. No I/O.

`grants` defines what the client may do. Three values are derived from the same facts: the protocol keyword of
the Received field (RFC 3848), the client data for a policy, and the sender addresses that the client may use.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from zonerelay.config.credentials.file import User
from zonerelay.config.settings import Idempotency, ListenerSettings
from zonerelay.config.user_limits import UserIdempotency
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.policy import ClientInfo
from zonerelay.inbound.state.permissions import Grants, GrantTable
from zonerelay.inbound.tls.ports import TlsInfo
from zonerelay.model.address import NULL_SENDER, Mailbox
from zonerelay.model.address_list import read_addresses
from zonerelay.model.envelope import Origin
from zonerelay.model.queue_name import Priority
from zonerelay.routing.zones.address_patterns import AddressPatterns
from zonerelay.smtp.server.proxy_protocol import XClient

MAX_AUTHORS = 4096  # characters of From fields; longer ones take the parser time and are not legitimate
_ANY_ADDRESS = re.compile(r"""[^\s<>(),:;@"\\\[\]]++@[^\s<>(),:;"\\\[\]]++""")


class ClientState:
    """The state of one client: its address, TLS, HELO name and user. `helo` is empty before EHLO; `protocol`
    is empty for an SMTP client. `origin` is made at the first use and then cached. `idempotency` is the
    listener's setting unless the user has another one.
    """

    __slots__ = (
        "_extended", "_origin", "_settings", "_table", "client", "grants", "helo", "idempotency", "kept",
        "protocol", "tls", "user",
    )  # fmt: skip

    def __init__(
        self, settings: ListenerSettings, table: GrantTable, client: Client, tls: TlsInfo | None
    ) -> None:
        self._settings = settings
        self._table = table
        self.client = client
        self.tls = tls
        self.user: User | None = None
        self.helo = ""
        self.protocol = ""
        self.idempotency = settings.idempotency
        self._extended = True
        self._origin: Origin | None = None
        self.kept: dict[str, object] | None = None  # data that a policy keeps about this client
        self.grants = self._weighed()

    def said_hello(self, name: str, *, extended: bool) -> None:
        self.helo = name
        self._extended = extended
        self._origin = None

    def came_by(self, protocol: str, helo: str) -> None:
        """Set the protocol of a client that submits mail without SMTP."""
        self.protocol, self.helo, self._origin = protocol, helo, None

    def logged_in(self, user: User) -> None:
        self.user = user
        self._origin = None
        self.grants = self._weighed()

    def go_by(self, wish: UserIdempotency) -> None:
        """Use the idempotency setting of the user's limits, or the listener's if the user has none."""
        own = wish is UserIdempotency.LISTENER
        self.idempotency = self._settings.idempotency if own else Idempotency(wish.value)

    def take_over(self, before: ClientState, xclient: XClient) -> None:
        """Set the attributes that XCLIENT names, and copy the others from `before`."""
        if xclient.helo is None:
            self.helo, self._extended = before.helo, before._extended
        else:
            self.said_hello(xclient.helo, extended=xclient.protocol != "SMTP")
        if xclient.login is None:
            self.user = before.user
        elif xclient.login:
            self.user = User(name=xclient.login, hash="", senders=())
        self.grants = self._weighed()

    def _weighed(self) -> Grants:
        client, tls = self.client, self.tls
        proven = self.user is not None or (
            tls is not None and tls.certificate in self._settings.allow_certificates
        )
        return self._table.of(client.may_relay, client.may_xclient, tls is not None, proven)

    @property
    def origin(self) -> Origin:
        if self._origin is None:
            self._origin = self._came_from()
        return self._origin

    @property
    def priority(self) -> Priority | None:
        """The user's priority, or `None` if the listener's priority applies."""
        return None if self.user is None else self.user.priority

    @property
    def info(self) -> ClientInfo:
        """The client data for a policy."""
        tls = self.tls
        if self.kept is None:
            self.kept = {}
        return ClientInfo(
            address=self.client.address,
            port=self.client.port,
            helo=self.helo,
            user=self.user.name if self.user is not None else "",
            tls=tls.version if tls is not None else "",
            certificate=tls.certificate if tls is not None else "",
            listener=self._settings.address,
            extended=self._extended,
            kept=self.kept,
        )

    def may_send_as(self, sender: Mailbox) -> bool:
        """Return whether the client may use this sender. A user with a list of senders may use those, and the
        null sender for bounces.
        """
        if not self.is_bound or sender == NULL_SENDER:
            return True
        assert self.user is not None
        return _patterns(tuple(self.user.senders)).match(sender)

    @property
    def is_lenient(self) -> bool:
        """Whether the client may use nonstandard paths, as some devices do. It must be allowed to relay."""
        return self._settings.lenient_paths and self.grants.may_relay

    @property
    def is_bound(self) -> bool:
        """Whether the user may send from listed addresses only."""
        return self.user is not None and bool(self.user.senders)

    def may_write_as(self, authors: Sequence[str]) -> bool:
        """Check every address in the values of From fields. A value with an unreadable element is refused. If
        other software may read different addresses, every string that looks like an address must be the
        user's.
        """
        if sum(map(len, authors)) > MAX_AUTHORS:
            return False
        addresses: list[str] = []
        for author in authors:
            found = read_addresses(author)
            addresses += [entry.address for entry in found.entries] or [""]
            if not found.clear:
                addresses += _ANY_ADDRESS.findall(author)
        return all(address and self.may_send_as(Mailbox(address)) for address in addresses)

    def _came_from(self) -> Origin:
        protocol = self.protocol or "SMTP"
        if self._extended and not self.protocol:
            protocol = f"ESMTP{'S' if self.tls is not None else ''}{'A' if self.user is not None else ''}"
        return Origin(
            client_address=self.client.address,
            client_port=self.client.port,
            helo=self.helo,
            protocol=protocol,
            listener=self._settings.address,
            user=self.user.name if self.user is not None else "",
            tls=self.tls.version if self.tls is not None else "",
            certificate=self.tls.certificate if self.tls is not None else "",
            stranger=not self.grants.may_relay,
        )


@lru_cache(maxsize=1024)
def _patterns(senders: Sequence[str]) -> AddressPatterns:
    return AddressPatterns(senders)
