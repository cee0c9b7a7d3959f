"""Whether a credential may be tried at a zone's smarthost now. Pure: no I/O, `now` is a parameter.

    new ──accepted──▶ proven ──refused──▶ refused ──its pause is over──▶ one try ──accepted──▶ proven
                                            ▲  │                           │
                                            │  └─ another secret, another  └─refused: twice as long─┐
                                            │     configuration, an operator's word: new            │
                                            └───────────────────────────────────────────────────────┘

Accounts get locked by repeated wrong passwords, so a refusal ends all tries for a pause; log-ins go one at a
time, also after one was accepted, for the server's idea of the password may have changed since, and those
that were on their way when one was refused are not carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

FIRST_PAUSE = 300.0
LONGEST_PAUSE = 3600.0

TRY_TIME = 120.0
"""How long one try after a pause keeps others back, should it never report."""

PATIENCE = 15.0
"""How long a log-in with a secret that was accepted before waits for another one: a host that hangs must not
hold up those at other hosts, and servers answer a wrong password after 10 seconds at most."""


class Account:
    """One credential at one zone. `problem`: why it cannot log in, in words, `""` while it can.

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
        """One log-in after the other."""
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
        """`material` stands for the secrets as they are now. True may be the one try after a pause."""
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
        """True when that is news: there was a problem."""
        news = bool(self.problem)
        self.forgive()
        self._proven = material
        self.problem = ""
        return news

    def is_proven(self, material: str) -> bool:
        """Accepted before, with these secrets, and nothing has spoken against it since."""
        return bool(self._proven) and self._proven == material

    @property
    def is_known(self) -> bool:
        """Its last log-in says something about the next."""
        return bool(self._proven or self.problem)

    def doubt(self) -> None:
        self._proven = ""

    def forgive(self) -> None:
        """Try as if never refused; the problem stands until a log-in has shown that it is gone."""
        self.refused = False
        self._failures = 0
        self._until = 0.0


def digest(*secrets: str) -> str:
    """What `material` is: enough to see a change, and no secret."""
    return hashlib.sha256("\0".join(secrets).encode()).hexdigest()
