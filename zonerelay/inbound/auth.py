"""Who a client is: credentials in, a `Login` out. One for all listeners of a worker.

- OK: the user, as the credentials file has it.
- WRONG: no such user, or not this password. Which of them is nobody's business: the same hash is computed.
  The answer waits longer each time (`attempts`), without holding a thread.
- LOCKED: too many failures of this client. Nothing is looked at, also not what was right a minute ago: a lock
  that opens for the right password is a way to look for it.
- BROKEN: the file cannot be used, too much is waiting, or something unexpected. Never the client's fault, so
  the answer is temporary, and nothing is counted against it.

A failure counts when its hash is done, whether or not the client is still there to hear of it.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config import passwords
from zonerelay.config.access import AuthSettings
from zonerelay.config.credentials import User
from zonerelay.inbound.attempts import Attempts
from zonerelay.inbound.credentials_watch import CredentialsWatch
from zonerelay.inbound.limits import Key, client_key
from zonerelay.inbound.password_check import (
    BusyError,
    ClosedError,
    Matches,
    PasswordChecks,
    RememberedPasswords,
)
from zonerelay.model.clock import Clock
from zonerelay.smtp.sasl import Credentials
from zonerelay.telemetry.events import Events


class LoginKind(enum.StrEnum):
    """Also the metric's label."""

    OK = "ok"
    WRONG = "wrong"
    LOCKED = "locked"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Login:
    """`user` is there when it is OK. `detail` is for the operator, never for the client."""

    kind: LoginKind
    user: User | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """`client` is what failures count against, `address` what the log shows."""

    credentials: Credentials
    address: str
    client: Key


_LOCKED = Login(LoginKind.LOCKED, detail="too many failed log-ins of this client")


class Authenticator:
    """Use it on one event loop. `secret` is the process's own and lives as long as it."""

    def __init__(
        self,
        settings: AuthSettings,
        *,
        clock: Clock,
        events: Events,
        secret: bytes,
        matches: Matches = passwords.matches,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._events = events
        self._sleep = sleep
        self._remembered = RememberedPasswords(secret)
        self._checks = PasswordChecks(matches)
        self._attempts = Attempts(max_failures=settings.max_client_failures, window=settings.forget_failures)
        self._file = self._watch(settings.credentials)
        self._tasks: set[asyncio.Task[tuple[Login, float]]] = set()

    def configure(self, settings: AuthSettings) -> None:
        """Other settings from now on. What failed until now still counts."""
        self._attempts.configure(max_failures=settings.max_client_failures, window=settings.forget_failures)
        if settings.credentials != self._file.path:
            self._remembered.clear()
            self._file = self._watch(settings.credentials)

    def close(self) -> None:
        """Nobody can log in any more; who waits for an answer gets BROKEN."""
        self._checks.close()

    @property
    def problem(self) -> str:
        """Why nobody can log in, as far as the last log-in showed; `""` when all is well."""
        return self._file.problem

    async def check(self, credentials: Credentials, client_address: str) -> Login:
        """Never raises but when cancelled, which is what a session does whose client has left."""
        attempt = _Attempt(credentials, client_address, client_key(client_address))
        known = self._at_once(attempt)
        if known is not None:
            self._report(attempt, known)
            return known
        task = asyncio.create_task(self._examine(attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Shielded: what was begun is counted and reported without the client, too.
        login, delay = await asyncio.shield(task)
        if delay:
            await self._sleep(delay)
        return login

    def _watch(self, path: Path) -> CredentialsWatch:
        return CredentialsWatch(path, events=self._events, changed=self._remembered.clear)

    def _at_once(self, attempt: _Attempt) -> Login | None:
        """What needs neither a thread nor a file: the way of an application that logs in all the time."""
        if self._attempts.locked(attempt.client, self._clock.monotonic()):
            return _LOCKED
        if not self._file.is_current() or self._file.users is None:
            return None
        user = self._file.users.get(attempt.credentials.user)
        if user is not None and self._remembered.holds(
            self._key(attempt, user.hash), self._clock.monotonic()
        ):
            return self._success(attempt, user)
        return None

    async def _examine(self, attempt: _Attempt) -> tuple[Login, float]:
        """The login, counted and reported, and how long its answer waits."""
        try:
            login = await self._ask(attempt)
        except BusyError:
            login = Login(LoginKind.BROKEN, detail="too many passwords wait to be checked")
        except ClosedError:
            login = Login(LoginKind.BROKEN, detail="the relay stops")
        except Exception as error:  # noqa: BLE001  (rule 3: unknown trouble is temporary)
            self._events.trouble("auth", error)
            login = Login(LoginKind.BROKEN, detail="unexpected error")
        delay = 0.0
        if login.kind is LoginKind.WRONG:
            delay = self._attempts.failed(attempt.client, self._clock.monotonic())
        self._report(attempt, login)
        return login, delay

    async def _ask(self, attempt: _Attempt) -> Login:
        await self._file.refresh()
        users, nobodys_hash = self._file.users, self._file.nobodys_hash
        if users is None:
            return Login(LoginKind.BROKEN, detail=self._file.problem)
        user = users.get(attempt.credentials.user)
        stored = user.hash if user is not None else nobodys_hash
        key = self._key(attempt, stored)
        right = await self._checks.check(key, stored, attempt.credentials.password, client=attempt.client)
        if self._attempts.locked(attempt.client, self._clock.monotonic()):
            # Guesses that went in side by side must not all be answered.
            return _LOCKED
        if user is None:
            return Login(LoginKind.WRONG, detail="no such user")
        if not right:
            return Login(LoginKind.WRONG, detail="wrong password")
        self._remembered.add(key, self._clock.monotonic())
        return self._success(attempt, user)

    def _success(self, attempt: _Attempt, user: User) -> Login:
        self._attempts.succeeded(attempt.client)
        return Login(LoginKind.OK, user)

    def _key(self, attempt: _Attempt, stored_hash: str) -> bytes:
        return self._remembered.key(attempt.credentials.user, attempt.credentials.password, stored_hash)

    def _report(self, attempt: _Attempt, login: Login) -> None:
        name = attempt.credentials.user
        # A name that is nobody's is not shown: people type their password there.
        known = self._file.users is not None and name in self._file.users
        self._events.login(login.kind, attempt.address, user=name if known else "")
