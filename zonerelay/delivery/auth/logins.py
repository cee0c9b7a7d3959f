"""Logs in to smarthosts: chooses the credential of a batch, decides whether it may be tried, and reports the
result.

- A login needs TLS. A connection whose certificate was not verified is accepted only if the operator set `tls
  = "required"`.
- A refusal (5yz to AUTH, no mechanism in common, a server that cannot prove its identity, a permanent error
  of a token server) bounces no mail. It is reported once, is a problem in `status` and metrics, and prevents
  all tries with the credential at the zone for a pause (`accounts.py`). With one credential in the zone the
  refusal suspends the destination; with several it defers the message.
- A 4yz reply, a broken connection and a malformed answer are failures of the host: the courier tries another
  host.
- If a secret cannot be read or a token server is unreachable, mail waits and the operator is notified.
- A token that was fetched earlier may have been revoked since, so its refusal is a StaleTokenError. Another
  token is fetched and tried on a new connection, once.
"""

from __future__ import annotations

import contextlib
import secrets as random_secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from zonerelay.config.credentials.secrets import SecretError
from zonerelay.config.settings import CredentialSettings, Settings, TlsMode, ZoneSettings, passwords_that_end
from zonerelay.delivery.auth import accounts
from zonerelay.delivery.auth.accounts import Account, RefreshTokenFiles, Secrets, digest
from zonerelay.delivery.auth.oauth import Post, TokenError, TokenSource, post
from zonerelay.delivery.peer import HostFailure, Terms
from zonerelay.delivery.tls.plan import ENCRYPTED
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import QueueKind, queue_of
from zonerelay.model.reply import Reply, Scope
from zonerelay.process.threads import LOGIN
from zonerelay.routing.zones.address_patterns import AddressPatterns
from zonerelay.smtp.client import sasl
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.replies import make_reply, printable

if TYPE_CHECKING:  # a command that only explains needs no metrics
    from zonerelay.telemetry.events.events import Events
    from zonerelay.telemetry.metrics.instruments import Figures

MAX_SHOWN = 200
MAX_WORDS = 500
"""Characters of a reply that are kept, because the text is stored with every message that waits."""

_PASSWORDS_OFF = ("7.30", "7.139")
"""With one of these codes Microsoft refuses passwords, either for everyone or for one tenant or mailbox."""
NO_PASSWORDS = (
    "password logins are disabled there; use XOAUTH2 (token_url; docs/deliver/smarthosts.md), or ask an "
    "administrator to enable them"
)


class AuthDialog(Protocol):
    """Sends one command at a time on a connection during its login."""

    who: str
    address: str

    async def say(self, line: bytes) -> tuple[int, str]:
        """Send a line and return the reply's code and text. Raise HostFailure."""


class NoLogin(HostFailure):
    """The batch cannot log in at any host of the zone with any credential. The attempt does not count."""

    def __init__(self, reply: Reply, scope: Scope, *, address: str = "") -> None:
        super().__init__(reply, address=address, asked=False, scope=scope)


class StaleTokenError(Exception):
    """A cached access token was rejected. A new one may be accepted."""

    def __init__(self, token: str) -> None:
        super().__init__("a cached access token was rejected")
        self.token = token


def _no_login(account: Account, scope: Scope) -> NoLogin:
    """Return the error for mail that cannot be sent because its credential cannot log in."""
    where = f" at {account.host}" if account.host else ""
    why = account.problem or "the credential has changed"
    text = f"zone {account.zone} cannot log in{where}: {why}"
    return NoLogin(Reply(454, "7.0", text), scope, address=account.address)


@dataclass(slots=True, eq=False)
class Login:
    """The login (SMTP AUTH) of one account on one outbound connection. `material` is described in `Account`.
    `scope` is the scope of a refusal.

    `is_new` is true if the secret is certainly up to date. `epoch` is the account's when the login was
    permitted: a refusal since then prevents it.
    """

    logins: Logins
    account: Account
    scope: Scope
    credential: CredentialSettings
    identity: sasl.SaslIdentity
    material: str
    mode: TlsMode
    is_new: bool
    epoch: int

    async def run(self, dialog: AuthDialog, capabilities: Capabilities, *, security: str) -> None:
        """Log in on a connection after EHLO. `security` is the verified security of the connection.

        Raise HostFailure (including NoLogin) and StaleTokenError.
        """
        self._check_tls(dialog, security)
        credential = self.credential
        wanted = sasl.XOAUTH2 if credential.token_url else credential.mechanism.value.upper()
        name = sasl.choose_mechanism(wanted, capabilities.auth)
        if name is None:
            offered = ", ".join(sorted(capabilities.auth)) or "no AUTH at all"
            missing = "a mechanism for passwords" if wanted == sasl.ANY_PASSWORD else wanted
            raise self._refused(
                dialog, f"the server does not offer {missing}, only {printable(offered)[:MAX_SHOWN]}"
            )
        async with self.account.one_at_a_time(self.material):
            await self._log_in(dialog, name)

    def _check_tls(self, dialog: AuthDialog, security: str) -> None:
        if security == "none":
            text = f"{dialog.who} does not use TLS, so the relay does not log in"
            raise HostFailure(Reply(451, "7.4", text), address=dialog.address)
        if security == ENCRYPTED and self.mode is not TlsMode.REQUIRED:
            text = f"the certificate of {dialog.who} was not verified, so the relay does not log in"
            raise HostFailure(Reply(451, "7.5", text), address=dialog.address)

    async def _log_in(self, dialog: AuthDialog, name: str) -> None:
        account = self.account
        if account.epoch != self.epoch:
            raise _no_login(self.account, self.scope)
        token = digest(self.identity.secret)
        if not self.is_new and token == account.stale:
            raise StaleTokenError(self.identity.secret)
        try:
            nonce = random_secrets.token_urlsafe(24)
            talking = sasl.SaslConversation(sasl.make_mechanism(name, self.identity, nonce))
            reply = await self._converse(dialog, talking)
        except sasl.SaslError as error:
            raise self._refused(dialog, str(error)) from error
        if reply.is_positive:
            self.logins.accepted(account, dialog, self.material)
            return
        words = f"{reply} ({talking.mechanism.explanation})" if talking.mechanism.explanation else str(reply)
        words = sasl.without_secrets(words, self.identity)[:MAX_WORDS]
        if reply.is_transient:
            self.logins.events.login_answered(account.zone, "failed")
            text = f"{dialog.who} rejected the login: {words}"
            raise HostFailure(Reply(454, reply.detail or "7.0", text), address=dialog.address)
        if not self.is_new:
            account.stale = token
            raise StaleTokenError(self.identity.secret)
        if reply.detail in _PASSWORDS_OFF and not self.credential.token_url:
            words = f"{words}; {NO_PASSWORDS}"
        raise self._refused(dialog, words)

    async def _converse(self, dialog: AuthDialog, talking: sasl.SaslConversation) -> Reply:
        """Run the SASL dialog and return the last reply. Raise HostFailure and SaslError."""
        line = talking.begin()
        while True:
            code, text = await dialog.say(line)
            if sasl.is_slow(talking.mechanism):
                line = await LOGIN.run(talking.receive, code, text)
            else:
                line = talking.receive(code, text)
            if talking.done:
                if not (200 <= code <= 599 and code // 100 != 3):
                    reply = Reply(451, "5.0", f"{dialog.who} replied to AUTH with {code}")
                    raise HostFailure(reply, address=dialog.address)
                return make_reply(code, [printable(each) for each in text.split("\n")])

    def _refused(self, dialog: AuthDialog, problem: str) -> NoLogin:
        self.logins.refused(self.account, dialog, problem, self.material)
        return _no_login(self.account, self.scope)


_Session = TypeVar("_Session")
Senders = Mapping[str, AddressPatterns]


@dataclass(eq=False, repr=False)
class Logins:
    """The logins of a worker at smarthosts: the choice of credentials, their accounts and the results.
    `resume(zone)` is called when the zone's mail may be tried again.
    """

    clock: Clock
    events: Events
    environment: InitVar[Mapping[str, str]]
    _: KW_ONLY
    directory: InitVar[Path]
    resume: Callable[[str], None] = lambda zone: None
    post: Post = post

    def __post_init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self._secrets = Secrets(environment)
        self._kept = RefreshTokenFiles(directory)
        self._accounts: dict[tuple[str, str], Account] = {}
        self._credentials: dict[str, CredentialSettings] = {}
        # The credentials of mailboxes, each under the name of the only zone that uses it.
        self._mailboxes: dict[str, CredentialSettings] = {}
        self._patterns: Senders = {}
        self._ending: list[str] = []
        # A batch from before a reload ends with the settings that it began with.
        self._tokens: dict[CredentialSettings, TokenSource] = {}

    # ---- settings and operators ---------------------------------------------------------------

    def configure(
        self, credentials: Sequence[CredentialSettings], senders: Senders, zones: Sequence[ZoneSettings]
    ) -> None:
        """Apply new settings of credentials and zones. A credential that was refused may be tried again.
        `senders` is described in `senders_of`.
        """
        old = self._credentials
        self._credentials = {each.name: each for each in credentials} | self._mailboxes
        self._patterns = senders
        for each in [each for each in self._tokens if self._credentials.get(each.name) != each]:
            if not self._tokens[each].is_fetching:  # batches wait for the answer, which may rotate the token
                del self._tokens[each]
        self._ending = [
            f"zone {zone.name} logs in at {host} with a password ({name}): {why}"
            for zone in zones
            for name, host, why in passwords_that_end(credentials, zone)
        ]
        wanted = {(zone.name, name) for zone in zones for name in zone.credentials}
        wanted |= {(name, name) for name in self._mailboxes}
        self.events.declare_logins(sorted({zone for zone, _ in wanted}))
        for key, account in list(self._accounts.items()):
            if key not in wanted:
                del self._accounts[key]
                continue
            if self._credentials.get(key[1]) != old.get(key[1]):
                account.doubt()
            if account.problem:
                self.forgive(key[0])
                self.resume(key[0])

    def provide(self, credential: CredentialSettings) -> None:
        """Add the credential of an outbox mailbox, under the name of the mailbox's zone. An earlier refusal
        is forgotten.
        """
        name = credential.name
        self._mailboxes[name] = self._credentials[name] = credential
        account = self._accounts.get((name, name))
        if account is not None:
            account.doubt()
            self.forgive(name)

    def withdraw(self, name: str) -> None:
        """Remove the credential of a mailbox."""
        self._mailboxes.pop(name, None)
        self._credentials.pop(name, None)
        self._accounts.pop((name, name), None)

    def passwords_of_mailboxes(self, read: Callable[[str], str]) -> None:
        """Set the function that returns the password of a mailbox. `read(zone)` raises SecretError."""
        self._secrets.of_mailbox = read

    def forgive(self, zone: str) -> None:
        """Allow an immediate login attempt in a zone, because an operator requested one."""
        for account in self._accounts.values():
            if account.zone == zone and account.problem:
                account.forgive()

    def problems(self) -> Iterator[str]:
        """Yield one line for each credential that cannot log in or is about to expire, for `status`."""
        yield from self._ending
        for account in self._accounts.values():
            if account.problem:
                where = f" at {account.host}" if account.host else ""
                who = f"zone {account.zone} cannot log in{where} as {account.credential}"
                yield f"{who}: {account.problem}"

    def login_states(self) -> dict[str, Figures]:
        """Return, by zone and credential, whether the last login succeeded, as a metric."""
        states = {
            (account.zone, account.credential): float(not account.problem)
            for account in self._accounts.values()
            if account.is_known and queue_of(account.zone).kind is not QueueKind.MAILBOX
        }
        return {"zonerelay_smarthost_login": states}

    async def close(self) -> None:
        for source in list(self._tokens.values()):
            await source.close()

    # ---- one batch ----------------------------------------------------------------------------

    def credential_for(self, zone: ZoneSettings, sender: str) -> CredentialSettings:
        """Return the zone's first credential that applies to this envelope sender. Raise NoLogin."""
        credential = self._credentials.get(first_for(sender, zone, self._patterns))
        if credential is not None:
            return credential
        text = f"no credential of zone {zone.name} applies to this sender"
        raise NoLogin(Reply(451, "7.0", text), Scope.LOCAL)

    def explain(self, zone: ZoneSettings, sender: str) -> str:
        """Return the credential that a zone uses for this sender, and the problem that prevents its login, if
        any.
        """
        name = first_for(sender, zone, self._patterns)
        account = self._accounts.get((zone.name, name))
        return f"{name}, which cannot log in: {account.problem}" if account and account.problem else name

    async def opening(self, terms: Terms, open_with: Callable[[Login], Awaitable[_Session]]) -> _Session:
        """Open a connection that is logged in, and return its session. `open_with` connects and runs the
        login. Raise HostFailure.
        """
        login = await self._prepare(terms)
        try:
            try:
                return await open_with(login)
            except StaleTokenError as error:
                login = await self._prepare(terms, refused=error.token)
                return await open_with(login)
        except HostFailure:
            login.account.not_tried(login.epoch)
            raise

    async def _prepare(self, terms: Terms, *, refused: str = "") -> Login:
        credential = terms.key.credential
        assert credential is not None
        zone = terms.zone
        account = self._accounts.get((zone.name, credential.name))
        if account is None:
            account = self._accounts[zone.name, credential.name] = Account(zone.name, credential.name)
        scope, epoch = Scope.HOST if len(zone.credentials) == 1 else Scope.MESSAGE, account.epoch
        try:
            material = await self._material(credential)
            if not refused and not account.may_try(material, self.clock.monotonic()):
                raise _no_login(account, scope)
            identity, new = await self._identity(credential, refused)
        except (SecretError, TokenError) as error:
            is_final = isinstance(error, TokenError) and error.refused
            material = await self._material_or_none(credential)
            is_current = self._credentials.get(credential.name) == credential
            if is_current and account.epoch == epoch:  # batches that shared a request count its failure once
                self._broken(account, str(error), material, is_final=is_final)
            raise _no_login(account, scope) from error
        # A server may have replaced the refresh token by now.
        if credential.token_url:
            material = await self._material_or_none(credential)
        return Login(self, account, scope, credential, identity, material, terms.tls.mode, new, epoch)

    async def _material(self, credential: CredentialSettings) -> str:
        if credential.token_url:
            return digest(credential.user, *await self._token_source(credential).material())
        return digest(credential.user, await self._secrets.get(credential.password))

    async def _material_or_none(self, credential: CredentialSettings) -> str:
        with contextlib.suppress(SecretError):  # the next try reads it again and reports the error
            return await self._material(credential)
        return ""

    async def _identity(self, credential: CredentialSettings, refused: str) -> tuple[sasl.SaslIdentity, bool]:
        """Return the user and password or token for a login, and whether they are certainly up to date. The
        `refused` token is never returned.
        """
        if not credential.token_url:
            return sasl.SaslIdentity(credential.user, await self._secrets.get(credential.password)), True
        source = self._token_source(credential)
        if refused:
            return sasl.SaslIdentity(credential.user, await source.another_than(refused)), True
        token, new = await source.token()
        return sasl.SaslIdentity(credential.user, token), new

    def _token_source(self, credential: CredentialSettings) -> TokenSource:
        source = self._tokens.get(credential)
        if source is None:
            name = credential.name
            source = self._tokens[credential] = TokenSource(
                credential,
                secrets=self._secrets,
                kept=self._kept,
                clock=self.clock,
                warn=lambda text: self.events.token_problem(name, text),
                post=self.post,
            )
        return source

    # ---- what came of it ----------------------------------------------------------------------

    def _broken(self, account: Account, problem: str, material: str, *, is_final: bool) -> None:
        """Record that a login could not be tried. If it `is_final`, an operator has to correct the secrets
        `material`.
        """
        pauses = accounts.LOGIN_PAUSES if is_final else accounts.SHORT_PAUSES
        news = problem != account.problem
        account.refuse(problem, material=material, now=self.clock.monotonic(), pauses=pauses)
        self.events.login_answered(account.zone, "broken")
        if news:
            self.events.login_broken(account.zone, account.credential, problem)

    def refused(self, account: Account, dialog: AuthDialog, problem: str, material: str) -> None:
        for credential, source in self._tokens.items():
            if credential.name == account.credential:
                source.forget()
        now = self.clock.monotonic()
        account.refuse(problem, host=dialog.who, address=dialog.address, material=material, now=now)
        self.events.login_answered(account.zone, "refused")
        self.events.login_refused(account.zone, account.credential, dialog.who, problem)

    def accepted(self, account: Account, dialog: AuthDialog, material: str) -> None:
        news = account.accept(material)
        self.events.login_answered(account.zone, "ok")
        if news:
            self.events.login_restored(account.zone, account.credential, dialog.who)


def senders_of(credentials: Sequence[CredentialSettings]) -> Senders:
    """Return the sender patterns of each credential that is restricted to some senders. Raise ValueError."""
    return {each.name: AddressPatterns(each.sender) for each in credentials if each.sender}


def first_for(sender: str, zone: ZoneSettings, senders: Senders) -> str:
    """Return the name of the zone's first credential for this envelope sender, or `""` if there is none."""
    return next((name for name in zone.credentials if name not in senders or senders[name].match(sender)), "")


def token_directory(settings: Settings) -> Path:
    """Return the directory, next to the spool, for refresh tokens whose original file cannot be written."""
    return settings.spool.path.parent / "refresh-tokens"
