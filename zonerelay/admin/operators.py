"""What the API and the page answer from: the relay's handler, the identities, the settings in force, the
workers that take mail.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from zonerelay.admin.access import Access
from zonerelay.config.credentials.identities import Identities, identities_file
from zonerelay.config.endpoints import CAPTURE
from zonerelay.config.settings import ListenerSettings, Settings
from zonerelay.control.asking import Asking
from zonerelay.control.socket.server import Handler
from zonerelay.model.clock import Clock

if TYPE_CHECKING:
    from zonerelay.admin.captured import Sandbox

MAX_STREAMS = 16
"""Event streams at once; they are among the connections of operators and leave the most for requests."""

Place = Path | Callable[[asyncio.Protocol], None]
"""Where mail can be handed in: the socket of a worker, or what connects a client with one in this process."""

Trouble = Callable[[str, BaseException], None]
Audit = Callable[[Mapping[str, str]], None]


class BusyError(Exception):
    """There are as many event streams as may be."""


class Streams:
    """The event streams that are open."""

    def __init__(self) -> None:
        self._open = 0

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Raises BusyError."""
        if self._open >= MAX_STREAMS:
            raise BusyError(f"{MAX_STREAMS} event streams are open")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """One per process that serves HTTP. `settings` gives those in force; `audit` writes a line of the log;
    `workers` are the places where mail can be handed in now, `rules` gives the settings of the listener by
    which it is taken there.
    """

    asking: Asking
    identities: Identities
    access: Access
    settings: Callable[[], Settings]
    trouble: Trouble
    audit: Audit
    clock: Clock
    workers: Callable[[], Sequence[Place]]
    rules: Callable[[], ListenerSettings]
    streams: Streams = field(default_factory=Streams)
    sandbox: Sandbox | None = None

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
    workers: Callable[[], Sequence[Place]],
    rules: Callable[[], ListenerSettings] | None = None,
    sandbox: Sandbox | None = None,
) -> Operators:
    """Without `rules` mail is taken by those of the first listener."""
    start = settings()
    identities = Identities(
        identities_file(start.spool.path.parent), clock.now, token_file=start.admin.token_file
    )
    return Operators(
        asking=Asking(handler, trouble),
        identities=identities,
        access=Access(identities, clock, audit),
        settings=settings,
        trouble=trouble,
        audit=audit,
        clock=clock,
        workers=workers,
        rules=rules or (lambda: settings().listener[0]),
        sandbox=sandbox,
    )
