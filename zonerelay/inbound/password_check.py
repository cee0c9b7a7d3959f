"""Passwords against hashes: two threads, a bounded queue, and a memory for what was right.

argon2 is slow on purpose, so it never runs on the event loop, and an application that logs in for every
message must not pay for it each time. What is remembered is a keyed hash over user, password and
stored hash: without the process's secret it says nothing, and a changed password is another key.
Only right passwords are remembered.

Too many waiting raise `BusyError`, of one client sooner than of all, so that one cannot keep the others
out. Equal checks at the same time (a pool of connections that opens) are one check. A check that was begun is
finished even when nobody waits for it any more.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from zonerelay.inbound.limits import Key

THREADS = 2
MAX_WAITING = 64
MAX_WAITING_PER_CLIENT = 32

MAX_REMEMBERED = 1024
REMEMBERED_FOR = 600.0
"""Seconds from the check; using it does not extend it."""

MIN_SECRET = 16

Matches = Callable[[str, str], bool]


class BusyError(Exception):
    """Too many passwords wait to be checked."""


class ClosedError(Exception):
    """The relay stops."""


class RememberedPasswords:
    """What was right within the last ten minutes, by `key`."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET:
            raise ValueError(f"the secret needs {MIN_SECRET} octets or more")
        # Hashed, because BLAKE2 takes keys of 64 octets at most.
        self._keyed = hashlib.blake2b(key=hashlib.blake2b(secret).digest(), person=b"password")
        self._until: dict[bytes, float] = {}  # oldest first: all live equally long

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
        if len(self._until) >= MAX_REMEMBERED:
            del self._until[next(iter(self._until))]
        self._until[key] = now + REMEMBERED_FOR

    def clear(self) -> None:
        self._until.clear()

    def __len__(self) -> int:
        return len(self._until)


class PasswordChecks:
    """The threads. Use it on one event loop."""

    def __init__(self, matches: Matches) -> None:
        self._matches = matches
        self._pool = ThreadPoolExecutor(THREADS, "password")  # starts no thread before the first check
        self._running: dict[bytes, asyncio.Future[bool]] = {}
        self._of_client: dict[Key, int] = {}
        self._closed = False

    async def check(self, key: bytes, stored_hash: str, password: str, *, client: Key) -> bool:
        """`key` is the same for equal checks. Raises BusyError, ClosedError, and what `matches` raises."""
        running = self._running.get(key)
        if running is None:
            running = self._start(key, stored_hash, password, client)
        # Shielded: the others who wait for it need the answer also when one leaves.
        return await asyncio.shield(running)

    def close(self) -> None:
        """What waits is answered with ClosedError; a hash that is being computed ends by itself."""
        self._closed = True
        self._pool.shutdown(wait=False)

    def _start(self, key: bytes, stored_hash: str, password: str, client: Key) -> asyncio.Future[bool]:
        of_client = self._of_client.get(client, 0)
        if self._closed:
            raise ClosedError
        if len(self._running) >= THREADS + MAX_WAITING or of_client >= MAX_WAITING_PER_CLIENT:
            raise BusyError
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._run, stored_hash, password)
        self._running[key] = future
        self._of_client[client] = of_client + 1
        future.add_done_callback(lambda done: self._finished(key, client, done))
        return future

    def _finished(self, key: bytes, client: Key, done: asyncio.Future[bool]) -> None:
        del self._running[key]
        left = self._of_client[client] - 1
        if left:
            self._of_client[client] = left
        else:
            del self._of_client[client]
        if not done.cancelled():
            done.exception()  # seen, so that asyncio does not complain when the client has left

    def _run(self, stored_hash: str, password: str) -> bool:
        """In a thread."""
        if self._closed:
            raise ClosedError
        return self._matches(stored_hash, password)
