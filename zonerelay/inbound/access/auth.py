"""Checks logins: takes the credentials of a client and returns a `LoginResult`. One object serves all
listeners of a worker.

- OK: the user, as listed in the credentials file.
- WRONG: the user does not exist, or the password is wrong. The client cannot distinguish the two, because a
  hash is computed in both cases. Each reply is delayed longer than the last (`limits/clients`), without
  blocking a thread.
- LOCKED: there were too many failures. No password is checked, not even one that was right a minute ago: a
  lock that accepts the right password would let an attacker search for it.
- BARRED: the password is right, but the user is disabled, has expired, or may not connect from this address.
- BROKEN: the file cannot be used, too many checks are waiting, or an unexpected error occurred. This is never
  the client's fault, so the reply is temporary, and no failure is counted.

The correct passwords of the last ten minutes are remembered, so that an application that logs in for every
message does not wait for a hash each time: argon2 is slow by design, and never runs on the event loop. The
memory holds a keyed hash of user, password and stored hash: it reveals nothing without the secret of the
process, and a changed password has another key.

Hashes are computed in threads (`PasswordChecks`), those of regular users on all cores. Regular users are
those who have logged in recently from their current network. The hashes of other clients are computed on one
core less, so that guessing does not slow regular users down and leaves the event loop a core if there are
several. Among the other clients, those with the fewest failures in their network come first, so that many
guessing addresses do not lock out an address without failures. Too many waiting checks raise
`ChecksBusyError`; the limit for one client is lower than the limit for all. When the queue of other clients
is full, the check with the most failures gets it. Equal checks at the same time (as when a connection pool
opens) are combined.

Failures are counted for the client (an IPv4 address, an IPv6 /64), its network (/24, /48) and the account,
whether or not the account exists. The same name with the same password counts once. The workers of a relay
share their failures. None of these counters applies to regular users, so that guesses by other clients lock
no user out of a network from which that user has logged in recently. For a regular user, separate counters
exist for the client and the network, and a separate queue of checks (`PasswordChecks`).

A failure is counted when its hash has been computed, even if the client has disconnected by then. If the
client disconnects before the computation has started, nothing is computed or counted.
"""

import asyncio
import enum
import hashlib
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from zonerelay.config.credentials import file as credentials_file
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import AuthSettings
from zonerelay.inbound.access.guard import Guard, WatchedFile
from zonerelay.inbound.limits.clients import FailedAttempts, Key, client_and_network
from zonerelay.inbound.refusal import Refusal
from zonerelay.model.bounded import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.process.tasks import Tasks
from zonerelay.smtp.server.sasl import Credentials
from zonerelay.telemetry.events.events import Events

MAX_WAITING = 64
"""The number of checks that may wait in each queue, for each check that can be computed at the same time."""
MAX_WAITING_PER_CLIENT = 32

MIN_REMEMBERED = 1024
"""The minimum number of cached passwords. The maximum is the number of users, if that is larger."""
REMEMBERED_FOR = 600.0
"""Seconds since the check. Using the cache does not extend them."""

MIN_SECRET = 16

Matches = Callable[[str, str], bool]


class ChecksBusyError(Exception):
    """The queue of password checks is full."""


class ClosedError(Exception):
    """Passwords are not checked any more, because the relay is shutting down."""


class GoneError(Exception):
    """The password was not checked, because the login was locked or all clients that waited have
    disconnected.
    """


class RememberedPasswords(ExpiringSet[bytes]):
    """A cache of passwords that were correct within the last ten minutes, stored as keyed hashes (`key`)."""

    def __init__(self, secret: bytes, clock: Clock) -> None:
        super().__init__(clock, REMEMBERED_FOR, MIN_REMEMBERED)
        if len(secret) < MIN_SECRET:
            raise ValueError(f"the secret requires at least {MIN_SECRET} bytes")
        # Hashed, because a key of BLAKE2 has at most 64 bytes.
        self._keyed = hashlib.blake2b(key=hashlib.blake2b(secret).digest(), person=b"password")

    def key(self, user: str, password: str, stored_hash: str) -> bytes:
        hashed = self._keyed.copy()
        for part in (user, password, stored_hash):
            octets = part.encode("utf-8", "surrogatepass")
            # With lengths, so that "a" + "bc" differs from "ab" + "c".
            hashed.update(len(octets).to_bytes(4))
            hashed.update(octets)
        return hashed.digest()


@dataclass(slots=True, eq=False, repr=False)
class PasswordCheck:
    """A pending password check. `key` is the same for equal checks. `rank` is called when the check might be
    next: it returns the number of failures in the client's network, or None if the check is no longer wanted.
    `waiting` is the number of logins that wait for it.
    """

    key: bytes
    stored_hash: str
    password: str
    client: Key
    rank: Callable[[], int | None]
    regular: bool
    begun: bool = False
    waiting: int = 0
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class PasswordChecks:
    """Runs password checks in threads, in order of priority; for use on one event loop."""

    def __init__(self, matches: Matches, cores: int = 1) -> None:
        self._matches = matches
        self._at_once = {True: cores, False: max(1, cores - 1)}  # regulars, strangers
        # The pool starts no thread before the first check.
        self._pool = ThreadPoolExecutor(sum(self._at_once.values()), "password")
        self._checks: dict[bytes, PasswordCheck] = {}  # in order of arrival
        self._computing = {True: 0, False: 0}
        self._closed = False

    def enter(self, new: PasswordCheck) -> PasswordCheck:
        """Queue a password check, and return it, or an equal one that is already queued. Its future `done`
        gets the result: the answer, ChecksBusyError, ClosedError, GoneError, or the error of `matches`. Raise
        ChecksBusyError or ClosedError.
        """
        if self._closed:
            raise ClosedError
        check = self._checks.get(new.key)
        if check is None:
            if sum(each.client == new.client for each in self._checks.values()) >= MAX_WAITING_PER_CLIENT:
                raise ChecksBusyError
            self._make_room(new)
            check = self._checks[new.key] = new
        elif new.regular and not check.begun:
            check.regular = True
        check.waiting += 1
        self._compute_next(check.regular)
        return check

    def leave(self, check: PasswordCheck) -> bool:
        """Remove one of the clients that wait for a check. Return False if the computation has started, so
        that its result counts.
        """
        if check.begun:
            return False
        check.waiting -= 1
        if not check.waiting and not check.done.done():
            self._end(check, GoneError())
        return True

    def close(self) -> None:
        """End all waiting checks with ClosedError. A hash that is being computed is completed."""
        self._closed = True
        for check in list(self._checks.values()):
            if not check.begun:
                self._end(check, ClosedError())
        self._pool.shutdown(wait=False)

    def _make_room(self, check: PasswordCheck) -> None:
        """Remove a check from a full queue to make room for this one. Raise ChecksBusyError if this check has
        the lowest priority.
        """
        queue = [each for each in self._checks.values() if each.regular is check.regular and not each.begun]
        if len(queue) < MAX_WAITING * self._at_once[check.regular]:
            return
        # Among equal checks, the most recent one is removed.
        worst = check if check.regular else max(reversed([*queue, check]), key=_rank)
        if worst is check:
            raise ChecksBusyError
        self._end(worst, ChecksBusyError())

    def _compute_next(self, regular: bool) -> None:
        while self._computing[regular] < self._at_once[regular]:
            queue = [each for each in self._checks.values() if each.regular is regular and not each.begun]
            if not queue:
                return
            check = queue[0] if regular else min(queue, key=_rank)
            if check.rank() is None:
                self._end(check, GoneError())
                continue
            check.begun = True
            self._computing[regular] += 1
            computed = asyncio.get_running_loop().run_in_executor(
                self._pool, self._run, check.stored_hash, check.password
            )
            computed.add_done_callback(partial(self._computed, check, regular))

    def _computed(self, check: PasswordCheck, regular: bool, computed: asyncio.Future[bool]) -> None:
        self._computing[regular] -= 1
        self._end(check, ClosedError() if computed.cancelled() else computed.exception() or computed.result())
        if not self._closed:
            self._compute_next(regular)

    def _end(self, check: PasswordCheck, result: bool | BaseException) -> None:
        del self._checks[check.key]
        if isinstance(result, BaseException):
            check.done.set_exception(result)
            check.done.exception()  # retrieved, so that asyncio does not log an error if all clients left
        else:
            check.done.set_result(result)

    def _run(self, stored_hash: str, password: str) -> bool:
        """Compute the hash of a password and compare it with the stored one. This runs in a thread."""
        if self._closed:
            raise ClosedError
        return self._matches(stored_hash, password)


def _rank(check: PasswordCheck) -> int:
    """Return the priority of a check; smaller numbers come first. An unwanted check comes first, because it
    takes no time.
    """
    rank = check.rank()
    return -1 if rank is None else rank


class LoginKind(enum.StrEnum):
    """The kind of a login result, as a metric label."""

    OK = "ok"
    WRONG = "wrong"
    LOCKED = "locked"
    BROKEN = "broken"
    BARRED = "barred"


class LoginResult(msgspec.Struct, frozen=True):
    """The result of checking a login. `user` is set if it is OK. `detail` is for the operator and is never
    sent to the client. `refusal` is set if the password is right but the user's limits do not permit the
    login.
    """

    kind: LoginKind
    user: User | None = None
    detail: str = ""
    refusal: Refusal | None = None


AskForLogin = Callable[[], Awaitable[LoginResult]]
"""Calls an operator's authenticator with the credentials. It returns OK with the user, WRONG or BROKEN."""

MAX_REGULARS = 10_000
"""The number of remembered pairs of account and network. Beyond it, the least recently seen pair is
forgotten.
"""

REGULAR_FOR = 30 * 86400.0
"""Seconds since the last login of the account from the network."""


class _LoginAttempt(msgspec.Struct):
    """An attempt to log in, with its credentials and its client. `address` is shown in the log. `regular` is
    explained in the module's docstring. `check` is set while the attempt waits for its hash. `ask` replaces
    the credentials file.
    """

    credentials: Credentials
    address: str
    client: Key
    network: Key
    account: bytes
    ask: AskForLogin | None = None
    regular: bool = False
    check: PasswordCheck | None = None


class FailedLogin(msgspec.Struct, frozen=True, array_like=True):
    """A failed login, as one worker reports it to the others. `account` and `guess` are hashes in
    hexadecimal.
    """

    address: str
    account: str
    guess: str
    regular: bool


class _Users(msgspec.Struct, frozen=True):
    """The users of the credentials file by name, for checking logins. `nobodys_hash` is checked for users
    that do not exist, and is as expensive as the hashes of the others. Remembered passwords are bound to the
    hash in the file: they become useless when a user is changed or deleted, and stay valid for the other
    users.
    """

    named: Mapping[str, User]
    nobodys_hash: str


def _read_users(path: Path) -> _Users:
    users = credentials_file.read(path)
    return _Users(users, passwords.nobodys_hash(user.hash for user in users.values()))


_NOTHING = Credentials("", "")


def _account(name: str) -> bytes:
    """Return a hash of a user name, because an unauthenticated client can send names of any length."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(eq=False, repr=False)
class Authenticator:
    """Checks the logins of clients on one event loop. `secret` is the key of the remembered passwords and
    must not outlive the process.
    """

    settings: InitVar[AuthSettings]
    _: KW_ONLY
    clock: Clock
    events: Events
    secret: InitVar[bytes]
    guard: Guard | None = None
    matches: InitVar[Matches] = passwords.matches
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    share: Callable[[str], None] = lambda _: None
    cores: InitVar[int] = 1

    def __post_init__(self, settings: AuthSettings, secret: bytes, matches: Matches, cores: int) -> None:
        self._remembered = RememberedPasswords(secret, self.clock)
        self._checks = PasswordChecks(matches, cores)
        self._clients, self._networks, self._accounts = (
            FailedAttempts(max_failures=most, window=settings.forget_failures) for most in _limits(settings)
        )
        self._regulars = ExpiringSet[tuple[str, Key]](self.clock, REGULAR_FOR, MAX_REGULARS)
        self._file = self._watch(settings.credentials)
        self._tasks = Tasks()

    def configure(self, settings: AuthSettings) -> None:
        """Apply new settings to later logins. Earlier failures still count."""
        tables = (self._clients, self._networks, self._accounts)
        for table, most in zip(tables, _limits(settings), strict=True):
            table.configure(max_failures=most, window=settings.forget_failures)
        if settings.credentials != self._file.path:
            self._remembered.until.clear()
            self._file = self._watch(settings.credentials)

    def close(self) -> None:
        """Refuse all later logins. Logins that are waiting get BROKEN."""
        self._checks.close()

    @property
    def problem(self) -> str:
        """The reason why no user could log in at the last attempt, or an empty string."""
        return self._file.problem

    async def check(
        self, credentials: Credentials, client_address: str, ask: AskForLogin | None = None
    ) -> LoginResult:
        """Check the credentials of a client, and return the result. With `ask`, an operator's authenticator
        decides; failures count the same.

        Raise only CancelledError: a session cancels the check when its client has disconnected.
        """
        keys = client_and_network(client_address)
        attempt = _LoginAttempt(credentials, client_address, *keys, _account(credentials.user), ask)
        attempt.regular = (credentials.user, attempt.network) in self._regulars
        known = self._at_once(attempt)
        if known is not None:
            known = await self._guarded(attempt, known)
            self._report(attempt, known)
            return known
        task = self._tasks.start(self._examine(attempt))
        try:
            # Shielded: a check that has started is counted and reported even if the client disconnects.
            login, delay = await asyncio.shield(task)
        except asyncio.CancelledError:
            if attempt.check is None or self._checks.leave(attempt.check):
                task.cancel()
            raise
        if delay:
            await self.sleep(delay)
        return login

    async def named(self, name: str) -> LoginResult:
        """Return the user with this name as a login result, for a client that has authenticated with an API
        token.
        """
        await self._file.refresh()
        users = self._file.content
        if users is None:
            return LoginResult(LoginKind.BROKEN, detail=self._file.problem)
        if name not in users.named:
            return LoginResult(LoginKind.WRONG, detail="no such user")
        return LoginResult(LoginKind.OK, users.named[name])

    def _watch(self, path: Path) -> WatchedFile[_Users]:
        read, events = self.events.credentials_read, self.events
        return WatchedFile(path, _read_users, events=events, was_read=lambda users: read(len(users.named)))

    def _at_once(self, attempt: _LoginAttempt) -> LoginResult | None:
        """Return the result of a login that can be decided without a thread and without reading a file, or
        None.
        """
        locked = self._lock(attempt)
        if locked is not None or attempt.ask is not None:
            return locked
        if not self._file.is_current() or self._file.content is None:
            return None
        user = self._file.content.named.get(attempt.credentials.user)
        if user is None:
            return None
        is_known = self._key(attempt, user.hash) in self._remembered
        if not is_known and self.guard is not None and (second := self.guard.second_hash(user.name)):
            is_known = self._key(attempt, second) in self._remembered
        return self._success(attempt, user) if is_known else None

    async def _guarded(self, attempt: _LoginAttempt, login: LoginResult) -> LoginResult:
        if login.user is None or self.guard is None:
            return login
        refusal = await self.guard.log_in_refusal(login.user.name, attempt.address)
        if refusal is None:
            return login
        kind = LoginKind.BROKEN if refusal.reply.is_transient else LoginKind.BARRED
        return LoginResult(kind, detail=self.guard.problem, refusal=refusal)

    async def _examine(self, attempt: _LoginAttempt) -> tuple[LoginResult, float]:
        """Check a login, count and report it, and return its result and the delay of the reply."""
        try:
            login = await (self._ask(attempt) if attempt.ask is None else self._asked(attempt, attempt.ask))
            login = await self._guarded(attempt, login)
        except ChecksBusyError:
            login = LoginResult(LoginKind.BROKEN, detail="too many passwords are waiting to be checked")
        except ClosedError:
            login = LoginResult(LoginKind.BROKEN, detail="the relay is shutting down")
        except Exception as error:  # noqa: BLE001  (rule 3: unknown trouble is temporary)
            self.events.error("auth", error)
            login = LoginResult(LoginKind.BROKEN, detail="unexpected error")
        delay = 0.0
        if login.kind is LoginKind.WRONG:
            guess = self._key(attempt, "")
            delay = self._failed(attempt, guess)
            failure = FailedLogin(attempt.address, attempt.account.hex(), guess.hex(), attempt.regular)
            self.share(msgspec.json.encode(failure).decode())
        self._report(attempt, login)
        return login, delay

    def _failed(self, attempt: _LoginAttempt, guess: bytes) -> float:
        now = self.clock.monotonic()
        delay, *_ = [table.failed(key, now, guess) for table, key, _ in self._counters(attempt)]
        return delay

    def failed_elsewhere(self, text: str) -> None:
        """Count a failed login that another worker has reported, so that several workers allow no more
        guesses.
        """
        failure = msgspec.json.decode(text, type=FailedLogin)
        keys = client_and_network(failure.address)
        account, guess = bytes.fromhex(failure.account), bytes.fromhex(failure.guess)
        attempt = _LoginAttempt(_NOTHING, failure.address, *keys, account, regular=failure.regular)
        self._failed(attempt, guess)

    async def _ask(self, attempt: _LoginAttempt) -> LoginResult:
        await self._file.refresh()
        # A user may be remembered even though the file has changed elsewhere.
        if (known := self._at_once(attempt)) is not None:
            return known
        users = self._file.content
        if users is None:
            return LoginResult(LoginKind.BROKEN, detail=self._file.problem)
        user = users.named.get(attempt.credentials.user)
        stored = user.hash if user is not None else users.nobodys_hash
        try:
            right = await self._is_right(attempt, stored)
            if not right and user is not None and self.guard is not None:
                rails = await self.guard.rails_of(user.name)
                if rails is not None and rails.second_hash:
                    stored = rails.second_hash
                    right = await self._is_right(attempt, stored)
        except GoneError:
            return self._lock(attempt) or LoginResult(LoginKind.BROKEN, detail="the lock has expired")
        locked = self._lock(attempt)
        if locked is not None:
            # Guesses that were sent in parallel must not all be answered.
            return locked
        if user is None or not right:
            detail = "no such user" if user is None else "wrong password"
            return LoginResult(LoginKind.WRONG, detail=detail)
        self._remembered.until.limit = max(MIN_REMEMBERED, len(users.named))
        self._remembered.add(self._key(attempt, stored))
        return self._success(attempt, user)

    async def _is_right(self, attempt: _LoginAttempt, stored: str) -> bool:
        key, password = self._key(attempt, stored), attempt.credentials.password
        attempt.check = self._checks.enter(
            PasswordCheck(key, stored, password, attempt.client, lambda: self._rank(attempt), attempt.regular)
        )
        # Shielded: other logins may wait for the same check.
        return await asyncio.shield(attempt.check.done)

    async def _asked(self, attempt: _LoginAttempt, ask: AskForLogin) -> LoginResult:
        login = await ask()
        locked = self._lock(attempt)
        if locked is None and login.user is not None:
            return self._success(attempt, login.user)
        return locked or login

    def _success(self, attempt: _LoginAttempt, user: User) -> LoginResult:
        for table, key, _ in self._counters(attempt):
            table.succeeded(key)
        self._regulars.add((user.name, attempt.network))
        return LoginResult(LoginKind.OK, user)

    def _counters(self, attempt: _LoginAttempt) -> tuple[tuple[FailedAttempts, Hashable, str], ...]:
        """Return the counters of failed logins to which this attempt belongs, each with a description."""
        client, network = attempt.client, attempt.network
        if attempt.regular:
            account = attempt.account
            return (
                (self._clients, (account, client), "of this user from this client"),
                (self._networks, (account, network), "of this user from this network"),
            )
        return (
            (self._clients, client, "from this client"),
            (self._networks, network, "from this network"),
            (self._accounts, attempt.account, "for this account"),
        )

    def _lock(self, attempt: _LoginAttempt) -> LoginResult | None:
        now = self.clock.monotonic()
        for table, key, what in self._counters(attempt):
            if table.locked(key, now):
                return LoginResult(LoginKind.LOCKED, detail=f"too many failed logins {what}")
        return None

    def _rank(self, attempt: _LoginAttempt) -> int | None:
        """Return the number of failed logins from the client's network, or None if this login is locked."""
        if self._lock(attempt) is not None:
            return None
        return self._networks.count(attempt.network, self.clock.monotonic())

    def _key(self, attempt: _LoginAttempt, stored_hash: str) -> bytes:
        return self._remembered.key(attempt.credentials.user, attempt.credentials.password, stored_hash)

    def _report(self, attempt: _LoginAttempt, login: LoginResult) -> None:
        name = attempt.credentials.user
        # A name that is not a user is not logged: people type their passwords there.
        users = self._file.content
        known = login.user is not None or (users is not None and name in users.named)
        self.events.login(login.kind, attempt.address, user=name if known else "")


def _limits(settings: AuthSettings) -> tuple[int, int, int]:
    return settings.max_client_failures, settings.max_network_failures, settings.max_account_failures
