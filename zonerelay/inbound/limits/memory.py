"""Accounts for the memory that all client connections of a worker hold together, and bounds it.

One account serves all listeners. Sessions add to `used` what they hold and take it away again (waiting input,
headers that are being read, bodies that wait for the store; `TLS_COST` while they have TLS): an integer add
where octets arrive and leave. Each open connection costs `SESSION_COST` on top for its objects.

Policy: from `TIGHT` of the limit new connections are refused, because they can come back while mail in
progress should end well. At the limit the session that holds most is ended, which frees most with the least
harm; a session whose message is here whole is spared: it gets its reply, and ending it would free nothing.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Protocol

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
        """Octets of `used` that belong to this session."""

    @property
    def must_stay(self) -> bool:
        """Ending it would free nothing, or lose what its client believes to have sent."""

    def shed(self) -> None:
        """End it, so that it holds nothing any more."""


class SessionMemory:
    """`used` is in octets. Sessions change it themselves; `holders` are the open sessions."""

    __slots__ = ("_limit", "_tight", "holders", "used")

    def __init__(self, limit: int) -> None:
        self.used = 0
        self.holders: set[MemoryHolder] = set()
        self.change(limit)

    def change(self, limit: int) -> None:
        """Apply another limit, in octets, from now on."""
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
