"""The objects that all listeners of a worker share, and those that all sessions of a listener share.

A context is immutable. A reload creates a new one for new sessions; open sessions keep the one they began
with.

Lookups that a command must wait for are here too: passwords, DNS and the operator's policy. A command that
needs a lookup returns a question. The session awaits `ask` and passes the verdict back. Sessions without
lookups create no task: `asked` lists the events for which a lookup is needed. `ask` raises only
CancelledError. An unexpected error is temporary (rule 3): the reply is 451 or 454.

The context also changes the envelope of a transaction as an aiosmtpd handler wants it. A handler may not do
more than its client: the syntax of addresses, the permission to relay, the user's list of senders, the
[[access]] rules and `max_recipients` also apply to the addresses that it sets. If a check fails, nothing has
changed. An address with invalid syntax is the handler's error, so the reply is temporary (rule 3).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import structs

from zonerelay.config.credentials.file import User
from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.access.auth import AskForLogin, Authenticator, LoginKind, LoginResult
from zonerelay.inbound.access.guard import Allowance, Guard
from zonerelay.inbound.access.networks import AccessPolicy, AccessRules, SenderDomains
from zonerelay.inbound.limits.clients import Bursts, ErrorDelays, SrsRecipients
from zonerelay.inbound.limits.memory import LargeBodies, SessionMemory
from zonerelay.inbound.policy import ACCEPT, Auth, ClientInfo, Connect, Decision, Event, Mail
from zonerelay.inbound.policy.api import Changes, FailureKind, PresentedLogin
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState, GrantTable, grant_table
from zonerelay.inbound.state.replies import Greeting, ServerReply, refused
from zonerelay.inbound.state.transaction import MailTransaction, RewriteRules, ZoneHeader, renamed
from zonerelay.message.srs import Srs
from zonerelay.model import envelope as model
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Mailbox, Origin
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.zones import ChooseZone
from zonerelay.smtp.server.paths import CommandError, forward_path, require_ascii, reverse_path
from zonerelay.smtp.server.sasl import Credentials
from zonerelay.store.contract import OwnMessage, QueueStore
from zonerelay.telemetry.events.events import Events

if TYPE_CHECKING:
    from zonerelay.inbound.tls.certificates import Certificates

UNUSABLE = refused(Reply(451, "3.0", "Policy not available now"), Reason.POLICY)
_NOT_NOW = Decision(reply=Reply(451, "3.0", "Local error, try again later"))

IDEMPOTENCY_KEY = "idempotency-key"
"""The header field in which clients set the idempotency key of a message."""
DAY = 86400.0

HANDSHAKE = 30.0
"""Seconds for a PROXY header (as in Haraka) or a TLS handshake, which takes two round trips."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of a lookup on which the reply to a command depends. `login` is set by
    `ListenerContext.log_in`, and `allowance` by `limits_of`. `reason` is the reason of a refusal.
    """

    decision: Decision = ACCEPT
    login: LoginResult | None = None
    allowance: Allowance | Refusal | None = None
    reason: Reason = Reason.POLICY


Question = Event | Callable[[], Awaitable[LookupResult]]
"""An event for the policy, or another lookup."""


class Users(Protocol):
    """Interface: checks logins and finds users."""

    async def check(
        self, credentials: Credentials, client_address: str, ask: AskForLogin | None = None, /
    ) -> LoginResult: ...


class AskedPolicy(Protocol):
    """Interface: calls the operator's policy about events."""

    @property
    def asked(self) -> Set[type]: ...

    async def ask(self, event: Event) -> Decision: ...


class SuspensionCheck(Protocol):
    """Interface: rejects mail that operators have suspended. Most relays have none that refuses mail, and
    should not spend a call on it.
    """

    are_refusing: bool
    """Whether an active suspension refuses mail."""

    def refuse(self, origin: Origin, sender: Mailbox, recipient: Mailbox | None, names_zone: bool, /) -> str:
        """Return the id of the suspension that refuses mail of a client from a sender, or "" if there is
        none. At MAIL, there is no recipient. `names_zone` means that the message itself may name its zone.
        """


class AcceptanceReporter(Protocol):
    """Interface: creates messages that report accepted mail to other programs."""

    def accepted(self, message: model.Message) -> list[OwnMessage]:
        """Return the messages that report this accepted message, to be stored together with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedContext:
    """The objects that all listeners of a worker share, except the store.

    `access` is `None` without [[access]], `rewriting` without [[rewrite]], `srs` without [srs], and `users`
    if no listener offers AUTH. `named` finds the user of a token. With `hash_bodies`, body hashes for DKIM
    are computed while bodies arrive, which is cheapest. `capture_zone` is the first zone that captures its
    mail instead of sending it, or "". `zone_sizes` is the maximum message size, in bytes, of each zone that
    has one. `idempotency_window` is in seconds.
    """

    memory: SessionMemory = field(default_factory=lambda: SessionMemory(sys.maxsize))
    error_delays: ErrorDelays = field(default_factory=ErrorDelays)
    access: AccessRules | None = None
    users: Users | None = None
    named: Authenticator | None = None
    guard: Guard | None = None
    sender_domains: SenderDomains | None = None
    bursts: Bursts | None = None
    rewriting: RewriteRules | None = None
    webhooks: AcceptanceReporter | None = None
    srs: Srs | None = None
    srs_recipients: SrsRecipients = field(default_factory=SrsRecipients)
    hash_bodies: bool = False
    capture_zone: str = ""
    zone_sizes: Mapping[str, int] = field(default_factory=dict)
    orders: SuspensionCheck | None = None
    idempotency_window: float = DAY

    def fields(self) -> dict[str, Any]:  # Any: values of every field's type
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerContext(SharedContext):
    """The objects that all sessions of a listener share, with values derived from its settings. It performs
    their lookups; `asked` are the events for which one is needed.

    `certificates` is `None` if the listener has no TLS. `dropped` are the names of fields that are removed
    from every message, in lower case. `lists` is locked while a message with many recipients is stored.
    `first_look` is the number of seconds until a new session can first exceed a time limit.
    """

    settings: ListenerSettings
    hostname: str
    store: QueueStore
    ids: model.MessageIdSource
    choose_zone: ChooseZone
    events: Events
    clock: Clock
    certificates: Certificates | None = None
    policy: AskedPolicy | None = None
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    lists: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked: frozenset[type] = field(init=False)
    greeting: Greeting = field(init=False)
    grants: GrantTable = field(init=False)
    clients: AccessPolicy = field(init=False)
    zone_header: ZoneHeader | None = field(init=False)
    dropped: frozenset[str] = field(init=False)
    greets_at_once: bool = field(init=False)
    first_look: float = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        implicit = settings.tls is ListenerTls.IMPLICIT
        asked = frozenset(self.policy.asked if self.policy is not None else ())
        if settings.check_sender_domain and self.sender_domains is not None:
            asked |= {Mail}
        derived = {
            "asked": asked,
            "greeting": Greeting(self.hostname, settings),
            "grants": grant_table(settings),
            "clients": AccessPolicy(settings),
            "zone_header": ZoneHeader.of(settings),
            "dropped": dropped_headers(settings),
            "greets_at_once": not implicit and Connect not in asked,
            "first_look": min(settings.idle_timeout, settings.transaction_timeout, HANDSHAKE),
        }
        for name, value in derived.items():
            # This is how a frozen dataclass sets derived fields.
            object.__setattr__(self, name, value)

    async def ask(self, question: Question) -> LookupResult:
        """Perform the lookup on which the reply to a command depends. Raise only CancelledError."""
        try:
            if not isinstance(question, Event):
                return await question()
            domains = self.sender_domains if self.settings.check_sender_domain else None
            if isinstance(question, Mail) and domains is not None:
                reply = await domains.check(model.domain_of(Mailbox(question.sender)))
                if reply is not None:
                    return LookupResult(Decision(reply=reply), reason=Reason.SENDER_DOMAIN)
            return LookupResult(await self._decide(question))
        except Exception as error:  # noqa: BLE001 - rule 3: unknown trouble is temporary
            self.events.error("inbound", error)
            return LookupResult(_NOT_NOW, LoginResult(LoginKind.BROKEN), reason=Reason.LOCAL_ERROR)

    async def _decide(self, event: Event) -> Decision:
        if self.policy is not None and type(event) in self.policy.asked:
            return await self.policy.ask(event)
        return ACCEPT

    async def wait(self, seconds: float) -> LookupResult:
        """Wait before the reply to an error is sent."""
        await asyncio.sleep(seconds)
        return LookupResult()

    async def limits_of(self, user: str) -> LookupResult:
        """Read the limits of a user who begins a transaction with MAIL."""
        assert self.guard is not None
        return LookupResult(allowance=await self.guard.allowance(user))

    async def log_in(self, client: ClientInfo, mechanism: str, credentials: Credentials) -> LookupResult:
        """Check the credentials that a client has sent with AUTH."""
        if self.users is None:
            return LookupResult(login=LoginResult(LoginKind.BROKEN, detail="no users"))
        ask = partial(self._presented, client, mechanism, credentials)
        asked = ask if PresentedLogin in self.asked else None
        login = await self.users.check(credentials, client.address, asked)
        if login.kind is not LoginKind.OK or login.user is None:
            return LookupResult(login=login)
        event = Auth(client=client, user=login.user.name, mechanism=mechanism)
        return LookupResult(await self._decide(event), login)

    async def _presented(self, client: ClientInfo, mechanism: str, credentials: Credentials) -> LoginResult:
        """Call the operator's authenticator with the credentials of a client."""
        name, password = credentials.user, credentials.password
        event = PresentedLogin(client=client, user=name, password=password, mechanism=mechanism)
        reply = (await self._decide(event)).reply
        if reply is None:
            return LoginResult(LoginKind.OK, User(name=name, hash=""))
        if reply.is_transient:
            return LoginResult(LoginKind.BROKEN, detail=f"the authenticator: {reply}")
        return LoginResult(LoginKind.WRONG, detail="the authenticator rejects the login")

    def guarded(self, refusal: Refusal) -> ServerReply:
        """Return the reply to mail that exceeds the user's limits, and count it if a quota is used up."""
        if refusal.quota:
            self.events.metrics.quota_refused.add((refusal.quota,))
        return structs.replace(refused(refusal.reply, refusal.reason), retry_after=refusal.retry_after)

    def change_envelope(
        self,
        changes: Changes,
        transaction: MailTransaction,
        client_state: ClientState,
        *,
        step: str,
        given: model.Recipient | None = None,
        given_address: str = "",
    ) -> tuple[ServerReply, str] | None:
        """Apply an aiosmtpd handler's changes to the envelope, or return the refusal and its cause. `step` is
        the name of the policy's step.

        `given` is the recipient of the current RCPT command, and `given_address` its address in that command.
        The transaction does not include it yet.
        """
        mail, known = transaction.mail, transaction.recipients
        wanted = {key: each for key, each in known.items() if each.address not in changes.removed}
        try:
            sender = mail.sender
            if changes.sender is not None:
                sender = _checked(reverse_path(f"<{changes.sender}>"), smtputf8=mail.smtputf8)
            added = [_checked(forward_path(f"<{each}>"), smtputf8=mail.smtputf8) for each in changes.added]
        except CommandError as error:
            return self._unusable(step, f"it set an invalid address: {error.reply}")
        for mailbox in added:
            recipient = model.Recipient(address=mailbox) if given is None else renamed(given, mailbox)
            wanted.setdefault(model.recipient_key(mailbox), recipient)
        addresses = [each.address for each in wanted.values()]
        if given is not None and given_address not in changes.removed:
            addresses.append(given.address)
        refusals = self._change_refusals(changes, transaction, client_state, sender, addresses)
        if (refusal := next(refusals, None)) is not None:
            return refusal
        transaction.mail = mail if sender == mail.sender else structs.replace(mail, sender=sender)
        transaction.recipients.clear()  # the same object, because it identifies the transaction
        transaction.recipients.update(wanted)
        transaction.rewritten += [("recipient policy", mailbox) for mailbox in added]
        return None

    def _unusable(self, step: str, cause: str) -> tuple[ServerReply, str]:
        self.events.policy_failed(step, FailureKind.BAD_DECISION, cause)
        return UNUSABLE, cause

    def _change_refusals(
        self,
        changes: Changes,
        transaction: MailTransaction,
        client_state: ClientState,
        sender: Mailbox,
        addresses: Sequence[Mailbox],
    ) -> Iterator[tuple[ServerReply, str]]:
        """Yield the reasons for which these changes to the envelope are not allowed. The first refusal is
        enough.
        """
        if changes.sender is not None and not client_state.may_send_as(sender):
            yield replies.NOT_YOUR_ADDRESS, f"the handler changed the sender to {sender}"
        if changes.added and not client_state.grants.may_relay:
            yield replies.RELAYING_DENIED, f"the handler added {changes.added[0]}"
        most, after = self.settings.max_recipients, "after the handler's changes"
        if changes.added or changes.sender is not None:
            if len(addresses) > most:
                yield replies.too_many_recipients(most), "including those added by the handler"
            if (access := self.access) is not None:
                for address in addresses:
                    if reply := access.decide(client_state.origin, sender, address):
                        yield refused(reply, Reason.ACCESS), f"{address} {after}"
        if (allowance := transaction.allowance) is not None:
            for number, address in enumerate(addresses):
                if refusal := allowance.rcpt_refusal(address, number):
                    yield self.guarded(refusal), f"{address} {after}"


def _checked(parsed: tuple[Mailbox, str], *, smtputf8: bool) -> Mailbox:
    """Return the address of a path that an aiosmtpd handler has set. Raise CommandError if the path is
    invalid.
    """
    mailbox, rest = parsed
    if rest:
        raise CommandError(Reply(501, "1.3", "Bad address syntax"))
    if not smtputf8:
        require_ascii(mailbox)
    return mailbox


def dropped_headers(settings: ListenerSettings) -> frozenset[str]:
    names = {name.lower() for name in settings.drop_headers} | {IDEMPOTENCY_KEY}
    if settings.zone_header:
        names.add(settings.zone_header.lower())
    return frozenset(names)
