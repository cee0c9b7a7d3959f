"""One log-in on one connection: from EHLO's mechanisms to what the server's answer means.

- Never without TLS. A connection whose other end is not known (any certificate) will do only where the
  operator wrote `tls = "required"`.
- A refusal (5yz to AUTH, no mechanism in common, a server that cannot prove itself) ends the log-ins of the
  account (`accounts.py`). 4yz, a broken connection, nonsense are the host's trouble: another one is tried.
- A token that was fetched earlier may have been revoked since: that is a StaleTokenError, not a refusal.
"""

from __future__ import annotations

import asyncio
import secrets as random_secrets
from dataclasses import dataclass
from typing import Protocol

from zonerelay.config.settings import CredentialSettings, TlsMode
from zonerelay.delivery.auth.accounts import Account, digest
from zonerelay.delivery.peer.sockets import HostTrouble
from zonerelay.delivery.tls.verify import ENCRYPTED
from zonerelay.model.outcome import Scope
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.replies import make_reply, printable
from zonerelay.smtp.client.sasl import (
    ANY_PASSWORD,
    XOAUTH2,
    Conversation,
    Identity,
    SaslError,
    choose_mechanism,
    is_slow,
    make_mechanism,
    without_secrets,
)

MAX_SHOWN = 200
MAX_WORDS = 500  # of a reply: it is stored with every message that waits


class Dialog(Protocol):
    """One connection, one command at a time."""

    who: str
    address: str

    async def say(self, line: bytes) -> tuple[int, str]:
        """The reply's code and text. Raises HostTrouble."""


class NoLogin(HostTrouble):
    """No host of the zone needs to be tried with this batch. Costs no attempt."""

    def __init__(self, reply: Reply, scope: Scope, *, address: str = "") -> None:
        super().__init__(reply, address=address, asked=False)
        self.scope = scope


class StaleTokenError(Exception):
    """The token is not from just now, and was refused; another one may do."""

    def __init__(self, token: str) -> None:
        super().__init__("a token from earlier was refused")
        self.token = token


class Ledger(Protocol):
    """Where it is written down what came of a log-in; `logins.py` has it."""

    def accepted(self, account: Account, dialog: Dialog, material: str) -> None: ...

    def failed(self, account: Account) -> None: ...

    def refused(self, account: Account, dialog: Dialog, problem: str, material: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Stop:
    """What becomes of mail while the account has a problem."""

    account: Account
    scope: Scope

    def exception(self) -> NoLogin:
        account = self.account
        where = f" at {account.host}" if account.host else ""
        text = f"zone {account.zone} cannot log in{where}: {account.problem}"
        return NoLogin(Reply(454, "7.0", text), self.scope, address=account.address)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before a connection is made. `material`: see `Account`. `is_new`: the secret is certainly
    not out of date.
    """

    credential: CredentialSettings
    identity: Identity
    material: str
    mode: TlsMode
    stop: Stop
    is_new: bool


class Login:
    """For one connection."""

    def __init__(self, ledger: Ledger, prepared: Prepared) -> None:
        self._ledger = ledger
        self._prepared = prepared
        self._account = prepared.stop.account
        self._identity = prepared.identity
        self._epoch = self._account.epoch

    async def run(self, dialog: Dialog, capabilities: Capabilities, *, security: str) -> None:
        """On a connection with EHLO done. `security` as in `tls_check.Proof`.

        Raises HostTrouble (also NoLogin) and StaleTokenError.
        """
        self._check_tls(dialog, security)
        credential = self._prepared.credential
        wanted = XOAUTH2 if credential.token_url else credential.mechanism.value.upper()
        name = choose_mechanism(wanted, capabilities.auth)
        if name is None:
            offered = ", ".join(sorted(capabilities.auth)) or "no AUTH at all"
            missing = "a mechanism that takes a password" if wanted == ANY_PASSWORD else wanted
            raise self._refused(dialog, f"it does not offer {missing}, but {printable(offered)[:MAX_SHOWN]}")
        async with self._account.turn(self._prepared.material):
            await self._log_in(dialog, name)

    def _check_tls(self, dialog: Dialog, security: str) -> None:
        if security == "none":
            text = f"{dialog.who} has no TLS, and nobody logs in in clear text"
            raise HostTrouble(Reply(451, "7.4", text), address=dialog.address)
        if security == ENCRYPTED and self._prepared.mode is not TlsMode.REQUIRED:
            text = f"the certificate of {dialog.who} was not verified, so nobody logs in there"
            raise HostTrouble(Reply(451, "7.5", text), address=dialog.address)

    async def _log_in(self, dialog: Dialog, name: str) -> None:
        account = self._account
        if account.epoch != self._epoch:
            raise self._prepared.stop.exception()
        token = digest(self._identity.secret)
        if not self._prepared.is_new and token == account.stale:
            raise StaleTokenError(self._identity.secret)
        try:
            nonce = random_secrets.token_urlsafe(24)
            talking = Conversation(make_mechanism(name, self._identity, nonce))
            reply = await self._converse(dialog, talking)
        except SaslError as error:
            raise self._refused(dialog, str(error)) from error
        if reply.is_positive:
            self._ledger.accepted(account, dialog, self._prepared.material)
            return
        words = f"{reply} ({talking.mechanism.explanation})" if talking.mechanism.explanation else str(reply)
        words = without_secrets(words, self._identity)[:MAX_WORDS]
        if reply.is_transient:
            self._ledger.failed(account)
            text = f"{dialog.who} did not let us log in: {words}"
            raise HostTrouble(Reply(454, reply.detail or "7.0", text), address=dialog.address)
        if not self._prepared.is_new:
            account.stale = token
            raise StaleTokenError(self._identity.secret)
        raise self._refused(dialog, words)

    async def _converse(self, dialog: Dialog, talking: Conversation) -> Reply:
        """The last reply. Raises HostTrouble and SaslError."""
        line = talking.begin()
        while True:
            code, text = await dialog.say(line)
            if is_slow(talking.mechanism):
                line = await asyncio.to_thread(talking.receive, code, text)
            else:
                line = talking.receive(code, text)
            if talking.done:
                if not (200 <= code <= 599 and code // 100 != 3):
                    reply = Reply(451, "5.0", f"{dialog.who} answered AUTH with {code}")
                    raise HostTrouble(reply, address=dialog.address)
                return make_reply(code, [printable(each) for each in text.split("\n")])

    def _refused(self, dialog: Dialog, problem: str) -> NoLogin:
        self._ledger.refused(self._account, dialog, problem, self._prepared.material)
        return self._prepared.stop.exception()
