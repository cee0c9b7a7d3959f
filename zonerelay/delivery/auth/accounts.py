"""Decides whether a credential may be tried at a zone's smarthost now. No I/O; `now` is a parameter.

    new ──accepted──▶ proven ──refused──▶ refused ──its pause is over──▶ one try ──accepted──▶ proven
                                            ▲  │                           │
                                            │  └─ another secret, another  └─refused: twice as long─┐
                                            │     configuration, an operator's word: new            │
                                            └───────────────────────────────────────────────────────┘

Servers lock accounts after repeated wrong passwords, so a refusal ends all tries for a pause. Log-ins go one
at a time, after an accepted one too, because the server's idea of the password may have changed since.
Log-ins that were waiting when one was refused are not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

FIRST_PAUSE = 300.0
LONGEST_PAUSE = 3600.0

TRY_TIME = 120.0
"""Seconds for which the one try after a pause keeps others back, should it never report."""

PATIENCE = 15.0
"""Seconds that a log-in with a proven secret waits for another one. A host that hangs must not hold up
log-ins at other hosts, and servers answer a wrong password within 10 seconds.
"""


class Account:
    """One credential at one zone. `problem` says in words why it cannot log in, `""` while it can.

    `epoch` changes with each refusal. `stale`: the digest of a token that was refused for its age.
    """

    def __init__(self, zone: str, credential: str) -> None:
        self.zone = zone
        self.credential = credential
        self.stale = ""
        self._lock = asyncio.Lock()
        self.problem = ""
        self.host = ""
        self.address = ""
        self.epoch = 0
        self.refused = False
        self._failures = 0
        self._until = 0.0
        self._material = ""
        self._proven = ""

    @contextlib.asynccontextmanager
    async def one_at_a_time(self, material: str) -> AsyncIterator[None]:
        """Holds the account for one log-in."""
        try:
            async with asyncio.timeout(PATIENCE if self.is_proven(material) else None):
                await self._lock.acquire()
        except TimeoutError:
            yield
            return
        try:
            yield
        finally:
            self._lock.release()

    def may_try(self, material: str, now: float) -> bool:
        """True when a log-in may start. `material` is the digest of the present secrets. True may be the one
        try after a pause.
        """
        if not self.refused:
            return True
        if material != self._material:
            self.forgive()
            return True
        if now < self._until:
            return False
        self._until = now + TRY_TIME
        return True

    def refuse(self, problem: str, *, host: str, address: str, material: str, now: float) -> None:
        self.problem, self.host, self.address = problem, host, address
        self.doubt()
        self.refused = True
        self.epoch += 1
        self._material = material
        self._until = now + min(FIRST_PAUSE * 2.0 ** min(self._failures, 30), LONGEST_PAUSE)
        self._failures += 1

    def accept(self, material: str) -> bool:
        """Notes an accepted log-in. Returns true when the account had a problem before."""
        news = bool(self.problem)
        self.forgive()
        self._proven = material
        self.problem = ""
        return news

    def is_proven(self, material: str) -> bool:
        """True when a log-in with these secrets was accepted and no later event speaks against them."""
        return bool(self._proven) and self._proven == material

    @property
    def is_known(self) -> bool:
        """True when the last log-in says something about the next."""
        return bool(self._proven or self.problem)

    def doubt(self) -> None:
        self._proven = ""

    def forgive(self) -> None:
        """Allows a try as if there had been no refusal. The problem stands until a log-in succeeds."""
        self.refused = False
        self._failures = 0
        self._until = 0.0


def digest(*secrets: str) -> str:
    """Returns the `material` of secrets: enough to notice a change, and no secret."""
    return hashlib.sha256("\0".join(secrets).encode()).hexdigest()
