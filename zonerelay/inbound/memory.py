"""How much memory all client connections of a worker hold together, and what is to give when it is too much.

One account for all listeners. Sessions write what they hold into `used` themselves (waiting input, headers
that are being read, bodies that wait for the store; `TLS_COST` while they have TLS): an integer add where
octets arrive and leave. Each open connection is charged `SESSION_COST` on top for its objects.

Policy: from `TIGHT` of the limit new connections are refused (they can come back; what has begun should end
well); at the limit the session that holds most is ended, for that frees most with the least harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

SESSION_COST = 4 * 1024
"""Octets of an open connection that does nothing. Measured: resident memory grew by 2.7 KB for each of 5,000
after EHLO; a part is left for what a client has said (its name, a transaction)."""

TLS_COST = 36 * 1024
"""Octets that OpenSSL takes for one. Measured: 20 to 35 KB with TLS 1.3, buffers released."""

TIGHT = 0.8  # of the limit


class Holder(Protocol):
    """A session, as far as its memory goes."""

    @property
    def held(self) -> int:
        """Its share of `used`: what would be free if it ended."""

    def shed(self) -> None:
        """End it."""


SomeHolder = TypeVar("SomeHolder", bound=Holder)


class SessionMemory:
    """`used` is the sessions' own to change; what they add they take away again. `holders` are they."""

    __slots__ = ("_limit", "_tight", "holders", "used")

    def __init__(self, limit: int) -> None:
        self.used = 0
        self.holders: set[Holder] = set()
        self.change(limit)

    def change(self, limit: int) -> None:
        """Another limit from now on."""
        self._limit = limit
        self._tight = int(limit * TIGHT)

    @property
    def total(self) -> int:
        return self.used + len(self.holders) * SESSION_COST

    @property
    def tight(self) -> bool:
        """No new connections."""
        return self.used + len(self.holders) * SESSION_COST >= self._tight

    @property
    def full(self) -> bool:
        """Somebody has to go."""
        return self.used + len(self.holders) * SESSION_COST >= self._limit


def heaviest(sessions: Iterable[SomeHolder]) -> SomeHolder | None:
    """Whom to end at the limit; `None` when nobody holds anything, so that ending one would free little."""
    most = max(sessions, key=lambda session: session.held, default=None)
    return most if most is not None and most.held > 0 else None
