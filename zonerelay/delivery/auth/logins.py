"""Credentials at work: which one is for a batch, whether it may be tried, and who is told what came of it.

- A refusal, by a smarthost (`login.py`) or by a token server, bounces nothing. It is told once, is a problem
  in `status` and metrics, and ends all tries with that credential at that zone for a pause (`accounts.py`).
  With one credential in the zone it is the destination's trouble, and suspends it; with several it is the
  message's.
- A secret that cannot be read, a token server that cannot be reached: mail waits, and the operator is told.
- Where a token from earlier is refused another is fetched and shown on a new connection, once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from zonerelay.config.credentials.secrets import SecretError
from zonerelay.config.tables.models import CredentialSettings, Settings, ZoneSettings
from zonerelay.delivery.auth.accounts import Account, digest
from zonerelay.delivery.auth.login import Dialog, Login, NoLogin, Prepared, StaleTokenError, Stop
from zonerelay.delivery.auth.oauth import Post, TokenSource, post
from zonerelay.delivery.auth.oauth_grants import TokenError
from zonerelay.delivery.auth.secret_files import Secrets
from zonerelay.delivery.auth.token_files import KeptTokens
from zonerelay.delivery.peer.connection_key import Terms
from zonerelay.model.clock import Clock
from zonerelay.model.outbox import is_mailbox_zone
from zonerelay.model.outcome import Scope
from zonerelay.model.reply import Reply
from zonerelay.routing.zones.address_patterns import AddressPatterns
from zonerelay.smtp.client.sasl import Identity

_Session = TypeVar("_Session")
Senders = Mapping[str, AddressPatterns]


class Reports(Protocol):
    """Who is told; `telemetry.smarthosts` has it."""

    def declare(self, zones: Iterable[str]) -> None: ...

    def answered(self, zone: str, result: str) -> None:
        """`ok`, `refused` or `failed`; `broken`: it could not even be tried."""

    def refused(self, zone: str, credential: str, host: str, reply: str) -> None: ...

    def broken(self, zone: str, credential: str, problem: str) -> None: ...

    def restored(self, zone: str, credential: str, host: str) -> None: ...

    def token_trouble(self, credential: str, problem: str) -> None: ...


class Logins:
    """One per worker. `resume(zone)`: its mail may be tried again now."""

    def __init__(
        self,
        clock: Clock,
        reports: Reports,
        environment: Mapping[str, str],
        *,
        directory: Path,
        post: Post = post,
    ) -> None:
        self._clock = clock
        self._reports = reports
        self._secrets = Secrets(environment)
        self._kept = KeptTokens(directory)
        self._post = post
        self._accounts: dict[tuple[str, str], Account] = {}
        self._credentials: dict[str, CredentialSettings] = {}
        # Of mailboxes, each under the name of the one zone that logs in with it.
        self._mailboxes: dict[str, CredentialSettings] = {}
        self._patterns: Senders = {}
        self._tokens: dict[str, TokenSource] = {}
        self._retired: set[asyncio.Task[None]] = set()
        self.resume: Callable[[str], None] = _nobody

    # ---- settings and operators ---------------------------------------------------------------

    def configure(
        self, credentials: Sequence[CredentialSettings], senders: Senders, zones: Sequence[ZoneSettings]
    ) -> None:
        """Go by these from now on; whatever was refused may be tried again. `senders`: see below."""
        old = self._credentials
        self._credentials = {each.name: each for each in credentials} | self._mailboxes
        self._patterns = senders
        self._secrets.forget()
        for name in [name for name in self._tokens if self._credentials.get(name) != old.get(name)]:
            self._retire(self._tokens.pop(name))
        wanted = {(zone.name, name) for zone in zones for name in zone.credentials}
        wanted |= {(name, name) for name in self._mailboxes}
        self._reports.declare(sorted({zone for zone, _ in wanted}))
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
        """That of a mailbox; its name is its zone's. It may have been tried in vain before."""
        name = credential.name
        self._mailboxes[name] = self._credentials[name] = credential
        account = self._accounts.get((name, name))
        if account is not None:
            account.doubt()
            self.forgive(name)

    def withdraw(self, name: str) -> None:
        """The mailbox is not used any more."""
        self._mailboxes.pop(name, None)
        self._credentials.pop(name, None)
        self._accounts.pop((name, name), None)

    def passwords_of_mailboxes(self, read: Callable[[str], str]) -> None:
        """`read(zone)` raises SecretError."""
        self._secrets.of_mailbox = read

    def forgive(self, zone: str) -> None:
        """An operator wants it tried now."""
        for account in self._accounts.values():
            if account.zone == zone and account.problem:
                account.forgive()
                if account.credential in self._tokens:
                    self._tokens[account.credential].retry_now()

    def problems(self) -> Iterator[str]:
        """For `status`."""
        for account in self._accounts.values():
            if account.problem:
                where = f" at {account.host}" if account.host else ""
                who = f"zone {account.zone} cannot log in{where} as {account.credential}"
                yield f"{who}: {account.problem}"

    def standing(self) -> Iterator[tuple[str, str, bool]]:
        """Zone, credential and whether it can log in, of those that have tried."""
        for account in self._accounts.values():
            if account.is_known and not is_mailbox_zone(account.zone):
                yield account.zone, account.credential, not account.problem

    async def close(self) -> None:
        for source in self._tokens.values():
            await source.close()
        await asyncio.gather(*self._retired)

    def _retire(self, source: TokenSource) -> None:
        task = asyncio.get_running_loop().create_task(source.close())
        self._retired.add(task)
        task.add_done_callback(self._retired.discard)

    # ---- one batch ----------------------------------------------------------------------------

    def credential_for(self, zone: ZoneSettings, sender: str) -> CredentialSettings:
        """The zone's first that is for this envelope sender. Raises NoLogin."""
        credential = self._credentials.get(first_for(sender, zone, self._patterns))
        if credential is not None:
            return credential
        text = f"no credential of zone {zone.name} is for this sender"
        raise NoLogin(Reply(451, "7.0", text), Scope.LOCAL)

    def explain(self, zone: ZoneSettings, sender: str) -> str:
        """As whom a zone with credentials logs in for this sender, and what keeps it from that."""
        name = first_for(sender, zone, self._patterns)
        account = self._accounts.get((zone.name, name))
        return f"{name}, which cannot log in: {account.problem}" if account and account.problem else name

    async def opening(self, terms: Terms, open_with: Callable[[Login], Awaitable[_Session]]) -> _Session:
        """A session that is logged in. `open_with` connects, and has the log-in `run`. Raises HostTrouble."""
        login = await self._prepare(terms)
        try:
            return await open_with(login)
        except StaleTokenError as error:
            return await open_with(await self._prepare(terms, refused=error.token))

    async def _prepare(self, terms: Terms, *, refused: str = "") -> Login:
        credential = terms.key.credential
        assert credential is not None
        zone = terms.zone
        account = self._accounts.get((zone.name, credential.name))
        if account is None:
            account = self._accounts[zone.name, credential.name] = Account(zone.name, credential.name)
        stop = Stop(account, Scope.HOST if len(zone.credentials) == 1 else Scope.MESSAGE)
        try:
            material = await self._material(credential)
            if not refused and not account.may_try(material, self._clock.monotonic()):
                raise stop.exception()
            identity, new = await self._identity(credential, refused)
        except (SecretError, TokenError) as error:
            final = isinstance(error, TokenError) and error.refused
            self._broken(account, str(error), await self._material_or_none(credential) if final else None)
            raise stop.exception() from error
        # A server may have replaced the refresh token meanwhile.
        if credential.token_url:
            material = await self._material_or_none(credential)
        return Login(self, Prepared(credential, identity, material, terms.tls.mode, stop, new))

    async def _material(self, credential: CredentialSettings) -> str:
        if credential.token_url:
            return digest(credential.user, *await self._token_source(credential).material())
        return digest(credential.user, await self._secrets.get(credential.password))

    async def _material_or_none(self, credential: CredentialSettings) -> str:
        with contextlib.suppress(SecretError):  # it is told at the next try, which reads it again
            return await self._material(credential)
        return ""

    async def _identity(self, credential: CredentialSettings, refused: str) -> tuple[Identity, bool]:
        """With what to log in, and whether it is certainly not out of date; not with the `refused` token."""
        if not credential.token_url:
            return Identity(credential.user, await self._secrets.get(credential.password)), True
        source = self._token_source(credential)
        if refused:
            return Identity(credential.user, await source.another_than(refused)), True
        token, new = await source.token()
        return Identity(credential.user, token), new

    def _token_source(self, credential: CredentialSettings) -> TokenSource:
        source = self._tokens.get(credential.name)
        if source is None:
            name = credential.name
            source = self._tokens[name] = TokenSource(
                credential,
                secrets=self._secrets,
                kept=self._kept,
                clock=self._clock,
                warn=lambda text: self._reports.token_trouble(name, text),
                post=self._post,
            )
        return source

    # ---- what came of it ----------------------------------------------------------------------

    def _broken(self, account: Account, problem: str, material: str | None) -> None:
        """It could not be tried. `material`: with these secrets, which somebody has to correct."""
        news = problem != account.problem
        if material is None:
            account.problem, account.host, account.address = problem, "", ""
            account.doubt()
        else:
            now = self._clock.monotonic()
            account.refuse(problem, host="", address="", material=material, now=now)
        self._reports.answered(account.zone, "broken")
        if news:
            self._reports.broken(account.zone, account.credential, problem)

    def refused(self, account: Account, dialog: Dialog, problem: str, material: str) -> None:
        if account.credential in self._tokens:
            self._tokens[account.credential].forget()
        now = self._clock.monotonic()
        account.refuse(problem, host=dialog.who, address=dialog.address, material=material, now=now)
        self._reports.answered(account.zone, "refused")
        self._reports.refused(account.zone, account.credential, dialog.who, problem)

    def failed(self, account: Account) -> None:
        self._reports.answered(account.zone, "failed")

    def accepted(self, account: Account, dialog: Dialog, material: str) -> None:
        news = account.accept(material)
        self._reports.answered(account.zone, "ok")
        if news:
            self._reports.restored(account.zone, account.credential, dialog.who)


def senders_of(credentials: Sequence[CredentialSettings]) -> Senders:
    """Whom each is for, of those that are not for everybody. Raises ValueError."""
    return {each.name: AddressPatterns(each.sender) for each in credentials if each.sender}


def first_for(sender: str, zone: ZoneSettings, senders: Senders) -> str:
    """The name of the zone's first credential that is for this envelope sender; `""` when none is."""
    return next((name for name in zone.credentials if name not in senders or senders[name].match(sender)), "")


def token_directory(settings: Settings) -> Path:
    """Where refresh tokens are kept that cannot be written to where they came from: beside the spool."""
    return settings.spool.path.parent / "refresh-tokens"


def _nobody(zone: str) -> None:
    """Until a scheduler listens."""
