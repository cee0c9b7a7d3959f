"""Checks passwords against hashes in threads: a queue for regulars, one for strangers, and a memory of
matches.

argon2 is slow on purpose, so it never runs on the event loop, and an application that logs in for every
message must not pay for it each time. The memory holds a keyed hash over user, password and stored hash:
without the process's secret it says nothing, and a changed password has another key. Only right passwords are
remembered.

The hashes of regulars, users who have logged in lately from the network that they come from now
(`access/auth` knows them), are computed on as many cores as there are, those of strangers on one less:
guessing takes nothing from regulars, who have threads of their own, and leaves the event loop a core where
there are several. Strangers with the fewest failures in their network come first, so that many guessing
addresses do not keep out one that has not failed. Too many waiting checks raise `BusyError`, for one client
sooner than for all; among all strangers it meets the one with the most failures. Equal checks at the same
time (a pool of connections that opens) are one check. A check whose clients have left is not computed,
unless it has begun.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from zonerelay.inbound.limits.connections import Key

MAX_WAITING = 64
"""Checks in each queue for each that is computed at once, besides those."""
MAX_WAITING_PER_CLIENT = 32

MIN_REMEMBERED = 1024
"""As many passwords are remembered as there are users, and at least these."""
REMEMBERED_FOR = 600.0
"""Seconds from the check; using it does not extend it."""

MIN_SECRET = 16

Matches = Callable[[str, str], bool]


class BusyError(Exception):
    """Too many passwords wait to be checked."""


class ClosedError(Exception):
    """The relay stops."""


class GoneError(Exception):
    """The check was not computed: a lock has come before it, or all its clients have left."""


class RememberedPasswords:
    """Remembers passwords that were right within the last ten minutes, by `key`."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET:
            raise ValueError(f"the secret needs {MIN_SECRET} octets or more")
        # Hashed, because BLAKE2 takes keys of 64 octets at most.
        self._keyed = hashlib.blake2b(key=hashlib.blake2b(secret).digest(), person=b"password")
        self._until: dict[bytes, float] = {}  # oldest first: all live equally long
        self.most = MIN_REMEMBERED

    def key(self, user: str, password: str, stored_hash: str) -> bytes:
        hashed = self._keyed.copy()
        for part in (user, password, stored_hash):
            octets = part.encode("utf-8", "surrogatepass")
            # With lengths: "a" + "bc" is not "ab" + "c".
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


class Check:
    """One password that is to be checked; `waiting` counts the log-ins that wait for it."""

    __slots__ = ("begun", "client", "done", "key", "password", "rank", "regular", "stored_hash", "waiting")

    def __init__(
        self, key: bytes, stored_hash: str, password: str, client: Key, rank: Callable[[], int | None]
    ) -> None:
        self.key = key
        self.stored_hash = stored_hash
        self.password = password
        self.client = client
        self.rank = rank
        self.regular = False
        self.begun = False
        self.waiting = 0
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()


class PasswordChecks:
    """The threads. Use it on one event loop."""

    def __init__(self, matches: Matches, cores: int = 1) -> None:
        self._matches = matches
        self._at_once = {True: cores, False: max(1, cores - 1)}  # regulars, strangers
        # Starts no thread before the first check.
        self._pool = ThreadPoolExecutor(sum(self._at_once.values()), "password")
        self._checks: dict[bytes, Check] = {}  # in the order in which they came
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
    ) -> Check:
        """`key` is the same for equal checks. `rank` is asked when it may be its turn: the failures in its
        network, `None` when it is not to be computed any more. The `done` of the check has the answer,
        BusyError, ClosedError, GoneError, or the error of `matches`. Raises BusyError and ClosedError.
        """
        if self._closed:
            raise ClosedError
        check = self._checks.get(key)
        if check is None:
            if self._of_client.get(client, 0) >= MAX_WAITING_PER_CLIENT:
                raise BusyError
            check = Check(key, stored_hash, password, client, rank)
            check.regular = regular
            self._make_room(check)
            self._checks[key] = check
            self._of_client[client] = self._of_client.get(client, 0) + 1
        elif regular and not check.begun:
            check.regular = True
        check.waiting += 1
        self._compute_next(check.regular)
        return check

    def leave(self, check: Check) -> bool:
        """A client has left. False when the hash was begun, and its result counts."""
        if check.begun:
            return False
        check.waiting -= 1
        if not check.waiting and not check.done.done():
            self._end(check, GoneError())
        return True

    def close(self) -> None:
        """Answer waiting checks with ClosedError; a hash that is being computed ends by itself."""
        self._closed = True
        for check in list(self._checks.values()):
            if not check.begun:
                self._end(check, ClosedError())
        self._pool.shutdown(wait=False)

    def _make_room(self, check: Check) -> None:
        """Raises BusyError when it is this one that has no room."""
        queue = [each for each in self._checks.values() if each.regular is check.regular and not each.begun]
        if len(queue) < MAX_WAITING * self._at_once[check.regular]:
            return
        # Of equals the one that came last goes.
        worst = check if check.regular else max(reversed([*queue, check]), key=_rank)
        if worst is check:
            raise BusyError
        self._end(worst, BusyError())

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

    def _computed(self, check: Check, regular: bool, computed: asyncio.Future[bool]) -> None:
        self._computing[regular] -= 1
        self._end(check, ClosedError() if computed.cancelled() else computed.exception() or computed.result())
        if not self._closed:
            self._compute_next(regular)

    def _end(self, check: Check, result: bool | BaseException) -> None:
        del self._checks[check.key]
        left = self._of_client[check.client] - 1
        if left:
            self._of_client[check.client] = left
        else:
            del self._of_client[check.client]
        if isinstance(result, BaseException):
            check.done.set_exception(result)
            check.done.exception()  # seen, so that asyncio does not complain when the clients have left
        else:
            check.done.set_result(result)

    def _run(self, stored_hash: str, password: str) -> bool:
        """Compute the hash, in a thread."""
        if self._closed:
            raise ClosedError
        return self._matches(stored_hash, password)


def _rank(check: Check) -> int:
    """A check that is not to be computed any more comes first, for it costs nothing."""
    rank = check.rank()
    return -1 if rank is None else rank
