"""The objects that the API and the page share: the request handler, the tokens, the current settings, and the
function that accepts mail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import TYPE_CHECKING

import msgspec

from zonerelay.admin.access import Access
from zonerelay.config.credentials.identities import Identities, IdentitiesError, Token, identities_file
from zonerelay.config.endpoints import CAPTURE
from zonerelay.config.settings import ListenerSettings, Settings
from zonerelay.control.runner import Handler, OnError, Runner
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.model.clock import Clock
from zonerelay.operations.answers import addresses_in
from zonerelay.operations.errors import BusyError, ControlError
from zonerelay.operations.requests import Request

if TYPE_CHECKING:
    from zonerelay.capture.faults import InjectedFaults
    from zonerelay.capture.store import Capture

MAX_STREAMS = 16
"""Event streams open at the same time. They count as connections of operators, and leave most of these to
requests.
"""
MAX_OF_TOKEN = 4
"""The number of these that one token may have."""
CHECK = 0.5
"""Seconds between checks whether the token of a stream is still valid."""
Audit = Callable[[Mapping[str, str]], None]


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


class StreamCounter:
    """Counts the open event streams of each token."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    @property
    def open(self) -> int:
        return self._open.total()

    @contextlib.asynccontextmanager
    async def one_more(self, token: Token, is_valid: Callable[[], bool]) -> AsyncIterator[None]:
        """Count a stream during the block, and end the block soon after its token becomes invalid. Raise
        BusyError if too many streams are open.
        """
        if self._open.total() >= MAX_STREAMS:
            raise BusyError(f"the limit of {MAX_STREAMS} open event streams is reached")
        if self._open[token.name] >= MAX_OF_TOKEN:
            raise BusyError(
                f"the token {token.name} has reached its limit of {MAX_OF_TOKEN} open event streams"
            )
        self._open[token.name] += 1
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
            self._open[token.name] -= 1


async def _watch(is_valid: Callable[[], bool], scope: asyncio.Timeout) -> None:
    while is_valid():  # noqa: ASYNC110 - a file is looked at
        await asyncio.sleep(CHECK)
    scope.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False, repr=False)
class Operators:
    """The objects that the API and the page of one process share. `settings` returns the current settings;
    `audit` writes a line to the log; `submit` accepts mail by the rules of the listener whose settings
    `listener` returns. Without that, those of the first listener apply.
    """

    handler: InitVar[Handler]
    settings: Callable[[], Settings]
    _: KW_ONLY
    on_error: OnError
    audit: Audit
    clock: Clock
    submit: Submit
    listener: InitVar[Callable[[], ListenerSettings] | None] = None
    sandbox: Sandbox | None = None

    def __post_init__(self, handler: Handler, listener: Callable[[], ListenerSettings] | None) -> None:
        start = self.settings()
        self.asking = Runner(handler, self.on_error)
        self.identities = Identities(
            identities_file(start.spool.path.parent), self.clock.now, token_file=start.admin.token_file
        )
        self.access = Access(self.identities, self.clock, self.audit, self.on_error)
        self.rules = listener or (lambda: self.settings().listener[0])
        self.streams = StreamCounter()

    def is_valid(self, token: Token) -> bool:
        """Return whether the token is still valid. A newer token with the same name is a different one."""
        try:
            return self.identities.named(token.name) == token
        except IdentitiesError:
            return False

    @property
    def captures(self) -> bool:
        """Whether mail is captured here."""
        return self.sandbox is not None or any(zone.next_hop == CAPTURE for zone in self.settings().zone)

    async def addresses(self, questions: Iterable[Request]) -> list[str]:
        """Return the addresses in the answers to `control.history.questions`."""
        found: list[str] = []
        for request in questions:
            with contextlib.suppress(ControlError):
                frames, _ = await self.asking.all(request, object, "")
                found += [address for frame in frames for address in addresses_in(frame)]
        return found
