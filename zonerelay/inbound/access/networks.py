"""Identifies clients by their IP addresses, and decides what a listener permits to each.

A listener is closed by default (rule 6). By its address, a client may relay in three cases: the address is in
the listener's `allow_networks`, the client connected to the listener's Unix socket (whose file permissions
decide who can), or the configuration explicitly opens the listener to every client. Passwords and
certificates can permit more later in the session. A client that is named by a PROXY header or XCLIENT is
trusted only by its own address, never by the address of the load balancer.
"""

import ipaddress
import re
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec import structs

from zonerelay.config.settings import AccessAction, AccessSettings, ListenerSettings, UnsafeListener
from zonerelay.model.envelope import Origin
from zonerelay.model.reply import Reply
from zonerelay.routing.addresses import ascii_domain, is_literal, networks_of
from zonerelay.routing.dns.answers import DnsStatus
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.routing.zones.route_rules import RoutedMail, RuleConditions, asked, index_of
from zonerelay.smtp.server.proxy_protocol import canonical

# Checks whether mail could be sent to a sender's domain (`check_sender_domain`).
#
# A sender is rejected permanently only if the DNS of the domain is conclusive: the domain accepts no mail
# (null MX, RFC 7505 4.2), it does not exist, it has neither an MX nor an address record, or it is not a valid
# domain. A name server that fails or does not answer causes a 451. The null sender and address literals have
# no domain and are accepted.
#
# This code has no cache. The resolver caches, within bounds, and combines equal queries.

NULL_MX = Reply(550, "7.27", "Sender address has null MX")
NO_DOMAIN = Reply(550, "1.8", "Sender's domain does not exist")
NO_HOST = Reply(550, "1.8", "Sender's domain has no mail host")
UNKNOWN = Reply(451, "4.3", "Sender's domain cannot be looked up now")


class SenderDomains:
    """Checks with DNS whether mail can be sent to the domains of senders."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def check(self, domain: str) -> Reply | None:
        """Return the refusal of a sender domain that does not exist or accepts no mail, or None."""
        if not domain or is_literal(domain):
            return None
        try:
            name = ascii_domain(domain)
        except ValueError:
            return NO_DOMAIN
        answer = await self._resolver.mx(name)
        status = answer.status
        if status is DnsStatus.OK:
            return NULL_MX if all(not record.host for record in answer.records) else None
        if status.is_definite:
            found = await self._resolver.implicit_mx(name, status)
            if found is DnsStatus.OK:
                return None
            if found is status:
                return NO_DOMAIN if status is DnsStatus.NXDOMAIN else NO_HOST
        return UNKNOWN


# The [[access]] rules: they refuse, defer or accept clients, users and addresses.
#
# The first rule whose conditions all match decides; after `accept` no later rule is evaluated. The cost
# depends neither on the number of rules (`routing/zones/route_rules`) nor on the number of their networks and
# address patterns.

REFUSED = Reply(550, "7.1", "Access denied")
DEFERRED = Reply(450, "7.1", "Access denied for now")

_REPLY = re.compile(r"([0-9]{3}) (?:[245]\.([0-9]{1,3}\.[0-9]{1,3}) )?(.*)")


class AccessRules:
    """The compiled [[access]] rules. The constructor raises ValueError if the domain of a pattern is
    invalid.
    """

    def __init__(self, rules: Sequence[AccessSettings]) -> None:
        self._rules = tuple((RuleConditions(rule), _reply(rule)) for rule in rules)
        self._index = index_of(rules)

    def decide(self, origin: Origin, sender: str, recipient: str) -> Reply | None:
        """Return the refusal of a recipient by the first matching rule, or None. A client on a Unix socket
        has no address, so no network contains it.
        """
        mail = RoutedMail(sender, origin)
        for at in self._index.find(asked(mail, recipient)):
            conditions, reply = self._rules[at]
            if conditions.matches(mail, recipient):
                return reply
        return None


def _reply(settings: AccessSettings) -> Reply | None:
    if settings.action is AccessAction.ACCEPT:
        return None
    usual = REFUSED if settings.action is AccessAction.REFUSE else DEFERRED
    match = _REPLY.fullmatch(settings.reply)
    if match is None:
        return usual
    return Reply(int(match[1]), match[2] or usual.detail, match[3])


MAX_REMEMBERED = 1024


class Client(msgspec.Struct, frozen=True, gc=False):
    """A connected client, and what its address permits. `address` is `""` on a Unix socket, and if the
    address is unknown.

    With `proxies`, the client must begin with a PROXY header. With `may_xclient`, it may name another client
    by XCLIENT.
    """

    address: str
    port: int
    may_relay: bool
    proxies: bool = False
    may_xclient: bool = False


class AccessPolicy:
    """Decides from clients' addresses what they may do, and caches the decisions."""

    def __init__(self, settings: ListenerSettings) -> None:
        self._networks = networks_of(settings.allow_networks)
        self._proxies = networks_of(settings.proxy_networks)
        self._xclient = networks_of(settings.xclient_networks)
        self._open = UnsafeListener.OPEN_RELAY in settings.unsafe
        self._unix = settings.address.startswith("unix:")
        self._decided = lru_cache(MAX_REMEMBERED)(self._decide)

    def identify(self, peer: object) -> Client:
        """Return the client of a connection. `peer` is the peername of the transport."""
        if self._unix or not isinstance(peer, tuple):
            # A TCP client that has disconnected has no peername; it must not be taken for a local client.
            return Client("", 0, may_relay=self._unix)
        return self.client(str(peer[0]), int(peer[1]))

    def named(self, address: str, port: int, *, by: Client) -> Client:
        """Return the client whose address a PROXY header or XCLIENT gives. Without an address, the client is
        unknown.
        """
        # A server that sent XCLIENT may send it again. Behind a load balancer, the client itself is speaking.
        again = by.may_xclient and not by.proxies
        if not address:
            return Client("", 0, may_relay=self._open, may_xclient=again)
        client = self.client(address, port)
        return structs.replace(client, proxies=False, may_xclient=client.may_xclient or again)

    def client(self, host: str, port: int) -> Client:
        """Return the client with this address, and what it may do."""
        address, may_relay, proxies, may_xclient = self._decided(host)
        return Client(address, port, may_relay, proxies, may_xclient)

    def _decide(self, host: str) -> tuple[str, bool, bool, bool]:
        # The scope of a link-local address names the local interface, not the client.
        text = canonical(ipaddress.ip_address(host.partition("%")[0]))
        return (
            text,
            self._open or self._networks.match(text),
            self._proxies.match(text),
            self._xclient.match(text),
        )
