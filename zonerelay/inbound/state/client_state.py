"""The state of a client (its address, TLS, HELO name and user), and what the client may do. No I/O.

`Grants` are the permissions of a client and its EHLO extensions, by its address, its TLS and its
authentication. There are few combinations of these in a listener, so each is computed once. To relay, a
client needs one of: an address in `allow_networks`, a login as a user, or a listed client certificate. With
`auth = "required"` the address is not sufficient.

Three values are derived from the same facts: the protocol keyword of
the Received field (RFC 3848), the client data for a policy, and the sender addresses that the client may use.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial

import msgspec

from zonerelay.config.credentials.file import User
from zonerelay.config.settings import ListenerAuth, ListenerSettings, ListenerTls, UnsafeListener
from zonerelay.inbound.access.guard import patterns_of
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.policy import ClientInfo
from zonerelay.inbound.state import replies
from zonerelay.inbound.tls.channel import TlsInfo
from zonerelay.model.address_list import read_addresses
from zonerelay.model.envelope import NULL_SENDER, Mailbox, Origin, Priority
from zonerelay.smtp.server import params
from zonerelay.smtp.server.proxy_protocol import XClient

MAX_AUTHORS = 4096  # characters of From fields; longer ones take the parser time and are not legitimate
_LOCAL = r"""[^\s<>(),:;@"\\\[\]]"""
# The look-behind lets the search start only where a word begins, which keeps it linear.
_ANY_ADDRESS = re.compile(rf"""(?<!{_LOCAL}){_LOCAL}++@[^\s<>(),:;"\\\[\]]++""")


class Grants(msgspec.Struct, frozen=True, kw_only=True):
    """What one client may do, such as relaying. With `must_log_in`, the client must log in first. `offer` are
    its lines of the EHLO reply; `mail_parameters` and `rcpt_parameters` are the accepted parameters of MAIL
    and RCPT.
    """

    may_relay: bool
    must_log_in: bool
    must_start_tls: bool
    mail_parameters: frozenset[str]
    rcpt_parameters: frozenset[str]
    offer: tuple[str, ...]


def _grants(
    settings: ListenerSettings, may_relay: bool, may_xclient: bool, secure: bool, proven: bool
) -> Grants:
    """Return what a client of a listener may do, given its address, TLS and login. `may_relay` is determined
    by its address. `secure` means that it uses TLS. `proven` means that it has logged in or presented a
    listed certificate.
    """
    must_log_in = not proven and settings.auth is ListenerAuth.REQUIRED
    may_relay = proven or (may_relay and not must_log_in)
    auth = settings.auth is not ListenerAuth.OFF and (
        secure or UnsafeListener.CLEARTEXT_AUTH in settings.unsafe
    )
    # Only for clients that may relay, now or after a login: RFC 4865 is for submission, and with DSN an
    # unauthenticated client could have our reports sent to a third party.
    submits = may_relay or auth
    hold = submits and settings.max_hold > 0
    offers = {
        "DSN": submits,
        replies.STARTTLS: settings.tls is ListenerTls.STARTTLS and not secure,
        replies.AUTH: auth,
        replies.FUTURE_RELEASE: hold,
        replies.XCLIENT: may_xclient,
    }
    return Grants(
        may_relay=may_relay,
        must_log_in=must_log_in,
        must_start_tls=settings.require_tls and not secure,
        mail_parameters=params.MAIL_PARAMETERS
        | (params.DSN_MAIL_PARAMETERS if submits else frozenset())
        | (params.AUTH_MAIL_PARAMETERS if auth else frozenset())
        | (params.HOLD_MAIL_PARAMETERS if hold else frozenset()),
        rcpt_parameters=params.DSN_RCPT_PARAMETERS if submits else params.RCPT_PARAMETERS,
        offer=tuple(line for line, offered in offers.items() if offered),
    )


GrantTable = Callable[[bool, bool, bool, bool], Grants]


def grant_table(settings: ListenerSettings) -> GrantTable:
    """Return a cached function that determines what a client of this listener may do."""
    return cache(partial(_grants, settings))


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

    def logged_in(self, user: User) -> None:
        self.user = user
        self._origin = None
        self.grants = self._weighed()

    def take_over(self, before: "ClientState", xclient: XClient) -> None:
        """Set the attributes that XCLIENT contains, and copy the others from `before`."""
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
        return self._table(client.may_relay, client.may_xclient, tls is not None, proven)

    @property
    def origin(self) -> Origin:
        if self._origin is not None:
            return self._origin
        protocol = self.protocol or "SMTP"
        if self._extended and not self.protocol:
            protocol = f"ESMTP{'S' if self.tls is not None else ''}{'A' if self.user is not None else ''}"
        self._origin = Origin(
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
        return self._origin

    @property
    def priority(self) -> Priority | None:
        """The user's priority, or `None` if the listener's priority applies."""
        return None if self.user is None else self.user.priority

    @property
    def info(self) -> ClientInfo:
        """The information about the client that a policy gets."""
        origin = self.origin
        if self.kept is None:
            self.kept = {}
        return ClientInfo(
            address=origin.client_address,
            port=origin.client_port,
            helo=origin.helo,
            user=origin.user,
            tls=origin.tls,
            certificate=origin.certificate,
            listener=origin.listener,
            extended=self._extended,
            kept=self.kept,
        )

    def may_send_as(self, sender: Mailbox) -> bool:
        """Return whether the client may use this sender address. A user with a list of senders may use those,
        and the null sender for bounces.
        """
        if not self.is_bound or sender == NULL_SENDER:
            return True
        assert self.user is not None
        return patterns_of(tuple(self.user.senders)).match(sender)

    @property
    def is_lenient(self) -> bool:
        """Whether paths with invalid syntax are accepted from the client, as some devices send them. The
        client must be allowed to relay.
        """
        return self._settings.lenient_paths and self.grants.may_relay

    @property
    def is_bound(self) -> bool:
        """Whether the user may send only from certain addresses."""
        return self.user is not None and bool(self.user.senders)

    def may_write_as(self, authors: Sequence[str]) -> bool:
        """Return whether the client may use every address in its From fields. A value with an unreadable
        element is refused. If other software may read different addresses, every string that looks like an
        address must be the user's.
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
