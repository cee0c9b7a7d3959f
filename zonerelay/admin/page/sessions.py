"""The operators' sessions on the page: in memory, limited in number and in time.

A session begins with a token and has its name and scope. It ends `IDLE` seconds after the operator's last
request for a page, `LONGEST` seconds after the login, when the operator ends it, when its token becomes
invalid, and with the process. The cookie contains a secret, of which only the hash is in memory.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Callable

import msgspec

from zonerelay.config.credentials.identities import Scope, Token

IDLE = 3600.0
LONGEST = 12 * 3600.0
MAX_SESSIONS = 100
"""The maximum number of sessions. Beyond it, the longest idle session of the token with the most sessions is
ended.
"""


class PageSession(msgspec.Struct):
    """A login session of the operators' page. `number` identifies it in the list of sessions; `check` is
    included in every form.
    """

    number: int
    token: Token
    address: str
    began: float
    used: float
    check: str = msgspec.field(default_factory=lambda: secrets.token_urlsafe(18))

    @property
    def who(self) -> str:
        return self.token.name

    @property
    def scope(self) -> Scope:
        return self.token.scope


class Sessions:
    """The open login sessions of the operators' page. `now` is a monotonic clock; `is_valid` returns whether
    a token is still valid.
    """

    def __init__(self, now: Callable[[], float], is_valid: Callable[[Token], bool]) -> None:
        self._now = now
        self._is_valid = is_valid
        self._sessions: dict[bytes, PageSession] = {}
        self._begun = 0

    def begin(self, token: Token, address: str) -> str:
        """Begin a session, and return the secret for the cookie."""
        self._expire()
        if len(self._sessions) >= MAX_SESSIONS:
            counts = Counter(each.who for each in self._sessions.values())
            del self._sessions[min(self._sessions, key=lambda each: self._rank(each, counts))]
        secret, now = secrets.token_urlsafe(32), self._now()
        self._begun += 1
        self._sessions[_hashed(secret)] = PageSession(self._begun, token, address, now, now)
        return secret

    def _rank(self, key: bytes, counts: Counter[str]) -> tuple[int, float]:
        session = self._sessions[key]
        return -counts[session.who], session.used

    def find(self, secret: str, *, by_itself: bool) -> PageSession | None:
        """Return the open session of a cookie, or None. With `by_itself`, the page sent the request without
        the operator; this does not extend the session.
        """
        self._expire()
        session = self._sessions.get(_hashed(secret))
        if session is not None and not by_itself:
            session.used = self._now()
        return session

    def open(self) -> list[PageSession]:
        """Return the sessions of all operators, the most recently used first."""
        self._expire()
        return sorted(self._sessions.values(), key=lambda each: -each.used)

    def end(self, *numbers: int) -> None:
        self._sessions = {key: each for key, each in self._sessions.items() if each.number not in numbers}

    def _expire(self) -> None:
        now = self._now()
        self._sessions = {
            key: each
            for key, each in self._sessions.items()
            if now - each.used < IDLE and now - each.began < LONGEST and self._is_valid(each.token)
        }


def _hashed(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
