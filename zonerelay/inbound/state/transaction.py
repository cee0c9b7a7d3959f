"""One mail transaction, from MAIL to the end of data (RFC 5321 3.3), and the rewriting of its addresses.

It holds the arguments of MAIL and RCPT, and the policy's decisions about the message: zones and header
changes.

The [[rewrite]] tables replace matching addresses in the envelope and in the header. The first rule that
matches an address applies, and its result is not looked up again, so rules cannot form loops. Conditions on
user and listener are part of the match. The null sender is never rewritten.

Decisions about the client (access rules, the user's senders, a policy at MAIL and RCPT) see the address that
the client sent. Decisions about the message (routes, the queue, a policy at headers) see the rewritten
address. If several recipients become the same address, they are one delivery, which keeps the first of their
original addresses: RFC 3461 5.2.1 d) puts it into ORCPT, and a DSN shows the sender this address.

The cost of a lookup does not depend on the number of rules. An invalid rule raises ValueError with a message,
only while the rules are loaded.

The mode of a user (`config`) is applied to the complete envelope, before anything is stored.

- redirect: the whole message is sent to the user's mailbox, once. The first `MAX_FIELDS` of the original
  recipients are listed in X-Original-To fields.
- copy: the mailbox is an additional recipient, for which no DSN is sent.
- capture, listed: `cleanup/intake` captures the mail that is not to be sent.

So routes, durability, DSNs and the queue treat such mail like any other.

The module also reads the header field in which a trusted client names the zone of its mail, such as
`X-Sending-Zone`. The field is removed from every message (`cleanup/intake`), because recipients do not
need it and the next relay might obey it. If there are several such fields, the first one applies. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import structs

from zonerelay.config.settings import ListenerSettings, RewriteScope, RewriteSettings
from zonerelay.config.user_limits import UserMode
from zonerelay.inbound.access.guard import Allowance
from zonerelay.inbound.policy import Decision
from zonerelay.inbound.refusal import Refusal
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.message.header import Fields, change_addresses
from zonerelay.model import envelope as model
from zonerelay.model.envelope import Mailbox, Notify, Recipient, recipient_key
from zonerelay.routing.addresses import Networks, ascii_domain, networks_of
from zonerelay.routing.zones.address_patterns import AddressTable
from zonerelay.smtp.client.transaction import original_recipient
from zonerelay.smtp.server.params import MailCommand
from zonerelay.smtp.server.paths import CommandError, reverse_path


class HeaderEdits(msgspec.Struct, frozen=True):
    """Changes to the header: fields to add at the top, and names of fields to remove."""

    add: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()

    def and_those_of(self, decision: Decision | HeaderEdits) -> HeaderEdits:
        if not (decision.add or decision.remove):
            return self
        return HeaderEdits((*self.add, *decision.add), (*self.remove, *decision.remove))


NO_EDITS = HeaderEdits()


FIELD = "X-Original-To"
MAX_FIELDS = 100
RECIPIENT_COST = 512  # bytes of memory counted for each recipient of an open transaction


class MailTransaction:
    """A mail transaction of a client. `release` is the Unix time before which it must not be sent; 0.0 means
    immediately.

    `cost` is the memory counted for the recipients. `idempotency_key` is the key that the client set outside
    the message, or ""; `key_may_follow` means that the header may contain one, and `over_quota` is the
    refusal of a message that has none. `rewritten` lists the changes of recipients since RCPT, with the new
    addresses. A submission that may be accepted in part has all its recipients in `asked`, and
    the replies to those that are refused in `refused`. `unless_repeated` is the refusal of a message that is
    accepted only if it was submitted before with the same key.
    """

    def __init__(self, mail: MailCommand, *, release: float, edits: HeaderEdits) -> None:
        self.mail = mail
        self.recipients: dict[str, Recipient] = {}
        self.release = release
        self.edits = edits
        self.zone = ""
        self.allowance: Allowance | None = None  # the limits of the user, if there is one
        self.named: tuple[Mailbox, ...] = ()  # the recipients before the user's mode replaced them
        self.asked: tuple[Mailbox, ...] = ()
        self.refused: dict[Mailbox, str] = {}
        self.idempotency_key = ""
        self.key_may_follow = False
        self.over_quota: Refusal | None = None
        self.unless_repeated: ServerReply | None = None
        self.zone_named = ""  # the zone that the message itself names
        self.notes: tuple[str, ...] = ()  # notes for the trace
        self.zones: dict[Mailbox, str] = {}
        self.cost = 0
        self.octets = 0  # that BDAT has announced
        self.rewrites: ClientRewrites | None = None  # for this client's mail, once the envelope is complete
        self.rewritten: list[tuple[str, Mailbox]] = []
        self.chunked = False  # after the first BDAT, RCPT and DATA are not allowed

    def decide(self, decision: Decision, recipient: Mailbox | None = None) -> None:
        """Apply a policy's decision for the whole message or for one recipient."""
        self.edits = self.edits.and_those_of(decision)
        if decision.zone and recipient is None:
            self.zone = decision.zone
            self.zones.clear()  # the zone of a later step replaces that of an earlier one
        elif decision.zone and recipient is not None:
            self.zones[recipient] = decision.zone

    def zone_of(self, recipient: Mailbox) -> str:
        """Return the zone that the policy has chosen for a recipient, or "" if the routes decide."""
        return self.zones.get(recipient) or self.zone

    def apply_mode(self) -> None:
        """Change the complete envelope as the user's mode requires, such as redirecting it to a mailbox."""
        if self.allowance is None:
            return
        self.named = model.mailboxes(self.recipients.values())
        rails = self.allowance.rails
        mailbox = Mailbox(rails.mailbox)
        if rails.mode is UserMode.REDIRECT:
            fields = tuple((FIELD, each) for each in self.named[:MAX_FIELDS])
            self.edits = self.edits.and_those_of(HeaderEdits(add=fields))
            self.recipients = {recipient_key(mailbox): Recipient(address=mailbox)}
            self.rewritten.append(("recipient mode=redirect", mailbox))
        elif rails.mode is UserMode.COPY:
            copy = Recipient(address=mailbox, notify=Notify.NEVER)
            if recipient_key(mailbox) not in self.recipients:
                self.recipients[recipient_key(mailbox)] = copy
                self.rewritten.append(("recipient mode=copy", mailbox))

    def envelope(
        self, message_id: model.MessageId, created: float, origin: model.Origin, priority: model.Priority
    ) -> model.Envelope:
        mail = self.mail
        if mail.smtputf8:
            # RFC 6531 4.3: UTF8SMTP, with A and S as for ESMTP.
            origin = structs.replace(origin, protocol=origin.protocol.replace("ESMTP", "UTF8SMTP"))
        return model.Envelope(
            id=message_id,
            sender=mail.sender,
            recipients=tuple(self.recipients.values()),
            created=created,
            body=mail.body,
            smtputf8=mail.smtputf8,
            ret=mail.ret,
            envid=mail.envid,
            origin=origin,
            priority=priority,
            require_tls=mail.require_tls,
        )

    def rewriting_notes(self) -> Iterator[str]:
        """Yield notes for the trace about the rewriting rules that matched and the new addresses, at most
        `MAX_NOTES`.
        """
        by_rule: dict[str, list[Mailbox]] = {}
        for how, address in self.rewritten:
            by_rule.setdefault(how, []).append(address)
        for how, addresses in list(by_rule.items())[:MAX_NOTES]:
            more = f" and {len(addresses) - MAX_NAMED} more" if len(addresses) > MAX_NAMED else ""
            yield f"rewritten {how}: {', '.join(addresses[:MAX_NAMED])}{more}"
        if self.rewrites is not None and self.rewrites.rules_of_header:
            rules = sorted(self.rewrites.rules_of_header)[:MAX_NOTES]
            yield f"rewritten header rewrite={','.join(map(str, rules))}"


class ZoneHeader(msgspec.Struct, frozen=True):
    """The zone header of one listener, and the clients that may use it. `name` is in lower case."""

    name: str
    users: frozenset[str]
    networks: Networks

    @classmethod
    def of(cls, settings: ListenerSettings) -> ZoneHeader | None:
        """Return the zone header of a listener, or None if `zone_header` is not set."""
        if not settings.zone_header:
            return None
        users = frozenset(settings.zone_header_users)
        return cls(settings.zone_header.lower(), users, networks_of(settings.zone_header_networks))

    def trusts(self, client_address: str, user: str) -> bool:
        if user and (user in self.users or _ANY in self.users):
            return True
        return self.networks.match(client_address)

    def zone_in(self, fields: Fields) -> str:
        """Return the value of the first zone header of a message, or an empty string."""
        return next((value.strip() for name, value in fields if name.lower() == self.name), "")


MAX_DOMAIN = 180
"""The maximum length of a target domain in bytes: with any local part, it is a valid path (RFC 5321
4.5.3.1).
"""

MAX_NOTES = 20
MAX_NAMED = 5  # recipients in one note

_ANY = "*"
_EVERYBODY = ""  # the key of rules without a condition on the user


class _RewriteRule(msgspec.Struct, frozen=True):
    """A compiled [[rewrite]] rule. `local` is empty if the local part does not change. `number` counts the
    rules from 1.
    """

    number: int
    local: str
    domain: str
    listeners: frozenset[str]

    def of(self, address: str) -> Mailbox:
        local = self.local or address.rpartition("@")[0] or address
        return Mailbox(f"{local}@{self.domain}")


class RewriteRules:
    """All [[rewrite]] rules, compiled once from the settings."""

    def __init__(self, rules: Sequence[RewriteSettings]) -> None:
        self.rules: list[_RewriteRule] = []
        self.tables: dict[tuple[RewriteScope, str], AddressTable] = {}
        for at, settings in enumerate(rules):
            try:
                self._add(settings, at)
            except ValueError as error:
                raise ValueError(f"rewrite[{at}]: {error}") from error

    def _add(self, settings: RewriteSettings, at: int) -> None:
        local, domain = target(settings.to)
        self.rules.append(_RewriteRule(at + 1, local, domain, frozenset(settings.listener)))
        for place in settings.where.kinds:
            for user in settings.user or (_EVERYBODY,):
                table = self.tables.setdefault((place, user), AddressTable())
                for pattern in settings.address:
                    table.add(pattern, at)

    def rewrite(self, transaction: MailTransaction, origin: model.Origin) -> None:
        """Rewrite the addresses of the complete envelope."""
        rewrites = ClientRewrites(self, origin.listener, origin.user)
        if rewrites.changes(RewriteScope.HEADER):
            transaction.rewrites = rewrites
        sender, rule = rewrites.find(RewriteScope.SENDER, transaction.mail.sender)
        if rule:
            transaction.mail = structs.replace(transaction.mail, sender=sender)
            transaction.rewritten.append((f"sender rewrite={rule}", sender))
        if rewrites.changes(RewriteScope.RECIPIENT):
            _rewrite_recipients(transaction, rewrites)


class ClientRewrites:
    """The [[rewrite]] rules that apply to the mail of one client. `user` is `""` without a login."""

    __slots__ = ("_listener", "_rules", "_tables", "rules_of_header")

    def __init__(self, rewriting: RewriteRules, listener: str, user: str) -> None:
        users = (_EVERYBODY, _ANY, user) if user else (_EVERYBODY,)
        self._listener = listener
        self._rules = rewriting.rules
        self._tables: dict[RewriteScope, list[AddressTable]] = {}
        for place in RewriteScope.ALL.kinds:
            found = [rewriting.tables[place, name] for name in users if (place, name) in rewriting.tables]
            if found:
                self._tables[place] = found
        self.rules_of_header: set[int] = set()  # the rules that have changed something

    def changes(self, place: RewriteScope) -> bool:
        """Return whether a rule may change addresses of this kind."""
        return place in self._tables

    def find(self, place: RewriteScope, address: Mailbox) -> tuple[Mailbox, int]:
        """Return the rewritten address and the number of the rule, or the same address and 0 if no rule
        matches.
        """
        if not address:
            return address, 0
        found = [at for table in self._tables.get(place, ()) for at in table.find(address)]
        for at in sorted(found):
            rule = self._rules[at]
            if not rule.listeners or self._listener in rule.listeners:
                return rule.of(address), rule.number
        return address, 0

    def rewrite_header(self, header: bytes) -> bytes:
        """Return a header section with rewritten addresses. `header` consists of complete lines."""
        return change_addresses(header, self._in_header)

    def _in_header(self, address: str) -> str:
        other, rule = self.find(RewriteScope.HEADER, Mailbox(address))
        if rule:
            self.rules_of_header.add(rule)
        return other


def target(to: str) -> tuple[str, str]:
    """Split the `to` of a [[rewrite]] rule into its local part (empty if unchanged) and its domain. Raise
    ValueError with a message.
    """
    local, _, domain = to.rpartition("@")
    try:
        domain = ascii_domain(domain)
        mailbox, rest = reverse_path(f"<{local or 'x'}@{domain}>")
    except (ValueError, CommandError) as error:
        raise ValueError(f'"{to}" is not an address that mail can be sent to') from error
    if rest or not mailbox.isascii():
        raise ValueError(f'"{to}" is not an ASCII address, and would require SMTPUTF8 on the whole route')
    if len(domain) > MAX_DOMAIN:
        raise ValueError(f"the domain may have at most {MAX_DOMAIN} characters")
    return local, domain


def _rewrite_recipients(transaction: MailTransaction, rewrites: ClientRewrites) -> None:
    recipients: dict[str, Recipient] = {}
    zones: dict[Mailbox, str] = {}
    rewritten: list[tuple[str, Mailbox]] = []
    for key, recipient in transaction.recipients.items():
        address, rule = rewrites.find(RewriteScope.RECIPIENT, recipient.address)
        zone = transaction.zones.get(recipient.address)
        if rule:
            rewritten.append((f"recipient rewrite={rule}", address))
            key, recipient = recipient_key(address), renamed(recipient, address)  # noqa: PLW2901
        there = recipients.get(key)
        if there is not None:
            recipient = structs.replace(there, notify=wishes_of_both(there.notify, recipient.notify))  # noqa: PLW2901
        recipients[key] = recipient
        if zone:
            zones.setdefault(recipient.address, zone)
    if rewritten:
        transaction.recipients, transaction.zones = recipients, zones
        transaction.rewritten += rewritten


def renamed(recipient: Recipient, address: Mailbox) -> Recipient:
    """Return a recipient with its rewritten address. ORCPT keeps the address of RCPT (RFC 3461 5.2.1 d)."""
    return structs.replace(
        recipient, address=address, orcpt=recipient.orcpt or original_recipient(recipient.address)
    )


def wishes_of_both(one: Notify, other: Notify) -> Notify:
    """Combine the NOTIFY values of two recipients that were rewritten to the same address, so that each
    requested DSN is sent.
    """
    if one == other or other is Notify.NEVER:
        return one
    if one is Notify.NEVER:
        return other
    if Notify.UNSET in (one, other):
        return one | other | Notify.FAILURE | Notify.DELAY
    return one | other
