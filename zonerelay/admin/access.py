"""Authenticates clients by token, and counts failed attempts per client.

A valid token is accepted regardless of earlier failures of its client: 256 random bits cannot be guessed, and
all clients of a proxy or an office share one address. A client with more than `MAX_FAILURES` failures in
`WINDOW` seconds only gets a message about that, and its failures are no longer logged.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zonerelay.admin.problems import ApiError
from zonerelay.config.credentials.identities import Identities, IdentitiesError, Scope, Token
from zonerelay.control.runner import OnError
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock

if TYPE_CHECKING:
    from zonerelay.admin.requests import RequestIdentity

MAX_FAILURES = 30
WINDOW = 60.0
MAX_CLIENTS = 4096
_NETWORK = 64
"""The prefix length of an IPv6 network that counts as one client."""


@dataclass(eq=False, repr=False)
class Access:
    """Authenticates HTTP clients. `audit` logs the first failure of a client in each window, and the one that
    exceeds the limit.
    """

    identities: Identities
    clock: Clock
    audit: Callable[[Mapping[str, str]], None]
    on_error: OnError

    def __post_init__(self) -> None:
        self._failures: BoundedDict[str, tuple[float, int]] = BoundedDict(MAX_CLIENTS)

    def admit(self, text: str, visit: RequestIdentity, *scopes: Scope) -> Token:
        """Return the token of a request, and record its name in the visit. Raise ApiError if the token is
        not valid, cannot be read, or has none of the scopes.
        """
        try:
            token = self._identified(text, visit.client)
        except IdentitiesError as error:
            self.on_error("identities", error)
            raise ApiError(503, "unavailable", "tokens cannot be read; see the relay's log") from error
        require(token, *scopes)
        visit.who = token.name
        return token

    def _identified(self, text: str, client: str) -> Token:
        found = self.identities.identify(text)
        if found is not None:
            return found
        now, who = self.clock.monotonic(), _client(client)
        began, count = self._failures.get(who, (now, 0))
        if now - began >= WINDOW:
            began, count = now, 0
        self._failures[who] = (began, count + 1)
        if count in (0, MAX_FAILURES):
            self.audit({"client": client, "request": "refused: a token that is not valid"})
        if count >= MAX_FAILURES:
            again = str(int(began + WINDOW - now) + 1)
            raise ApiError(429, "too_many_failures", "too many invalid tokens", fields={"Retry-After": again})
        challenge = {"WWW-Authenticate": 'Bearer realm="zonerelay", error="invalid_token"'}
        text = "the token is invalid: it has expired, was removed, or is incomplete"
        raise ApiError(401, "unauthorized", text, fields=challenge)


def require(token: Token, *scopes: Scope) -> None:
    """Raise ApiError if the token has none of these scopes."""
    if scopes and not any(map(token.may, scopes)):
        text = f"the token {token.name} has the scope {token.scope}; this request requires {scopes[0]}"
        raise ApiError(403, "forbidden", text)


def require_private(visit: RequestIdentity) -> None:
    """Raise ApiError if a token would cross a network in clear text."""
    if not visit.private:
        text = "remote clients must send tokens over TLS, or through a trusted proxy"
        raise ApiError(403, "clear_text", text)


def _client(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((found, _NETWORK), strict=False)) if found.version == 6 else address
