"""The objects that the API and the page share: the request handler, the tokens, the current settings, and the
function that accepts mail.

A valid token is accepted regardless of earlier failures of its client: 256 random bits cannot be guessed, and
all clients of a proxy or an office share one address. A client with more than `MAX_FAILURES` failures in
`WINDOW` seconds only gets a message about that, and its failures are no longer logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING

import msgspec

from zonerelay.admin.problems import ApiError
from zonerelay.config.credentials.identities import Identities, IdentitiesError, Scope, Token, identities_file
from zonerelay.config.endpoints import CAPTURE
from zonerelay.config.settings import ListenerSettings, Settings
from zonerelay.control.runner import Handler, Runner
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.inbound.limits.clients import Key, client_key
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.operations.answers import addresses_in
from zonerelay.operations.errors import BusyError, ControlError
from zonerelay.operations.requests import Request
from zonerelay.telemetry.events.events import Events

if TYPE_CHECKING:
    from zonerelay.admin.requests import RequestIdentity
    from zonerelay.capture.faults import InjectedFaults
    from zonerelay.capture.store import Capture
    from zonerelay.control.history import HistorySearch

MAX_STREAMS = 16
"""Event streams open at the same time. They count as connections of operators, and leave most of these to
requests.
"""
MAX_OF_TOKEN = 4
"""The number of these that one token may have."""
CHECK = 0.5
"""Seconds between checks whether the token of a stream is still valid."""
MAX_FAILURES = 30
WINDOW = 60.0
MAX_CLIENTS = 4096


class Sandbox(msgspec.Struct, frozen=True):
    """The captured mail and the simulated failures that `zonerelay sandbox` provides for the page and the
    API.
    """

    capture: Capture
    faults: InjectedFaults
    token: str = ""
    """The token by which everyone is logged in to the page, because an open sandbox has no secrets, or
    empty.
    """


async def _watch(is_valid: Callable[[], bool], scope: asyncio.Timeout) -> None:
    while is_valid():  # noqa: ASYNC110 - a file is looked at
        await asyncio.sleep(CHECK)
    scope.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False, repr=False)
class Access:
    """Authenticates HTTP clients by their API tokens, and limits failed attempts. The first failure of a
    client in each window is logged, and the one that exceeds the limit.
    """

    identities: Identities
    clock: Clock
    events: Events

    def __post_init__(self) -> None:
        self._failures: BoundedDict[Key, tuple[float, int]] = BoundedDict(MAX_CLIENTS)

    def admit(self, text: str, visit: RequestIdentity, *scopes: Scope) -> Token:
        """Return the API token with this text, and record its name in the identity of the request. Raise
        ApiError if the token is not valid, cannot be read, or has none of the scopes.
        """
        try:
            token = self._identified(text, visit.client)
        except IdentitiesError as error:
            self.events.error("identities", error)
            raise ApiError(503, "unavailable", "tokens cannot be read; see the relay's log") from error
        require(token, *scopes)
        visit.who = token.name
        return token

    def _identified(self, text: str, client: str) -> Token:
        found = self.identities.identify(text)
        if found is not None:
            return found
        now, who = self.clock.monotonic(), client_key(client)
        began, count = self._failures.get(who, (now, 0))
        if now - began >= WINDOW:
            began, count = now, 0
        self._failures[who] = (began, count + 1)
        if count in (0, MAX_FAILURES):
            self.events.requested({"client": client, "request": "rejected: invalid token"})
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
    """Raise ApiError if the client's token may have crossed a network without encryption."""
    if not visit.private:
        text = "remote clients must send tokens over TLS, or through a trusted proxy"
        raise ApiError(403, "clear_text", text)


@dataclass(eq=False, repr=False)
class Operators:
    """The objects that the API and the page of one process share. `settings` returns the current settings;
    `submit` accepts mail by the rules of the listener whose settings
    `listener` returns. Without that, those of the first listener apply.
    """

    handler: InitVar[Handler]
    settings: Callable[[], Settings]
    _: KW_ONLY
    events: Events
    clock: Clock
    submit: Submit
    listener: InitVar[Callable[[], ListenerSettings] | None] = None
    sandbox: Sandbox | None = None

    def __post_init__(self, handler: Handler, listener: Callable[[], ListenerSettings] | None) -> None:
        start = self.settings()
        self.asking = Runner(handler, self.events.error)
        self.identities = Identities(
            identities_file(start.spool.path.parent), self.clock.now, token_file=start.admin.token_file
        )
        self.access = Access(self.identities, self.clock, self.events)
        self.rules = listener or (lambda: self.settings().listener[0])
        self.streams = Counter[str]()
        """The numbers of open event streams by token."""

    def is_valid(self, token: Token) -> bool:
        """Return whether the token is still valid. A newer token with the same name is a different one."""
        try:
            return self.identities.named(token.name) == token
        except IdentitiesError:
            return False

    @contextlib.asynccontextmanager
    async def one_more(self, token: Token, is_valid: Callable[[], bool]) -> AsyncIterator[None]:
        """Count an open event stream while the block runs, and cancel the block soon after the operator's
        token becomes invalid. Raise BusyError if too many streams are open.
        """
        if self.streams.total() >= MAX_STREAMS:
            raise BusyError(f"the limit of {MAX_STREAMS} open event streams is reached")
        if self.streams[token.name] >= MAX_OF_TOKEN:
            raise BusyError(
                f"the token {token.name} has reached its limit of {MAX_OF_TOKEN} open event streams"
            )
        self.streams[token.name] += 1
        scope = asyncio.timeout(None)
        watching = asyncio.create_task(_watch(is_valid, scope))
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            watching.cancel()
            self.streams[token.name] -= 1

    @property
    def captures(self) -> bool:
        """Whether this relay is a sandbox or captures the mail of any zone instead of sending it."""
        return self.sandbox is not None or any(zone.next_hop == CAPTURE for zone in self.settings().zone)

    def history(self) -> HistorySearch:
        from zonerelay.control.history import HistorySearch  # noqa: PLC0415 - SQLite

        return HistorySearch(self.settings(), self.clock.now())

    async def addresses(self, questions: Iterable[Request]) -> list[str]:
        """Send the relay requests from `control.history.questions`, and return the addresses in its
        responses.
        """
        found: list[str] = []
        for request in questions:
            with contextlib.suppress(ControlError):
                frames, _ = await self.asking.all(request, object, "")
                found += [address for frame in frames for address in addresses_in(frame)]
        return found
