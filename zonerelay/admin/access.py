"""Authenticates clients by token, and counts failed attempts per client.

A valid token is accepted regardless of earlier failures of its client: 256 random bits cannot be guessed, and
all clients of a proxy or an office share one address. A client with more than `MAX_FAILURES` failures in
`WINDOW` seconds only gets a message about that, and its failures are no longer logged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from zonerelay.config.credentials.identities import Identities, Token
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock

MAX_FAILURES = 30
WINDOW = 60.0
MAX_CLIENTS = 4096
_NETWORK = 64
"""The prefix length of an IPv6 network that counts as one client."""


class DeniedError(Exception):
    """The token is not valid. `retry_after` is not 0 if the client has failed too often."""

    def __init__(self, text: str, retry_after: int = 0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Access:
    """Authenticates HTTP clients. `audit` logs the first failure of a client in each window, and the one that
    exceeds the limit.
    """

    def __init__(
        self, identities: Identities, clock: Clock, audit: Callable[[Mapping[str, str]], None]
    ) -> None:
        self._identities = identities
        self._clock = clock
        self._audit = audit
        self._failures: BoundedDict[str, tuple[float, int]] = BoundedDict(MAX_CLIENTS)

    def admit(self, text: str, client: str) -> Token:
        """Return the token. Raise DeniedError if it is not valid, or IdentitiesError if tokens cannot be
        read.
        """
        found = self._identities.identify(text)
        if found is not None:
            return found
        now, who = self._clock.monotonic(), _client(client)
        began, count = self._failures.get(who, (now, 0))
        if now - began >= WINDOW:
            began, count = now, 0
        self._failures[who] = (began, count + 1)
        if count in (0, MAX_FAILURES):
            self._audit({"client": client, "request": "refused: a token that is not valid"})
        if count >= MAX_FAILURES:
            raise DeniedError("too many invalid tokens", int(began + WINDOW - now) + 1)
        raise DeniedError("the token is invalid: it has expired, was removed, or is incomplete")


def _client(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, _NETWORK), strict=False)) if found.version == 6 else address
