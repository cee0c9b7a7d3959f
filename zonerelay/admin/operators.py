"""What the API and the page answer from: the relay's handler, the identities, the settings in force, and the
call that takes mail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zonerelay.admin.access import Access
from zonerelay.config.credentials.identities import Identities, IdentitiesError, Token, identities_file
from zonerelay.config.endpoints import CAPTURE
from zonerelay.config.settings import ListenerSettings, Settings
from zonerelay.control.runner import Handler, Runner
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.model.clock import Clock
from zonerelay.operations.errors import BusyError

if TYPE_CHECKING:
    from zonerelay.capture.store import Capture
    from zonerelay.capture.troubles import Troubles

MAX_STREAMS = 16
"""Event streams at once; they are among the connections of operators and leave the most for requests."""
MAX_OF_TOKEN = 4
"""Of them those of one token: it leaves the others to others."""
CHECK = 0.5
"""Seconds after which a stream looks whether its token is still one."""

Trouble = Callable[[str, BaseException], None]
Audit = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The captured mail and the simulated failures that `zonerelay sandbox` gives to the page and the API."""

    capture: Capture
    troubles: Troubles
    token: str = ""
    """Logs everyone in to the page: a sandbox that is open to a network has no secrets. Empty: no one."""


class Streams:
    """The event streams that are open, each of a token."""

    def __init__(self) -> None:
        self._open = Counter[str]()

    @property
    def open(self) -> int:
        return self._open.total()

    @contextlib.asynccontextmanager
    async def one_more(self, token: Token, is_valid: Callable[[], bool]) -> AsyncIterator[None]:
        """End the block when the token is no longer valid, within `CHECK` seconds, also while it waits for
        its client. Raises BusyError.
        """
        if self._open.total() >= MAX_STREAMS:
            raise BusyError(f"{MAX_STREAMS} event streams are open")
        if self._open[token.name] >= MAX_OF_TOKEN:
            raise BusyError(f"the token {token.name} has {MAX_OF_TOKEN} event streams open, its share")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """One per process that serves HTTP. `settings` gives those in force; `audit` writes a line of the log;
    `submit` takes mail, `rules` gives the settings of the listener by which it does.
    """

    asking: Runner
    identities: Identities
    access: Access
    settings: Callable[[], Settings]
    trouble: Trouble
    audit: Audit
    clock: Clock
    submit: Submit
    rules: Callable[[], ListenerSettings]
    streams: Streams = field(default_factory=Streams)
    sandbox: Sandbox | None = None

    def is_valid(self, token: Token) -> bool:
        """Return whether it is still a token. One of the same name that was made since is another one."""
        try:
            return self.identities.named(token.name) == token
        except IdentitiesError:
            return False

    @property
    def captures(self) -> bool:
        """Mail is captured here."""
        return self.sandbox is not None or any(zone.next_hop == CAPTURE for zone in self.settings().zone)


def build_operators(
    handler: Handler,
    settings: Callable[[], Settings],
    *,
    trouble: Trouble,
    audit: Audit,
    clock: Clock,
    submit: Submit,
    rules: Callable[[], ListenerSettings] | None = None,
    sandbox: Sandbox | None = None,
) -> Operators:
    """Without `rules` mail is taken by those of the first listener."""
    start = settings()
    identities = Identities(
        identities_file(start.spool.path.parent), clock.now, token_file=start.admin.token_file
    )
    return Operators(
        asking=Runner(handler, trouble),
        identities=identities,
        access=Access(identities, clock, audit),
        settings=settings,
        trouble=trouble,
        audit=audit,
        clock=clock,
        submit=submit,
        rules=rules or (lambda: settings().listener[0]),
        sandbox=sandbox,
    )
