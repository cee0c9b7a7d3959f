"""Accounts for the memory that all client connections of a worker hold together, and bounds it.

One account serves all listeners. Sessions add to `used` what they hold and take it away again (waiting input,
headers that are being read, bodies that wait for the store; `TLS_COST` while they have TLS): an integer add
where bytes arrive and leave. Each open connection costs `SESSION_COST` on top for its objects.

Policy: from `TIGHT` of the limit new connections are refused, because they can come back while mail in
progress should end well. At the limit the session that holds most is ended, which frees most with the least
harm; a session whose message is here whole is spared: it gets its reply, and ending it would free nothing.
"""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import Protocol

# Reads a few large bodies at a time at full speed; the others wait in their socket buffers.
#
# Fifty uploads that are read side by side all end late, fill the memory with their halves, and have left the
# store's cache when they are delivered. Read a few at a time, the first are on their way out while the last
# come in.
#
# Policy: a body of more than `LARGE` octets needs a slot while it comes faster than it is read, which shows
# in pieces of `FAST` octets or more. `AT_ONCE` bodies have a slot at the same time; the others are not read
# and get theirs first come, first served. A slot ends with the body, with the first small piece (we have
# caught up with the client), or, while others wait, after `PATIENCE` seconds without any octet. So small
# messages and slow clients never wait and never delay others.

LARGE = 256 * 1024
FAST = 64 * 1024
AT_ONCE = 4
PATIENCE = 0.05


class Reader(Protocol):
    """A session with a large body."""

    @property
    def held_up(self) -> bool:
        """The relay does not read from it, for a reason of its own."""

    def resume_reading(self) -> None:
        """It has a slot now."""


class LargeBodies:
    """The large bodies of a listener. Synchronous; every reader that has asked must `leave`."""

    def __init__(self, at_once: int = AT_ONCE, patience: float = PATIENCE) -> None:
        self._at_once = at_once
        self._patience = patience
        self._heard: dict[Reader, float] = {}  # those with a slot, and when octets came last
        self._waiting: dict[Reader, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def may_read(self, reader: Reader, size: int, now: float) -> bool:
        """`size` bytes of a large body came at `now` (loop time). False: it waits for `resume_reading`."""
        if size < FAST:
            self.leave(reader)
            return True
        if reader not in self._heard:
            self._waiting[reader] = None
            if len(self._waiting) > 1 or len(self._heard) >= self._at_once:
                self._watch()
                return False
            del self._waiting[reader]
        self._heard[reader] = now
        return True

    def leave(self, reader: Reader) -> None:
        """Its body has ended, or the session has. Does nothing for a session without a slot."""
        self._waiting.pop(reader, None)
        if self._heard.pop(reader, None) is not None:
            self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and len(self._heard) < self._at_once:
            reader = next(iter(self._waiting))
            del self._waiting[reader]
            self._heard[reader] = asyncio.get_running_loop().time()
            reader.resume_reading()

    def _watch(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(self._patience, self._look)

    def _look(self) -> None:
        """Take the slots that clients do not use."""
        self._timer = None
        before = asyncio.get_running_loop().time() - self._patience
        for reader in [each for each, heard in self._heard.items() if heard < before and not each.held_up]:
            del self._heard[reader]
        self._hand_out()
        self._watch()


SESSION_COST = 4 * 1024
"""Octets of an open connection that does nothing. Measured: resident memory grew by 2.7 KB for each of 5,000
after EHLO; a part is left for what a client has said (its name, a transaction)."""

TLS_COST = 36 * 1024
"""Octets that OpenSSL takes for one. Measured: 20 to 35 KB with TLS 1.3, buffers released."""

TIGHT = 0.8  # of the limit


class MemoryHolder(Protocol):
    """A session, as far as its memory goes."""

    @property
    def held(self) -> int:
        """Bytes of `used` that belong to this session."""

    @property
    def must_stay(self) -> bool:
        """Ending it would free nothing, or lose what its client believes to have sent."""

    def shed(self) -> None:
        """End it, so that it holds nothing any more."""


class SessionMemory:
    """A memory account; `used` is in bytes. Sessions change it themselves; `holders` are open sessions."""

    __slots__ = ("_limit", "_tight", "holders", "used")

    def __init__(self, limit: int) -> None:
        self.used = 0
        self.holders: set[MemoryHolder] = set()
        self.change(limit)

    def change(self, limit: int) -> None:
        """Apply another limit, in bytes, from now on."""
        self._limit = limit
        self._tight = int(limit * TIGHT)

    @property
    def total(self) -> int:
        return self.used + len(self.holders) * SESSION_COST

    @property
    def tight(self) -> bool:
        """No new connection may be admitted."""
        return self.used + len(self.holders) * SESSION_COST >= self._tight

    @property
    def full(self) -> bool:
        """A session has to end."""
        return self.used + len(self.holders) * SESSION_COST >= self._limit

    def relieve(self) -> None:
        """End the session that holds most, of any listener; none when that would free nothing."""
        most = max(
            (each for each in self.holders if not each.must_stay), key=attrgetter("held"), default=None
        )
        if most is not None and most.held > 0:
            most.shed()
