"""Checks passwords against hashes in threads, with a queue for regular users, a queue for other clients, and
a cache of correct passwords.

argon2 is slow by design. Therefore it never runs on the event loop, and an application that logs in for every
message must not wait for it each time. The cache holds a keyed hash of user, password and stored hash: it
reveals nothing without the secret of the process, and a changed password has another key. Only correct
passwords are cached.

Regular users are those who have logged in recently from their current network (`access/auth` knows them).
Their hashes are computed on all cores, in dedicated threads. The hashes of other clients are computed on one
core less, so that guessing does not slow regular users down and leaves the event loop a core if there are
several. Among the other clients, those with the fewest failures in their network come first, so that many
guessing addresses do not lock out an address without failures. Too many waiting checks raise
`ChecksBusyError`; the limit for one client is lower than the limit for all. When the queue of other clients
is full, the check with the most failures gets it. Equal checks at the same time (as when a connection pool
opens) are combined. A check whose clients have all disconnected is not computed, unless its computation has
started.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from zonerelay.inbound.limits.connections import Key

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
    """The relay is shutting down."""


class GoneError(Exception):
    """The password was not checked, because of a lock, or because all its clients have disconnected."""


class RememberedPasswords:
    """Remembers the passwords that were correct within the last ten minutes, by `key`."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET:
            raise ValueError(f"the secret requires at least {MIN_SECRET} bytes")
        # Hashed, because a key of BLAKE2 has at most 64 bytes.
        self._keyed = hashlib.blake2b(key=hashlib.blake2b(secret).digest(), person=b"password")
        self._until: dict[bytes, float] = {}  # oldest first, because all have the same lifetime
        self.most = MIN_REMEMBERED

    def key(self, user: str, password: str, stored_hash: str) -> bytes:
        hashed = self._keyed.copy()
        for part in (user, password, stored_hash):
            octets = part.encode("utf-8", "surrogatepass")
            # With lengths, so that "a" + "bc" differs from "ab" + "c".
            hashed.update(len(octets).to_bytes(4))
            hashed.update(octets)
        return hashed.digest()

    def holds(self, key: bytes, now: float) -> bool:
        until = self._until.get(key)
        if until is None:
            return False
        if until > now:
            return True
        del self._until[key]
        return False

    def add(self, key: bytes, now: float) -> None:
        self._until.pop(key, None)
        while len(self._until) >= self.most:
            del self._until[next(iter(self._until))]
        self._until[key] = now + REMEMBERED_FOR

    def clear(self) -> None:
        self._until.clear()

    def __len__(self) -> int:
        return len(self._until)


def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False, repr=False)
class PasswordCheck:
    """A pending password check. `waiting` is the number of logins that wait for it."""

    key: bytes
    stored_hash: str
    password: str
    client: Key
    rank: Callable[[], int | None]
    regular: bool
    begun: bool = False
    waiting: int = 0
    done: asyncio.Future[bool] = field(default_factory=_future)


class PasswordChecks:
    """The queues and threads of password checks, for use on one event loop."""

    def __init__(self, matches: Matches, cores: int = 1) -> None:
        self._matches = matches
        self._at_once = {True: cores, False: max(1, cores - 1)}  # regulars, strangers
        # The pool starts no thread before the first check.
        self._pool = ThreadPoolExecutor(sum(self._at_once.values()), "password")
        self._checks: dict[bytes, PasswordCheck] = {}  # in order of arrival
        self._of_client: dict[Key, int] = {}
        self._computing = {True: 0, False: 0}
        self._closed = False

    def enter(
        self,
        key: bytes,
        stored_hash: str,
        password: str,
        *,
        client: Key,
        regular: bool,
        rank: Callable[[], int | None],
    ) -> PasswordCheck:
        """Add a check to a queue, and return it. `key` is the same for equal checks. `rank` is called when
        the check might be next: it returns the number of failures in the client's network, or None if the
        check is no longer wanted. The result is in `done` of the check: the answer, ChecksBusyError,
        ClosedError, GoneError, or the error of `matches`. Raise ChecksBusyError or ClosedError.
        """
        if self._closed:
            raise ClosedError
        check = self._checks.get(key)
        if check is None:
            if self._of_client.get(client, 0) >= MAX_WAITING_PER_CLIENT:
                raise ChecksBusyError
            check = PasswordCheck(key, stored_hash, password, client, rank, regular)
            self._make_room(check)
            self._checks[key] = check
            self._of_client[client] = self._of_client.get(client, 0) + 1
        elif regular and not check.begun:
            check.regular = True
        check.waiting += 1
        self._compute_next(check.regular)
        return check

    def leave(self, check: PasswordCheck) -> bool:
        """Remove a waiting client. Return False if the computation has started, so that its result counts."""
        if check.begun:
            return False
        check.waiting -= 1
        if not check.waiting and not check.done.done():
            self._end(check, GoneError())
        return True

    def close(self) -> None:
        """End waiting checks with ClosedError. A hash that is being computed is completed."""
        self._closed = True
        for check in list(self._checks.values()):
            if not check.begun:
                self._end(check, ClosedError())
        self._pool.shutdown(wait=False)

    def _make_room(self, check: PasswordCheck) -> None:
        """Make room for this check in its queue. Raise ChecksBusyError if this check has the lowest
        priority.
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
        left = self._of_client[check.client] - 1
        if left:
            self._of_client[check.client] = left
        else:
            del self._of_client[check.client]
        if isinstance(result, BaseException):
            check.done.set_exception(result)
            check.done.exception()  # retrieved, so that asyncio does not log an error if all clients left
        else:
            check.done.set_result(result)

    def _run(self, stored_hash: str, password: str) -> bool:
        """Compute the hash. This runs in a thread."""
        if self._closed:
            raise ClosedError
        return self._matches(stored_hash, password)


def _rank(check: PasswordCheck) -> int:
    """Return the rank of a check. A check that is no longer wanted comes first, because it costs nothing."""
    rank = check.rank()
    return -1 if rank is None else rank
