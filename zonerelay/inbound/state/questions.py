"""Lookups that a command must wait for: passwords, DNS and the operator's policy.

A command that needs a lookup returns a question. The session awaits `ask` and passes the verdict back.
Sessions without lookups create no task: `asked` lists the events for which a lookup is needed.

Promise: `ask` raises only CancelledError. An unexpected error is temporary (rule 3): the reply is 451 or 454.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Protocol

from zonerelay.config.credentials.file import User
from zonerelay.inbound.access.auth import AskForLogin, LoginKind, LoginResult
from zonerelay.inbound.access.guard import Allowance, Guard
from zonerelay.inbound.policy import ACCEPT, Auth, ClientInfo, Decision, Event, Mail
from zonerelay.inbound.policy.api import PresentedLogin
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.sasl import Credentials
from zonerelay.telemetry.events.events import Events


@dataclass(frozen=True, slots=True)
class LoginLookup:
    """Lookup: check the credentials of a client (AUTH)."""

    client: ClientInfo
    mechanism: str
    credentials: Credentials


@dataclass(frozen=True, slots=True)
class UserLimitsLookup:
    """Lookup: read the limits of a user who begins a transaction (MAIL)."""

    guard: Guard
    user: str


Question = LoginLookup | UserLimitsLookup | Event


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The result of a lookup. `login` answers a LoginLookup, and `allowance` a UserLimitsLookup. `reason` is
    the reason of a refusal.
    """

    decision: Decision = ACCEPT
    login: LoginResult | None = None
    allowance: Allowance | Refusal | None = None
    reason: Reason = Reason.POLICY


class Users(Protocol):
    """Interface: checks logins and finds users."""

    async def check(
        self, credentials: Credentials, client_address: str, ask: AskForLogin | None = None, /
    ) -> LoginResult: ...


class SenderDomainCheck(Protocol):
    """Interface: checks the domain of a sender."""

    async def check(self, domain: str) -> Reply | None: ...


class AskedPolicy(Protocol):
    """Interface: calls the operator's policy."""

    @property
    def asked(self) -> Set[type]: ...

    async def ask(self, event: Event) -> Decision: ...


@dataclass(eq=False, repr=False)
class Consultants:
    """Performs the lookups of one listener. Users, sender domains and policy are optional."""

    _: KW_ONLY
    events: Events
    users: Users | None = None
    sender_domains: SenderDomainCheck | None = None
    policy: AskedPolicy | None = None

    def __post_init__(self) -> None:
        self._by_policy = self.policy.asked if self.policy is not None else frozenset()
        self.asked: frozenset[type] = frozenset(self._by_policy)
        if self.sender_domains is not None:
            self.asked |= {Mail}

    async def ask(self, question: Question) -> LookupResult:
        try:
            if isinstance(question, LoginLookup):
                return await self._log_in(question)
            if isinstance(question, UserLimitsLookup):
                return LookupResult(allowance=await question.guard.allowance(question.user))
            if isinstance(question, Mail) and self.sender_domains is not None:
                reply = await self.sender_domains.check(domain_of(Mailbox(question.sender)))
                if reply is not None:
                    return LookupResult(Decision(reply=reply), reason=Reason.SENDER_DOMAIN)
            return LookupResult(await self._decide(question))
        except Exception as error:  # noqa: BLE001 - rule 3: unknown trouble is temporary
            self.events.error("inbound", error)
            return LookupResult(_NOT_NOW, LoginResult(LoginKind.BROKEN), reason=Reason.LOCAL_ERROR)

    async def _decide(self, event: Event) -> Decision:
        if self.policy is not None and type(event) in self._by_policy:
            return await self.policy.ask(event)
        return ACCEPT

    async def _log_in(self, question: LoginLookup) -> LookupResult:
        if self.users is None:
            return LookupResult(login=LoginResult(LoginKind.BROKEN, detail="no users"))
        if PresentedLogin in self._by_policy:
            ask = partial(self._presented, question)
            login = await self.users.check(question.credentials, question.client.address, ask)
        else:
            login = await self.users.check(question.credentials, question.client.address)
        if login.kind is not LoginKind.OK or login.user is None:
            return LookupResult(login=login)
        event = Auth(client=question.client, user=login.user.name, mechanism=question.mechanism)
        return LookupResult(await self._decide(event), login)

    async def _presented(self, question: LoginLookup) -> LoginResult:
        """Call the operator's authenticator."""
        name = question.credentials.user
        event = PresentedLogin(
            client=question.client,
            user=name,
            password=question.credentials.password,
            mechanism=question.mechanism,
        )
        reply = (await self._decide(event)).reply
        if reply is None:
            return LoginResult(LoginKind.OK, User(name=name, hash=""))
        if reply.is_transient:
            return LoginResult(LoginKind.BROKEN, detail=f"the authenticator: {reply}")
        return LoginResult(LoginKind.WRONG, detail="the authenticator rejects the login")


_NOT_NOW = Decision(reply=Reply(451, "3.0", "Local error, try again later"))
